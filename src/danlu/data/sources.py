r"""What people have on disk, as a stream of chunks, and chunks as records.

Reading is split in two so that it parallelises without depending on the number of workers. `read_chunks` runs in one
process and only finds boundaries: it decompresses and cuts at line breaks, or hands on parsed rows where a format has
no cheap boundaries (csv, json, tar) or is columnar (parquet). `parse_chunk` runs in the workers and turns a chunk into
records. Memory is bounded by a chunk, a line, or the window of a zstd frame, never by a file (plain text read as one
document aside).

Cutting at ``\n`` before decoding is right for both encodings: neither UTF-8 nor GB18030 uses byte 0x0A inside a longer
character. A byte order mark is dropped. Each malformed row is a `BadRow` that says where it is: file and line (item or
row number where there are no lines), with the byte offset for undecodable bytes; compressed files count decompressed
bytes.
"""

from __future__ import annotations

import csv
import glob
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from danlu.base.errors import UserError
from danlu.base.log import log
from danlu.data.streams import (
    BLOCK_BYTES,
    DAMAGE,
    BadRow,
    Lines,
    SourceFile,
    open_stream,
    strip_bom,
    text_blocks,
    undecodable,
)  # fmt: skip

FORMATS = {
    ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "json", ".csv": "csv", ".tsv": "tsv", ".parquet": "parquet",
    ".txt": "text", ".text": "text", ".md": "text", ".tar": "tar", ".tgz": "tar",
}  # fmt: skip
COMPRESSIONS = (".gz", ".zst")
MAX_LINE_BYTES = 1 << 30

