"""Shards that do not divide by the ranks, and shards that are damaged, read by several ranks for real."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.base.errors import DanluError
from danlu.data import shards
from danlu.train.loop import train
from distributed.pool import RankPool
from tiny import random_rows, read_metrics, tiny_config, write_rows

WORDS = ("train.global_batch_size=2", "train.micro_batch_size=1")


def run(data: Path, output: Path, *words: str) -> dict[int, float] | str:
    """Train and return the losses by step, or what the user is told (a job for the pool)."""
    try:
        return train(tiny_config(data, output, *WORDS, *words)).losses
    except DanluError as error:
        return str(error)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
def test_br_170_fewer_shards_than_readers_train_in_step(pool: RankPool, tmp_path: Path, num_shards: int) -> None:
    """1, 2, 3 or 5 shards of 4 rows on 2 ranks with 2 loader processes each: the epoch of one process."""
    data = write_rows(tmp_path / "data", random_rows(4 * num_shards, seed=1), per_shard=4)
    alone = run(data, tmp_path / "alone", "train.epochs=1")
    assert isinstance(alone, dict)
    assert list(alone) == list(range(1, 2 * num_shards + 1))
    for losses in pool.run(2, run, data, tmp_path / "run", "train.epochs=1", "data.num_workers=2"):
        assert losses == pytest.approx(alone, rel=1e-5)


@pytest.mark.timeout(120)
def test_br_171_uneven_evaluation_shards(pool: RankPool, tmp_path: Path) -> None:
    """Held-out shards of 4, 4 and 1 rows on 2 ranks: each row once, the loss of one process."""
    data = write_rows(tmp_path / "data", random_rows(4, seed=1))
    held_out = write_rows(tmp_path / "held_out", random_rows(9, seed=2), per_shard=4)
    words = ("train.steps=2", f"eval.data={held_out}", "eval.every_steps=1", "eval.micro_batch_size=1")
    run(data, tmp_path / "alone", *words)
    pool.run(2, run, data, tmp_path / "run", *words)
    found, expected = (
        [record["eval_loss"] for record in read_metrics(tmp_path / name) if "eval_loss" in record]
        for name in ("run", "alone")
    )
    assert len(found) == 2
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.timeout(120)
def test_br_173_a_damaged_shard_is_the_same_fault_on_all_ranks(
    pool: RankPool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The second of 3 shards is cut to 60 %: strict names shard and byte on each rank, tolerant keeps the good rows."""
    data = write_rows(tmp_path / "data", random_rows(12, seed=1), per_shard=4)
    damaged = data / shards.shard_name(1)
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size * 6 // 10])
    for told in pool.run(2, run, data, tmp_path / "strict", "train.epochs=1"):
        assert isinstance(told, str)
        assert "shard-000001.tar" in told
        assert "byte" in told
    assert not (tmp_path / "strict" / "checkpoints").exists(), "refused before anything is made"
    words = ("train.epochs=1", "data.on_corrupt=skip")
    alone = run(data, tmp_path / "alone", *words)
    assert isinstance(alone, dict)
    assert 4 <= len(alone) < 6
    assert "shard-000001.tar" in caplog.text
    for losses in pool.run(2, run, data, tmp_path / "tolerant", *words):
        assert losses == pytest.approx(alone, rel=1e-5)
