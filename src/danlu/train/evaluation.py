"""Evaluate a trained model: held-out loss, and the share of questions that it answers right.

Loss says whether a model fits text, exact match whether it does the job; one can improve while the other does not, so
both are measured here in one go. Answers are generated greedily, in batches over a KV cache, until EOS or the chat
template's end of turn. What a model says to one question depends neither on the batch size nor on how many ranks share
the file: each question has its own budget of new tokens, cut only by the model's own positions.

Nothing is dropped: a prompt that leaves no position for an answer counts as wrong, and how many there were, like how
many answers ran into the budget without an end, is part of the result.

The result is one JSON document (``eval.json``): ``model, step, held_out`` (`danlu.train.evaluate`) and ``questions``
with ``all, tasks, languages``, each a `danlu.train.scores.Score`. Every prompt and answer lies beside it in
``predictions.jsonl``.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress

from danlu.base import env
from danlu.base.errors import UserError
from danlu.base.folders import check_output_file
from danlu.base.layout import solve_degrees
from danlu.base.log import log
from danlu.config.stages import EvalOptions
from danlu.data.dataset import PackedDataset
from danlu.model.generate import generate
from danlu.parallel.mesh import World, open_world
from danlu.train.evaluate import held_out_loss
from danlu.train.load import TrainedModel, is_run, load_model
from danlu.train.load_spread import load_spread, spread_forward
from danlu.train.questions import Asked, QuestionForm, encode_prompts, read_asked, sample_asked
from danlu.train.scores import Reply, Stratum, final_answer, majority_answers, score_groups, score_replies


@dataclass(frozen=True, slots=True)
class Answer:
    """What was generated for one question, and why it ended: ``stop``, ``budget`` or ``too long`` (never begun)."""

    text: str
    ended: str


def evaluate(options: EvalOptions, output: Path | None = None) -> dict[str, Any]:
    """Evaluate a model and return (and save) the result.

    What the file holds of the other kind (loss or questions) about the same weights stays in it.

    Under torchrun each rank takes its share of rows and questions; all return the same result and rank 0 saves it.

    Args:
        options: what to evaluate, on what.
        output: the JSON file to write; None is ``eval.json`` in the run folder, and no file for other models.

    Raises:
        UserError: nothing to evaluate, missing or unfit files, or a model that cannot be opened.
    """
    check_options(options)
    if output is None and is_run(Path(options.model)):
        output = Path(options.model) / "eval.json"
    if output is not None:
        check_output_file(output)
    sources = [PackedDataset(folder) for folder in options.data]
    wanted = {"pp": options.pp, "dp_replicate": -1, "dp_shard": 1, "cp": 1, "tp": options.tp}
    degrees = solve_degrees(wanted, world_size=env.ranks().world_size, zero=0)
    with open_world(degrees, device=options.device) as world:
        if degrees.data == world.size:
            opened = load_model(options.model, dtype=options.dtype, device=options.device)
        else:
            opened = load_spread(options.model, world, dtype=options.dtype)
        result: dict[str, Any] = {"model": options.model, "step": opened.step, "dtype": options.dtype}
        if sources:
            result["held_out"] = _held_out(opened, sources, world, options)
        if options.questions is not None:
            result["questions"] = _ask_questions(opened, Path(options.questions), world, options, output)
        if output is not None and world.rank == 0:
            kept = {**_of_the_same_weights(output, result), **result}
            output.write_text(json.dumps(kept, ensure_ascii=False, indent=2, allow_nan=False) + "\n", "utf-8")
            log.info("saved %s", output)
    return result


def _of_the_same_weights(path: Path, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an earlier evaluation of the same weights left in ``path``, by kind."""
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    if not isinstance(before, dict) or any(before.get(key) != result[key] for key in ("step", "dtype")):
        return {}
    if Path(str(before.get("model"))).resolve() != Path(result["model"]).resolve():
        return {}
    return {kind: before[kind] for kind in ("held_out", "questions") if kind in before}


