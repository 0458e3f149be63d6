"""A pipeline: stages in order, each with options of its kind, whose outputs feed later ones.

A stage writes into a folder of its own, ``OUTPUT/NAME``; ``stage:NAME`` or ``stage:NAME/file`` as an option of a later
stage stands for that folder or a file in it. ``file:NAME`` stands for an entry of the pipeline's ``[files]``: what a
user must bring is named once, and given on the command line as ``files.NAME=path``.

Everything is checked before the first stage runs: names, references (only backwards), and each stage's options against
the schema of its kind.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from danlu.base.errors import UserError, unknown_name
from danlu.config.load import build, read_toml
from danlu.config.schema import Section

Kind = Literal["finance", "tokenizer", "data", "train", "eval", "export"]

_REFERENCE = re.compile(r"(stage|file):([A-Za-z0-9_-]+)((?:/.*)?)")


class Stage(Section):
    """One step of a pipeline."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """Name of the stage and of its folder."""
    kind: Kind
    """What it does."""
    config: str | None = None
    """TOML file with the options; `options` below win over it."""
    nproc: PositiveInt = 1
    """Ranks to start (train only)."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the kind; a value `stage:other/file` is a file of the earlier stage `other`."""


class Pipeline(Section):
    """Stages that run one after the other."""

    name: str
    """Title of the report."""
    output: str
    """Folder that holds the stages' folders and the report."""
    files: dict[str, str] = Field(default_factory=dict)
    """Paths (or glob patterns) of what the user brings; an option `file:NAME` stands for one."""
    stage: Annotated[tuple[Stage, ...], Field(min_length=1)]
    """The stages, in order."""


def check_pipeline(pipeline: Pipeline) -> None:
    """Names are unique, references point backwards, and only a train stage has several ranks."""
    seen: list[str] = []
    for stage in pipeline.stage:
        where = f"stage {stage.name}"
        if stage.name in seen:
            raise UserError("two stages have the same name", where=where, seen=stage.name)
        if stage.nproc > 1 and stage.kind != "train":
            raise UserError("only a train stage has ranks", where=f"{where}: nproc", seen=stage.nproc, legal="1")
        for kind, name in sorted(references(stage_options(stage))):
            if kind == "file" and name not in pipeline.files:
                raise unknown_name("file", name, pipeline.files, where=where)
            if kind == "stage" and name not in seen:
                raise UserError(
                    "a stage can only use the output of an earlier one",
                    where=where,
                    seen=f"stage:{name}",
                    legal=seen or "none: this is the first stage",
                )
        seen.append(stage.name)


def references(value: Any) -> set[tuple[str, str]]:
    """Return what a tree of options refers to, as ``("stage" or "file", name)``."""
    if isinstance(value, str):
        match = _REFERENCE.fullmatch(value)
        return {(match[1], match[2])} if match else set()
    if isinstance(value, Mapping):
        return set().union(*(references(item) for item in value.values()))
    if isinstance(value, list | tuple):
        return set().union(*(references(item) for item in value))
    return set()


def resolve(value: Any, places: Mapping[tuple[str, str], str]) -> Any:
    """Return ``value`` with every reference replaced by the path of what it refers to."""
    if isinstance(value, str):
        match = _REFERENCE.fullmatch(value)
        return f"{places[match[1], match[2]]}{match[3]}" if match else value
    if isinstance(value, Mapping):
        return {key: resolve(item, places) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [resolve(item, places) for item in value]
    return value


def stage_options(stage: Stage) -> dict[str, Any]:
    """Return a stage's options: those of its config file, overlaid with its own."""
    if stage.config is None:
        return dict(stage.options)
    return _overlay(read_toml(Path(stage.config)), stage.options)


def _overlay(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in top.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _overlay(merged[key], value) if both else value
    return merged


def plan_stages(
    pipeline: Pipeline, schemas: Mapping[str, type[Section]], outputs: Mapping[str, str | None]
) -> list[tuple[Stage, Path, Section]]:
    """Return each stage with its folder and its checked options.

    Args:
        pipeline: the pipeline.
        schemas: the options' schema of each kind.
        outputs: the option (``key`` or ``section.key``) of each kind that names its output folder, if it has one; the
            pipeline sets it.

    Raises:
        UserError: an illegal pipeline or illegal options of any stage, before anything has run.
    """
    check_pipeline(pipeline)
    places = {("file", name): path for name, path in pipeline.files.items()}
    planned = []
    for stage in pipeline.stage:
        folder = Path(pipeline.output) / stage.name
        options = resolve(stage_options(stage), places)
        if key := outputs[stage.kind]:
            options = _set_output(options, key.split("."), folder, stage)
        planned.append((stage, folder, build(schemas[stage.kind], options, source=f"stage {stage.name}")))
        places["stage", stage.name] = str(folder)
    return planned


def _set_output(options: dict[str, Any], path: list[str], folder: Path, stage: Stage) -> dict[str, Any]:
    parent = options
    for part in path[:-1]:
        parent = parent.setdefault(part, {})
    given = stage.options if len(path) == 1 else stage.options.get(path[0], {})
    if path[-1] in given:
        raise UserError(
            "a stage's output folder is set by the pipeline",
            where=f"stage {stage.name}: {'.'.join(path)}",
            seen=parent[path[-1]],
            hint="leave it out; the folder is OUTPUT/NAME",
        )
    parent[path[-1]] = str(folder)
    return options
