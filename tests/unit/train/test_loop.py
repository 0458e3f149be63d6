"""The loop in one process: windows at epochs' edges, policies for bad numbers, what a run leaves, and stopping."""

from __future__ import annotations

import dataclasses
import os
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from danlu.base.errors import RunError, UserError
from danlu.checkpoint.store import find_checkpoints
from danlu.config.load import load
from danlu.config.schema import Config, ModelSection
from danlu.model.presets import PRESETS
from danlu.train import loop as loop_module
from danlu.train.loop import train
from danlu.train.start import open_sources, plan_start
from tiny import T0_SPEC, largest_difference, last_tensors, random_rows, read_metrics, tiny_config, write_rows

EQUAL = [[[3, 4, 5, 6, 7, 8]]]
FROZEN = ("optimizer.learning_rate=1e-30", "optimizer.max_grad_norm=0")


def metric(folder: Path, name: str) -> list[Any]:
    return [record[name] for record in read_metrics(folder) if name in record]


@pytest.mark.parametrize(
    ("rows", "epochs", "sizes"),
    [
        pytest.param(10, 1, [4, 4, 2], id="br_011"),
        pytest.param(5, 1, [4, 1], id="br_012"),
        pytest.param(3, 2, [3, 3], id="br_013"),
    ],
)
def test_br_011_012_013_short_windows_at_an_epochs_end(
    tmp_path: Path, rows: int, epochs: int, sizes: list[int]
) -> None:
    """Equal rows, 4 passes a step: all steps have one mean gradient, none leaks, and the schedule ends at the last."""
    data = write_rows(tmp_path / "data", EQUAL * rows)
    words = (f"train.epochs={epochs}", "train.global_batch_size=4", "train.micro_batch_size=1", "schedule.kind=linear")
    result = train(tiny_config(data, tmp_path / "run", *words, *FROZEN))
    assert result.step == len(sizes)
    assert metric(tmp_path / "run", "valid_tokens") == [5 * size for size in sizes]
    norms, losses = metric(tmp_path / "run", "grad_norm"), metric(tmp_path / "run", "loss")
    assert norms == pytest.approx([norms[0]] * len(sizes), rel=1e-5)
    assert losses == pytest.approx([losses[0]] * len(sizes), rel=1e-6)
    assert metric(tmp_path / "run", "lr")[-1] == pytest.approx(1e-31)


def test_br_015_the_logged_loss_does_not_depend_on_accumulation(tmp_path: Path, tiny_rows: Path) -> None:
    """Step 1 with 1, 2 and 4 micro-batches reports one loss."""
    first = []
    for size in (8, 4, 2):
        train(tiny_config(tiny_rows, tmp_path / str(size), "train.steps=1", f"train.micro_batch_size={size}"))
        first.append(metric(tmp_path / str(size), "loss")[0])
    assert first == pytest.approx([first[0]] * 3, rel=1e-6)


@pytest.mark.parametrize("micro_batch", [4, 2, 1])
def test_accumulation_gives_the_same_run(tmp_path: Path, tiny_rows: Path, micro_batch: int) -> None:
    """20 steps with clipping and AdamW: losses and final weights to 1e-5 for 8 rows at once or 2, 4 or 8 passes."""
    words = ("train.steps=20", "optimizer.max_grad_norm=0.5")
    whole = train(tiny_config(tiny_rows, tmp_path / "whole", *words))
    cut = train(tiny_config(tiny_rows, tmp_path / "cut", *words, f"train.micro_batch_size={micro_batch}"))
    assert list(cut.losses.values()) == pytest.approx(list(whole.losses.values()), rel=1e-5)
    assert largest_difference(last_tensors(tmp_path / "cut"), last_tensors(tmp_path / "whole")) < 1e-5
    assert max(metric(tmp_path / "whole", "grad_norm")) > 0.5, "clipping has to be at work"


def test_packed_equals_unpacked(tmp_path: Path) -> None:
    """The same documents two a row, or one a row with twice the rows a step: the same run to 1e-5."""
    documents = [row[0] for row in random_rows(48, seed=5)]
    alone = write_rows(tmp_path / "alone", [[document] for document in documents])
    packed = write_rows(tmp_path / "packed", [documents[at : at + 2] for at in range(0, 48, 2)])
    words = ("train.steps=20", "data.shuffle=false", "optimizer.max_grad_norm=0.5")
    one = train(tiny_config(alone, tmp_path / "one", *words, "train.global_batch_size=8"))
    two = train(tiny_config(packed, tmp_path / "two", *words, "train.global_batch_size=4"))
    assert metric(tmp_path / "one", "valid_tokens") == metric(tmp_path / "two", "valid_tokens")
    assert list(two.losses.values()) == pytest.approx(list(one.losses.values()), rel=1e-5)
    assert largest_difference(last_tensors(tmp_path / "two"), last_tensors(tmp_path / "one")) < 1e-5


