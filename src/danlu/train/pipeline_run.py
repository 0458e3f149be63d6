"""``danlu run``: stages one after the other, each skipped when it is done and nothing that it depends on has changed.

A stage's key is the hash of its kind, its options, the keys of the stages it refers to, the content of the files it
names and danlu's version. ``pipeline.json`` keeps each stage's key and status; a stage is skipped when its key is the
recorded one and its status is ``done``. A stage that was interrupted runs again in the same folder, so a build goes on
with its next shard and a training run with its newest checkpoint. A stage whose key has changed starts anew: its old
folder is moved aside where it holds checkpoints (they may have cost GPU days), else removed.
"""

from __future__ import annotations

import glob
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.base.errors import RunError, UserError
from danlu.base.folders import lock_folder, make_folder
from danlu.base.log import log, setup_log
from danlu.config.data_build import DataBuild, TokenizerTrain
from danlu.config.load import to_toml
from danlu.config.pipeline import Pipeline, Stage, plan_stages, references, stage_options
from danlu.config.rules import check_config
from danlu.config.schema import Config, Section
from danlu.config.stages import EvalOptions, ExportOptions, FinanceOptions
from danlu.version import __version__

Result = dict[str, Any]


@dataclass(frozen=True)
class Runner:
    """How stages of a kind run: their options' schema, where the output folder goes in them, and the function."""

    schema: type[Section]
    output_key: str | None
    run: Callable[[Any, Path, Stage], Result]


def _run_finance(options: FinanceOptions, folder: Path, stage: Stage) -> Result:
    from danlu.data.finance import write_finance

    return dict(write_finance(folder, **options.model_dump()))


def _run_tokenizer(options: TokenizerTrain, folder: Path, stage: Stage) -> Result:
    from danlu.data.tokenizer_train import build_tokenizer

    return build_tokenizer(options)


def _run_data(options: DataBuild, folder: Path, stage: Stage) -> Result:
    from danlu.data.build import build

    manifest = build(options)
    keys = ("num_samples", "num_rows", "num_tokens", "target_tokens", "truncated", "dropped", "bad_rows", "fingerprint")
    return {key: manifest[key] for key in keys}


def _run_train(options: Config, folder: Path, stage: Stage) -> Result:
    if stage.nproc == 1:
        from danlu.train.loop import train

        finished = train(options).finished
        setup_log()  # the next stages' lines do not belong into this run's log file
    else:
        from danlu.train.local import run_local_ranks

        config_file = folder.with_name(f"{stage.name}.toml")
        config_file.write_text(to_toml(options), encoding="utf-8")
        job = run_local_ranks(["train", str(config_file)], nproc=stage.nproc)
        if job.exit_code != 0:
            raise RunError("training failed", where=f"stage {stage.name}", hint=f"see {folder / 'log.txt'}")
        finished = job.stopped_by is None
    if not finished:
        raise RunError("training was stopped by a signal", where=f"stage {stage.name}", hint="run the pipeline again")
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [record for record in map(json.loads, lines) if "loss" in record]
    if not steps:
        raise RunError("training left no metrics", where=f"stage {stage.name}")
    return {"step": steps[-1]["step"], "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"]}


def _run_eval(options: EvalOptions, folder: Path, stage: Stage) -> Result:
    from danlu.train.evaluation import evaluate

    return evaluate(options, folder / "eval.json")


def _run_export(options: ExportOptions, folder: Path, stage: Stage) -> Result:
    from danlu.train.export import export

    return export(options.model, folder, dtype=options.dtype, verify=options.verify, overwrite=True)


RUNNERS: Mapping[str, Runner] = {
    "finance": Runner(FinanceOptions, None, _run_finance),
    "tokenizer": Runner(TokenizerTrain, "output", _run_tokenizer),
    "data": Runner(DataBuild, "output", _run_data),
    "train": Runner(Config, "train.output", _run_train),
    "eval": Runner(EvalOptions, None, _run_eval),
    "export": Runner(ExportOptions, None, _run_export),
}


def plan_pipeline(pipeline: Pipeline) -> list[tuple[Stage, Path, Section]]:
    """Return the stages with their folders and checked options.

    Raises:
        UserError: anything about any stage that can be known before it runs.
    """
    from danlu.train.evaluation import check_options

    outputs = {kind: runner.output_key for kind, runner in RUNNERS.items()}
    planned = plan_stages(pipeline, {kind: runner.schema for kind, runner in RUNNERS.items()}, outputs)
    for stage, _, options in planned:
        if isinstance(options, Config):
            check_config(options, stage.nproc)
        if isinstance(options, EvalOptions):
            check_options(options)
    return planned


def _check_inputs(stage: Stage, options: Section, output: Path) -> None:
    """Raise `UserError` for a file that a stage will want and that neither is there nor will be made before."""
    wanted: dict[str, str | Sequence[str] | None]
    if isinstance(options, Config):
        wanted = {"data.train": options.data.train, "eval.data": options.eval.data}
    else:
        names = ("inputs", "tokenizer", "data", "questions", "majority_from")
        wanted = {name: getattr(options, name, None) for name in names}
    for key, value in wanted.items():
        for text in [value] if isinstance(value, str) else value or ():
            if not _is_below(text, output) and not any(_paths(text)):
                raise UserError(
                    "no such file, folder or pattern",
                    where=f"stage {stage.name}: {key}",
                    seen=text,
                    hint="what you must bring is named in [files]: files.NAME=path on the command line",
                )


