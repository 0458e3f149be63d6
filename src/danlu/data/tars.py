"""WebDataset tars as input, read without trusting them.

A member's name is only ever a key: nothing is written to disk, links are not followed, and no more is read than the
file holds and the limits below allow. Members that share the part before the first dot of their file name are one
sample; ``.json`` gives its fields, ``.txt`` the field ``text``; other extensions are left out. What does not belong in
a shard (links, devices, names that climb, the same name twice, sizes beyond the file, floods of empty members) is a
fault that names shard and byte offset; the build's ``on_error`` decides whether it ends the build or is counted.

Headers are parsed by `tarfile`, but the walk is our own: `tarfile` in streaming mode ends silently where a file was
cut and seeks through declared sizes of any length.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, BinaryIO

from danlu.data.sources import as_object
from danlu.data.streams import DAMAGE, BadRow, SourceFile, open_stream

Record = dict[str, Any]
MAX_MEMBER_BYTES = 256 << 20
MAX_EMPTY_MEMBERS = 10_000
_MAX_HEADER_BYTES = 1 << 20
_CUT = "tar is damaged or cut short"


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    offset: int
    content: bytes | BadRow
    """Its bytes, or why it is not used."""


def read_tar(file: SourceFile) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield (sample number, record) of a WebDataset tar, plain or compressed, streaming."""
    number, key = 0, None
    sample: Record = {}
    for member in _members(file):
        where = f"{file.path}: byte {member.offset}: {member.name[:80]!r}"
        path = PurePosixPath(member.name)
        stem, _, extension = path.name.partition(".")
        this = str(path.parent / stem)
        if isinstance(member.content, bytes) and this != key:
            if sample:
                yield number, sample
            key, sample, number = this, {}, number + 1
        content = member.content
        fields = content if isinstance(content, BadRow) else _fields(extension, content)
        if isinstance(fields, BadRow):
            fields.where = fields.where or where
            yield number, fields
        else:
            sample |= fields
    if sample:
        yield number, sample


def _members(file: SourceFile) -> Iterator[_Member]:
    """Walk the members; a fault that ends the walk comes last, as a member without content."""
    seen: set[str] = set()
    empty = 0
    name, offset = "", 0
    try:
        with open_stream(file) as stream:
            walk = _Walk(stream)
            while (info := walk.next_header()) is not None:
                name, offset = info.name, info.offset
                fault = _fault(info, seen)
                empty += info.isreg() and info.size == 0
                if empty > MAX_EMPTY_MEMBERS:
                    reason = BadRow("tar has too many empty members", detail=f"over {MAX_EMPTY_MEMBERS}")
                    yield _Member(name, offset, reason)
                    return
                if fault:
                    yield _Member(name, offset, BadRow(fault))
                    walk.skip(info.size)
                elif info.isdir():
                    walk.skip(info.size)
                else:
                    seen.add(name)
                    yield _Member(name, offset, walk.read(info.size))
    except (tarfile.HeaderError, EOFError, ValueError, OSError, *DAMAGE) as error:
        yield _Member(name, offset, BadRow(_CUT, detail=str(error)))


class _Walk:
    """Reads a tar's blocks in sequence."""

    def __init__(self, stream: BinaryIO) -> None:
        self.stream, self.offset = stream, 0

    def next_header(self) -> tarfile.TarInfo | None:
        """Return the next member, its long name or pax path and size applied, or None at the end mark."""
        offset = self.offset
        longer: dict[str, str] = {}
        while True:
            block = self._take(tarfile.BLOCKSIZE)
            if not block.strip(b"\0"):
                return None
            info = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
            if info.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK, tarfile.XHDTYPE, tarfile.XGLTYPE):
                if info.size > _MAX_HEADER_BYTES:
                    raise ValueError(f"a header of {info.size} bytes")
                content = self.read(info.size)
                if info.type == tarfile.GNUTYPE_LONGNAME:
                    longer["path"] = content.rstrip(b"\0").decode("utf-8", "surrogateescape")
                elif info.type == tarfile.XHDTYPE:
                    longer |= _pax(content)
                continue
            info.offset = offset
            info.name = longer.get("path", info.name)
            info.size = int(longer.get("size", info.size))
            return info

    def read(self, size: int) -> bytes:
        """Return a member's bytes and step over its padding."""
        content = self._take(size)
        self._take(-size % tarfile.BLOCKSIZE)
        return content

    def skip(self, size: int) -> None:
        """Step over a member."""
        left = size + -size % tarfile.BLOCKSIZE
        while left:
            left -= len(self._take(min(left, 1 << 20)))

    def _take(self, size: int) -> bytes:
        content = self.stream.read(size)
        self.offset += len(content)
        if len(content) < size:
            raise EOFError(f"the file ends at byte {self.offset}, inside a member or without an end mark")
        return content


def _pax(content: bytes) -> dict[str, str]:
    """Parse pax records, ``length key=value`` each (POSIX.1-2001)."""
    found: dict[str, str] = {}
    while content:
        length, _, _ = content.partition(b" ")
        size = int(length)
        if not len(length) + 1 < size <= len(content):
            raise ValueError("malformed pax header")
        key, _, value = content[len(length) + 1 : size - 1].partition(b"=")
        found[key.decode()] = value.decode("utf-8", "surrogateescape")
        content = content[size:]
    return found


def _fault(info: tarfile.TarInfo, seen: set[str]) -> str | None:
    path = PurePosixPath(info.name)
    if path.is_absolute() or ".." in path.parts:
        return "tar member's name leaves the archive"
    if not (info.isreg() or info.isdir()):
        return "tar member is a link or a device"
    if not 0 <= info.size <= MAX_MEMBER_BYTES:
        return f"tar member is over {MAX_MEMBER_BYTES} bytes"
    if info.name in seen:
        return "tar has the same member twice"
    return None


def _fields(extension: str, content: bytes) -> Record | BadRow:
    kind = extension.rpartition(".")[2].lower()
    try:
        if kind == "json":
            text = content.decode("utf-8-sig")
            return as_object(json.loads(text), "", text)
        if kind in ("txt", "text"):
            return {"text": content.decode("utf-8-sig")}
    except UnicodeDecodeError as error:
        return BadRow("bytes are not utf-8", detail=f"byte offset {error.start} of the member")
    except (ValueError, RecursionError) as error:
        return BadRow("malformed json", detail=str(error))
    return {}