def test_trimmed_padding_changes_nothing(tmp_path: Path, tiny_rows: Path) -> None:
    """Micro-batches cut to their longest row give the run of full rows."""
    runs = [
        train(tiny_config(tiny_rows, tmp_path / word, "train.steps=5", f"data.trim_padding={word}"))
        for word in ("true", "false")
    ]
    assert list(runs[0].losses.values()) == pytest.approx(list(runs[1].losses.values()), rel=1e-5)


def test_a_run_leaves_what_the_design_promises(tmp_path: Path, tiny_rows: Path) -> None:
    """Resolved config, log, metrics with every promised field, checkpoint, tokenizer; the config reads back equal."""
    folder = tmp_path / "run"
    config = tiny_config(tiny_rows, folder, "train.steps=3", f"eval.data={tiny_rows}", "eval.every_steps=2")
    result = train(config)
    assert load(Config, folder / "config.toml").config == config
    assert tomllib.loads((folder / "config.toml").read_text())["train"]["steps"] == 3
    steps = [record for record in read_metrics(folder) if "loss" in record]
    promised = {
        "step", "loss", "grad_norm", "lr", "valid_tokens", "tokens_seen", "tokens_per_second",
        "tokens_per_second_per_gpu", "mfu", "hfu", "peak_memory_bytes", "data_wait_seconds", "step_seconds", "skipped",
    }  # fmt: skip
    assert promised <= steps[0].keys()
    assert [record["step"] for record in steps] == [1, 2, 3]
    assert {step: record["loss"] for step, record in zip((1, 2, 3), steps, strict=True)} == result.losses
    assert steps[0]["mfu"] is None
    evaluated = [record["step"] for record in read_metrics(folder) if "eval_loss" in record]
    assert evaluated == [2, 3]
    assert result.held_out is not None
    assert (folder / "tokenizer").is_dir()
    assert "step 3/3" in (folder / "log.txt").read_text()
    assert [path.name for path in find_checkpoints(folder / "checkpoints")] == ["step-00000003"]


def test_fewer_records_keep_the_last_step(tmp_path: Path, tiny_rows: Path) -> None:
    """With a record every third step the end of the run is still recorded."""
    train(tiny_config(tiny_rows, tmp_path / "run", "train.steps=7", "metrics.log_every=3"))
    assert metric(tmp_path / "run", "step") == [3, 6, 7]


def test_no_checkpoint_where_none_is_wanted(tmp_path: Path, tiny_rows: Path) -> None:
    """`save_last = false` writes none."""
    train(tiny_config(tiny_rows, tmp_path / "run", "train.steps=1", "checkpoint.save_last=false"))
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []


