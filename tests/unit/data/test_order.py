"""The order of the stream is a bijection per epoch and exact in its proportions."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danlu.base.errors import UserError
from danlu.data.order import MAX_BLOCK, Order, block_counts, permute


@given(size=st.integers(1, 3000), key=st.tuples(st.integers(0, 2**63), st.integers(0, 50)))
def test_permutation_is_a_bijection(size: int, key: tuple[int, int]) -> None:
    """Every index of the range is hit exactly once, for any size and key."""
    assert np.sort(permute(np.arange(size), size, key)).tolist() == list(range(size))


@given(size=st.integers(1, 2**40), index=st.data())
def test_permutation_is_pointwise(size: int, index: st.DataObject) -> None:
    """An index goes to the same place whether it is asked for alone or among others."""
    one = index.draw(st.integers(0, size - 1))
    alone = permute(np.array([one]), size, (3,))
    assert 0 <= alone[0] < size
    assert permute(np.array([one, 0, one]), size, (3,))[[0, 2]].tolist() == [alone[0]] * 2


def test_permutation_looks_random() -> None:
    """Neighbours do not stay neighbours, and first places are spread evenly over seeds."""
    order = permute(np.arange(10_000), 10_000, (0,))
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
    assert np.mean(np.abs(np.diff(order)) == 1) < 0.01
    first = [int(permute(np.array([0]), 10, (seed,))[0]) for seed in range(2000)]
    assert np.bincount(first, minlength=10).min() > 140


def test_epoch_is_every_row_once() -> None:
    """Without weights each epoch holds each row of each source once, in another order than the last."""
    order = Order([5, 3], weights=None, seed=1, shuffle=True)
    epochs = [list(zip(*order.locate(np.arange(e * 8, e * 8 + 8)), strict=True)) for e in range(3)]
    expected = sorted([(0, row) for row in range(5)] + [(1, row) for row in range(3)])
    assert all(sorted((int(s), int(r)) for s, r in epoch) == expected for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]


def test_unshuffled_order_is_the_files_order() -> None:
    """With shuffle off sample k is row k of the sources one after the other."""
    sources, rows = Order([2, 3], weights=None, seed=0, shuffle=False).locate(np.arange(7))
    assert sources.tolist() == [0, 0, 1, 1, 1, 0, 0]
    assert rows.tolist() == [0, 1, 0, 1, 2, 0, 1]


@given(
    weights=st.lists(st.sampled_from([0.05, 0.1, 0.3, 0.7, 1.0, 2.0]), min_size=1, max_size=4),
    num=st.integers(0, 400),
    seed=st.integers(0, 2**32),
)
def test_mixture_counts(weights: list[float], num: int, seed: int) -> None:
    """Source counts follow from k alone, equal what is drawn, and are exact after whole blocks."""
    order = Order([7] * len(weights), weights=weights, seed=seed, shuffle=True)
    sources, _ = order.locate(np.arange(num))
    assert np.bincount(sources, minlength=len(weights)).tolist() == order.source_counts(num).tolist()
    counts = block_counts(weights)
    whole = order.source_counts(3 * sum(counts))
    assert whole.tolist() == [3 * count for count in counts]


def test_mixture_walks_each_source_without_repeats() -> None:
    """Before a source is used up none of its rows comes twice, and its epochs are complete."""
    order = Order([70, 40], weights=[0.7, 0.3], seed=5, shuffle=True)
    sources, rows = order.locate(np.arange(100))
    assert sorted(rows[sources == 0].tolist()) == list(range(70))
    assert len(set(rows[sources == 1].tolist())) == 30


def test_awkward_weights_are_rounded_and_tiny_ones_refused() -> None:
    """Weights beyond the block's resolution become the nearest parts of it; one that would never be drawn raises."""
    assert sum(block_counts([0.123456, 0.876544])) == MAX_BLOCK
    with pytest.raises(UserError, match="too small"):
        block_counts([1.0, 1e-9])
    with pytest.raises(UserError, match="positive"):
        block_counts([1.0, 0.0])
