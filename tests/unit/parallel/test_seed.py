"""Random streams: equal where they must be, different where they must differ."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from danlu.parallel.seed import derive_seed, set_seed

SEEDS = st.integers(0, 2**63)


@given(SEEDS, st.integers(0, 1000), st.integers(0, 1000))
def test_seeds_are_in_range_and_depend_on_every_label(seed: int, rank: int, step: int) -> None:
    """63 bits, a function of its arguments, and neighbours in any argument share nothing."""
    value = derive_seed(seed, "data", rank, step)
    assert 0 <= value < 2**63
    assert value == derive_seed(seed, "data", rank, step)
    others = [(seed + 1, "data", rank, step), (seed, "data", rank + 1, step), (seed, "data", rank, step + 1)]
    assert value not in [derive_seed(*other) for other in [*others, (seed, "init", rank, step)]]


def test_labels_do_not_run_into_each_other() -> None:
    """(1, 12) and (11, 2) are different streams."""
    assert derive_seed(1, 12) != derive_seed(11, 2)


def draw(data_rank: int, step: int = 0) -> list[float]:
    set_seed(0, data_rank=data_rank, step=step)
    return torch.rand(4).tolist()


def test_ranks_and_restarts_draw_differently() -> None:
    """Other ranks and other steps give other numbers; the same place gives the same."""
    assert draw(0) == draw(0)
    assert len({tuple(draw(rank, step)) for rank in range(3) for step in range(3)}) == 9