Record = dict[str, Any]
TextUnit = Literal["file", "paragraph", "line"]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a file that workers parse: raw lines, parsed rows, or a parquet batch."""

    file: str
    kind: Literal["jsonl", "line", "paragraph", "file", "rows", "parquet"]
    first: int
    """Line (or row) number of the first row, from 1."""
    offset: int
    """Byte offset of the payload in the (decompressed) file."""
    payload: Any
    num_bytes: int


def find_files(inputs: Sequence[str], format: str = "auto") -> list[SourceFile]:
    """Expand files, folders and patterns to a sorted list per input.

    Raises:
        UserError: an input that matches nothing, an unknown suffix, or one file named twice.
    """
    found: list[SourceFile] = []
    for text in inputs:
        path = Path(text)
        if path.is_dir():
            candidates = [p for p in sorted(path.rglob("*")) if p.is_file() and not _is_hidden(p.relative_to(path))]
            paths = [p for p in candidates if format != "auto" or _suffixes(p)[0] in FORMATS]
            if skipped := len(candidates) - len(paths):
                log.info("%s: %d files of other kinds are left out", text, skipped)
        elif path.is_file():
            paths = [path]
        else:
            paths = [Path(p) for p in sorted(glob.glob(text, recursive=True)) if Path(p).is_file()]
        if not paths:
            raise UserError("no such file, folder or pattern, or nothing to read in it", where="inputs", seen=text)
        found += [_source(p, format) for p in paths]
    seen: set[Path] = set()
    for file in found:
        resolved = Path(file.path).resolve()
        if resolved in seen:
            raise UserError("file is named twice", where="inputs", seen=file.path)
        seen.add(resolved)
    return found


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _suffixes(path: Path) -> tuple[str, str]:
    """Return (format suffix, compression suffix), lower case."""
    name = Path(path.name.lower())
    if name.suffix in COMPRESSIONS:
        return Path(name.stem).suffix, name.suffix
    return name.suffix, ""


def _source(path: Path, format: str) -> SourceFile:
    suffix, compression = _suffixes(path)
    if suffix == ".tgz":
        compression = ".gz"
    if format == "auto" and suffix not in FORMATS:
        raise UserError(
            "unknown kind of file",
            where=str(path),
            seen=suffix or "no suffix",
            legal=[*FORMATS, *(f"the same + {c}" for c in COMPRESSIONS)],
            hint='name it: format = "jsonl" (or another)',
        )
    found = FORMATS[suffix] if format == "auto" else format
    if found == "parquet" and compression:
        raise UserError(
            "a parquet file compresses its columns itself", where=str(path), seen=compression, hint="unpack it first"
        )
    return SourceFile(str(path), found, compression)


def read_chunks(
    file: SourceFile, *, encoding: str, text_unit: TextUnit, block_bytes: int = BLOCK_BYTES
) -> Iterator[Chunk | BadRow]:
    """Yield a file's chunks in order; damage that ends the file comes last, as a `BadRow`.

    Args:
        file: what to read.
        encoding: ``utf-8`` or ``gb18030``, for text formats.
        text_unit: what a document is in a plain text file.
        block_bytes: about the size of a chunk.
    """
    if file.format == "parquet":
        yield from _parquet_chunks(file)
        return
    if file.format == "tar":
        from danlu.data.tars import read_tar

        yield from _row_chunks(file, read_tar(file), block_bytes)
        return
    try:
        with open_stream(file) as stream:
            if file.format in ("csv", "tsv"):
                delimiter = "," if file.format == "csv" else "\t"
                rows = _csv_rows(file.path, Lines(stream, file.path, encoding), delimiter)
                yield from _row_chunks(file, rows, block_bytes)
            elif file.format == "json":
                rows = _json_rows(file.path, text_blocks(stream, file.path, encoding, block_bytes))
                yield from _row_chunks(file, rows, block_bytes)
            elif file.format == "text" and text_unit == "file":
                content = strip_bom(stream.read(), file.path)
                yield Chunk(file.path, "file", 1, 0, content, len(content))
            elif file.format == "text" and text_unit == "paragraph":
                yield from _blob_chunks(file.path, stream, "paragraph", re.compile(rb"\n[ \t\r]*\n"), block_bytes)
            else:
                kind: Literal["jsonl", "line"] = "jsonl" if file.format == "jsonl" else "line"
                yield from _blob_chunks(file.path, stream, kind, re.compile(rb"\n"), block_bytes)
    except DAMAGE as error:
        yield BadRow("file is damaged or cut short", file.path, str(error) or type(error).__name__)


def _blob_chunks(
    path: str, stream: BinaryIO, kind: Literal["jsonl", "line", "paragraph"], cut: re.Pattern[bytes], block_bytes: int
) -> Iterator[Chunk]:
    """Cut a stream after the last separator of each block."""
    line, offset, rest = 1, 0, bytearray()
    at_start, damage = True, None
    while True:
        try:
            block = stream.read(block_bytes)
        except DAMAGE as error:
            block, damage = b"", error
        if at_start and block:
            stripped = strip_bom(block, path)
            offset, block, at_start = len(block) - len(stripped), stripped, False
        rest += block
        if len(rest) > MAX_LINE_BYTES:
            raise UserError("a line is too long", where=f"{path}:{line}", legal=f"{MAX_LINE_BYTES} bytes")
        end = len(rest) if not block and damage is None else _last_cut(rest, len(rest) - len(block), cut)
        if end:
            blob = bytes(rest[:end])
            yield Chunk(path, kind, line, offset, blob, end)
            line += blob.count(b"\n")
            offset += end
            del rest[:end]
        if damage is not None:
            raise damage
        if not block and not rest:
            return


def _last_cut(data: bytearray, searched: int, cut: re.Pattern[bytes]) -> int:
    """Return the end of the last separator, or 0; for single line breaks a plain search is faster."""
    if cut.pattern == rb"\n":
        return data.rfind(b"\n") + 1
    end = 0
    for match in cut.finditer(data, max(0, searched - 4096)):
        end = match.end()
    return end


def _csv_rows(path: str, lines: Lines, delimiter: str) -> Iterator[tuple[int, Record | BadRow]]:
    csv.field_size_limit(MAX_LINE_BYTES)
    reader = csv.reader(iter(lines), delimiter=delimiter, strict=True)
    header: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:  # the reader goes on at the next line; without a header there is nothing to go on to
            yield lines.number, BadRow("malformed csv", f"{path}:{lines.number}", str(error))
            if header is None:
                return
            continue
        except BadRow as error:  # undecodable bytes: where the next row begins cannot be known, so the file ends here
            yield lines.number, error
            return
        if header is None:
            header = values
            if len(set(header)) < len(header):
                raise UserError("csv header names a column twice", where=f"{path}:1", seen=header)
        elif len(values) == len(header):
            yield line, dict(zip(header, values, strict=True))
        elif values:
            detail = f"{len(values)} values for {len(header)} columns"
            yield line, BadRow("wrong number of csv columns", f"{path}:{line}", detail)


def _json_rows(path: str, blocks: Iterator[str]) -> Iterator[tuple[int, Record | BadRow]]:
    """Yield the items of a top-level array, or the top-level objects, decoding incrementally."""
    decoder, text, at, item, in_array = json.JSONDecoder(), "", 0, 0, False
    space = {False: re.compile(r"\s*"), True: re.compile(r"[\s,]*")}
    while True:
        at = space[in_array].match(text, at).end()  # type: ignore[union-attr]
        try:
            if at == len(text):
                text, at = next(blocks, ""), 0
                if text:
                    continue
                if in_array:
                    yield item, BadRow("malformed json", f"{path}: after item {item}", "the array is not closed")
                return
            if not in_array and item == 0 and text[at] == "[":
                in_array, at = True, at + 1
            elif in_array and text[at] == "]":
                in_array, at = False, at + 1
            else:
                value, start, at, text = _decode_value(decoder, text, at, blocks)
                item += 1
                yield item, as_object(value, f"{path}: item {item}", text[start:at])
        except (ValueError, RecursionError) as error:
            detail = f"{error}; the file is read up to here"
            yield item + 1, BadRow("malformed json", f"{path}: item {item + 1}", detail)
            return
        except BadRow as error:
            yield item + 1, error
            return


def _decode_value(decoder: json.JSONDecoder, text: str, at: int, blocks: Iterator[str]) -> tuple[Any, int, int, str]:
    """Decode the value at ``at``, reading on while it is incomplete; return (value, start, end, the text it is in)."""
    while True:
        try:
            value, end = decoder.raw_decode(text, at)
            return value, at, end, text
        except json.JSONDecodeError as error:
            # An error well before the end is a real one; only an open string may begin long before it.
            if not error.msg.startswith("Unterminated string") and error.pos < len(text) - 32:
                raise
            more = []
            wanted = max(len(text) - at, 1)  # as much again: the work stays linear in the value's size
            while wanted > 0 and (block := next(blocks, "")):
                more.append(block)
                wanted -= len(block)
            if not more:
                raise
            text, at = text[at:] + "".join(more), 0


def as_object(value: Any, where: str, raw: str) -> Record | BadRow:
    """Return a decoded JSON value if it is an object of real text (half a surrogate pair is not)."""
    if not isinstance(value, dict):
        return BadRow("row is not an object", where, type(value).__name__)
    if "\\ud" in raw or "\\uD" in raw:
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            return BadRow("text has half a surrogate pair", where, repr(error.object[error.start : error.end]))
    return value


def _row_chunks(file: SourceFile, rows: Iterator[tuple[int, Record | BadRow]], block_bytes: int) -> Iterator[Chunk]:
    """Group parsed rows; a row's size is the length of its text."""
    batch: list[tuple[int, Record | BadRow]] = []
    size = 0
    for number, row in rows:
        batch.append((number, row))
        size += 64 if isinstance(row, BadRow) else sum(len(str(value)) for value in row.values())
        if size >= block_bytes:
            yield Chunk(file.path, "rows", batch[0][0], 0, batch, size)
            batch, size = [], 0
    if batch:
        yield Chunk(file.path, "rows", batch[0][0], 0, batch, size)


