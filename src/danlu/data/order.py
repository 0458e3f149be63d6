"""Which row is sample k of the stream, as arithmetic.

The stream of training samples is a pure function of (seed, k). Nothing is shuffled in memory and there is no state to
save: a run that has seen k samples goes on at k, whatever the number of ranks, workers or the batch size were before.

An epoch visits its n rows in the order of a pseudo-random permutation: a balanced Feistel network (Luby and Rackoff
1988) over the next even power of two, with cycle walking (Black and Rogaway 2002) for the values beyond n. Each round
mixes one half with the splitmix64 finaliser. It is a bijection by construction; it is for shuffling, not for secrets.

Without weights all sources form one long table: an epoch is every row exactly once. With weights the stream is made of
blocks: a block of L samples holds ``counts[i]`` of source i, in an order permuted anew for each block, so proportions
are exact after every block and the number of samples that source i has given follows from k alone. Each source then
walks its own epochs. Weights that are not multiples of 1/`MAX_BLOCK` are rounded to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from math import gcd, lcm

import numpy as np

from danlu.base.errors import UserError
from danlu.data.dataset import RowSource, Subset

MAX_BLOCK = 10_000
_ROUNDS = 8
_EPOCH, _BLOCK, _SPLIT = 1, 2, 3  # what a key is for, so no two uses share one


def _mix(x: np.ndarray) -> np.ndarray:
    """The splitmix64 finaliser (Steele, Lea, Flood 2014), on uint64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


@lru_cache(maxsize=1024)
def _keys(key: tuple[int, ...]) -> np.ndarray:
    return np.random.SeedSequence(key).generate_state(_ROUNDS, np.uint64)


def permute(indices: np.ndarray, size: int, key: tuple[int, ...]) -> np.ndarray:
    """Return where a keyed permutation of ``range(size)`` sends each index.

    Args:
        indices: int64, each in ``range(size)``.
        size: number of elements permuted.
        key: non-negative integers; another key is another permutation.
    """
    half = np.uint64(max(1, (size - 1).bit_length() + 1 >> 1))
    low = np.uint64((1 << int(half)) - 1)
    keys = _keys(key)
    values = np.asarray(indices).astype(np.uint64)
    walking = np.ones(values.shape, np.bool_)
    while walking.any():
        x = values[walking]
        left, right = x >> half, x & low
        for round_key in keys:
            left, right = right, left ^ (_mix(right + round_key) & low)
        values[walking] = left << half | right
        walking = values >= np.uint64(size)
    return values.astype(np.int64)


