"""Look at what the model will see: rows as text, with targets and documents told apart, and statistics.

The text is decoded run by run, a run being neighbouring tokens of one document that are all targets or all not; a
character whose bytes are spread over two runs shows as a replacement character.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from danlu.base.errors import UserError
from danlu.data.dataset import PackedDataset
from danlu.data.tokenizer import Tokenizer

_SAMPLE_ROWS = 10_000


@dataclass(frozen=True, slots=True)
class Run:
    """Neighbouring tokens of one document with the same mask."""

    document: int
    target: bool
    num_tokens: int
    text: str


def read_rows(dataset: PackedDataset, tokenizer: Tokenizer, indices: Sequence[int]) -> list[list[Run]]:
    """Return the runs of some rows.

    Raises:
        UserError: a row number beyond the data set.
    """
    for index in indices:
        if not 0 <= index < len(dataset):
            raise UserError("no such row", where=str(dataset.folder), seen=index, legal=f"0 to {len(dataset) - 1}")
    rows = dataset.rows(indices)
    return [_runs(rows.tokens_BS[i], rows.mask_BS[i], rows.document_ids_BS[i], tokenizer) for i in range(len(indices))]


def _runs(tokens: np.ndarray, mask: np.ndarray, documents: np.ndarray, tokenizer: Tokenizer) -> list[Run]:
    real = documents >= 0
    tokens, mask, documents = tokens[real], mask[real], documents[real]
    cuts = np.flatnonzero((np.diff(documents) != 0) | (np.diff(mask.astype(np.int8)) != 0)) + 1
    edges = [0, *cuts.tolist(), len(tokens)]
    return [
        Run(int(documents[a]), bool(mask[a]), b - a, tokenizer.decode(tokens[a:b])) for a, b in pairwise(edges) if b > a
    ]


def statistics(dataset: PackedDataset) -> dict[str, Any]:
    """Return counts, fill and document lengths (lengths from at most `_SAMPLE_ROWS` rows spread over the data set)."""
    index, manifest = dataset.index, dataset.manifest
    tokens = index["num_tokens"].astype(np.int64)
    chosen = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), _SAMPLE_ROWS)).astype(np.int64))
    lengths = np.concatenate([dataset.document_lengths(int(row)) for row in chosen])
    quantiles = np.quantile(lengths, [0, 0.5, 0.9, 1]).round().astype(int).tolist()
    names = ("num_samples", "truncated", "split", "dropped", "bad_rows", "ignored_fields", "target_bytes")
    return {
        "folder": str(dataset.folder),
        "num_rows": len(dataset),
        "sequence_length": dataset.sequence_length,
        "num_documents": int(index["num_documents"].sum(dtype=np.int64)),
        "num_tokens": int(tokens.sum()),
        "target_tokens": int(index["target_tokens"].sum(dtype=np.int64)),
        "fill": float(tokens.mean() / dataset.sequence_length),
        "document_tokens": dict(zip(("shortest", "median", "90 %", "longest"), quantiles, strict=True)),
        "num_shards": len(manifest["shards"]),
        **{name: manifest[name] for name in names if name in manifest},
    }


def inspect(
    folder: str | Path, *, rows: Sequence[int] = (0,), verify: bool = False
) -> tuple[dict[str, Any], dict[int, list[Run]]]:
    """Return statistics and the runs of the chosen rows.

    Args:
        folder: a data set.
        rows: which rows to decode; those beyond the last are left out, if the first is there.
        verify: hash every shard first.

    Raises:
        UserError: not a data set, damaged, or no such row.
    """
    dataset = PackedDataset(folder)
    if verify:
        dataset.verify()
    rows = [row for row in rows if row < len(dataset)] or rows[:1]
    decoded = read_rows(dataset, Tokenizer.load(dataset.folder), rows) if rows else []
    return statistics(dataset), dict(zip(rows, decoded, strict=True))


def as_json(statistics: dict[str, Any], rows: dict[int, list[Run]]) -> dict[str, Any]:
    """Return the result of `inspect` as a JSON document."""
    listed = [{"row": number, "runs": [asdict(run) for run in runs]} for number, runs in rows.items()]
    return {"statistics": statistics, "rows": listed}


def as_text(statistics: dict[str, Any], rows: dict[int, list[Run]], *, color: bool) -> str:
    """Return the result of `inspect` for people: targets green, or between [[ and ]] where there is no colour."""
    text = Text()
    for number, runs in rows.items():
        text.append(f"row {number}", style="bold")
        text.append(f"  targets are {'green' if color else 'between [[ and ]]'}\n")
        document = None
        for run in runs:
            if run.document != document:
                text.append(f"{'' if document is None else chr(10)}--- document {run.document}\n", style="dim")
                document = run.document
            shown = run.text if color or not run.target else f"[[{run.text}]]"
            text.append(shown, style="green" if run.target else "dim")
        text.append("\n\n")
    width = max(len(name) for name in statistics)
    for name, value in statistics.items():
        text.append(f"{name.replace('_', ' '):<{width}}  {_shown(value)}\n")
    if not color:
        return text.plain.rstrip()
    console = Console(force_terminal=True)
    with console.capture() as captured:
        console.print(text, end="", soft_wrap=True)
    return captured.get().rstrip()


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(item)}" for name, item in value.items()) or "none"
    if isinstance(value, float):
        return f"{value:.3f}"
    return f"{value:,}" if isinstance(value, int) else str(value)