def check_options(options: EvalOptions) -> None:
    """Raise `UserError` where there is nothing to evaluate or an option would have no effect."""
    if not options.data and options.questions is None:
        raise UserError("nothing to evaluate on", legal="data sets for the loss, a question file, or both")
    defaults = {name: field.default for name, field in EvalOptions.model_fields.items()}
    about = {"data": ["max_rows"], "questions": [
        "prompt_template", "completion_template", "layout", "system", "answer_marker", "majority_from", "limit",
    ]}  # fmt: skip
    for needed, names in about.items():
        for name in names:
            if not getattr(options, needed) and getattr(options, name) != defaults[name]:
                raise UserError(f"has no effect without {needed}", where=name, seen=getattr(options, name))


def check_same_tokens(opened: TrainedModel, sources: Sequence[PackedDataset]) -> None:
    """Raise where rows cannot be the model's; warn where they were tokenized with another tokenizer."""
    for source in sources:
        if source.vocab_size > opened.spec.vocab_size:
            raise UserError(
                "the data has more token ids than the model has embedding rows",
                where=str(source.folder),
                seen=f"{source.vocab_size} token ids, {opened.spec.vocab_size} rows",
                hint="build the data with the model's tokenizer",
            )
        if int(source.index["num_tokens"].max()) > opened.max_tokens:
            raise UserError(
                "the rows are longer than the model's positions",
                where=str(source.folder),
                seen=f"{int(source.index['num_tokens'].max())} tokens",
                legal=f"at most {opened.max_tokens}",
                hint=f"build the data with sequence_length = {opened.max_tokens}",
            )
        if opened.tokenizer_folder is not None and source.manifest["tokenizer_hash"] != opened.tokenizer.hash:
            log.warning(
                "%s was built with another tokenizer than the model's; its loss may mean nothing", source.folder
            )


def _held_out(
    opened: TrainedModel, sources: Sequence[PackedDataset], world: World, options: EvalOptions
) -> dict[str, float | None]:
    check_same_tokens(opened, sources)
    numbers = held_out_loss(
        spread_forward(opened, world), sources, world=world,
        micro_batch_size=options.batch_size, max_rows=options.max_rows,
    )  # fmt: skip
    return {name: value if math.isfinite(value) else None for name, value in numbers.items()}


def _ask_questions(
    opened: TrainedModel, path: Path, world: World, options: EvalOptions, output: Path | None
) -> dict[str, Any]:
    """Return the ``questions`` part of the result; write the predictions beside ``output``."""
    everything = _read(path, opened, options)
    train = everything if options.majority_from is None else _read(Path(options.majority_from), opened, options)
    marker = options.answer_marker
    majority = majority_answers([(one.stratum, final_answer(one.answer, marker)) for one in train])
    asked = sample_asked(everything, options.limit, options.seed)
    sampled = len(asked) < len(everything)
    sample = f"a random {len(asked)} (seed {options.seed}) of " if sampled else ""
    log.info("asking %s%d questions of %s", sample, len(everything), path)
    answers = _answer_together(opened, asked, world, options)
    result = {
        "file": str(path),
        "num_in_file": len(everything),
        "num_asked": len(asked),
        "sample_seed": options.seed if sampled else None,
        "majority_from": str(options.majority_from or path),
        "max_new_tokens": options.max_new_tokens,
        "answer_marker": marker,
        **grade(asked, answers, majority, marker),
    }
    if output is not None and world.rank == 0:
        _write_predictions(output.with_name("predictions.jsonl"), asked, answers, marker)
    return result


def _read(path: Path, opened: TrainedModel, options: EvalOptions) -> list[Asked]:
    form = QuestionForm(
        prompt_template=options.prompt_template,
        completion_template=options.completion_template,
        layout=options.layout,
        system=options.system,
    )
    has_chat_template = opened.tokenizer.core.chat_template is not None
    return read_asked(path, form, opened.data_config, has_chat_template=has_chat_template)


