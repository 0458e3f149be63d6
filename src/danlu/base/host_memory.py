"""Keep a CPU run's memory instead of giving it back to the system at every tensor.

glibc takes large blocks straight from the system and returns them when they are freed. A training step frees and takes
the same gigabytes again and again, and every time the kernel must hand out, zero and map each 4 KiB page anew: a
quarter of a bf16 step on a CPU was spent there, in no operator that a profiler shows. Two switches end it:

- `keep_freed_memory`: blocks come from the heap and freed ones stay there for the next tensor of that size;
- `THP_MEM_ALLOC_ENABLE`: torch asks for 2 MiB pages, so that what is mapped is mapped 512 pages at a time. torch reads
  it at its first allocation.

The price is that memory of a finished phase (loading weights, a checkpoint's copy) stays with the process, for later
phases to use. CUDA memory has torch's own caching allocator and needs none of this.
"""

from __future__ import annotations

import ctypes

import psutil

from danlu.base import env

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4
"""glibc's names for mallopt, see its malloc.h."""


def ask_for_huge_pages() -> None:
    """Let torch ask for huge pages, unless the user has decided; works until torch allocates for the first time."""
    env.set_default("THP_MEM_ALLOC_ENABLE", "1")


def keep_freed_memory() -> bool:
    """Stop glibc from returning freed memory to the system; return whether this C library can do that."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))


def free_memory_bytes() -> int:
    """Return the host memory that is free or can be freed at once; limits of a container are not known here."""
    return int(psutil.virtual_memory().available)
