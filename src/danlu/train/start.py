"""Which model is trained on which rows: found out before a process group, a parameter or a run folder exists."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.base.errors import UserError
from danlu.checkpoint.convert import load_hf
from danlu.checkpoint.hub import local_folder, resolve_model
from danlu.checkpoint.store import Checkpoint
from danlu.config.rules import check_experts, size_overrides
from danlu.config.schema import ModelSection
from danlu.data.dataset import PackedDataset, RowSource
from danlu.data.order import split_rows
from danlu.model.families import hf_from_spec
from danlu.model.presets import PRESETS
from danlu.model.spec import ModelSpec
from danlu.train.load import find_checkpoint, spec_from_record


@dataclass(frozen=True)
class Start:
    """Where a model comes from: its shape and, unless it starts from random weights, a folder with them."""

    spec: ModelSpec
    weights: Path | Checkpoint | None


def open_sources(paths: Sequence[str], on_corrupt: str) -> list[PackedDataset]:
    """Open data folders and check that they agree on the tokenizer's size."""
    sources = [PackedDataset(path, on_corrupt="skip" if on_corrupt == "skip" else "fail") for path in paths]
    sizes = {source.vocab_size for source in sources}
    if len(sizes) > 1:
        seen = ", ".join(f"{source.folder}: {source.vocab_size}" for source in sources)
        raise UserError("the data folders were built with different tokenizers", where="data", seen=seen)
    return sources


def hold_out(
    sources: Sequence[PackedDataset], fraction: float, *, seed: int
) -> tuple[Sequence[RowSource], Sequence[RowSource]]:
    """Split off ``fraction`` of each source's rows and return (training rows, held-out rows)."""
    if not fraction:
        return sources, []
    pairs = [split_rows(source, max(1, round(len(source) * fraction)), seed=seed) for source in sources]
    return [train for train, _ in pairs], [held_out for _, held_out in pairs]


def plan_start(model: ModelSection, sources: Sequence[PackedDataset], held_out: Sequence[PackedDataset] = ()) -> Start:
    """Find out which model is trained on ``sources`` and evaluated on ``held_out``, before anything expensive happens.

    Raises:
        UserError: unknown name, sizes that cannot be changed, rows with more token ids or positions than the model has.
    """
    weights: Path | Checkpoint | None = None
    if saved := find_checkpoint(model.name):
        weights, spec = saved, spec_from_record(saved.record["identity"]["model"], model.name)
    elif (found := resolve_model(model.name)).kind != "preset":
        weights = local_folder(found)
        spec = load_hf(weights)
    else:
        spec = PRESETS[model.name]
        if model.init == "pretrained":
            raise UserError(
                "a preset is only a shape and has no weights",
                where="model.init",
                seen=model.name,
                hint="name an HF folder, a run folder, a GGUF file or a hub id",
            )
    check_experts(model, spec.num_experts)
    changes = size_overrides(model)
    if model.init == "random" or weights is None:
        spec, weights = dataclasses.replace(spec, **_consistent(changes)), None
        if changes:
            hf_from_spec(spec)  # sizes that no config.json of the family can say are refused before training
    elif changes:
        raise UserError(
            "a pretrained model keeps its sizes",
            where=f"model.{next(iter(changes))}",
            seen=changes,
            hint='set model.init = "random", or leave the size out',
        )
    _check_fit(spec, sources, spec.max_positions)
    _check_fit(spec, held_out, spec.longest_input)
    return Start(spec, weights)


def _consistent(changes: dict[str, Any]) -> dict[str, Any]:
    """A changed width or number of heads changes the head width with it, unless that is given too."""
    if "head_dim" not in changes and "hidden_size" in changes and "num_heads" in changes:
        return {**changes, "head_dim": changes["hidden_size"] // changes["num_heads"]}
    return changes


def _check_fit(spec: ModelSpec, sources: Sequence[PackedDataset], max_positions: int) -> None:
    for source in sources:
        if source.vocab_size > spec.vocab_size:
            raise UserError(
                "the data has more token ids than the model has embedding rows",
                where=str(source.folder),
                seen=f"{source.vocab_size} token ids, model.vocab_size = {spec.vocab_size}",
                hint="build the data with the model's tokenizer, or set model.vocab_size for a model from scratch",
            )
        if source.sequence_length > max_positions:
            raise UserError(
                "the rows are longer than the model's positions",
                where=str(source.folder),
                seen=f"rows of {source.sequence_length} tokens",
                legal=f"at most {max_positions} positions",
                hint=f"build the data with sequence_length = {max_positions}, or raise model.max_positions of a model "
                "from scratch",
            )
