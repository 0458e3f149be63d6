"""``report.html``: one file that tells what a run or pipeline did, to anybody who opens it, without a network.

Style sheet and charts are inside the page; there is no script, and the page's own content security policy forbids any.
Every text comes through a template that escapes it, so a config value cannot become markup. What is not there is said
in words; no number is made up to fill a place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.base.folders import check_folder
from danlu.report.chart import Chart, Point, format_number, plan_chart
from danlu.report.read import Record, Run, Story, read_story
from danlu.report.scores import build_score_tables, describe_rate, score_x
from danlu.version import __version__

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Fact:
    """A number with its name, for the tiles at the top of a run."""

    name: str
    value: str
    about: str = ""


def write_report(folder: Path) -> Path:
    """Write ``report.html`` into a run folder or a pipeline folder.

    Args:
        folder: of `danlu train` or of `danlu run`.

    Returns:
        The path of the page.

    Raises:
        UserError: the folder is neither.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined

    story = read_story(folder)
    environment = Environment(
        loader=PackageLoader("danlu.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("page.html").render(
        story=story,
        version=__version__,
        stages=[{**stage, "outcome": describe_stage(stage)} for stage in story.stages],
        runs=[(run, run_facts(run), run_charts(run)) for run in story.runs],
        tables=build_score_tables(story.evaluations),
        losses=[evaluation for evaluation in story.evaluations if evaluation.held_out is not None],
        missing=all_missing(story),
        number=format_number,
        describe_rate=describe_rate,
        score_x=score_x,
        duration=format_duration,
    )
    path = folder / "report.html"
    check_folder(folder, where="report")
    temporary = folder / "report.html.partial"
    temporary.write_text(page, encoding="utf-8", newline="\n")
    os.replace(temporary, path)
    return path


def all_missing(story: Story) -> list[str]:
    """Return every sentence about what is not there; those of a run name it where there are several."""
    several = len(story.runs) > 1
    return [
        *story.missing,
        *(f"{run.name}: {text}" if several else text for run in story.runs for text in run.missing),
    ]


def run_facts(run: Run) -> list[Fact]:
    """Return the tiles of a run."""
    if not run.steps:
        return []
    first, last = run.steps[0], run.steps[-1]
    facts = [
        Fact("steps", f"{last['step']:,}"),
        Fact("training loss", _number(last["loss"]), f"step {first['step']}: {_number(first['loss'])}"),
    ]
    if run.evaluations:
        found = run.evaluations[-1]
        facts.append(Fact("held-out loss", _number(found["eval_loss"]), f"step {found['step']}"))
    if last.get("tokens_seen") is not None:
        facts.append(Fact("tokens seen", f"{last['tokens_seen']:,}"))
    rates = _values(run.steps, "tokens_per_second")
    if rates:
        facts.append(Fact("tokens/s (median)", _number(_median(rates)), "whole job, padding not counted"))
    utilisation = _values(run.steps, "mfu")
    about = "model FLOPs, causal attention as half" if utilisation else "the device's peak is not known"
    facts.append(Fact("MFU (median)", f"{100 * _median(utilisation):.1f} %" if utilisation else "not known", about))
    memory = _values(run.steps, "peak_memory_bytes")
    facts.append(Fact("peak memory", f"{max(memory) / GIB:.2f} GiB" if memory else "not recorded", "one rank"))
    skipped = sum(int(record.get("skipped") or 0) for record in run.steps)
    if skipped:
        facts.append(Fact("skipped updates", f"{skipped:,}", "non-finite gradients"))
    return facts


def run_charts(run: Run) -> list[Chart]:
    """Return the charts of a run; one without any value is left out, and one step makes no curve."""
    if len(run.steps) < 2:
        return []

    def points(key: str, records: Iterable[Record] = run.steps, scale: float = 1.0) -> list[Point]:
        found = ((record["step"], record.get(key)) for record in records)
        return [(step, None if value is None else value * scale) for step, value in found]

    plan: Callable[..., Chart | None] = plan_chart
    loss = [("training", points("loss"))]
    if run.evaluations:
        loss.append(("held out", points("eval_loss", run.evaluations)))
    seconds = [("step", points("step_seconds")), ("waiting for data", points("data_wait_seconds"))]
    charts = [
        plan("Loss", loss, x_label="step", y_label="loss (nats per token)"),
        plan("Learning rate", [("learning rate", points("lr"))], x_label="step", y_label="learning rate", zero=True),
        plan("Gradient norm", [("norm before clipping", points("grad_norm"))], x_label="step", y_label="norm"),
        plan("Throughput", [("whole job", points("tokens_per_second"))], x_label="step", y_label="tokens/s", zero=True),
        plan("Time of a step", seconds, x_label="step", y_label="seconds", zero=True),
        plan(
            "Peak memory",
            [("one rank", points("peak_memory_bytes", scale=1 / GIB))],
            x_label="step",
            y_label="GiB",
            zero=True,
        ),
    ]
    return [chart for chart in charts if chart is not None]


def describe_stage(stage: Record) -> str:
    """Return the outcome of a stage in a few words, from the result it recorded."""
    result: Any = stage.get("result")
    if not isinstance(result, dict):
        return ""
    if isinstance(result.get("questions"), dict):
        return f"{describe_rate(result['questions']['all']['strict'])} right"
    if isinstance(result.get("held_out"), dict):
        return f"held-out loss {_number(result['held_out']['loss'])}"
    shown = []
    for key, value in result.items():
        if isinstance(value, (bool | str, int | float)):
            text = _number(value) if isinstance(value, int | float) and not isinstance(value, bool) else str(value)
            shown.append(f"{key.replace('_', ' ')} {text if len(text) <= 60 else text[:57] + '...'}")
    return ", ".join(shown[:5])


def format_duration(seconds: float | None) -> str:
    """Return seconds as people say them: ``0.8 s``, ``1 min 05 s``, ``2 h 03 min``."""
    if seconds is None:
        return "-"
    if seconds < 60:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _number(value: float | None) -> str:
    if value is None:
        return "not finite"
    return f"{value:,}" if isinstance(value, int) else format_number(value)


def _values(records: Sequence[Record], key: str) -> list[float]:
    return [record[key] for record in records if record.get(key) is not None]


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
