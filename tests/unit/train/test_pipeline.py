"""Pipelines: what is done and unchanged is skipped, what changed runs anew, what failed goes on, nothing is lost."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import RunError, UserError
from danlu.base.log import log
from danlu.config.load import build, load
from danlu.config.pipeline import Pipeline, references, resolve
from danlu.train import pipeline_run
from danlu.train.pipeline_run import plan_pipeline, run_pipeline
from tiny import PLAIN, SENTENCES, held_elsewhere

STAGES = """
name = "test"
output = "{output}"

[[stage]]
name = "tokens"
kind = "tokenizer"
options = {{ inputs = "{text}", vocab_size = 300, chat = false }}

[[stage]]
name = "rows"
kind = "data"
[stage.options]
inputs = "{text}"
tokenizer = "stage:tokens"
text_unit = "line"
sequence_length = 32
num_workers = 1

[[stage]]
name = "model"
kind = "train"
config = "{train}"
[stage.options]
data.train = "stage:rows"
"""


class Run:
    """A pipeline on disk and a record of which stages ran."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.output, self.text = folder, folder / "out", folder / "text.txt"
        self.ran: list[str] = []
        self.broken: set[str] = set()
        self.text.write_text("\n".join(SENTENCES), encoding="utf-8")
        self.write_train(steps=3)
        for kind, runner in pipeline_run.RUNNERS.items():
            spied = pipeline_run.Runner(runner.schema, runner.output_key, self._spy(runner.run))
            monkeypatch.setitem(pipeline_run.RUNNERS, kind, spied)  # type: ignore[arg-type]

    def _spy(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        def run(options: Any, folder: Path, stage: Any) -> Any:
            self.ran.append(stage.name)
            if stage.name in self.broken:
                raise RunError("broken on purpose")
            return plain(options, folder, stage)

        return run

    def write_train(self, **values: Any) -> None:
        words = [*PLAIN, "model.vocab_size=320", *(f"train.{name}={value}" for name, value in values.items())]
        (self.folder / "train.toml").write_text("\n".join(words))  # a dotted key is TOML as it stands

    def load(self, template: str = STAGES, **values: Any) -> Pipeline:
        path = self.folder / "pipeline.toml"
        places = {"output": self.output, "text": self.text, "train": self.folder / "train.toml"}
        path.write_text(template.format(**{**places, **values}))
        return load(Pipeline, path).config

    def __call__(self, **values: Any) -> list[str]:
        """Run the pipeline and return the stages that ran."""
        self.ran.clear()
        run_pipeline(self.load(**values))
        return list(self.ran)

    def state(self) -> dict[str, Any]:
        stages = json.loads((self.output / "pipeline.json").read_text())["stages"]
        return {stage["name"]: stage for stage in stages}


@pytest.fixture
def pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    yield Run(tmp_path, monkeypatch)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()


def test_unchanged_stages_are_skipped(pipeline: Run) -> None:
    """The first run does everything, the second nothing, and the record holds keys, results and seconds."""
    assert pipeline() == ["tokens", "rows", "model"]
    first = pipeline.state()
    assert pipeline() == []
    assert pipeline.state() == first
    assert [stage["status"] for stage in first.values()] == ["done"] * 3
    assert first["rows"]["result"]["num_rows"] > 0
    assert first["model"]["result"]["step"] == 3


def test_an_option_reruns_its_stage_and_what_depends_on_it(pipeline: Run) -> None:
    """A changed option of the data stage rebuilds data and model, not the tokenizer; checkpoints are moved aside."""
    pipeline()
    changed = STAGES.replace("sequence_length = 32", "sequence_length = 16")
    pipeline.ran.clear()
    run_pipeline(pipeline.load(changed))
    assert pipeline.ran == ["rows", "model"]
    assert list((pipeline.output / "model.old-1" / "checkpoints").glob("step-*"))
    assert not (pipeline.output / "rows.old-1").exists()


def test_the_content_of_an_input_file_counts_not_its_date(pipeline: Run) -> None:
    """Rewriting the same text changes nothing; another text of the same length reruns all that read it."""
    pipeline()
    text = pipeline.text.read_text()
    pipeline.text.write_text(text)
    assert pipeline() == []
    pipeline.text.write_text(text.replace("card 1 ", "card 2 "))
    assert pipeline() == ["tokens", "rows", "model"]


@pytest.mark.parametrize("pattern", ["*.txt", "", "**/*.txt"])
def test_files_behind_folders_and_patterns_count_too(pipeline: Run, pattern: str) -> None:
    """A new or changed file in a folder, or one that a pattern matches, reruns the stage."""
    texts = pipeline.folder / "texts"
    texts.mkdir()
    (texts / "a.txt").write_text(pipeline.text.read_text())
    place = texts / pattern if pattern else texts
    pipeline(text=place)
    assert pipeline(text=place) == []
    (texts / "b.txt").write_text("one more line of text\n")
    assert pipeline(text=place) == ["tokens", "rows", "model"]
    (texts / "b.txt").write_text("one more like of text\n")
    assert pipeline(text=place) == ["tokens", "rows", "model"]


def test_a_config_file_counts_by_its_content(pipeline: Run) -> None:
    """Changing the train stage's own config file reruns only the training, from step 0 in a fresh folder."""
    pipeline()
    pipeline.write_train(steps=4)
    assert pipeline() == ["model"]
    assert pipeline.state()["model"]["result"]["step"] == 4
    assert (pipeline.output / "model.old-1").is_dir()
    pipeline.write_train(steps=5)
    pipeline()
    assert (pipeline.output / "model.old-2").is_dir()


def test_a_failed_stage_goes_on_where_it_stopped(pipeline: Run) -> None:
    """The stages before it are kept; the next run begins with the failed one, in its folder."""
    pipeline.broken = {"model"}
    with pytest.raises(RunError, match="on purpose"):
        pipeline()
    assert [stage["status"] for stage in pipeline.state().values()] == ["done", "done", "failed"]
    (pipeline.output / "model" / "half.txt").write_text("kept")
    pipeline.broken = set()
    assert pipeline() == ["model"]
    assert (pipeline.output / "model" / "half.txt").exists()


@pytest.mark.parametrize("nproc", [1, 2])
def test_a_training_stopped_by_a_signal_is_not_done(pipeline: Run, monkeypatch: pytest.MonkeyPatch, nproc: int) -> None:
    """One process or several: the pipeline stops, the stage is not recorded as done, and the next run continues it."""
    import os

    from danlu.train import local, loop

    plain, calls = loop.forward_backward, iter(range(1, 100))

    def signalled(*args: Any, **options: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return plain(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "forward_backward", signalled)
        patch.setattr(local, "run_local_ranks", lambda words, nproc: local.JobResult(0, "SIGTERM"))
        stages = STAGES.replace('kind = "train"', f'kind = "train"\nnproc = {nproc}')
        with pytest.raises(RunError, match="stopped by a signal"):
            run_pipeline(pipeline.load(stages))
    assert pipeline.state()["model"]["status"] == "failed"
    if nproc == 1:
        pipeline.ran.clear()
        run_pipeline(pipeline.load(stages))
        assert pipeline.ran == ["model"]
        assert pipeline.state()["model"]["result"]["step"] == 3


def test_a_later_stage_does_not_write_into_the_training_log(pipeline: Run) -> None:
    """After the training stage the log goes to stderr again, not into the run's file."""
    pipeline()
    log.info("something else")
    assert "something else" not in (pipeline.output / "model" / "log.txt").read_text()


def test_a_lost_record_costs_a_rerun_and_nothing_else(pipeline: Run) -> None:
    """A damaged pipeline.json means that every stage runs again; checkpoints are kept."""
    pipeline()
    (pipeline.output / "pipeline.json").write_text("{")
    assert pipeline() == ["tokens", "rows", "model"]
    assert (pipeline.output / "model.old-1").is_dir()


def test_two_runs_of_one_pipeline_do_not_mix(pipeline: Run) -> None:
    """While one process runs it, another is refused."""
    config = pipeline.load()
    with held_elsewhere(pipeline.output), pytest.raises(UserError, match="another process"):
        run_pipeline(config)


def stages(*entries: dict[str, Any]) -> Pipeline:
    return build(Pipeline, {"name": "x", "output": "/nowhere", "stage": list(entries)})


TOKENS = {"name": "tokens", "kind": "tokenizer", "options": {"inputs": "a.txt"}}


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ([TOKENS, TOKENS], "two stages have the same name"),
        ([{**TOKENS, "nproc": 2}], "only a train stage has ranks"),
        ([{**TOKENS, "options": {"inputs": "stage:later"}}], "only use the output of an earlier one"),
        ([{**TOKENS, "options": {"inputs": ["stage:tokens/a"]}}], "only use the output of an earlier one"),
        ([{**TOKENS, "options": {"inputs": "a", "vocab": 3}}], "stage tokens: vocab: unknown key"),
        ([{**TOKENS, "options": {"inputs": "a", "output": "mine"}}], "output folder is set by the pipeline"),
        ([{"name": "m", "kind": "train", "options": {"data": {"train": "x"}}}], "exactly one of train.steps"),
        ([{"name": "m", "kind": "train", "options": {"train": {"steps": 1, "output": "y"}}}], "set by the pipeline"),
        ([{"name": "m", "kind": "train", "config": "/no/file.toml"}], "no such config file"),
        (
            [{"name": "m", "kind": "train", "nproc": 3, "options": {"data": {"train": "x"}, "train": {"steps": 1}}}],
            "does not divide",
        ),
    ],
)  # fmt: skip
def test_everything_is_checked_before_anything_runs(entries: list[dict[str, Any]], part: str) -> None:
    """A slip in the last stage costs no minute of the first: planning alone refuses, naming the stage."""
    with pytest.raises(UserError, match=part.replace("(", r"\(")):
        plan_pipeline(stages(*entries))


