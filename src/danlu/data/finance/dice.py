"""Random choices that are the same on every machine and in every version of Python.

The generator promises byte-identical files for a seed. Python keeps that promise only for `random.Random.random()`
(its documentation: methods built on top may change between versions), so everything here is built on that one
method. The price is a bias of at most ``size / 2**53`` in a draw, which is nothing for the sizes used.

A stream is named: the draws for one purpose do not shift when another purpose takes more or fewer of them. Making the
training split larger therefore leaves the test split as it was.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeVar

Item = TypeVar("Item")


class Dice:
    """A seeded, named stream of choices."""

    def __init__(self, seed: int, purpose: str) -> None:
        """Start the stream of ``purpose`` for ``seed``."""
        self._random = random.Random(f"danlu-finance/{seed}/{purpose}")

    def below(self, size: int) -> int:
        """Return an integer in ``[0, size)``."""
        return int(self._random.random() * size)

    def between(self, low: int, high: int, step: int = 1) -> int:
        """Return one of ``low, low + step, ...`` up to and including ``high``."""
        return low + step * self.below((high - low) // step + 1)

    def pick(self, items: Sequence[Item]) -> Item:
        """Return one element."""
        return items[self.below(len(items))]

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """Return the elements in a random order (Fisher and Yates)."""
        order = list(items)
        for last in range(len(order) - 1, 0, -1):
            other = self.below(last + 1)
            order[last], order[other] = order[other], order[last]
        return order

    def sample(self, items: Sequence[Item], count: int) -> list[Item]:
        """Return ``count`` different elements in a random order."""
        return self.shuffled(items)[:count]