def _parquet_chunks(file: SourceFile) -> Iterator[Chunk | BadRow]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    first = 1
    try:
        with pq.ParquetFile(file.path) as table:
            for batch in table.iter_batches(batch_size=1024):
                yield Chunk(file.path, "parquet", first, 0, batch, batch.nbytes)
                first += batch.num_rows
    except (pa.ArrowInvalid, OSError) as error:
        yield BadRow("file is damaged or cut short", f"{file.path}: row {first}", str(error).splitlines()[0])


def parse_chunk(chunk: Chunk, encoding: str) -> Iterator[tuple[str, Record | BadRow]]:
    """Yield (where, record) of a chunk's rows; blank lines are no rows."""
    path = chunk.file
    if chunk.kind == "rows":
        for number, row in chunk.payload:
            yield f"{path}:{number}", row
    elif chunk.kind == "parquet":
        for number, row in enumerate(chunk.payload.to_pylist(), chunk.first):
            yield f"{path}: row {number}", row
    elif chunk.kind == "file":
        yield path, _decode(chunk.payload, path, 1, 0, encoding)
    elif chunk.kind == "paragraph":
        line, offset = chunk.first, chunk.offset
        for part in re.split(rb"(\n[ \t\r]*\n)", chunk.payload):
            if part.strip():
                yield f"{path}:{line}", _decode(part.strip(b"\r\n"), path, line, offset, encoding)
            line, offset = line + part.count(b"\n"), offset + len(part)
    else:
        yield from _parse_lines(chunk, encoding)


def _parse_lines(chunk: Chunk, encoding: str) -> Iterator[tuple[str, Record | BadRow]]:
    offset = chunk.offset
    for line, raw in enumerate(chunk.payload.split(b"\n"), chunk.first):
        content = raw.strip()
        if content:
            where = f"{chunk.file}:{line}"
            if chunk.kind == "line":
                yield where, _decode(content, chunk.file, line, offset, encoding)
            else:
                yield where, _parse_json(content, chunk.file, line, offset, encoding)
        offset += len(raw) + 1


def _decode(content: bytes, path: str, line: int, offset: int, encoding: str) -> Record | BadRow:
    try:
        return {"text": content.decode(encoding)}
    except UnicodeDecodeError as error:
        before = content[: error.start]
        return undecodable(path, line + before.count(b"\n"), offset + error.start, encoding)


def _parse_json(content: bytes, path: str, line: int, offset: int, encoding: str) -> Record | BadRow:
    try:
        text = content.decode(encoding)
        return as_object(json.loads(text), f"{path}:{line}", text)
    except UnicodeDecodeError as error:
        return undecodable(path, line, offset + error.start, encoding)
    except (ValueError, RecursionError) as error:
        return BadRow("malformed json", f"{path}:{line}", str(error))