def _answer_together(opened: TrainedModel, asked: Sequence[Asked], world: World, options: EvalOptions) -> list[Answer]:
    """Answer this rank's share and gather all answers, in the order of the questions."""
    share = asked[world.data_rank :: world.data_degree]
    own = generate_answers(opened, share, batch_size=options.batch_size, max_new_tokens=options.max_new_tokens)
    if world.size == 1:
        return own
    everyone: list[tuple[int, list[Answer]]] = [(0, [])] * world.size
    dist.all_gather_object(everyone, (world.data_rank, own), group=world.checkpoint_group)
    shares = dict(everyone)  # peers of one data rank have the same answers
    return [shares[number % world.data_degree][number // world.data_degree] for number in range(len(asked))]


def generate_answers(
    opened: TrainedModel, asked: Sequence[Asked], *, batch_size: int, max_new_tokens: int
) -> list[Answer]:
    """Return the greedy answer to each question, in their order.

    Args:
        opened: the model.
        asked: the questions.
        batch_size: questions that run together.
        max_new_tokens: longest answer; less where the model's positions end before.
    """
    prompts = encode_prompts(asked, opened.tokenizer)
    answers = [Answer("", "too long")] * len(asked)
    by_room: defaultdict[int, list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        by_room[min(max_new_tokens, opened.max_tokens - len(prompt))].append(number)
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("answering", total=len(asked))
        for room, numbers in by_room.items():
            numbers.sort(key=lambda number: len(prompts[number]))
            for start in range(0, len(numbers), batch_size):
                batch = numbers[start : start + batch_size]
                if room >= 1:
                    ids = generate(
                        opened.model, [prompts[number] for number in batch], max_new_tokens=room,
                        stop_ids=opened.stop_ids, batch_size=batch_size,
                    )  # fmt: skip
                    for number, answer in zip(batch, ids, strict=True):
                        text = opened.tokenizer.decode(answer, skip_special=True)
                        answers[number] = Answer(text, "stop" if len(answer) < room else "budget")
                progress.advance(bar, len(batch))
    return answers


def make_reply(one: Asked, answer: Answer, marker: str | None) -> Reply:
    """Return what is compared for one question: both texts behind their last ``marker``."""
    return Reply(one.stratum, final_answer(one.answer, marker), final_answer(answer.text, marker))


def grade(
    asked: Sequence[Asked], answers: Sequence[Answer], majority: Mapping[Stratum, str], marker: str | None = None
) -> dict[str, Any]:
    """Return the scores of all questions, per task and per language, and how many answers had no room or no end."""
    replies = [make_reply(one, answer, marker) for one, answer in zip(asked, answers, strict=True)]
    counts = {ended: sum(answer.ended == ended for answer in answers) for ended in ("too long", "budget")}
    if counts["too long"]:
        log.warning("%d prompts leave no position for an answer and count as wrong", counts["too long"])
    return {
        "prompts_too_long": counts["too long"],
        "answers_without_end": counts["budget"],
        "all": score_replies(replies, majority).as_json(),
        "tasks": [score.as_json() for score in score_groups(replies, majority, by=0)],
        "languages": [score.as_json() for score in score_groups(replies, majority, by=1)],
    }


def _write_predictions(path: Path, asked: Sequence[Asked], answers: Sequence[Answer], marker: str | None) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for one, answer in zip(asked, answers, strict=True):
            reply = make_reply(one, answer, marker)
            task, language = one.stratum
            line = {
                "where": one.where, "task": task, "language": language, "prompt": one.prompt_text,
                "expected": one.answer, "predicted": answer.text, "strict": reply.strict,
                "normalized": reply.normalized, "ended": answer.ended,
            }  # fmt: skip
            file.write(json.dumps(line, ensure_ascii=False) + "\n")