def run_pipeline(pipeline: Pipeline) -> Path:
    """Run the stages that need it and return the pipeline's folder.

    Raises:
        UserError: an illegal pipeline or a missing input, before anything runs; or another process is running this one.
        RunError: a stage failed; the stages before it are kept and skipped the next time.
    """
    planned = plan_pipeline(pipeline)
    output = Path(pipeline.output)
    for stage, _, options in planned:
        _check_inputs(stage, options, output)
    make_folder(output)
    with lock_folder(output, what="another process is running this pipeline"):
        state = _State(output, pipeline)
        keys: dict[str, str] = {}
        for number, (stage, folder, options) in enumerate(planned, 1):
            keys[stage.name] = key = stage_key(stage, options, keys, output)
            title = f"[{number}/{len(planned)}] {stage.name} ({stage.kind})"
            if state.is_done(stage.name, key) and folder.exists():
                log.info("%s: done and unchanged, skipped", title)
                continue
            log.info("%s", title)
            if state.key(stage.name) != key:
                _clear(folder)
            _run_stage(stage, folder, options, key, state)
        state.drop_others(keys)
    return output


def _run_stage(stage: Stage, folder: Path, options: Section, key: str, state: _State) -> None:
    state.set(stage, folder, key, status="running")
    began = time.monotonic()
    make_folder(folder)
    try:
        result = RUNNERS[stage.kind].run(options, folder, stage)
    except BaseException:
        state.set(stage, folder, key, status="failed", seconds=time.monotonic() - began)
        raise
    state.set(stage, folder, key, status="done", seconds=time.monotonic() - began, result=result)


def stage_key(stage: Stage, options: Section, keys: Mapping[str, str], output: Path) -> str:
    """Return the hash of everything that a stage's result depends on."""
    upstream = {name: keys[name] for kind, name in sorted(references(stage_options(stage))) if kind == "stage"}
    values = options.model_dump(mode="json")
    files = {path: _content_hash(Path(path)) for path in sorted(set(_paths(values))) if not _is_below(path, output)}
    text = json.dumps([__version__, stage.kind, stage.nproc, values, upstream, files], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _paths(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if not value or len(value) >= 1024 or "\n" in value or "\0" in value:
            return
        if Path(value).exists():
            yield value
        elif glob.has_magic(value):
            yield from glob.glob(value, recursive=True)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _paths(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _paths(item)


def _is_below(path: str, output: Path) -> bool:
    return Path(path).resolve().is_relative_to(output.resolve())


def _content_hash(path: Path) -> str:
    files = [path] if path.is_file() else sorted(item for item in path.rglob("*") if item.is_file())
    digest = hashlib.sha256()
    for file in files:
        digest.update(str(file.relative_to(path)).encode())
        with file.open("rb") as stream:
            digest.update(hashlib.file_digest(stream, "sha256").digest())
    return digest.hexdigest()


def _clear(folder: Path) -> None:
    if not folder.exists():
        return
    if any(folder.glob("checkpoints/step-*")):
        number = 1
        while (aside := folder.with_name(f"{folder.name}.old-{number}")).exists():
            number += 1
        log.warning("%s has changed; its old checkpoints are kept in %s", folder.name, aside)
        folder.rename(aside)
    else:
        shutil.rmtree(folder)


class _State:
    """``pipeline.json``: one entry a stage, rewritten as a whole after each change."""

    def __init__(self, output: Path, pipeline: Pipeline) -> None:
        self.path = output / "pipeline.json"
        self.name = pipeline.name
        self.order = [stage.name for stage in pipeline.stage]
        try:
            stages = json.loads(self.path.read_text(encoding="utf-8"))["stages"]
            self.stages: dict[str, dict[str, Any]] = {stage["name"]: stage for stage in stages}
        except FileNotFoundError:
            self.stages = {}
        except (json.JSONDecodeError, KeyError, TypeError):
            log.warning("%s cannot be read; every stage runs again", self.path)
            self.stages = {}

    def key(self, name: str) -> str | None:
        """Return the recorded key of a stage."""
        return self.stages.get(name, {}).get("key")

    def is_done(self, name: str, key: str) -> bool:
        """Return whether the stage finished with this key."""
        return self.key(name) == key and self.stages[name].get("status") == "done"

    def set(
        self,
        stage: Stage,
        folder: Path,
        key: str,
        *,
        status: str,
        seconds: float | None = None,
        result: Result | None = None,
    ) -> None:
        """Record a stage's state durably."""
        self.stages[stage.name] = {
            "name": stage.name,
            "kind": stage.kind,
            "status": status,
            "seconds": seconds,
            "folder": folder.name,
            "key": key,
            "result": result,
        }
        self._write()

    def drop_others(self, keys: Mapping[str, str]) -> None:
        """Forget stages that the pipeline no longer has."""
        self.stages = {name: entry for name, entry in self.stages.items() if name in keys}
        self._write()

    def _write(self) -> None:
        known = [self.stages[name] for name in self.order if name in self.stages]
        temporary = self.path.with_suffix(".json.partial")
        text = json.dumps({"name": self.name, "stages": known}, ensure_ascii=False, indent=2)
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(self.path)
