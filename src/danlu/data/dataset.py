"""Rows at random from a folder of shards.

A data set is opened by reading its manifest and its index; both are checked against each other and against the sizes
of the shards before a run starts. Rows are copied out of memory-mapped files, so many processes on a machine share one
page cache and opening costs nothing however large the data is.

Damage is found in two places. A shard that is cut short is seen at open, from its size. Flipped bytes are seen when a
row is read, from its CRC. With ``on_corrupt="fail"`` both raise, naming shard and byte offset. With ``"skip"`` the rows
that a cut shard lost are left out of the row numbering (the same on every rank, since all see the same sizes) and a row
with a wrong CRC becomes a row of padding: no label, no effect on the loss, and the ranks stay in step.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from danlu.base.errors import UserError
from danlu.base.log import log
from danlu.data.shards import BLOCK, INDEX, INDEX_DTYPE, read_manifest, token_dtype

Corrupt = Literal["fail", "skip"]


@dataclass(frozen=True, slots=True)
class Rows:
    """Some rows as rectangular arrays [B, S]: ids, target mask (not shifted), positions, document ids (-1 padding)."""

    tokens_BS: np.ndarray
    mask_BS: np.ndarray
    positions_BS: np.ndarray
    document_ids_BS: np.ndarray

    @classmethod
    def padding(cls, num_rows: int, width: int) -> Rows:
        """Return ``num_rows`` rows of nothing but padding."""
        shape = (num_rows, width)
        return cls(
            np.zeros(shape, np.int64),
            np.zeros(shape, np.bool_),
            np.zeros(shape, np.int64),
            np.full(shape, -1, np.int64),
        )


class RowSource(Protocol):
    """What the loader needs of a data set: `PackedDataset`, or a `Subset` of one."""

    @property
    def sequence_length(self) -> int:
        """Slots in a row."""

    @property
    def fingerprint(self) -> str:
        """Hash of the content and of the choice of rows."""

    def __len__(self) -> int: ...

    def widths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the number of tokens of each row."""

    def target_bytes(self, indices: Sequence[int] | np.ndarray) -> int:
        """Return the UTF-8 bytes of the text of the rows' target tokens."""

    def fill(self, rows: Rows, start: int, indices: Sequence[int] | np.ndarray) -> None:
        """Copy rows of the data set into ``rows``, from its row ``start`` on."""


