"""Layout invariance: the same run on 1, 2 or 4 data ranks, in losses, weights and records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from danlu.checkpoint.store import find_checkpoints, open_checkpoint
from danlu.parallel.placement import Piece
from danlu.train.loop import train
from distributed.pool import RankPool
from tiny import largest_difference, last_tensors, read_metrics, read_tensors, tiny_config

STEPS = 20
WORDS = (f"train.steps={STEPS}", "optimizer.max_grad_norm=0.5", "schedule.warmup_steps=3")


def run(data: Path, output: Path, *words: str) -> dict[int, float]:
    """Train and return the losses by step (a job for the pool)."""
    return train(tiny_config(data, output, *WORDS, *words)).losses


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, tiny_rows: Path) -> Path:
    """One process, 8 rows in one pass."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run(tiny_rows, folder)
    return folder


def column(folder: Path, name: str) -> list[Any]:
    return [record[name] for record in read_metrics(folder)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("ranks", "micro_batch"), [(2, 8), (2, 2), (4, 8), (4, 1), (8, 1)])
def test_any_number_of_ranks_gives_the_same_run(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, alone: Path, ranks: int, micro_batch: int
) -> None:
    """20 steps over five epochs' edges with clipping and AdamW: losses, norms and final weights to 1e-5."""
    folder = tmp_path / "run"
    answers = pool.run(ranks, run, tiny_rows, folder, f"train.micro_batch_size={micro_batch}")
    assert all(losses == answers[0] for losses in answers), "every rank reports the global loss"
    assert column(folder, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert column(folder, "grad_norm") == pytest.approx(column(alone, "grad_norm"), rel=1e-4)
    assert largest_difference(last_tensors(folder), last_tensors(alone)) < 1e-5
    assert largest_difference(last_tensors(folder, "optimizer."), last_tensors(alone, "optimizer.")) < 1e-4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("words", ["dp_replicate=2", "tp=2", "cp=2", "pp=2"])
def test_br_261_tokens_are_counted_once_over_all_ranks(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, alone: Path, words: str
) -> None:
    """Valid tokens and tokens seen are those of the global batch; the rate per device is the whole job's over 2."""
    pool.run(2, run, tiny_rows, tmp_path / "run", f"parallel.{words}", "train.micro_batch_size=4")
    for name in ("step", "lr", "valid_tokens", "tokens_seen", "skipped"):
        assert column(tmp_path / "run", name) == column(alone, name)
    for record in read_metrics(tmp_path / "run"):
        assert record["tokens_per_second_per_gpu"] == pytest.approx(record["tokens_per_second"] / 2)


@pytest.mark.timeout(120)
def test_br_029_051_resume_on_two_ranks_is_bit_equal(pool: RankPool, tmp_path: Path, tiny_rows: Path) -> None:
    """With dropout, at an epoch's edge and inside one: losses, rates, weights, random states as without a break."""
    words = ("model.dropout=0.1", "train.steps=6", "checkpoint.every_steps=1", "checkpoint.keep_last=99")
    whole = tmp_path / "whole"
    pool.run(2, run, tiny_rows, whole, *words)
    for step in (3, 4):
        folder = tmp_path / f"from-{step}"
        pool.run(2, resume, tiny_rows, folder, whole / "checkpoints" / f"step-{step:08d}", *words)
        for name in ("loss", "lr"):
            assert column(folder, name) == column(whole, name)[step:]
        ours, theirs = last_tensors(folder, ""), last_tensors(whole, "")
        assert {"rng.0.cpu", "rng.1.cpu"} <= ours.keys()
        assert ours.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.timeout(120)
def test_tensor_ranks_draw_alike_after_sequence_parallelism_is_turned_off(
    pool: RankPool, tmp_path: Path, tiny_rows: Path
) -> None:
    """With it peers drop other tokens of a row; without it they hold the same ones, and must drop the same."""
    words = ("model.dropout=0.1", "parallel.tp=2")
    pool.run(2, run, tiny_rows, tmp_path / "split", *words, "train.steps=3")
    checkpoint = tmp_path / "split" / "checkpoints" / "step-00000003"
    pool.run(2, resume, tiny_rows, tmp_path / "whole", checkpoint, *words, "train.steps=4", "parallel.sp=false")
    split, whole = (last_tensors(tmp_path / name, "rng.") for name in ("split", "whole"))
    assert not torch.equal(split["rng.0.cpu"], split["rng.1.cpu"])
    assert torch.equal(whole["rng.0.cpu"], whole["rng.1.cpu"])


def resume(data: Path, output: Path, checkpoint: Path, *words: str) -> None:
    """Continue from a checkpoint in another folder (a job for the pool)."""
    train(tiny_config(data, output, *WORDS, *words), resume=str(checkpoint))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (4, 2)])
