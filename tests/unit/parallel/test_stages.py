"""The split of layers over pipeline stages: complete, and no other one has a faster slowest stage."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.base.errors import UserError
from danlu.model.presets import PRESETS
from danlu.parallel.stages import _balance, layer_costs, plan_stages
from tiny import MOE_SPEC, T0_SPEC


def group_sums(costs: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the sum of each group of consecutive costs."""
    ends = list(itertools.accumulate(sizes))
    return [sum(costs[end - size : end]) for size, end in zip(sizes, ends, strict=True)]


def score(costs: Sequence[int], sizes: Sequence[int]) -> tuple[int, int]:
    """Return what is minimised: the largest sum, then the sum of squares."""
    sums = group_sums(costs, sizes)
    return max(sums), sum(each**2 for each in sums)


@settings(max_examples=300, deadline=None)
@given(costs=st.lists(st.integers(1, 20), min_size=1, max_size=9), data=st.data())
def test_no_split_is_better(costs: list[int], data: st.DataObject) -> None:
    """Against every split there is: the largest stage is smallest, and then the squares are."""
    num_stages = data.draw(st.integers(1, len(costs)))
    sizes = _balance(tuple(map(float, costs)), num_stages)
    cuts = itertools.combinations(range(1, len(costs)), num_stages - 1)
    splits = [[b - a for a, b in itertools.pairwise((0, *cut, len(costs)))] for cut in cuts]
    assert score(costs, sizes) == min(score(costs, split) for split in splits)


def test_what_is_below_the_largest_is_even_too() -> None:
    """One block of 30 is slowest whatever comes after it; the rest must not be split as if it mattered most."""
    assert _balance((30.0, 1.0, 8.0, 6.0, 2.0), 4) == (1, 2, 1, 1)


@pytest.mark.parametrize("num_stages", range(1, 9))
def test_br_097_no_layer_is_lost(num_stages: int) -> None:
    """1 to 64 layers on 1 to 8 stages: consecutive, disjoint, complete, none empty; equal costs differ by one block."""
    for num_layers in range(num_stages, 65):
        spec = replace(T0_SPEC, num_layers=num_layers)
        stages = plan_stages(spec, num_stages, sequence_length=64)
        assert [layer for stage in stages for layer in stage] == list(range(num_layers))
        assert min(map(len, stages)) >= 1
        sizes = _balance((1.0,) * num_layers, num_stages)
        assert sum(sizes) == num_layers
        assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(("name", "num_stages"), [("qwen2.5-0.5b", 4), ("qwen2.5-0.5b", 2), ("llama-3.2-1b", 4)])
def test_the_head_is_priced(name: str, num_stages: int) -> None:
    """A large vocabulary: the last stage has fewer blocks, and the slowest is faster than with an even split."""
    spec = PRESETS[name]
    stages = plan_stages(spec, num_stages, sequence_length=2048)
    assert len(stages[-1]) < min(map(len, stages[:-1]))
    blocks, head = layer_costs(spec, 2048)
    costs = [round(cost) for cost in (*blocks[:-1], blocks[-1] + head)]
    even = [spec.num_layers // num_stages] * num_stages
    assert score(costs, [len(stage) for stage in stages])[0] < score(costs, even)[0]


def test_costs_are_the_arithmetic_of_each_block() -> None:
    """A block of T0: its matrices twice, attention over half a row; of experts only those that a token goes to."""
    costs, head = layer_costs(T0_SPEC, 64)
    matrices = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64
    assert costs == [2 * matrices + 4 * 32 * 32] * 2
    assert head == 2 * 64 * 32
    experts = 2 * 3 * 32 * 24 + 4 * 32
    assert layer_costs(MOE_SPEC, 64)[0] == [2 * (32 * 32 * 2 + 32 * 16 * 2 + experts) + 4 * 32 * 32] * 2


def test_the_largest_shape_is_split_at_once() -> None:
    """126 layers on 64 stages take well under a second."""
    began = time.process_time()
    stages = plan_stages(PRESETS["llama-3.1-405b"], 64, sequence_length=8192)
    assert time.process_time() - began < 0.5
    assert len(stages) == 64


@pytest.mark.parametrize("split", [(3, 1), (2, 1, 1), (1, 2)])
def test_a_split_that_does_not_add_up_is_refused(split: tuple[int, ...]) -> None:
    """The message has the key, what the split gives and what is legal; the right one is taken as it is."""
    spec = replace(T0_SPEC, num_layers=4)
    if split == (3, 1):
        assert plan_stages(spec, 2, sequence_length=8, split=split) == [range(3), range(3, 4)]
        return
    with pytest.raises(UserError) as caught:
        plan_stages(spec, 2, sequence_length=8, split=split)
    text = str(caught.value)
    assert text.startswith("parallel.pp_split:")
    assert f"{len(split)} stages, {sum(split)} blocks" in text
    assert "2 numbers" in text
    assert "4 blocks" in text


def test_more_stages_than_blocks_are_refused() -> None:
    """Five stages of four blocks: the message names the key and both numbers."""
    with pytest.raises(UserError, match=r"parallel\.pp:") as caught:
        plan_stages(replace(T0_SPEC, num_layers=4), 5, sequence_length=8)
    assert "5 stages for 4 blocks" in str(caught.value)
    assert "at most 4 stages" in str(caught.value)
