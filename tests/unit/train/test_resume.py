"""Resume = uninterrupted, bit for bit, from every step; and by another batch size or mixture at the right sample."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from danlu.base.errors import UserError
from danlu.checkpoint.store import find_checkpoints, open_checkpoint
from danlu.data import loader as loader_module
from danlu.data.dataset import PackedDataset
from danlu.train.loop import train
from tiny import last_tensors, random_rows, read_metrics, tiny_config, write_rows

STEPS = 12
WORDS = (f"train.steps={STEPS}", "model.dropout=0.1", "schedule.warmup_steps=3")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, tiny_rows: Path) -> Path:
    """12 steps without a break, every checkpoint kept. 28 rows by 8: the epochs end with short steps at 4, 8 and 12."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(tiny_config(tiny_rows, folder, *WORDS, "checkpoint.every_steps=1", "checkpoint.keep_last=99"))
    return folder


def at_step(whole: Path, step: int, folder: Path) -> Path:
    """Return a run folder as it was when ``step`` was saved."""
    (folder / "checkpoints").mkdir(parents=True)
    name = f"step-{step:08d}"
    shutil.copytree(whole / "checkpoints" / name, folder / "checkpoints" / name)
    shutil.copy(whole / "metrics.jsonl", folder / "metrics.jsonl")
    return folder


def losses(folder: Path) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["lr"]) for record in read_metrics(folder)]


def assert_same_end(folder: Path, whole: Path) -> None:
    ours, reference = last_tensors(folder, ""), last_tensors(whole, "")
    assert ours.keys() == reference.keys()
    assert [name for name in reference if not torch.equal(ours[name], reference[name])] == []


@pytest.mark.parametrize("step", range(1, STEPS + 1))
def test_br_051_resume_at_any_step_is_bit_equal(tmp_path: Path, tiny_rows: Path, whole: Path, step: int) -> None:
    """With dropout: all losses, rates, weights, moments and random states are those of the run without a break."""
    folder = at_step(whole, step, tmp_path / "run")
    result = train(tiny_config(tiny_rows, folder, *WORDS))
    assert (result.step, result.finished) == (STEPS, True)
    assert losses(folder) == losses(whole)
    assert_same_end(folder, whole)


def test_the_reference_crosses_epochs_and_uses_dropout(tmp_path: Path, tiny_rows: Path, whole: Path) -> None:
    """The 12 steps hold three epochs' edges, and dropout changes the losses: the tests above would notice."""
    samples = [open_checkpoint(path).record["samples_seen"] for path in find_checkpoints(whole / "checkpoints")]
    assert samples == [8, 16, 24, 28, 36, 44, 52, 56, 64, 72, 80, 84]
    train(tiny_config(tiny_rows, tmp_path / "dry", *WORDS, "model.dropout=0"))
    assert losses(tmp_path / "dry") != losses(whole)


def test_loading_processes_change_nothing(tmp_path: Path, tiny_rows: Path, whole: Path) -> None:
    """Resume with two loader processes instead of none: still bit-equal."""
    folder = at_step(whole, 5, tmp_path / "run")
    train(tiny_config(tiny_rows, folder, *WORDS, "data.num_workers=2"))
    assert losses(folder) == losses(whole)


def test_br_047_a_mixture_resumes_at_its_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two sources 70/30, stopped at step 5 of 20: the samples before and after are those of one run, none twice."""
    served: list[int] = []
    plain = loader_module.Loader.load

    def spy(self: Any, first: int) -> Any:
        served.extend(range(first, first + self.num_samples(first)))
        return plain(self, first)

    monkeypatch.setattr(loader_module.Loader, "load", spy)
    sources = [write_rows(tmp_path / name, random_rows(40, seed=seed)) for seed, name in enumerate("ab")]
    words = (f'data.train=["{sources[0]}", "{sources[1]}"]', "data.weights=[0.7, 0.3]", "train.global_batch_size=4",
             "schedule.kind=constant")  # fmt: skip

    def run(name: str, steps: int) -> None:
        train(tiny_config("", tmp_path / name, *words, f"train.steps={steps}"))

    run("once", 20)
    once, served[:] = list(served), []
    run("twice", 5)
    run("twice", 20)
    assert served == once == list(range(80))
    assert_same_end(tmp_path / "twice", tmp_path / "once")


@pytest.mark.parametrize("batch", [2, 4, 6])
def test_br_046_progress_is_counted_in_samples(tmp_path: Path, tiny_rows: Path, batch: int) -> None:
    """Saved after 12 samples (3 steps of 4) and resumed with another batch size: the next sample is number 12."""
    folder = tmp_path / "run"
    train(tiny_config(tiny_rows, folder, "train.steps=3", "train.global_batch_size=4"))
    train(tiny_config(tiny_rows, folder, "train.steps=5", f"train.global_batch_size={batch}", "checkpoint.keep_last=9"))
    first, last = (open_checkpoint(path).record["samples_seen"] for path in find_checkpoints(folder / "checkpoints"))
    assert (first, last) == (12, 12 + 2 * batch)


def test_br_070_the_position_is_said_and_recorded(
    tmp_path: Path, tiny_rows: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A resume says `sample N of M, epoch E` in the log; the record holds the sample."""
    folder = at_step(whole, 6, tmp_path / "run")
    capsys.readouterr()
    train(tiny_config(tiny_rows, folder, *WORDS))
    said = capsys.readouterr().err
    assert "resumed at sample 16 of 28, epoch 1" in said
    assert "step 6 of 12" in said
    assert open_checkpoint(folder / "checkpoints" / "step-00000006").record["samples_seen"] == 44