def test_br_029_046_049_resume_on_another_number_of_ranks(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, alone: Path, before: int, after: int
) -> None:
    """Stopped inside an epoch, continued by more or fewer ranks: one process's run to 1e-5, every sample once."""
    folder = tmp_path / "run"
    pool.run(before, stop_early, tiny_rows, folder, 10)
    pool.run(after, run, tiny_rows, folder)
    assert column(folder, "step") == list(range(1, STEPS + 1))
    assert column(folder, "lr") == column(alone, "lr")
    assert column(folder, "valid_tokens") == column(alone, "valid_tokens")
    assert column(folder, "loss") == pytest.approx(column(alone, "loss"), rel=1e-5)
    assert largest_difference(last_tensors(folder), last_tensors(alone)) < 1e-5
    records = [open_checkpoint(path).record for path in find_checkpoints(folder / "checkpoints")]
    assert [record["world_size"] for record in records] == [before, after]
    assert records[0]["samples_seen"] == 28 * 2 + 8 * 2


def stop_early(data: Path, output: Path, steps: int) -> None:
    """Train only the first steps of the 20-step run (a job for the pool)."""
    from danlu.train import loop

    config = tiny_config(data, output, *WORDS, f"checkpoint.every_steps={steps}", "checkpoint.save_last=false")
    plain, calls = loop.forward_backward, iter(range(1, 100))

    class Enough(Exception):
        """Ends the run after its checkpoint, as a crash would."""

    def counted(*args: Any, **options: Any) -> Any:
        if next(calls) > steps:
            raise Enough
        return plain(*args, **options)

    loop.forward_backward = counted  # type: ignore[assignment]
    try:
        train(config)
    except Enough:
        pass
    finally:
        loop.forward_backward = plain


def restore_after_training(data: Path, output: Path, *words: str) -> list[str]:
    """Train 5 steps, then restore step 2 into the same live run; return what is not as the file says."""
    from danlu.train import loop

    plain, different = loop._Run.train, []

    def train_and_restore(run: Any) -> Any:
        result = plain(run)
        folder = output / "checkpoints" / "step-00000002"
        run.restore(open_checkpoint(folder))
        saved = read_tensors(folder, "")
        for name, held in run.tensors().items():
            boxes = held.boxes if isinstance(held, Piece) else [((0,) * held.ndim, held)]
            for starts, view in boxes:
                place = tuple(slice(first, first + size) for first, size in zip(starts, view.shape, strict=True))
                if not torch.equal(view, saved[name][place]):
                    different.append(name)
        assert run.step == 2
        return result

    loop._Run.train = train_and_restore  # type: ignore[method-assign]
    try:
        train(tiny_config(data, output, "train.steps=5", "checkpoint.every_steps=2", "checkpoint.keep_last=9", *words))
    finally:
        loop._Run.train = plain  # type: ignore[method-assign]
    return different


@pytest.mark.timeout(120)
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_br_072_a_live_run_becomes_what_the_file_says(
    pool: RankPool, tmp_path: Path, tiny_rows: Path, zero: int
) -> None:
    """Restored into a run that has trained on: weights, moments, step counts and random states are those saved."""
    assert pool.run(2, restore_after_training, tiny_rows, tmp_path / "run", f"parallel.zero={zero}") == [[], []]
