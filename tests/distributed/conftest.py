"""The pool of ranks that all distributed tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from distributed.pool import RankPool


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """Ranks that live as long as the session."""
    ranks = RankPool()
    yield ranks
    ranks.close()