def poison(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Make the loss of one step NaN."""
    plain: Callable[..., Any] = loop_module.forward_backward
    calls = iter(range(1, 1000))

    def broken(compute_loss: Any, *args: Any, **options: Any) -> Any:
        bad = next(calls) == step

        def compute(*inputs: Any) -> Any:
            loss = compute_loss(*inputs)
            return type(loss)(loss.total * (float("nan") if bad else 1.0), loss.parts)

        return plain(compute, *args, **options)

    monkeypatch.setattr(loop_module, "forward_backward", broken)


def test_br_037_a_nan_stops_the_run_by_default(
    tmp_path: Path, tiny_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN at step 3: the run ends at step 3 with rank, step and samples, and the weights of step 2 are on disk."""
    poison(monkeypatch, 3)
    with pytest.raises(RunError, match="not finite at step 3") as caught:
        train(tiny_config(tiny_rows, tmp_path / "run", "train.steps=5", "checkpoint.every_steps=1"))
    assert "data rank 0" in str(caught.value)
    assert "samples [16, 17, 18, 19, 20, 21, 22, 23]" in str(caught.value)
    assert metric(tmp_path / "run", "step") == [1, 2]
    assert find_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000002"
    assert all(bool(value.isfinite().all()) for value in last_tensors(tmp_path / "run").values())


def test_br_037_a_nan_is_skipped_only_by_choice(
    tmp_path: Path, tiny_rows: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With `skip` step 3 is recorded, moves neither weights nor schedule, and the next samples follow."""
    poison(monkeypatch, 3)
    words = ("train.steps=5", "train.on_nonfinite=skip", "schedule.warmup_steps=5")
    result = train(tiny_config(tiny_rows, tmp_path / "run", *words))
    assert result.step == 5
    assert metric(tmp_path / "run", "skipped") == [0, 0, 1, 0, 0]
    assert metric(tmp_path / "run", "loss")[2] is None
    assert metric(tmp_path / "run", "lr") == pytest.approx([0.0006, 0.0012, 0.0018, 0.0018, 0.0024])
    assert "update skipped on all ranks" in capsys.readouterr().err
    assert all(bool(value.isfinite().all()) for value in last_tensors(tmp_path / "run").values())


def test_skipped_steps_between_records_are_counted(
    tmp_path: Path, tiny_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a record every third step the skip of step 2 is in the record of step 3."""
    poison(monkeypatch, 2)
    words = ("train.steps=6", "train.on_nonfinite=skip", "metrics.log_every=3")
    train(tiny_config(tiny_rows, tmp_path / "run", *words))
    assert metric(tmp_path / "run", "skipped") == [1, 0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_the_resumed_run_is_the_same(
    tmp_path: Path, tiny_rows: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """Told to stop in step 3: the step ends, a checkpoint is written, train returns; resumed, all losses are equal."""
    words = ("train.steps=6", "model.dropout=0.1")
    whole = train(tiny_config(tiny_rows, tmp_path / "whole", *words))
    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        plain, calls = loop_module.forward_backward, iter(range(1, 100))

        def signalled(*args: Any, **options: Any) -> Any:
            if next(calls) == 3:
                os.kill(os.getpid(), number)
            return plain(*args, **options)

        patch.setattr(loop_module, "forward_backward", signalled)
        stopped = train(tiny_config(tiny_rows, tmp_path / "run", *words))
    assert (stopped.step, stopped.finished) == (3, False)
    assert signal.getsignal(number) is before
    resumed = train(tiny_config(tiny_rows, tmp_path / "run", *words))
    assert resumed.finished
    assert {**stopped.losses, **resumed.losses} == whole.losses
    ours, theirs = last_tensors(tmp_path / "run", ""), last_tensors(tmp_path / "whole", "")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_typing_slip_costs_nothing(tmp_path: Path, tiny_rows: Path) -> None:
    """Wrong input is refused before a run folder exists."""
    folder = tmp_path / "run"
    for words in (["data.train=/no/such/folder"], ["model.name=tinny"], ["model.vocab_size=10"], ["train.epochs=2"]):
        with pytest.raises(UserError):
            train(tiny_config(tiny_rows, folder, "train.steps=2", *words))
        assert not folder.exists()


def test_a_failing_last_evaluation_does_not_cost_the_run(
    tmp_path: Path, tiny_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last step is saved before it is evaluated."""

    def broken(*_: Any, **__: Any) -> None:
        raise RuntimeError("no evaluation")

    monkeypatch.setattr(loop_module, "held_out_loss", broken)
    with pytest.raises(RuntimeError, match="no evaluation"):
        train(tiny_config(tiny_rows, tmp_path / "run", "train.steps=2", "eval.held_out_fraction=0.2"))
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000002"]


def test_rows_that_evaluation_cannot_read_are_refused_first(
    tmp_path: Path, tiny_rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first Qwen evaluates fewer positions than it trains on: longer held-out rows end the run at its start."""
    monkeypatch.setitem(PRESETS, "short", dataclasses.replace(T0_SPEC, eval_max_positions=16))
    rows = open_sources([str(tiny_rows)], "fail")
    model = ModelSection(name="short")
    plan_start(model, rows)
    with pytest.raises(UserError, match=r"(?s)longer than the model's positions.*16 positions"):
        plan_start(model, rows, rows)


@pytest.mark.parametrize(("warmup", "warned"), [(2, False), (3, True)])
def test_a_warm_up_longer_than_a_run_of_epochs_is_told(tmp_path: Path, warmup: int, warned: bool) -> None:
    """With train.epochs the length is known only once the data is open: a warning with both numbers."""
    data = write_rows(tmp_path / "data", random_rows(4, seed=0))
    words = ("train.epochs=1", "train.global_batch_size=2", f"schedule.warmup_steps={warmup}")
    train(tiny_config(data, tmp_path / "run", *words))
    text = (tmp_path / "run" / "log.txt").read_text()
    assert ("warning: the warm-up is longer than the run: schedule.warmup_steps = 3 of 2 steps" in text) is warned
