"""A checkpoint knows nothing of layouts: what one has written, any other continues, as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest

from danlu.train.loop import train
from distributed.pool import RankPool
from tiny import largest_difference, last_tensors, random_rows, read_metrics, tiny_config, write_rows

STEPS, BREAK = 8, 4
WORDS = (f"train.steps={STEPS}", "optimizer.max_grad_norm=0.5", "model.vocab_size=65", "train.micro_batch_size=2")
SOURCES = {
    "one": (1, ""),
    "replicas": (2, "dp_replicate=2"),
    "zero1": (2, "zero=1 bucket_cap_mb=0.01"),
    "zero2": (4, "zero=2"),
    "zero3": (2, "zero=3"),
    "hsdp": (4, "zero=3 dp_replicate=2 dp_shard=2"),
    "tp": (2, "tp=2"),
    "tp4": (4, "tp=4 sp=false"),
    "cp": (2, "cp=2"),
    "tp-zero2": (4, "tp=2 dp_shard=2 zero=2"),
    "cp-zero3": (4, "cp=2 dp_shard=2 zero=3"),
    "pp-zero1": (4, "pp=2 dp_shard=2 zero=1"),
}
TARGETS = {
    "one": (1, ""),
    "zero1": (2, "zero=1"),
    "zero3": (4, "zero=3"),
    "tp-cp": (4, "tp=2 cp=2"),
    "pp-zero2": (4, "pp=2 dp_shard=2 zero=2"),
    "tp-cp-zero3": (8, "tp=2 cp=2 dp_shard=2 zero=3"),
}


def words(layout: str) -> tuple[str, ...]:
    return (*WORDS, *(f"parallel.{word}" for word in layout.split()))


def begin(data: Path, output: Path, *config: str) -> None:
    """Train all steps and keep the checkpoint of the break (a job for the pool)."""
    train(tiny_config(data, output, *config, f"checkpoint.every_steps={BREAK}"))


def go_on(data: Path, output: Path, checkpoint: Path, *config: str) -> None:
    """Continue from a checkpoint in another folder (a job for the pool)."""
    train(tiny_config(data, output, *config), resume=str(checkpoint))


class Begun:
    """One process's whole run, and the checkpoint of every source, each made when first asked for."""

    def __init__(self, pool: RankPool, folder: Path) -> None:
        self.pool, self.folder = pool, folder
        self.data = write_rows(folder / "rows", random_rows(28, seed=1))

    def run(self, source: str) -> Path:
        """Return the run folder of a source."""
        ranks, layout = SOURCES[source]
        folder = self.folder / source
        if not folder.exists():
            self.pool.run(ranks, begin, self.data, folder, *words(layout), timeout=100)
        return folder


@pytest.fixture(scope="module")
def begun(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Begun:
    """The sources."""
    return Begun(pool, tmp_path_factory.mktemp("reshard"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "target", [pytest.param(name, marks=[pytest.mark.slow] if TARGETS[name][0] == 8 else []) for name in TARGETS]
)
@pytest.mark.parametrize("source", SOURCES)
def test_br_054_057_a_layout_continues_another(begun: Begun, tmp_path: Path, source: str, target: str) -> None:
    """4 steps in one layout, 4 in another: the losses and the last weights of one uninterrupted process to 1e-5."""
    whole = begun.run("one")
    checkpoint = begun.run(source) / "checkpoints" / f"step-{BREAK:08d}"
    ranks, layout = TARGETS[target]
    folder = tmp_path / "run"
    begun.pool.run(ranks, go_on, begun.data, folder, checkpoint, *words(layout), timeout=100)
    records, expected = read_metrics(folder), read_metrics(whole)[BREAK:]
    for name in ("step", "lr", "valid_tokens", "tokens_seen"):
        assert [record[name] for record in records] == [record[name] for record in expected]
    assert [record["loss"] for record in records] == pytest.approx([record["loss"] for record in expected], rel=1e-5)
    assert largest_difference(last_tensors(folder), last_tensors(whole)) < 1e-5
    assert largest_difference(last_tensors(folder, "optimizer."), last_tensors(whole, "optimizer.")) < 1e-4


@pytest.mark.timeout(120)
@pytest.mark.parametrize("source", SOURCES)
def test_br_057_padding_is_never_saved(begun: Begun, source: str) -> None:
    """65 rows that no number of ranks divides, and buckets with a tail: every tensor on disk has its own shape."""
    shapes = {name: value.shape for name, value in last_tensors(begun.run("one"), "").items() if "rng." not in name}
    found = {name: value.shape for name, value in last_tensors(begun.run(source), "").items() if "rng." not in name}
    assert found == shapes
    assert found["model.embedding.weight"] == (65, 32)
