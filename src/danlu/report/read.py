"""What a run or pipeline left behind, read back as it is.

Everything comes from files: `metrics.jsonl`, `config.toml`, `environment.json` and `eval*.json` of a run folder,
`pipeline.json` and the stages' folders of a pipeline. Nothing is recomputed and nothing is guessed. A file that is
missing or broken becomes a sentence in ``missing``, which the page shows; a run that was killed in the middle of a line
is still worth a report.
"""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.base.errors import UserError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """One ``eval.json``."""

    name: str
    result: Record

    @property
    def questions(self) -> Record | None:
        """The scores of a question file, if one was asked."""
        found: Record | None = self.result.get("questions")
        return found

    @property
    def held_out(self) -> Record | None:
        """Loss, perplexity and bits per byte, if held-out data was read."""
        found: Record | None = self.result.get("held_out")
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One training run: its resolved config (as text), its records, its machine, and what is not there."""

    name: str
    config: str | None
    steps: tuple[Record, ...]
    evaluations: tuple[Record, ...]
    environment: Record | None
    missing: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """All that one report tells."""

    title: str
    stages: tuple[Record, ...]
    runs: tuple[Run, ...]
    evaluations: tuple[Evaluation, ...]
    missing: tuple[str, ...]


def read_story(folder: Path) -> Story:
    """Read a run folder or a pipeline folder.

    Raises:
        UserError: the folder is neither.
    """
    if (folder / "pipeline.json").is_file():
        return _read_stages(folder)
    if not any((folder / name).is_file() for name in ("metrics.jsonl", "config.toml")):
        raise UserError(
            "neither a run nor a pipeline",
            where=str(folder),
            seen="no such folder" if not folder.is_dir() else "no metrics.jsonl, config.toml or pipeline.json",
            hint="give the folder that train.output or the pipeline's output names",
        )
    evaluations, missing = read_evaluations(folder)
    if not evaluations and not missing:
        missing = ("No evaluation: this folder holds no eval.json (danlu eval writes it).",)
    run = read_run(folder, folder.resolve().name)
    return Story(title=run.name, stages=(), runs=(run,), evaluations=evaluations, missing=missing)


def read_pipeline(folder: Path) -> Record:
    """Return ``pipeline.json``: the pipeline's name and its stages with status, seconds and results.

    Raises:
        UserError: there is none, or it is not the JSON that `danlu run` writes.
    """
    path = folder / "pipeline.json"
    try:
        document: Record = json.loads(path.read_text(encoding="utf-8"))
        if not all(isinstance(stage["name"], str) and isinstance(stage["kind"], str) for stage in document["stages"]):
            raise TypeError("a stage without name or kind")
    except FileNotFoundError:
        raise UserError("no pipeline here", where=str(path), hint="danlu run writes it") from None
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise UserError("cannot be read as a pipeline's record", where=str(path), seen=error) from None
    return document


def _read_stages(folder: Path) -> Story:
    document = read_pipeline(folder)
    runs: list[Run] = []
    evaluations: list[Evaluation] = []
    missing: list[str] = []
    for stage in document["stages"]:
        name, kind = stage["name"], stage["kind"]
        own = folder / str(stage.get("folder") or name)
        if stage.get("status") != "done":
            missing.append(f"Stage {name} ({kind}) is not done: {stage.get('status') or 'no status'}.")
        if kind == "train":
            runs.append(read_run(own, name))
        elif kind == "eval" and stage.get("status") == "done":
            found, faults = read_evaluations(own, name)
            evaluations += found
            missing += faults or ([] if found else [f"Stage {name} is done but its eval.json is gone."])
    return Story(
        title=str(document.get("name") or folder.resolve().name),
        stages=tuple(document["stages"]),
        runs=tuple(runs),
        evaluations=tuple(evaluations),
        missing=tuple(missing),
    )


def read_run(folder: Path, name: str) -> Run:
    """Read a run folder; what it lacks is named in ``missing``."""
    missing: list[str] = []
    config = _text(folder / "config.toml")
    if config is None:
        missing.append("The config was not found (config.toml).")
    else:
        try:
            tomllib.loads(config)
        except tomllib.TOMLDecodeError as error:
            missing.append(f"config.toml is not valid TOML ({error}); it is shown as it is.")
    records, broken = _lines(folder / "metrics.jsonl")
    if broken:
        missing.append(f"{broken} lines of metrics.jsonl could not be read and are left out.")
    steps = tuple(record for record in records if "loss" in record)
    if not steps:
        missing.append("No training step was logged (metrics.jsonl), so there are no curves.")
    environment = _text(folder / "environment.json")
    machine = _object(environment)
    if machine is None:
        what = "was not recorded" if environment is None else "cannot be read"
        missing.append(f"The environment of the run {what} (environment.json).")
    return Run(
        name=name,
        config=config,
        steps=steps,
        evaluations=tuple(record for record in records if "eval_loss" in record),
        environment=machine,
        missing=tuple(missing),
    )


def read_evaluations(folder: Path, name: str | None = None) -> tuple[tuple[Evaluation, ...], tuple[str, ...]]:
    """Return the evaluations of a folder (``eval*.json``, by name) and sentences about those that cannot be read."""
    found, missing = [], []
    for path in sorted(folder.glob("eval*.json")):
        result = _object(_text(path))
        if result is None:
            missing.append(f"{path.name} cannot be read and is left out.")
        else:
            found.append(Evaluation(name=name if name and path.stem == "eval" else path.stem, result=result))
    return tuple(found), tuple(missing)


def _text(path: Path) -> str | None:
    return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else None


def _object(text: str | None) -> Record | None:
    try:
        value = json.loads(text) if text is not None else None
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) else None


def _lines(path: Path) -> tuple[list[Record], int]:
    records, broken = [], 0
    for line in (_text(path) or "").splitlines():
        record = _object(line)
        if record is not None and isinstance(record.get("step"), int):
            records.append(record)
        else:
            broken += 1
    return records, broken
