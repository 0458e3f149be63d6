"""Collectives under the names that the installed torch gives them.

torch 2.13 renames ``reduce_scatter_tensor`` and ``all_gather_into_tensor`` and warns about the old names; 2.11 knows
only those. Everything in danlu calls these two.
"""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter(output: Tensor, source: Tensor, group: dist.ProcessGroup, *, wait: bool = True) -> dist.Work | None:
    """Sum ``source`` (group size times ``output``) over the group and leave this rank's piece in ``output``."""
    work: dist.Work | None = _reduce_scatter(output, source, group=group, async_op=not wait)
    return work


def all_gather(output: Tensor, source: Tensor, group: dist.ProcessGroup, *, wait: bool = True) -> dist.Work | None:
    """Fill ``output`` (group size times ``source``) with every rank's ``source`` in rank order."""
    work: dist.Work | None = _all_gather(output, source, group=group, async_op=not wait)
    return work
