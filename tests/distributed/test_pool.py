"""The pool itself: results in order, failures with their cause, hangs killed, and life after that."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

from danlu.parallel.mesh import open_world, sum_over
from distributed.pool import JobFailed, RankPool


def _sum(offset: float) -> tuple[int, int, float]:
    with open_world(device="cpu") as world:
        return world.rank, world.size, sum_over(world.group, world.rank + offset)[0]


def _fail_on(bad_rank: int) -> None:
    with open_world(device="cpu") as world:
        if world.rank == bad_rank:
            raise ZeroDivisionError("the cause")
        dist.all_reduce(torch.ones(1))


def _hang_on(bad_rank: int) -> None:
    with open_world(device="cpu") as world:
        while world.rank == bad_rank:
            time.sleep(1)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_results_come_back_in_rank_order(pool: RankPool, num_ranks: int) -> None:
    """Every job gets process groups of its own size, and answers arrive by rank."""
    total = sum(range(num_ranks)) + 10.0 * num_ranks
    assert pool.run(num_ranks, _sum, 10.0) == [(rank, num_ranks, total) for rank in range(num_ranks)]


def test_a_failing_rank_tells_its_cause_and_the_pool_lives_on() -> None:
    """The failing rank's traceback is in the error, its waiting peers are ended, and the next job runs."""
    ranks = RankPool()
    try:
        began = time.monotonic()
        with pytest.raises(JobFailed, match="ZeroDivisionError: the cause"):
            ranks.run(2, _fail_on, 1)
        assert time.monotonic() - began < 30
        assert [answer[2] for answer in ranks.run(2, _sum, 0.0)] == [1.0, 1.0]
    finally:
        ranks.close()


def test_a_hanging_rank_is_killed_and_named() -> None:
    """A rank that never answers fails the job in time instead of hanging the tests."""
    ranks = RankPool()
    try:
        ranks.run(1, _sum, 0.0)
        with pytest.raises(JobFailed, match=r"rank 0 ---\nno answer in time"):
            ranks.run(1, _hang_on, 0, timeout=1.0)
    finally:
        ranks.close()
