"""Layout invariance: any legal layout is the run of one process, in losses, norms, weights and optimizer state."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from danlu.config.load import load
from danlu.config.schema import Config, ParallelSection
from distributed.one_step import assert_same_step, step, whole_gradients
from distributed.parity_layouts import BLIND, FAMILIES, LAYOUTS, Bench, Layout
from distributed.pool import RankPool
from tiny import last_tensors, read_metrics


@pytest.fixture(scope="module")
def bench(pool: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """Data and references for all layouts."""
    return Bench(pool, tmp_path_factory.mktemp("parity"))


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "layout",
    [pytest.param(layout, marks=[pytest.mark.slow] if layout.ranks == 8 else []) for layout in LAYOUTS],
    ids=lambda layout: layout.name,
)
def test_a_layout_is_one_process(bench: Bench, layout: Layout) -> None:
    """20 steps of clipped AdamW over epochs' edges: losses and weights to 1e-5, norms and moments to 1e-4."""
    deviation = bench.measure(layout)
    assert deviation.within, deviation


def test_every_axis_and_every_pair_is_there() -> None:
    """The list has each axis alone and each pair of axes, each ZeRO stage with each of them, and no layout twice."""
    assert len(set(LAYOUTS)) == len(LAYOUTS)
    assert {layout.family for layout in LAYOUTS} == set(FAMILIES)
    used = [axes(layout) for layout in LAYOUTS]
    names = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
    for axis in names:
        assert {axis} in used
    for pair in itertools.combinations(names, 2):
        assert set(pair) in used, pair
    assert any(len(found) == 3 for found in used)
    stages = {(zero(layout), axis) for layout in LAYOUTS for axis in axes(layout)}
    assert {(stage, axis) for stage in (1, 2, 3) for axis in names[1:]} <= stages
    assert {parallel(layout).ep for layout in LAYOUTS} >= {1, 2, 4}


def axes(layout: Layout) -> set[str]:
    """Return the axes with more than one rank; ZeRO alone takes all ranks for dp_shard."""
    section = parallel(layout)
    found = {axis for axis in ("pp", "dp_replicate", "dp_shard", "cp", "tp") if (getattr(section, axis) or 1) > 1}
    return found or ({"dp_shard"} if section.zero else set())


def zero(layout: Layout) -> int:
    return parallel(layout).zero


def parallel(layout: Layout) -> ParallelSection:
    words = [word for word in layout.words.split() if word.startswith("parallel.")]
    return load(Config, None, words).config.parallel


def test_the_run_stresses_what_it_is_meant_to(bench: Bench) -> None:
    """Clipping bites, the short step at an epoch's end is there, and weights have moved far beyond the tolerance."""
    records = read_metrics(bench.reference("llama"))
    assert sum(record["grad_norm"] > 0.5 for record in records) > 5
    assert len({record["valid_tokens"] for record in records}) > 3
    assert records[3]["tokens_seen"] - records[2]["tokens_seen"] < records[2]["tokens_seen"] - records[1]["tokens_seen"]
    assert records[-1]["loss"] < 0.95 * records[0]["loss"]


def test_a_wrong_layout_would_be_seen(bench: Bench) -> None:
    """One row of the global batch more or less is far beyond every tolerance: the comparison can fail."""
    run = bench.run("wrong", Layout("llama", 1, "train.global_batch_size=7"))
    expected = last_tensors(bench.reference("llama"))
    assert max(float((value - expected[name]).norm()) for name, value in last_tensors(run).items()) > 1e-2


def test_only_blind_parameters_are_left_out(bench: Bench) -> None:
    """What the comparison of weights skips are key biases, and nothing else."""
    for family in ("gpt2", "qwen2.5"):
        skipped = [name for name in last_tensors(bench.reference(family)) if BLIND in name]
        assert skipped == [f"model.blocks.{layer}.{BLIND}" for layer in range(2)]
    assert not [name for name in last_tensors(bench.reference("llama")) if BLIND in name]


@pytest.mark.parametrize("family", ["gpt2", "qwen2.5"])
@pytest.mark.parametrize(("ranks", "layout"), [(2, "cp=2"), (2, "zero=3"), (4, "tp=2 zero=2"), (4, "tp=2 cp=2")])
def test_gradients_of_key_biases_agree_in_one_step(
    pool: RankPool, tmp_path: Path, family: str, ranks: int, layout: str
) -> None:
    """What the comparison of weights skips, equal to 1e-6: zero with learned positions, small with rotary ones."""
    (alone,) = pool.run(1, step, tmp_path, FAMILIES[family])
    words = (*FAMILIES[family], *(f"parallel.{word}" for word in layout.split()))
    assert_same_step(pool.run(ranks, step, tmp_path, words), alone)
    for name, gradient in whole_gradients([alone]).items():
        if name.endswith(BLIND):
            assert float(gradient.norm()) < (1e-6 if family == "gpt2" else 1e-2) * alone.norm


def test_the_window_of_mistral_bites(bench: Bench) -> None:
    """Without the window the model is another one, so its layouts do test it."""
    wide = (bench.folder / "mistral" / "config.json").read_text().replace('"sliding_window": 4', '"sliding_window": 24')
    other = bench.folder / "mistral-wide"
    other.mkdir()
    (other / "config.json").write_text(wide)
    run = bench.run("no-window", Layout("mistral", 1, f"model.name={other}"))
    theirs = last_tensors(bench.reference("mistral"))
    assert max(float((value - theirs[name]).norm()) for name, value in last_tensors(run).items()) > 1e-3
    assert all(torch.isfinite(value).all() for value in theirs.values())
