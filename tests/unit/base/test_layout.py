"""Degrees of the parallel axes: solved, refused with what would be legal, and checked against a model's sizes."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.base.layout import AXES, Degrees, check_pipeline, check_tensor, solve_degrees
from danlu.config.schema import Config, ParallelSection
from danlu.train.layout import plan_layers
from tiny import T0_SPEC


def solve(world_size: int, zero: int = 0, **wanted: int) -> Degrees:
    return solve_degrees({"pp": 1, "cp": 1, "tp": 1, **wanted}, world_size=world_size, zero=zero)


@pytest.mark.parametrize(
    ("world_size", "zero", "wanted", "expected"),
    [
        (1, 0, {}, {}),
        (8, 0, {}, {"dp_replicate": 8}),
        (8, 1, {}, {"dp_shard": 8}),
        (8, 3, {"tp": 2}, {"dp_shard": 4, "tp": 2}),
        (8, 0, {"tp": 2, "cp": 2}, {"dp_replicate": 2, "tp": 2, "cp": 2}),
        (8, 3, {"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4}),
        (8, 3, {"dp_shard": 2, "dp_replicate": -1}, {"dp_replicate": 4, "dp_shard": 2}),
        (8, 0, {"tp": -1}, {"tp": 8}),
        (8, 0, {"tp": -1, "pp": 2}, {"tp": 4, "pp": 2}),
        (16, 1, {"pp": 2, "cp": 2, "tp": 2}, {"pp": 2, "cp": 2, "tp": 2, "dp_shard": 2}),
        (6, 0, {"tp": 3, "dp_replicate": 2}, {"tp": 3, "dp_replicate": 2}),
    ],
)
def test_what_nobody_asked_for_is_what_is_left(
    world_size: int, zero: int, wanted: dict[str, int], expected: dict[str, int]
) -> None:
    """-1 takes the rest; where none does, copies do without ZeRO and shards with it."""
    degrees = solve(world_size, zero, **wanted)
    assert degrees == Degrees(**expected)
    assert degrees.world_size == world_size


def test_degrees_multiply_to_the_world_whatever_is_asked() -> None:
    """Every answer is a product of the number of processes that keeps what was asked; everything else is refused."""
    answers = 0
    for world_size, zero, tp, cp, replicas in itertools.product(
        (1, 6, 8), (0, 2), (1, 2, 3, -1), (1, 2), (None, 2, -1)
    ):
        wanted = {"pp": 1, "dp_replicate": replicas, "cp": cp, "tp": tp}
        try:
            degrees = solve_degrees(wanted, world_size=world_size, zero=zero)
        except UserError:
            continue
        answers += 1
        product = 1
        for axis, size in zip(AXES, degrees.shape, strict=True):
            product *= size
            assert wanted.get(axis) in (None, -1, size)
        assert product == world_size == degrees.world_size
        assert degrees.data == degrees.dp_replicate * degrees.dp_shard
    assert answers > 20


@pytest.mark.parametrize(
    ("world_size", "wanted", "words"),
    [
        (8, {"tp": -1, "cp": -1}, ["only one axis can take what is left", "parallel.tp", "cp = tp = -1"]),
        (8, {"tp": 3}, ["parallel.tp", "tp=3 on 8 processes", "legal: tp = 1, 2, 4, 8", "hint:  start 3 processes"]),
        (4, {"tp": 2, "cp": 4}, ["parallel.cp", "cp=4 x tp=2 = 8 on 4 processes", "cp = 1, 2"]),
        (8, {"dp_replicate": 2, "tp": 2}, ["= 4 on 8 processes", "= 4"]),
        (2, {"tp": 0}, ["a parallel degree is a positive number", "parallel.tp", "seen:  0"]),
        (2, {"pp": -2}, ["a parallel degree is a positive number", "parallel.pp"]),
    ],
)
def test_what_cannot_be_says_what_could(world_size: int, wanted: dict[str, int], words: list[str]) -> None:
    """The message names the axis, the product that was seen and the degrees that would do."""
    with pytest.raises(UserError) as error:
        solve(world_size, **wanted)
    for word in words:
        assert word in str(error.value)


def test_a_layout_reads_as_what_it_splits() -> None:
    """Axes with one rank are not mentioned."""
    assert str(Degrees()) == "one process"
    assert str(Degrees(tp=2, dp_shard=4)) == "dp_shard=4 x tp=2"


@pytest.mark.parametrize(
    ("heads", "kv", "mlp", "legal"),
    [
        (4, 2, 64, [1, 2, 4]),
        (10, 10, 80, [1, 2, 5, 10]),
        (6, 3, 48, [1, 3, 6]),
        (40, 10, 13824, [1, 2]),
        (8, 1, 64, [1, 2, 4, 8]),
        (14, 2, 4864, [1, 2]),
    ],
)
def test_br_074_075_077_262_tensor_degrees_of_a_model(heads: int, kv: int, mlp: int, legal: list[int]) -> None:
    """Exactly the legal degrees pass, without any process; the refusal has the numbers and the list."""
    for tp in range(1, heads + 4):
        if tp in legal:
            check_tensor(tp, num_heads=heads, num_kv_heads=kv, mlp_size=mlp)
            continue
        with pytest.raises(UserError) as error:
            check_tensor(tp, num_heads=heads, num_kv_heads=kv, mlp_size=mlp)
        text = str(error.value)
        assert f"tp={tp}; {heads} query heads, {kv} key/value heads" in text
        assert f"legal: {', '.join(map(str, legal))}" in text


@pytest.mark.parametrize(("heads", "kv", "tp"), [(4, 2, 3), (10, 10, 4), (6, 3, 2)])
def test_br_075_077_a_config_is_refused_before_any_process(
    heads: int, kv: int, tp: int, monkeypatch: pytest.MonkeyPatch, tiny_rows: Any, tmp_path: Any
) -> None:
    """Training refuses heads that do not split before a process group exists."""
    import torch.distributed as dist

    from danlu.train.loop import train
    from tiny import tiny_config

    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", str(tp))
    words = (f"model.num_heads={heads}", f"model.num_kv_heads={kv}", f"parallel.tp={tp}", "train.steps=1")
    with pytest.raises(UserError, match=f"tp={tp}; {heads} query heads, {kv} key/value heads"):
        train(tiny_config(tiny_rows, tmp_path / "run", *words))
    assert not dist.is_initialized()
    assert not (tmp_path / "run").exists()


def test_a_pipeline_that_is_too_long_is_refused_before_any_process() -> None:
    """The refusal of a config names the degrees that would do, with the stages a rank that its schedule has."""
    config = Config(parallel=ParallelSection(pp=3, pp_schedule="interleaved"))
    with pytest.raises(UserError, match=r"3 x 2 stages for 4 blocks\n.*pp = 1, 2 with pp_virtual = 2"):
        plan_layers(config, dataclasses.replace(T0_SPEC, num_layers=4), Degrees(pp=3), 64)


def test_a_stage_has_a_block() -> None:
    """Stages are at most as many as blocks; the refusal names the degrees that would do."""
    check_pipeline(4, num_layers=4)
    check_pipeline(2, num_layers=4, num_virtual=2)
    with pytest.raises(UserError, match=r"5 x 1 stages for 4 blocks\n.*pp = 1, 2, 3, 4 with pp_virtual = 1"):
        check_pipeline(5, num_layers=4)
    with pytest.raises(UserError, match=r"4 x 2 stages for 6 blocks\n.*pp = 1, 2, 3 with"):
        check_pipeline(4, num_layers=6, num_virtual=2)
    with pytest.raises(UserError, match="pp = none"):
        check_pipeline(1, num_layers=2, num_virtual=3)
