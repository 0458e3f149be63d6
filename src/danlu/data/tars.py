"""WebDataset tars as input, read without trusting them.

A member's name is only ever a key: nothing is written to disk, links are not followed, and sizes are checked against
what the file holds before a byte is read. Members that share the part before the first dot of their file name are one
sample; ``.json`` gives its fields, ``.txt`` the field ``text``; other extensions are left out. What does not belong in
a shard (links, devices, names that climb, the same name twice, sizes beyond the file, floods of empty members) is an
error that names shard and byte offset, or with ``on_error = "skip"`` is left out and counted.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from pathlib import PurePosixPath
from typing import Any

from danlu.data.streams import DAMAGE, BadRow, SourceFile, open_stream

Record = dict[str, Any]
MAX_MEMBER_BYTES = 256 << 20
MAX_EMPTY_MEMBERS = 10_000


def read_tar(file: SourceFile) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield (sample number, record) of a WebDataset tar, plain or compressed, streaming."""
    number, at, key = 0, 0, None
    sample: Record = {}
    seen: set[str] = set()
    try:
        with open_stream(file) as stream, tarfile.open(fileobj=stream, mode="r|") as tar:
            empty = 0
            for member in tar:
                tar.members = []  # type: ignore[attr-defined]  # else tarfile remembers every member of a huge shard
                at = member.offset
                where = f"{file.path}: byte {at}: {member.name[:80]!r}"
                if fault := _fault(member, seen):
                    yield number, BadRow(fault, where)
                    continue
                if member.isdir():
                    continue
                seen.add(member.name)
                empty += member.size == 0
                if empty > MAX_EMPTY_MEMBERS:
                    yield number, BadRow("tar has too many empty members", where, f"over {MAX_EMPTY_MEMBERS}")
                    return
                path = PurePosixPath(member.name)
                stem, _, extension = path.name.partition(".")
                if (next_key := str(path.with_name(stem))) != key:
                    if sample:
                        yield number, sample
                    key, sample, number = next_key, {}, number + 1
                content = tar.extractfile(member)
                fields = _fields(extension, b"" if content is None else content.read(), member.size, where)
                if isinstance(fields, BadRow):
                    yield number, fields
                else:
                    sample |= fields
    except (tarfile.TarError, OSError, *DAMAGE) as error:
        yield number, BadRow("tar is damaged or cut short", f"{file.path}: behind byte {at}", str(error))
        return
    if sample:
        yield number, sample


def _fault(member: tarfile.TarInfo, seen: set[str]) -> str | None:
    path = PurePosixPath(member.name)
    if path.is_absolute() or ".." in path.parts:
        return "tar member's name leaves the archive"
    if not (member.isreg() or member.isdir()):
        return "tar member is a link or a device"
    if member.size > MAX_MEMBER_BYTES:
        return f"tar member is over {MAX_MEMBER_BYTES} bytes"
    if member.name in seen:
        return "tar has the same member twice"
    return None


def _fields(extension: str, content: bytes, size: int, where: str) -> Record | BadRow:
    if len(content) < size:
        return BadRow("tar is damaged or cut short", where, f"{len(content)} of {size} bytes")
    kind = extension.rpartition(".")[2].lower()
    try:
        if kind == "json":
            value: Any = json.loads(content.decode("utf-8-sig"))
            return value if isinstance(value, dict) else BadRow("row is not an object", where, type(value).__name__)
        if kind in ("txt", "text"):
            return {"text": content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        return BadRow("bytes are not utf-8", where, f"byte offset {error.start} of the member")
    except (ValueError, RecursionError) as error:
        return BadRow("malformed json", where, str(error))
    return {}
