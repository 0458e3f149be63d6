"""One checksum per file of a checkpoint: what was written is what is read.

A disk, a copy or a bad memory module can change a byte without a word, and a weight with another exponent loads as well
as the right one. So every rank sums the files it has written, in the thread that wrote them and while they are still in
the page cache, and the sums are kept in the record. Before a checkpoint is read its files are summed once more,
each by one of the ranks, and the ranks agree before any of them goes on.

CRC-32 finds every change of up to 32 neighbouring bits, and all but one in 4 billion of the others; it is the fastest
sum of the standard library. It guards against accidents, not against forgery: nothing here would stop somebody who can
write the record too.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata

from danlu.base.errors import UserError

Sums = dict[str, dict[str, int]]
"""File name -> ``bytes`` and ``crc32``."""

_BLOCK_BYTES = 2**22
_THREADS = 4


def sum_files(folder: Path, names: Iterable[str]) -> Sums:
    """Return size and CRC-32 of files."""
    names = sorted(names)
    with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as threads:
        return dict(zip(names, threads.map(lambda name: _sum_file(folder / name), names), strict=True))


def sum_own_files(folder: Path, group: dist.ProcessGroup) -> Sums:
    """Sum, on each rank, the files it has written with DCP, and return the sums of all ranks to each."""
    own = [path.name for path in folder.iterdir() if path.name.startswith(f"__{group.rank()}_")]
    shares: list[Sums] = [{} for _ in range(group.size())]
    dist.all_gather_object(shares, sum_files(folder, [*own, ".metadata"] if group.rank() == 0 else own), group=group)
    return {name: sums for share in shares for name, sums in sorted(share.items())}


def listed_sums(record: Mapping[str, Any], where: Path) -> Sums | None:
    """Return the sums in a checkpoint's record; None for checkpoints of before there were any.

    Raises:
        UserError: something else stands there, or names of files outside the folder.
    """
    listed = record.get("files")
    if listed is None:
        return None
    sound = isinstance(listed, dict) and all(
        Path(name).name == name
        and isinstance(sums, dict)
        and {key: type(value) for key, value in sums.items()} == {"bytes": int, "crc32": int}
        for name, sums in listed.items()
    )
    if not sound:
        raise UserError("not the record of a checkpoint", where=str(where), seen="files without sizes and checksums")
    return dict(listed)


def find_damage(folder: Path, sums: Sums) -> list[tuple[str, str, str]]:
    """Return the files that are not what they were: name, what was seen, what was written."""
    found, whole = [], []
    for name, expected in sums.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else None
        if size == expected["bytes"]:
            whole.append(name)
        else:
            seen = "no such file" if size is None else f"{size:,} bytes"
            found.append((name, seen, f"{expected['bytes']:,} bytes"))
    for name, now in sum_files(folder, whole).items():
        if now != sums[name]:
            found.append((name, f"crc32 {now['crc32']:08x}", f"crc32 {sums[name]['crc32']:08x}"))
    return sorted(found)


def find_damage_together(folder: Path, sums: Sums, group: dist.ProcessGroup | None) -> list[tuple[str, str, str]]:
    """Like `find_damage`, each rank of ``group`` (None: the job) with its share of the files; all return the same."""
    if not dist.is_initialized():
        return find_damage(folder, sums)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    shares: list[Sequence[tuple[str, str, str]]] = [[] for _ in range(size)]
    dist.all_gather_object(shares, find_damage(folder, dict(sorted(sums.items())[rank::size])), group=group)
    return sorted(damage for share in shares for damage in share)


def find_cut_files(folder: Path, metadata: Metadata) -> list[tuple[str, str, str]]:
    """Return, as `find_damage`, the files that end before what DCP's metadata says they hold."""
    ends: dict[str, int] = {}
    for place in (metadata.storage_data or {}).values():
        ends[place.relative_path] = max(ends.get(place.relative_path, 0), place.offset + place.length)
    found = []
    for name, end in ends.items():
        path = folder / name
        if not path.is_file():
            found.append((name, "no such file", f"at least {end:,} bytes"))
        elif path.stat().st_size < end:
            found.append((name, f"{path.stat().st_size:,} bytes", f"at least {end:,} bytes"))
    return sorted(found)


def _sum_file(path: Path) -> dict[str, int]:
    total, crc = 0, 0
    buffer = memoryview(bytearray(_BLOCK_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(buffer):
            total, crc = total + length, zlib.crc32(buffer[:length], crc)
    return {"bytes": total, "crc32": crc}
