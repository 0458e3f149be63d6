"""The files of a data set: WebDataset tars, an index, a manifest.

One row is one WebDataset sample of three members, so ``webdataset.WebDataset(shards).decode()`` reads it as it is::

    00000003-000042.tokens.npy     uint16 or uint32 [n]   token ids, no padding
    00000003-000042.mask.npy       bool [n]               True where the token is to be predicted
    00000003-000042.lengths.npy    int32 [d]              tokens of each document, their sum is n

Beside the tars lies ``index.npy``, one fixed-size record per row: shard, byte offsets of the three payloads, counts,
and a CRC of the payload. Training reads rows at random through it and never parses a tar: member names are never
looked at, nothing is extracted, and a forged or damaged shard can at worst fail its CRC. ``manifest.json`` is written
last; a folder without it is not a data set.

A tar is assembled in memory and its bytes depend on the rows alone (no times, no owners), so equal input gives equal
hashes whoever built it. The 512-byte ustar header is filled in by hand because `tarfile` needs 20 times as long for it
and short rows have three headers each; a test reads the result with `tarfile` and with `webdataset`.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from danlu.base.errors import RunError, UserError

FORMAT_VERSION = 1
MANIFEST, INDEX = "manifest.json", "index.npy"
BLOCK = 512

INDEX_DTYPE = np.dtype(
    [
        ("shard", "<u4"),
        ("tokens_at", "<u8"),
        ("mask_at", "<u8"),
        ("lengths_at", "<u8"),
        ("num_tokens", "<u4"),
        ("num_documents", "<u4"),
        ("target_tokens", "<u4"),
        ("target_bytes", "<u4"),
        ("crc", "<u4"),
    ]
)
"""One row's record; offsets are those of the array payload (behind the npy header)."""


def shard_name(number: int) -> str:
    """Return the file name of a shard."""
    return f"shard-{number:06d}.tar"


def token_dtype(vocab_size: int) -> np.dtype:
    """Return the narrowest dtype that holds every id of the vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


@dataclass(frozen=True, slots=True)
class PackedRow:
    """One row before it is written: unpadded arrays of equal length and the lengths of its documents."""

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    target_bytes: int


@lru_cache(maxsize=4096)
def _npy_header(dtype: str, length: int) -> bytes:
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"descr": dtype, "fortran_order": False, "shape": (length,)})
    return buffer.getvalue()


def _tar_header(name: str, size: int) -> bytes:
    """Return a ustar header of a regular file (POSIX.1-1988, section 10.1.1), readable by all, time and owner zero."""
    fields = b"%-100b%07o\0%07o\0%07o\0%011o\0%011o\0" % (name.encode(), 0o644, 0, 0, size, 0)
    header = bytearray(fields.replace(b" ", b"\0").ljust(BLOCK, b"\0"))
    header[148:156] = b" " * 8
    header[156:157] = b"0"
    header[257:265] = b"ustar\x0000"
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def shard_bytes(number: int, rows: Sequence[PackedRow]) -> tuple[bytes, np.ndarray]:
    """Assemble one shard.

    Returns:
        The tar's bytes and the index records [len(rows)] of `INDEX_DTYPE`.
    """
    parts: list[bytes] = []
    records: list[tuple[int, ...]] = []
    at = 0
    for row_number, row in enumerate(rows):
        key = f"{number:08d}-{row_number:06d}"
        crc = 0
        offsets = []
        for name, array in (("tokens", row.tokens), ("mask", row.mask), ("lengths", row.lengths)):
            payload = array.tobytes()
            crc = zlib.crc32(payload, crc)
            head = _npy_header(array.dtype.str, len(array))
            size = len(head) + len(payload)
            parts += [_tar_header(f"{key}.{name}.npy", size), head, payload, bytes(-size % BLOCK)]
            offsets.append(at + BLOCK + len(head))
            at += BLOCK + size + (-size % BLOCK)
        counts = (len(row.tokens), len(row.lengths), int(np.count_nonzero(row.mask)), row.target_bytes, crc)
        records.append((number, *offsets, *counts))
    parts.append(bytes(2 * BLOCK))
    return b"".join(parts), np.array(records, dtype=INDEX_DTYPE)


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is either there and whole or not there: temporary name, fsync, rename.

    Raises:
        RunError: the disk is full, or the folder cannot be written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RunError(f"cannot write: {error.strerror}", where=str(path), hint="start again to resume") from None


def npy_bytes(array: np.ndarray) -> bytes:
    """Return the bytes of an ``.npy`` file."""
    buffer = io.BytesIO()
    np.save(buffer, array, allow_pickle=False)
    return buffer.getvalue()


def json_bytes(document: Any) -> bytes:
    """Return a JSON document as UTF-8 with sorted keys, so equal content has equal bytes."""
    return (json.dumps(document, ensure_ascii=False, indent=1, sort_keys=True) + "\n").encode()


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object of danlu's own.

    Raises:
        UserError: the file is damaged.
    """
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise UserError(f"cannot be read: {error}", where=str(path), hint="build the data set again") from None
    if not isinstance(document, dict):
        raise UserError("is not a JSON object", where=str(path), hint="build the data set again")
    return document


def read_manifest(folder: Path) -> dict[str, Any]:
    """Read and check the manifest of a data set.

    Raises:
        UserError: there is none (never built, or the build did not finish), or it is of another version.
    """
    path = folder / MANIFEST
    if not folder.is_dir():
        raise UserError("no such data set folder", where=str(folder), hint="make it with `danlu data build`")
    if not path.is_file():
        raise UserError(
            f"not a data set: it has no {MANIFEST}",
            where=str(folder),
            hint="the build did not finish, or never ran; `danlu data build` resumes it",
        )
    manifest = read_json(path)
    if manifest.get("format_version") != FORMAT_VERSION:
        raise UserError(
            "data set of another format version",
            where=str(path),
            seen=manifest.get("format_version"),
            legal=str(FORMAT_VERSION),
            hint="build it again with this version of danlu",
        )
    keys = ("num_rows", "sequence_length", "vocab_size", "shards", "fingerprint", "tokenizer_hash")
    if missing := [key for key in keys if key not in manifest]:
        raise UserError("manifest lacks keys", where=str(path), seen=missing, hint="build the data set again")
    return manifest


def content_fingerprint(shards: Sequence[dict[str, Any]], tokenizer_hash: str, sequence_length: int) -> str:
    """Return the hash of what training sees: the shards' hashes in order, the tokenizer and the row length."""
    text = json.dumps([[shard["sha256"] for shard in shards], tokenizer_hash, sequence_length])
    return hashlib.sha256(text.encode()).hexdigest()