@pytest.mark.parametrize("name", ["a b", "", "../up", "-x", "ä"])
def test_stage_names_are_folder_names(name: str) -> None:
    """Nothing that could leave the pipeline's folder."""
    with pytest.raises(UserError, match="name"):
        stages({**TOKENS, "name": name})


def test_references_are_found_and_replaced_everywhere() -> None:
    """In texts, lists and tables, alone or with a path behind; a text that only mentions one stays as it is."""
    value = {"a": "stage:x/checkpoints", "b": ["stage:y", "file:z"], "c": {"d": "see stage:w", "e": "/stage:w"}}
    assert references(value) == {("stage", "x"), ("stage", "y"), ("file", "z")}
    places = {("stage", "x"): "/o/x", ("stage", "y"): "/o/y", ("file", "z"): "/home/*.txt"}
    assert resolve(value, places) == {
        "a": "/o/x/checkpoints",
        "b": ["/o/y", "/home/*.txt"],
        "c": {"d": "see stage:w", "e": "/stage:w"},
    }


def test_files_are_named_once_and_checked() -> None:
    """`file:NAME` stands for an entry of [files]; a name that is not there is answered with the nearest."""
    stage = {**TOKENS, "options": {"inputs": "file:text"}}
    document = {"name": "x", "output": "/nowhere", "files": {"text": "/data/a.txt"}, "stage": [stage]}
    assert plan_pipeline(build(Pipeline, document))[0][2].model_dump()["inputs"] == ("/data/a.txt",)
    with pytest.raises(UserError, match="did you mean 'texts'"):
        plan_pipeline(build(Pipeline, {**document, "files": {"texts": "/data/a.txt"}}))


