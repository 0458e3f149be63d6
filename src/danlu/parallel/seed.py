"""Random streams by axis: what must be equal is seeded equally, what must differ differs.

Initial weights come from the seed alone (the same on every rank and for every world size); dropout draws must differ
between data ranks, or every rank would drop the same units. Streams are separated by hashing (seed, purpose, indices),
so neighbouring seeds share nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch


def derive_seed(seed: int, *labels: int | str) -> int:
    """Return a 63-bit seed for the stream that ``labels`` name."""
    text = "/".join(str(label) for label in (seed, *labels))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def set_seed(seed: int, *, data_rank: int, parts: Sequence[int] = (), step: int = 0) -> None:
    """Seed this rank's torch generators (CPU and CUDA) for what may differ between ranks, such as dropout.

    Args:
        seed: the run's.
        data_rank: ranks with other rows draw other numbers.
        parts: the rank's places on the axes along which it holds other activations of the same rows: stage, part of the
            sequence. A tensor parallel peer that holds the same activations must have the same.
        step: optimizer steps done.
    """
    torch.manual_seed(derive_seed(seed, "data", data_rank, *parts, step))
