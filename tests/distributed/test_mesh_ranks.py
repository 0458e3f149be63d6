"""The groups of a layout: who is in them, in which order, and how long they wait."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from danlu.base.layout import Degrees
from danlu.parallel.mesh import open_world
from distributed.pool import RankPool

pytestmark = pytest.mark.timeout(120)


def groups(degrees: Degrees) -> dict[str, Any]:
    """Return the members of every group of this rank, and its places (a job for the pool)."""
    with open_world(degrees, device="cpu") as world:
        found: dict[str, Any] = {
            axis: dist.get_process_group_ranks(world.axis_group(axis)) for axis in ("pp", "dp_shard", "cp", "tp")
        }
        found["reduce"] = dist.get_process_group_ranks(world.reduce_group)
        found["shard"] = dist.get_process_group_ranks(world.shard_group)
        found["data"] = (world.data_rank, world.data_degree)
        found["counts"] = (world.counts_rows, world.counts_losses)
        if world.experts is not None:
            experts = world.experts
            each = (experts.group, experts.reduce_group, experts.shard_group, experts.replicate_group)
            found["experts"] = [dist.get_process_group_ranks(group) for group in each]
        return found


def test_tensor_ranks_are_neighbours_and_stages_far_apart(pool: RankPool) -> None:
    """pp=2 x dp_shard=2 x tp=2 on 8 ranks: tp is (0, 1), shards are 2 apart, stages 4; losses count once a tp group."""
    answers = pool.run(8, groups, Degrees(pp=2, dp_shard=2, tp=2))
    assert answers[0]["tp"] == [0, 1]
    assert answers[0]["dp_shard"] == answers[0]["reduce"] == answers[0]["shard"] == [0, 2]
    assert answers[0]["pp"] == [0, 4]
    assert answers[7]["reduce"] == [5, 7]
    assert [answer["data"] for answer in answers] == [(0, 2), (0, 2), (1, 2), (1, 2)] * 2
    assert [rank for rank, answer in enumerate(answers) if answer["counts"][0]] == [0, 2]
    assert [rank for rank, answer in enumerate(answers) if answer["counts"][1]] == [0, 2, 4, 6]


def test_context_ranks_reduce_with_data_ranks_and_see_their_rows(pool: RankPool) -> None:
    """dp_replicate=2 x dp_shard=2 x cp=2: gradients are summed over all 8, ZeRO splits over the 4 of a copy."""
    answers = pool.run(8, groups, Degrees(dp_replicate=2, dp_shard=2, cp=2))
    assert answers[5]["reduce"] == list(range(8))
    assert answers[5]["shard"] == [4, 5, 6, 7]
    assert answers[5]["cp"] == [4, 5]
    assert [answer["data"][0] for answer in answers] == [0, 0, 1, 1, 2, 2, 3, 3]


def test_experts_are_spread_inside_a_copy(pool: RankPool) -> None:
    """dp_replicate=2 x dp_shard=2 x tp=2, ep=2: spread over the shards of a copy, reduced with the other copy."""
    answers = pool.run(8, groups, Degrees(dp_replicate=2, dp_shard=2, tp=2, ep=2))
    assert answers[0]["experts"] == [[0, 2], [0, 4], [0], [0, 4]]
    assert answers[7]["experts"] == [[5, 7], [3, 7], [7], [3, 7]]


def waits(seconds: int) -> float:
    """Return how long rank 0 waits in a mesh's group for rank 1, which never comes (a job for the pool)."""
    with open_world(Degrees(dp_replicate=2), device="cpu", timeout_seconds=seconds) as world:
        began = time.monotonic()
        if world.rank == 1:
            time.sleep(seconds + 2)
            return 0.0
        with pytest.raises(RuntimeError, match=r"[Tt]imed out|timeout"):
            dist.all_reduce(torch.ones(1), group=world.reduce_group)
        return time.monotonic() - began


def test_a_missing_rank_is_noticed_after_the_configured_time(pool: RankPool) -> None:
    """`parallel.timeout_seconds` holds for the groups of the axes as well, not only for the world's."""
    waited = pool.run(2, waits, 2)[0]
    assert 1.0 < waited < 20.0
    pool.close()