def test_references_in_a_config_file_are_checked_too(tmp_path: Path) -> None:
    """A stage's own config file can refer to an earlier stage, and not to one that does not exist."""
    file = tmp_path / "tokens.toml"
    file.write_text('inputs = "stage:first/text.txt"')
    late = {"name": "late", "kind": "tokenizer", "config": str(file)}
    with pytest.raises(UserError, match="only use the output of an earlier one"):
        plan_pipeline(stages(TOKENS, late))
    planned = plan_pipeline(stages({**TOKENS, "name": "first"}, late))
    assert planned[1][2].model_dump()["inputs"] == ("/nowhere/first/text.txt",)


def test_missing_inputs_are_told_before_anything_runs(tmp_path: Path) -> None:
    """A misspelled file of the last stage, or an evaluation of nothing, ends the pipeline before the first one."""
    (tmp_path / "a.txt").write_text("some words")
    first = {**TOKENS, "options": {"inputs": str(tmp_path / "*.txt"), "vocab_size": 300}}
    last = {"name": "last", "kind": "eval", "options": {"model": "tiny", "questions": str(tmp_path / "tset.jsonl")}}
    document = {"name": "x", "output": str(tmp_path / "out"), "stage": [first, last]}
    with pytest.raises(UserError, match=r"(?s)stage last: questions: no such file.*tset\.jsonl"):
        run_pipeline(build(Pipeline, document))
    last["options"] = {"model": "tiny"}
    with pytest.raises(UserError, match="nothing to evaluate on"):
        run_pipeline(build(Pipeline, document))
    assert not (tmp_path / "out").exists()