def test_br_029_the_rate_follows_the_step(whole: Path) -> None:
    """Three steps of warm-up, then the cosine: the logged rates are a function of the step alone."""
    rates = [rate for _, _, rate in losses(whole)]
    assert rates[:3] == pytest.approx([0.001, 0.002, 0.003])
    assert rates[-1] == pytest.approx(0.0003)


@pytest.mark.parametrize(
    ("words", "name"),
    [(["train.seed=1"], "seed"), (["model.num_layers=3"], "model"), (["data.shuffle=false"], "shuffle"),
     (["data.weights=[1]"], "weights")],
)  # fmt: skip
def test_another_run_is_not_continued(
    tmp_path: Path, tiny_rows: Path, whole: Path, words: list[str], name: str
) -> None:
    """Another model, seed or order would go on without a word and mean nothing: refused, naming what differs."""
    folder = at_step(whole, 3, tmp_path / "run")
    with pytest.raises(UserError, match=f"cannot resume: {name} is not"):
        train(tiny_config(tiny_rows, folder, *WORDS, *words))


def test_of_another_model_only_what_differs_is_shown(tmp_path: Path, tiny_rows: Path, whole: Path) -> None:
    """Two sizes changed: these two and their old values, not the whole shape twice."""
    folder = at_step(whole, 3, tmp_path / "run")
    with pytest.raises(UserError) as caught:
        train(tiny_config(tiny_rows, folder, *WORDS, "model.num_layers=3", "model.mlp_size=48"))
    assert "seen:  {'num_layers': 3, 'mlp_size': 48}\n  legal: {'num_layers': 2, 'mlp_size': 64}" in str(caught.value)


def test_other_data_is_not_continued(tmp_path: Path, whole: Path) -> None:
    """The rows' fingerprint is part of the run's identity."""
    folder = at_step(whole, 3, tmp_path / "run")
    with pytest.raises(UserError, match="cannot resume: data is not"):
        train(tiny_config(write_rows(tmp_path / "other", random_rows(28, seed=9)), folder, *WORDS))


def test_resume_words(tmp_path: Path, tiny_rows: Path, whole: Path) -> None:
    """`never` refuses a used folder, a path continues from that checkpoint, and a folder with other ones is refused."""
    with pytest.raises(UserError, match="holds checkpoints already"):
        train(tiny_config(tiny_rows, whole, *WORDS), resume="never")
    with pytest.raises(UserError, match="not a checkpoint"):
        train(tiny_config(tiny_rows, tmp_path / "new", *WORDS), resume=str(tmp_path / "nothing"))
    checkpoint = whole / "checkpoints" / "step-00000007"
    train(tiny_config(tiny_rows, tmp_path / "new", *WORDS), resume=str(checkpoint))
    assert losses(tmp_path / "new") == losses(whole)[7:]
    assert_same_end(tmp_path / "new", whole)
    with pytest.raises(UserError, match="other checkpoints than the one to continue from"):
        train(tiny_config(tiny_rows, whole, *WORDS), resume=str(checkpoint))


def test_a_finished_run_does_nothing_more(tmp_path: Path, tiny_rows: Path, whole: Path) -> None:
    """Running a complete run again takes no step and leaves metrics and checkpoints as they are."""
    folder = at_step(whole, STEPS, tmp_path / "run")
    before = losses(folder)
    result = train(tiny_config(tiny_rows, folder, *WORDS))
    assert (result.step, result.finished, result.losses) == (STEPS, True, {})
    assert "nothing is left to train" in (folder / "log.txt").read_text()
    assert losses(folder) == before
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["step-00000012"]


def test_new_weights_from_an_old_run(tmp_path: Path, tiny_rows: Path, whole: Path) -> None:
    """`model.name = RUN_FOLDER` starts a new run, step 0, from its newest weights."""
    config = tiny_config(tiny_rows, tmp_path / "next", "train.steps=1", "optimizer.learning_rate=1e-12")
    words = config.model_copy(update={"model": type(config.model)(name=str(whole))})
    result = train(words)
    assert result.step == 1
    ours, theirs = last_tensors(tmp_path / "next"), last_tensors(whole)
    assert max(float((ours[name] - theirs[name]).abs().max()) for name in theirs) < 1e-9


def test_the_record_is_plain_json(whole: Path, tiny_rows: Path) -> None:
    """Everything but tensors is JSON: step, counters, identity and the resolved config."""
    record = json.loads((whole / "checkpoints" / "step-00000012" / "danlu.json").read_text())
    assert record["step"] == STEPS
    assert record["world_size"] == 1
    assert record["identity"]["data"] == [PackedDataset(tiny_rows).fingerprint]
    assert record["config"]["train"]["steps"] == STEPS
