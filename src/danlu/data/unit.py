"""One unit of a build: some chunks of input become one shard.

Runs in worker processes, so what it needs is passed as data and imports stay light. Its files appear by rename, the
counts last: a unit is there as a whole or not at all.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from danlu.config.data_build import DataBuild
from danlu.data import shards
from danlu.data.forms import Example, Reader, make_reader
from danlu.data.masking import encode_chats, encode_plain
from danlu.data.packing import Documents, fit, pack
from danlu.data.sources import Chunk, parse_chunk
from danlu.data.streams import BadRow
from danlu.data.tokenizer import Tokenizer

CORE = "tokenizer-core.json"
"""File in an unfinished data set from which workers rebuild the tokenizer."""
MAX_EXAMPLES = 20
"""Bad rows that are named; the others are only counted."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker needs besides a unit; the ``auto`` values of the config are resolved."""

    config: DataBuild
    key: str
    first: tuple[dict[str, Any], ...]
    """The first rows, from which field names were taken."""

    @property
    def folder(self) -> Path:
        """The data set's folder."""
        return Path(self.config.output)


Unit = list[Chunk | BadRow]


def unit_name(number: int, kind: str) -> str:
    """Return the name of a unit's index (``npy``) or counts (``json``) file."""
    return f"unit-{number:06d}.{kind}"


@lru_cache(maxsize=1)
def _worker_tokenizer(path: Path, key: str) -> Tokenizer:
    return Tokenizer.read_core(path)


def build_unit(job: Job, number: int, unit: Unit) -> dict[str, Any]:
    """Turn a unit into its shard, its piece of the index and its counts; return the counts.

    Raises:
        UserError: a bad row, with ``on_error = "fail"``.
    """
    tokenizer = _worker_tokenizer(job.folder / CORE, job.key)
    config = job.config
    counts: Counter[str] = Counter()
    bad = _Bad(config.on_error == "fail")
    documents = _documents(job, unit, tokenizer, counts, bad)
    rows = pack(documents, config.sequence_length, config.packing, tokenizer.token_bytes)
    content, index = shards.shard_bytes(number, rows)
    name = shards.shard_name(number)
    result = {
        "shard": {
            "name": name, "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), "num_rows": len(rows),
        },
        "counts": dict(counts + documents.counts),
        "bad_rows": dict(bad.reasons),
        "bad_examples": bad.examples,
        "num_documents": int(index["num_documents"].sum(dtype=np.int64)),
        "num_tokens": int(index["num_tokens"].sum(dtype=np.int64)),
        "target_tokens": int(index["target_tokens"].sum(dtype=np.int64)),
        "target_bytes": int(index["target_bytes"].sum(dtype=np.int64)),
        "input_bytes": sum(chunk.num_bytes for chunk in unit if isinstance(chunk, Chunk)),
    }  # fmt: skip
    if rows:
        shards.write_file(job.folder / name, content)
    shards.write_file(job.folder / unit_name(number, "npy"), shards.npy_bytes(index))
    shards.write_file(job.folder / unit_name(number, "json"), shards.json_bytes(result))
    return result


class _Bad:
    """Counts bad rows, or raises at the first."""

    def __init__(self, fail: bool) -> None:
        self.fail = fail
        self.reasons: Counter[str] = Counter()
        self.examples: list[str] = []

    def add(self, fault: BadRow, where: str) -> None:
        fault.where = fault.where or where
        if self.fail:
            raise fault.error() from None
        self.reasons[fault.reason] += 1
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(f"{fault.where}: {fault.reason}")


def _documents(job: Job, unit: Unit, tokenizer: Tokenizer, counts: Counter[str], bad: _Bad) -> Documents:
    config = job.config
    dtype = shards.token_dtype(tokenizer.vocab_size)
    if config.form == "auto":  # no first row was good, so there is no form, and no row here is good either
        for where, row in _rows(unit, config.encoding):
            bad.add(row if isinstance(row, BadRow) else BadRow("row is empty"), where)
        return Documents.from_lists([], [], dtype)
    reader = make_reader(config, config.form, job.first, tokenizer.core.chat_template is not None)
    examples, places = _examples(unit, reader, config.encoding, counts, bad)
    if reader.chat:
        samples, faults = encode_chats(examples, tokenizer, train_on=config.train_on)
        for fault, where in zip(faults, places, strict=True):
            if fault is not None:
                bad.add(fault, where)
        places = [where for fault, where in zip(faults, places, strict=True) if fault is None]
    else:
        samples = encode_plain(examples, tokenizer, train_on=config.train_on)
    counts["samples"] += len(samples.ids)
    documents = Documents.from_lists(samples.ids, samples.masks, dtype)
    if config.packing == "chunk":
        return documents
    ends = {"eos_id": tokenizer.eos_id, "bos_id": tokenizer.bos_id}
    fit(documents, config.sequence_length, config.overlong, where=places, **ends)  # type: ignore[arg-type]
    return documents


def _rows(unit: Unit, encoding: str) -> Iterator[tuple[str, dict[str, Any] | BadRow]]:
    for chunk in unit:
        if isinstance(chunk, BadRow):
            yield chunk.where, chunk
        else:
            yield from parse_chunk(chunk, encoding)


def _examples(
    unit: Unit, reader: Reader, encoding: str, counts: Counter[str], bad: _Bad
) -> tuple[list[Example], list[str]]:
    examples: list[Example] = []
    places: list[str] = []
    for where, row in _rows(unit, encoding):
        counts["rows read"] += 1
        if isinstance(row, BadRow):
            bad.add(row, where)
            continue
        for field in row.keys() - reader.fields:
            counts[f"ignored field: {field}"] += 1
        try:
            examples.append(reader.read(row))
            places.append(where)
        except BadRow as fault:
            bad.add(fault, where)
    return examples, places