class PackedDataset:
    """A finished data set, opened read-only.

    Args:
        folder: what `danlu data build` wrote.
        on_corrupt: raise on a damaged shard, or leave out its rows and count them.

    Raises:
        UserError: no manifest, an index that does not fit, a missing or damaged shard (naming it and the offset).
    """

    def __init__(self, folder: str | Path, *, on_corrupt: Corrupt = "fail") -> None:
        self.folder = Path(folder)
        self.on_corrupt = on_corrupt
        self.manifest = read_manifest(self.folder)
        self.sequence_length: int = self.manifest["sequence_length"]
        self.vocab_size: int = self.manifest["vocab_size"]
        self._token_dtype = token_dtype(self.vocab_size)
        self._maps: dict[int, mmap.mmap] = {}
        self.num_corrupt = 0
        index = self._read_index()
        self._index: np.ndarray = index[self._check_shards(index)]
        self.fingerprint: str = self.manifest["fingerprint"]
        if len(self._index) < len(index):
            self.num_corrupt = len(index) - len(self._index)
            self.fingerprint = hashlib.sha256(f"{self.fingerprint} {len(self._index)}".encode()).hexdigest()
            log.warning("%s: %d of %d rows are lost and left out", self.folder, self.num_corrupt, len(index))
        if len(self._index) == 0:
            raise UserError("data set has no rows", where=str(self.folder), hint="build it again")

    def __len__(self) -> int:
        return len(self._index)

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.folder), self.on_corrupt)

    @property
    def index(self) -> np.ndarray:
        """The records of the rows, of `danlu.data.shards.INDEX_DTYPE`."""
        return self._index

    def _shard_path(self, number: int) -> Path:
        return self.folder / Path(self.manifest["shards"][number]["name"]).name

    def widths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the number of tokens of each row."""
        return np.asarray(self._index["num_tokens"][np.asarray(indices, np.int64)])

    def document_lengths(self, row: int) -> np.ndarray:
        """Return the tokens of each document of a row (empty where the row is damaged and skipped)."""
        read = self._read(self._index[row].item())
        return np.zeros(0, np.int32) if read is None else read[2].copy()

    def target_bytes(self, indices: Sequence[int] | np.ndarray) -> int:
        """Return the UTF-8 bytes of the text of the rows' target tokens (what bits per byte divides by)."""
        return int(self._index["target_bytes"][np.asarray(indices, np.int64)].sum(dtype=np.int64))

    def rows(self, indices: Sequence[int] | np.ndarray, *, width: int | None = None) -> Rows:
        """Return rows as arrays [len(indices), width], padded to ``width`` (default: the sequence length)."""
        rows = Rows.padding(len(indices), width or self.sequence_length)
        self.fill(rows, 0, indices)
        return rows

    def fill(self, rows: Rows, start: int, indices: Sequence[int] | np.ndarray) -> None:
        """Copy rows of the data set into ``rows``, from its row ``start`` on."""
        records = self._index[np.asarray(indices, np.int64)].tolist()
        for slot, record in enumerate(records, start):
            row = self._read(record)
            if row is None:
                continue
            tokens, mask, lengths = row
            n = len(tokens)
            rows.tokens_BS[slot, :n] = tokens
            rows.mask_BS[slot, :n] = mask
            if len(lengths) == 1:
                rows.document_ids_BS[slot, :n] = 0
                rows.positions_BS[slot, :n] = np.arange(n)
            else:
                starts = np.cumsum(lengths) - lengths
                rows.document_ids_BS[slot, :n] = np.repeat(np.arange(len(lengths)), lengths)
                rows.positions_BS[slot, :n] = np.arange(n) - np.repeat(starts, lengths)

    def _read(self, record: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
        shard, tokens_at, mask_at, lengths_at, n, d, _, _, crc = record
        view = self._map(shard)
        size = n * self._token_dtype.itemsize
        tokens, mask = view[tokens_at : tokens_at + size], view[mask_at : mask_at + n]
        lengths = view[lengths_at : lengths_at + 4 * d]
        if zlib.crc32(lengths, zlib.crc32(mask, zlib.crc32(tokens))) != crc:
            where = f"{self._shard_path(shard)}: row at byte {tokens_at}"
            if self.on_corrupt == "fail":
                raise UserError(
                    "damaged row: its checksum is wrong",
                    where=where,
                    hint='copy the shard again, or set data.on_corrupt = "skip"',
                )
            self.num_corrupt += 1
            log.warning("%s is damaged and left out (%d so far)", where, self.num_corrupt)
            return None
        return np.frombuffer(tokens, self._token_dtype), np.frombuffer(mask, np.bool_), np.frombuffer(lengths, "<i4")

    def _map(self, shard: int) -> mmap.mmap:
        if shard not in self._maps:
            with self._shard_path(shard).open("rb") as file:
                self._maps[shard] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return self._maps[shard]

    def _read_index(self) -> np.ndarray:
        path = self.folder / INDEX
        try:
            index: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise UserError(f"cannot be read: {error}", where=str(path), hint="build the data set again") from None
        num_rows = self.manifest["num_rows"]
        if index.dtype != INDEX_DTYPE or index.shape != (num_rows,):
            raise UserError(
                "index does not fit the manifest",
                where=str(path),
                seen=f"{index.shape} of {index.dtype}",
                legal=f"({num_rows},) of {INDEX_DTYPE}",
                hint="build the data set again",
            )
        return index

    def _check_shards(self, index: np.ndarray) -> np.ndarray:
        """Return which rows can be read; compare every shard's size with the manifest, every offset with the size."""
        sizes = np.zeros(len(self.manifest["shards"]), np.int64)
        for number, shard in enumerate(self.manifest["shards"]):
            path = self._shard_path(number)
            sizes[number] = seen = path.stat().st_size if path.is_file() else 0
            if seen != shard["bytes"] and self.on_corrupt == "fail":
                raise UserError(
                    "shard is missing" if not seen else f"shard differs from the manifest from byte {seen} on",
                    where=str(path),
                    seen=f"{seen} bytes",
                    legal=f"{shard['bytes']} bytes",
                    hint='copy or build it again, or set data.on_corrupt = "skip" to go on without its lost rows',
                )
            if seen != shard["bytes"]:
                log.warning("%s: %d of %d bytes are there", path, seen, shard["bytes"])
        if len(index) and int(index["shard"].max()) >= len(sizes):
            raise UserError("index names a shard that the manifest lacks", where=str(self.folder / INDEX))
        n = index["num_tokens"].astype(np.int64)
        ends = [
            index["tokens_at"].astype(np.int64) + n * self._token_dtype.itemsize,
            index["mask_at"].astype(np.int64) + n,
            index["lengths_at"].astype(np.int64) + 4 * index["num_documents"].astype(np.int64),
        ]
        inside: np.ndarray = (np.maximum.reduce(ends) <= sizes[index["shard"]]) & (index["tokens_at"] >= BLOCK)
        if self.on_corrupt == "fail" and not inside.all():
            row = int(np.argmin(inside))
            raise UserError(
                f"index puts row {row} outside its shard, at byte {int(index['tokens_at'][row])}",
                where=str(self._shard_path(int(index["shard"][row]))),
                hint="build the data set again",
            )
        too_long = int(n.max(initial=0))
        if too_long > self.sequence_length:
            raise UserError(
                "index has a row longer than the sequence length",
                where=str(self.folder / INDEX),
                seen=too_long,
                legal=f"at most {self.sequence_length}",
            )
        return inside

    def verify(self) -> None:
        """Hash every shard and compare with the manifest.

        Raises:
            UserError: a shard's bytes are not those that were written.
        """
        for number, shard in enumerate(self.manifest["shards"]):
            path = self._shard_path(number)
            with path.open("rb") as file:
                seen = hashlib.file_digest(file, "sha256").hexdigest()
            if seen != shard["sha256"]:
                raise UserError("shard's hash is wrong", where=str(path), seen=seen, legal=shard["sha256"])


def _reopen(folder: str, on_corrupt: Corrupt) -> PackedDataset:
    return PackedDataset(folder, on_corrupt=on_corrupt)


class Subset:
    """Some rows of a data set, in a given order; what a held-out split is made of."""

    def __init__(self, dataset: RowSource, indices: np.ndarray) -> None:
        self.dataset = dataset
        self.indices = np.asarray(indices, np.int64)
        self.sequence_length = dataset.sequence_length
        digest = hashlib.sha256(self.indices.tobytes()).hexdigest()
        self.fingerprint = hashlib.sha256(f"{dataset.fingerprint} {digest}".encode()).hexdigest()

    def __len__(self) -> int:
        return len(self.indices)

    def widths(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the number of tokens of each row."""
        return self.dataset.widths(self.indices[np.asarray(indices, np.int64)])

    def target_bytes(self, indices: Sequence[int] | np.ndarray) -> int:
        """Return the UTF-8 bytes of the text of the rows' target tokens."""
        return self.dataset.target_bytes(self.indices[np.asarray(indices, np.int64)])

    def fill(self, rows: Rows, start: int, indices: Sequence[int] | np.ndarray) -> None:
        """Copy rows of the data set into ``rows``, from its row ``start`` on."""
        self.dataset.fill(rows, start, self.indices[np.asarray(indices, np.int64)])
