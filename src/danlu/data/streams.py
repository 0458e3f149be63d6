"""Bytes and text out of input files: decompression, byte order marks, encodings, and where something is wrong.

Everything streams. A position is a line and a byte offset in the decompressed file; `BadRow` carries it to whoever
decides, by the build's ``on_error``, whether it ends the build or is counted.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import zstandard

from danlu.base.errors import UserError

BLOCK_BYTES = 1 << 20
DAMAGE = (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError)
"""What decompressors raise on a file that is damaged or cut short."""
_BOMS = (b"\xef\xbb\xbf", b"\x84\x31\x95\x33")  # U+FEFF in UTF-8 and in GB18030


class BadRow(Exception):
    """A row that cannot be used.

    Attributes:
        reason: short and the same for all rows of a kind; what the manifest counts.
        where: file and line.
        detail: what was seen.
        hint: what to try.
    """

    def __init__(self, reason: str, where: str = "", detail: str = "", hint: str | None = None) -> None:
        super().__init__(reason, where, detail, hint)
        self.reason, self.where, self.detail, self.hint = reason, where, detail, hint

    def error(self) -> UserError:
        """Return the error that ends a build with ``on_error = "fail"``."""
        hint = self.hint or 'on_error = "skip" leaves such rows out and counts them'
        return UserError(self.reason, where=self.where, seen=self.detail or None, hint=hint)


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One input file and how to read it."""

    path: str
    format: str
    compression: str


def open_stream(file: SourceFile) -> BinaryIO:
    """Open a file for reading decompressed bytes, streaming (zstd with windows of any length)."""
    if file.compression == ".gz":
        return cast(BinaryIO, gzip.open(file.path, "rb"))
    if file.compression == ".zst":
        return cast(BinaryIO, io.BufferedReader(_ZstdStream(Path(file.path)), BLOCK_BYTES))
    return Path(file.path).open("rb")


class _ZstdStream(io.RawIOBase):
    """Decompresses zstd frames; unlike `zstandard`'s own reader it notices a file that ends inside a frame."""

    def __init__(self, path: Path) -> None:
        self.raw = io.FileIO(path)
        self.ready = self.unused = b""
        self.frame, self.in_frame = self._new_frame(), False
        self.piece_bytes, self.taken = 256, 0

    @staticmethod
    def _new_frame() -> Any:
        return zstandard.ZstdDecompressor(max_window_size=1 << 31).decompressobj()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self.ready:
            piece = self.unused or self.raw.read(self.piece_bytes)
            if not piece:
                if self.in_frame:
                    raise EOFError("the file ends inside a zstd frame")
                return 0
            self.ready, self.in_frame = self.frame.decompress(piece), True
            self.unused = b""
            # A few bytes may decompress to very many, so the size of a piece follows from what came of the last one.
            if len(self.ready) > BLOCK_BYTES:
                self.piece_bytes = max(16, self.piece_bytes // 8)
            elif len(self.ready) < BLOCK_BYTES // 8:
                self.piece_bytes = min(4096, self.piece_bytes * 2)
            if self.frame.eof:
                self.unused, self.frame, self.in_frame = self.frame.unused_data, self._new_frame(), False
        taken = min(len(buffer), len(self.ready) - self.taken)
        buffer[:taken] = self.ready[self.taken : self.taken + taken]
        self.taken += taken
        if self.taken == len(self.ready):
            self.ready, self.taken = b"", 0
        return taken

    def close(self) -> None:
        self.raw.close()
        super().close()


def strip_bom(first: bytes, path: str) -> bytes:
    """Return a file's first bytes without a byte order mark; UTF-16 is refused."""
    if first[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE):
        raise UserError(
            "file is UTF-16", where=path, legal="utf-8, gb18030", hint="convert it: iconv -f UTF-16 -t UTF-8"
        )
    for bom in _BOMS:
        if first.startswith(bom):
            return first[len(bom) :]
    return first


class Lines:
    """Decoded lines of a stream, with the number and byte offset of the line last given."""

    def __init__(self, stream: BinaryIO, path: str, encoding: str) -> None:
        self.stream, self.path, self.encoding = stream, path, encoding
        self.number = self.offset = 0

    def __iter__(self) -> Iterator[str]:
        offset = 0
        for raw in self.stream:
            self.number, self.offset = self.number + 1, offset
            offset += len(raw)
            content = strip_bom(raw, self.path) if self.number == 1 else raw
            try:
                yield content.decode(self.encoding)
            except UnicodeDecodeError as error:
                start = self.offset + len(raw) - len(content) + error.start
                raise undecodable(self.path, self.number, start, self.encoding) from None


def undecodable(path: str, line: int, offset: int, encoding: str) -> BadRow:
    """Return the fault of bytes that are not text in ``encoding``."""
    other = "gb18030" if encoding == "utf-8" else "utf-8"
    hint = f'if the file is in {other}, set encoding = "{other}"; on_error = "skip" leaves such rows out'
    return BadRow(f"bytes are not {encoding}", f"{path}:{line}", f"byte offset {offset}", hint)


def text_blocks(stream: BinaryIO, path: str, encoding: str, block_bytes: int) -> Iterator[str]:
    """Yield a stream's text in blocks; a character may straddle two reads."""
    decoder = codecs.getincrementaldecoder(encoding)()
    offset, line, first = 0, 1, True
    while True:
        block = stream.read(block_bytes)
        content = strip_bom(block, path) if first else block
        offset, first = offset + len(block) - len(content), False
        pending = len(decoder.getstate()[0])
        try:
            text = decoder.decode(content, final=not block)
        except UnicodeDecodeError as error:
            line += error.object[: error.start].count(b"\n")
            raise undecodable(path, line, offset - pending + error.start, encoding) from None
        if not block:
            return
        offset, line = offset + len(content), line + text.count("\n")
        if text:
            yield text