def block_counts(weights: Sequence[float]) -> list[int]:
    """Return the samples of each source in a block: the smallest whole numbers in the proportion of the weights.

    Raises:
        UserError: a weight is not a positive number, or too small to get one sample of the longest block.
    """
    if not all(np.isfinite(weight) and weight > 0 for weight in weights):
        raise UserError("weights must be positive numbers", where="data.weights", seen=list(weights))
    exact = [Fraction(str(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * scale) for weight in exact]
    counts = [count // gcd(*counts) for count in counts]
    if sum(counts) <= MAX_BLOCK:
        return counts
    shares = [weight * MAX_BLOCK / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda i: (counts[i] - shares[i], i))
    for i in by_remainder[: MAX_BLOCK - sum(counts)]:
        counts[i] += 1
    if 0 in counts:
        raise UserError(
            "weight is too small to ever be drawn",
            where="data.weights",
            seen=weights[counts.index(0)],
            legal=f"at least 1/{MAX_BLOCK} of their sum",
        )
    return counts


class Order:
    """The map from sample k to (source, row).

    Args:
        sizes: rows of each source.
        weights: share of each source, or None for all rows once an epoch.
        seed: non-negative; another seed is another order.
        shuffle: False visits rows in their own order (a mixture still interleaves its sources).
    """

    def __init__(self, sizes: Sequence[int], *, weights: Sequence[float] | None, seed: int, shuffle: bool) -> None:
        if not sizes or min(sizes) < 1:
            raise UserError("no samples", where="data.train", seen=f"rows per source: {list(sizes)}")
        if seed < 0:
            raise UserError("seed must not be negative", where="train.seed", seen=seed)
        if weights is not None and len(weights) != len(sizes):
            seen = f"{len(weights)} weights for {len(sizes)} sources"
            raise UserError("one weight per source is needed", where="data.weights", seen=seen)
        self.sizes = np.asarray(sizes, np.int64)
        self.seed, self.shuffle = seed, shuffle
        self.counts = None if weights is None else np.asarray(block_counts(weights), np.int64)
        self._block: tuple[int, np.ndarray, np.ndarray] | None = None

    @property
    def epoch_size(self) -> int | None:
        """Samples in an epoch; None for a weighted mixture, which has none."""
        return None if self.counts is not None else int(self.sizes.sum())

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return (source, row) of each sample, both int64 of the shape of ``samples``."""
        samples = np.asarray(samples, np.int64)
        if self.counts is None:
            table = self._visit(samples, int(self.sizes.sum()), 0)
            starts = np.cumsum(self.sizes) - self.sizes
            sources = np.searchsorted(starts, table, side="right") - 1
            return sources, table - starts[sources]
        sources, ordinals = self._draw(samples)
        rows = np.empty_like(ordinals)
        for source in np.unique(sources):
            chosen = sources == source
            rows[chosen] = self._visit(ordinals[chosen], int(self.sizes[source]), int(source))
        return sources, rows

    def source_counts(self, num_samples: int) -> np.ndarray:
        """Return how many of the first ``num_samples`` samples each source gives (mixtures only)."""
        if self.counts is None:
            raise UserError("source counts are defined for a weighted mixture", where="data.weights", seen=None)
        block, rest = divmod(num_samples, int(self.counts.sum()))
        sources, _ = self._block_draws(block)
        return block * self.counts + np.bincount(sources[:rest], minlength=len(self.counts))

    def _visit(self, ordinals: np.ndarray, size: int, source: int) -> np.ndarray:
        """Return the rows that a source's ``ordinals``-th draws give, epoch after epoch."""
        epochs, places = np.divmod(ordinals, size)
        if not self.shuffle:
            return places
        rows = np.empty_like(places)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            rows[chosen] = permute(places[chosen], size, (self.seed, _EPOCH, source, int(epoch)))
        return rows

    def _draw(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        assert self.counts is not None
        blocks, slots = np.divmod(samples, int(self.counts.sum()))
        sources, ordinals = np.empty_like(samples), np.empty_like(samples)
        for block in np.unique(blocks):
            chosen = blocks == block
            drawn, ranks = self._block_draws(int(block))
            sources[chosen] = drawn[slots[chosen]]
            ordinals[chosen] = block * self.counts[sources[chosen]] + ranks[slots[chosen]]
        return sources, ordinals

    def _block_draws(self, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Return a block's sources in order, and how often each had been drawn in the block before."""
        assert self.counts is not None
        if self._block is None or self._block[0] != block:
            length = int(self.counts.sum())
            slots = permute(np.arange(length), length, (self.seed, _BLOCK, block))
            sources = np.searchsorted(np.cumsum(self.counts), slots, side="right")
            ranks = np.empty_like(sources)
            for source, count in enumerate(self.counts):
                ranks[sources == source] = np.arange(count)
            self._block = (block, sources, ranks)
        return self._block[1], self._block[2]


def split_rows(dataset: RowSource, num_held_out: int, *, seed: int) -> tuple[Subset, Subset]:
    """Split a data set into (training, held-out) rows, chosen by the seed alone.

    Raises:
        UserError: fewer than one row would be left for training.
    """
    size = len(dataset)
    if not 0 <= num_held_out < size:
        raise UserError("held-out rows must leave some to train on", seen=num_held_out, legal=f"0 to {size - 1}")
    order = permute(np.arange(size), size, (seed, _SPLIT))
    held_out = np.sort(order[:num_held_out])
    return Subset(dataset, np.sort(order[num_held_out:])), Subset(dataset, held_out)
