"""Formulas of communication: the closed forms of the papers, what is refused, and what scales how."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from danlu.base.errors import UserError
from danlu.base.layout import Degrees
from danlu.model.presets import PRESETS
from danlu.plan.communication import (
    Flow,
    Work,
    all_reduce_bytes,
    bookkeeping_bytes,
    bucketed_numel,
    gather_bytes,
    local_shapes,
    padded_numel,
    plan_communication,
)

SPEC = PRESETS["llama-3.1-8b"]
WORK = Work(micro_batches=4, rows=1, length=8192)


def total(flows: list[Flow], *axes: str) -> float:
    """Return the bytes on these axes."""
    return sum(flow.sent_bytes for flow in flows if flow.axes == axes)


def test_one_process_sends_nothing() -> None:
    """No flow is left where every axis has one rank."""
    assert plan_communication(SPEC, Degrees(), WORK) == []


@pytest.mark.parametrize(("zero", "factor"), [(0, 2), (1, 2), (2, 5), (3, 12)])
def test_data_parallelism_follows_the_table_of_zero(zero: int, factor: int) -> None:
    """In units of (r - 1)/r of the parameters, with 4 micro-batches: 2, 2, 1 + 4, 3 x 4."""
    degrees = Degrees(dp_replicate=8) if zero == 0 else Degrees(dp_shard=8)
    flows = plan_communication(SPEC, degrees, replace(WORK, zero=zero))
    unit = 7 / 8 * 4 * SPEC.num_parameters()
    once = 4 * 7 / 8 * 4 * SPEC.vocab_size * SPEC.hidden_size if zero == 3 else 0  # the head is not gathered twice
    assert sum(flow.sent_bytes for flow in flows) == pytest.approx(factor * unit - once, rel=1e-6)


def test_a_shard_of_the_gradient_crosses_between_copies() -> None:
    """HSDP: what goes over dp_replicate is 1/r of what plain data parallelism sends there."""
    flows = plan_communication(SPEC, Degrees(dp_replicate=2, dp_shard=8), replace(WORK, zero=3))
    assert total(flows, "dp_replicate") == pytest.approx(all_reduce_bytes(4 * SPEC.num_parameters() / 8, 2), rel=1e-6)


def test_sequence_parallelism_sends_the_same_bytes() -> None:
    """An all-reduce is a reduce-scatter and an all-gather; under sp only the gradients of norms come on top."""
    plain, split = (total(plan_communication(SPEC, Degrees(tp=8), replace(WORK, sp=sp)), "tp") for sp in (False, True))
    assert split - plain == all_reduce_bytes((2 * SPEC.num_layers + 1) * SPEC.hidden_size * 4, 8)
    blocks = 4 * SPEC.num_layers * all_reduce_bytes(4 * 8192 * SPEC.hidden_size * 2, 8)
    assert plain == pytest.approx(blocks, rel=0.03)


def test_ulysses_shrinks_with_ranks_and_the_ring_does_not() -> None:
    """Per rank, from 2 to 8 ranks: all-to-all falls as (c - 1)/c^2, the ring rises as (c - 1)/c."""

    def sent(method: str, cp: int) -> float:
        work = replace(WORK, cp_method=method)
        flows = plan_communication(SPEC, Degrees(cp=cp), work)
        return sum(flow.sent_bytes for flow in flows if flow.operation in ("all_to_all", "send"))

    assert sent("ulysses", 8) / sent("ulysses", 2) == pytest.approx((7 / 64) / (1 / 4))
    assert sent("ring", 8) / sent("ring", 2) == pytest.approx((7 / 8) / (1 / 2))
    assert sent("ring", 2) < sent("ulysses", 2)


def test_a_pipeline_sends_hidden_states_at_every_boundary() -> None:
    """Forward and backward, over pp - 1 boundaries; a tensor parallel rank under sp sends its part of the sequence."""
    flows = plan_communication(SPEC, Degrees(pp=4, tp=2), WORK)
    each = 8192 * SPEC.hidden_size * 2 / 2
    assert total(flows, "pp") == 2 * 3 * 4 * each / 4


def test_local_shapes_are_those_of_the_spec_over_tp() -> None:
    """Matrices and tables split evenly add up to the whole; key heads fewer than ranks are held by several."""
    whole = {name: math.prod(shape) for name, shape in SPEC.parameter_shapes().items()}
    for name, shape in local_shapes(SPEC, 8).items():
        assert math.prod(shape) * (8 if len(shape) > 1 else 1) == whole[name]
    shared = local_shapes(SPEC, 16)["blocks.0.attention.key.weight"]
    assert shared == (SPEC.head_dim, SPEC.hidden_size)


def test_padding_is_counted() -> None:
    """Buckets of 2, padded to 4: [5], [3, 2] -> 8 + 8 numbers; rows of 5 over 4 ranks are 8."""
    shapes = [(2,), (3,), (5,)]
    assert bucketed_numel(shapes, cap_bytes=20, multiple=4, parameter_bytes=4) == 16
    assert bucketed_numel(shapes, cap_bytes=1e9, multiple=4, parameter_bytes=4) == 12
    assert padded_numel([(5, 3), (8,)], 4) == 24 + 8


def test_bookkeeping_is_a_few_numbers() -> None:
    """Less than 100 bytes however many ranks."""
    assert bookkeeping_bytes(1) == 0
    assert bookkeeping_bytes(100_000) < 100
    assert gather_bytes(80, 2) == bookkeeping_bytes(2)


@pytest.mark.parametrize(
    ("changes", "degrees", "message"),
    [
        ({"zero": 4}, Degrees(), "no such ZeRO stage"),
        ({"rows": 0}, Degrees(), "rows"),
        ({"zero": 3}, Degrees(pp=2, dp_shard=2), "depends on its schedule"),
    ],
)
def test_what_has_no_number_is_refused(changes: dict[str, int], degrees: Degrees, message: str) -> None:
    """A wrong stage, an empty step, and ZeRO-3 that frees parameters in a pipeline."""
    with pytest.raises(UserError, match=message):
        plan_communication(SPEC, degrees, replace(WORK, **changes))


def test_models_with_experts_are_refused() -> None:
    """What they send depends on the router."""
    sparse = next(spec for spec in PRESETS.values() if spec.num_experts)
    with pytest.raises(UserError, match="router"):
        plan_communication(sparse, Degrees(dp_replicate=2), WORK)
