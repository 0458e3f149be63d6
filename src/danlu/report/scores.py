"""Evaluations side by side: before and after, next to what knowing nothing would score.

Evaluations of the same question file stand in one table, in the order in which they were made, one column each. The
majority baseline is the one that evaluation stored; it is not computed here, so a table cannot disagree with the file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.report.read import Evaluation, read_story

PLOT_WIDTH, LABEL_WIDTH, ROW_HEIGHT, PLOT_TOP = 720, 190, 30, 8


@dataclass(frozen=True, slots=True)
class Cell:
    """One group's score in one evaluation; None where that evaluation did not ask it."""

    strict: dict[str, Any] | None
    normalized: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """A group of questions (a task, a language, or all) over the evaluations."""

    name: str
    kind: str
    questions: tuple[int, ...]
    """How many each evaluation asked that asked any."""
    majority: float
    cells: tuple[Cell, ...]

    @property
    def number(self) -> str:
        """The count of questions, or one count per evaluation where they differ."""
        shown = self.questions[:1] if len(set(self.questions)) == 1 else self.questions
        return " / ".join(f"{count:,}" for count in shown)


@dataclass(frozen=True, slots=True)
class Mark:
    """A score in the plot: pixels of the value and of its interval, and what hovering shows."""

    y: float
    x: float
    low: float
    high: float
    text: str


@dataclass(frozen=True, slots=True)
class PlotRow:
    """One group in the plot."""

    name: str
    y: float
    majority: float
    majority_text: str
    marks: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class ScoreTable:
    """All evaluations of one question file."""

    file: str
    names: tuple[str, ...]
    rows: tuple[ScoreRow, ...]
    notes: tuple[str, ...]

    @property
    def plot_height(self) -> float:
        """Height of the plot in pixels."""
        return PLOT_TOP + ROW_HEIGHT * len(self.rows) + 34

    def plot(self) -> tuple[PlotRow, ...]:
        """Return where each score stands in the plot of strict scores."""
        placed = []
        for number, row in enumerate(self.rows):
            y = PLOT_TOP + ROW_HEIGHT * (number + 0.5)
            marks = []
            for index, (name, cell) in enumerate(zip(self.names, row.cells, strict=True)):
                if cell.strict is not None:
                    offset = (index - (len(self.names) - 1) / 2) * min(10, 18 / len(self.names))
                    text = f"{row.name}, {name}: {describe_rate(cell.strict)}"
                    value, low, high = (score_x(cell.strict[key]) for key in ("value", "low", "high"))
                    marks.append(Mark(y=y + offset, x=value, low=low, high=high, text=text))
            baseline = f"{row.name}, majority baseline: {row.majority:.3f}"
            placed.append(PlotRow(row.name, y, score_x(row.majority), baseline, tuple(marks)))
        return tuple(placed)


def score_x(share: float) -> float:
    """Return the pixel of a share between 0 and 1 in the plot."""
    return round(LABEL_WIDTH + share * (PLOT_WIDTH - LABEL_WIDTH - 24), 2)


def describe_rate(rate: dict[str, Any]) -> str:
    """Return a rate with counts and interval, such as ``0.950 (95 of 100, 0.889 to 0.978)``."""
    counts = f"{rate['correct']} of {rate['total']}"
    return f"{rate['value']:.3f} ({counts}, {rate['low']:.3f} to {rate['high']:.3f})"


def build_score_tables(evaluations: Sequence[Evaluation]) -> tuple[ScoreTable, ...]:
    """Return one table per question file, in the order of their first evaluation."""
    by_file: dict[str, list[Evaluation]] = {}
    for evaluation in evaluations:
        if evaluation.questions is not None:
            by_file.setdefault(str(evaluation.questions["file"]), []).append(evaluation)
    return tuple(_build_table(file, group) for file, group in by_file.items())


def _build_table(file: str, evaluations: Sequence[Evaluation]) -> ScoreTable:
    asked = [evaluation.questions or {} for evaluation in evaluations]
    scores = [
        {
            **{("task", score["name"]): score for score in one["tasks"]},
            **{("language", score["name"]): score for score in one["languages"]},
            ("all", "all"): one["all"],
        }
        for one in asked
    ]
    rows = []
    for kind, name in dict.fromkeys(key for group in scores for key in sorted(group, key=_order)):
        cells = [group.get((kind, name)) for group in scores]
        last = next(score for score in reversed(cells) if score is not None)
        rows.append(
            ScoreRow(
                name=name,
                kind=kind,
                questions=tuple(score["questions"] for score in cells if score is not None),
                majority=last["majority"]["value"],
                cells=tuple(
                    Cell(score["strict"], score["normalized"]) if score else Cell(None, None) for score in cells
                ),
            )
        )
    return ScoreTable(file, tuple(evaluation.name for evaluation in evaluations), tuple(rows), _notes(asked))


def _order(key: tuple[str, str]) -> tuple[int, str]:
    return ("task", "language", "all").index(key[0]), key[1]


def _notes(asked: Sequence[dict[str, Any]]) -> tuple[str, ...]:
    notes = [f"Majority: the most frequent answer of each task and language in {asked[-1]['majority_from']}."]
    marker = asked[-1].get("answer_marker")
    if marker is not None:
        notes.append(f"Compared is what follows the last {marker} of an answer; what stands before it is working.")
    if any(one["num_asked"] != one["num_in_file"] for one in asked):
        counts = ", ".join(f"{one['num_asked']} of {one['num_in_file']}" for one in asked)
        notes.append(f"Asked a random sample: {counts} questions.")
    if len({(one["num_asked"], one["sample_seed"]) for one in asked}) > 1:
        notes.append("The evaluations did not ask the same questions: compare them with care.")
    return tuple(notes)


def score_table(folder: Path) -> str:
    """Return the scores of a run or pipeline folder as a table for a terminal, or why there is none.

    Raises:
        UserError: the folder is neither a run nor a pipeline.
    """
    from rich.console import Console
    from rich.table import Table

    story = read_story(folder)
    console = Console(width=None if Console().is_terminal else 120)
    with console.capture() as captured:
        for scores in build_score_tables(story.evaluations):
            table = Table(title="right answers, strict (95 % Wilson interval)", title_justify="left")
            for number, column in enumerate(("questions about", "number", "majority", *scores.names)):
                table.add_column(column, justify="right" if number else "left")
            for number, row in enumerate(scores.rows):
                cells = [_cell_text(cell) for cell in row.cells]
                last = number + 1 == len(scores.rows) or scores.rows[number + 1].kind != row.kind
                shown = (row.name, row.number, f"{row.majority:.3f}", *cells)
                table.add_row(*shown, end_section=last)
            console.print(table, markup=False)
        for evaluation in story.evaluations:
            if evaluation.held_out is not None:
                loss, perplexity = evaluation.held_out["loss"], evaluation.held_out["perplexity"]
                console.print(f"{evaluation.name}: held-out loss {loss:.4f}, perplexity {perplexity:.2f}", markup=False)
    return captured.get().rstrip() or "no evaluation was made"


def _cell_text(cell: Cell) -> str:
    if cell.strict is None:
        return "-"
    return f"{cell.strict['value']:.3f} [{cell.strict['low']:.3f}, {cell.strict['high']:.3f}]"
