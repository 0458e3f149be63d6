"""``danlu eval``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from danlu.cli.options import Json, ModelName

if TYPE_CHECKING:
    from rich.table import Table


def command(
    model: ModelName,
    data: Annotated[list[str] | None, typer.Option(help="Data set for the held-out loss (repeatable).")] = None,
    questions: Annotated[str | None, typer.Option(help="File of questions and answers (jsonl, csv, ...).")] = None,
    prompt_template: Annotated[
        str | None, typer.Option(help="Prompt made of the file's fields, such as 'Query: {text}'.")
    ] = None,
    completion_template: Annotated[
        str | None, typer.Option(help="Answer made of the file's fields, such as ' {category}'.")
    ] = None,
    layout: Annotated[str, typer.Option(help="Prompts as chat or plain text; auto: as in training.")] = "auto",
    system: Annotated[str | None, typer.Option(help="System message for chats that have none.")] = None,
    answer_marker: Annotated[
        str | None, typer.Option(help="Compare only what follows the last such text, such as '####'.")
    ] = None,
    majority_from: Annotated[
        str | None, typer.Option(help="Training file that the majority baseline is taken from.")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Ask only a random sample of so many questions.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of that sample.")] = 0,
    batch_size: Annotated[int, typer.Option(help="Rows or questions that run together.")] = 64,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.")] = 32,
    max_rows: Annotated[int | None, typer.Option(help="Only the first rows of each data set.")] = None,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    tp: Annotated[int, typer.Option(help="Ranks that split every matrix (under torchrun).")] = 1,
    pp: Annotated[int, typer.Option(help="Ranks that hold consecutive layers (under torchrun).")] = 1,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write (default: eval.json in the run folder).")
    ] = None,
    json: Json = False,
) -> None:
    """Measure a model: held-out loss, and how many questions it answers right."""
    from danlu.base import env
    from danlu.base.log import print_json, print_result
    from danlu.config.load import build
    from danlu.config.stages import EvalOptions

    given = {
        "model": model, "data": data or [], "questions": questions, "prompt_template": prompt_template,
        "completion_template": completion_template, "layout": layout, "system": system,
        "answer_marker": answer_marker, "majority_from": majority_from, "limit": limit, "seed": seed,
        "batch_size": batch_size, "max_new_tokens": max_new_tokens, "max_rows": max_rows, "dtype": dtype,
        "device": device, "tp": tp, "pp": pp,
    }  # fmt: skip
    options = build(EvalOptions, given, source="command line")

    def work() -> None:
        from danlu.train.evaluation import evaluate

        result = evaluate(options, output)
        if env.ranks().rank == 0 and json:
            print_json(result)
        elif env.ranks().rank == 0:
            print_result(show_result(result))

    if env.ranks().launched:
        from danlu.train.local import run_as_rank

        run_as_rank(work)
    else:
        work()


def show_result(result: dict[str, Any]) -> str:
    """Return the result of `danlu.train.evaluation.evaluate` as tables for people."""
    from rich.console import Console

    console = Console(width=None if Console().is_terminal else 120)
    with console.capture() as captured:
        if "held_out" in result:
            console.print(_loss_table(result["held_out"]))
        if "questions" in result:
            console.print(_score_table(result["questions"]))
            console.print(_remarks(result["questions"]), highlight=False)
    return captured.get().rstrip()


def _loss_table(numbers: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="held-out loss", title_justify="left")
    shown = {
        "loss": f"{numbers['loss']:.4f}",
        "perplexity": f"{numbers['perplexity']:.2f}",
        "bits per byte": "-" if numbers["bits_per_byte"] is None else f"{numbers['bits_per_byte']:.4f}",
        "targets": f"{numbers['tokens']:,}",
        "rows": f"{numbers['rows']:,}",
    }
    for name in shown:
        table.add_column(name, justify="right")
    table.add_row(*shown.values())
    return table


def _score_table(questions: dict[str, Any]) -> Table:
    from rich.table import Table

    table = Table(title="answers that match (95 % Wilson interval)", title_justify="left")
    table.add_column("questions about")
    for name in ("number", "strict", "normalised", "majority"):
        table.add_column(name, justify="right")
    for group in ("tasks", "languages"):
        for score in questions[group]:
            table.add_row(*_score_row(score))
        if questions[group]:
            table.add_section()
    table.add_row(*_score_row(questions["all"]))
    return table


def _score_row(score: dict[str, Any]) -> list[str]:
    shares = [
        f"{score[rule]['value']:.3f} [{score[rule]['low']:.3f}, {score[rule]['high']:.3f}]"
        for rule in ("strict", "normalized")
    ]
    return [score["name"], f"{score['questions']:,}", *shares, f"{score['majority']['value']:.3f}"]


def _remarks(questions: dict[str, Any]) -> str:
    lines = []
    if questions["sample_seed"] is not None:
        sample = f"a random sample (seed {questions['sample_seed']})"
        lines.append(f"{sample} of the {questions['num_in_file']:,} questions in {questions['file']}")
    itself = questions["majority_from"] == questions["file"]
    source = "the questions themselves" if itself else questions["majority_from"]
    group = " of each task and language" if questions["tasks"] or questions["languages"] else ""
    lines.append(f"majority: the most frequent answer{group} in {source}")
    if questions["prompts_too_long"]:
        lines.append(f"{questions['prompts_too_long']} prompts left no position for an answer; they count as wrong")
    if questions["answers_without_end"]:
        lines.append(
            f"{questions['answers_without_end']} answers had no end within {questions['max_new_tokens']} tokens"
        )
    return "\n".join(lines)
