"""The recipe: config in, things ready to train out. The only place where techniques meet, and their order.

Functions here are the only ones that read the config and hand plain values to the layers below.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from danlu.base.devices import peak_flops
from danlu.base.errors import UserError
from danlu.checkpoint.convert import load_hf, load_hf_weights
from danlu.checkpoint.hub import local_folder, resolve_model
from danlu.checkpoint.store import Checkpoint
from danlu.config.rules import check_experts, micro_batch_size, size_overrides
from danlu.config.schema import Config, ModelSection
from danlu.data.dataset import PackedDataset, RowSource
from danlu.data.loader import Loader
from danlu.data.order import split_rows
from danlu.model.decoder import Decoder
from danlu.model.families import hf_from_spec
from danlu.model.flops import train_flops_per_token
from danlu.model.presets import PRESETS
from danlu.model.spec import ModelSpec
from danlu.objective.cross_entropy import CrossEntropy, Objective
from danlu.parallel.data import apply_ddp
from danlu.parallel.mesh import World
from danlu.train.load import DTYPES, find_checkpoint, load_checkpoint_weights, spec_from_record
from danlu.train.metrics import Rates
from danlu.train.optimizer import build_optimizer, can_fuse


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
                seen=f"rows of {source.sequence_length} tokens, {max_positions} positions",
            )


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype; ``auto`` is bf16 where the device multiplies bf16 matrices in hardware."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float32
    return (
        torch.bfloat16 if torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported() else torch.float32
    )


def build_model(config: Config, start: Start, world: World) -> tuple[Decoder, nn.Module]:
    """Return the model and the module that wraps it for training (the same one where nothing wraps it)."""
    dtype = pick_dtype(config.precision.compute_dtype, world.device)
    with torch.device("meta"):  # a shape without memory, so that what splits it later never sees the whole
        model = Decoder(start.spec, compute_dtype=dtype, dropout=config.model.dropout)
    # adapters, tensor, context and expert parallelism, recompute and compile come here, in this order
    model.to_empty(device=world.device)
    if start.weights is None:
        model.init_weights(config.train.seed)  # from the seed alone: equal on every rank
    elif isinstance(start.weights, Path):
        load_hf_weights(model, start.weights)
    else:
        load_checkpoint_weights(model, start.weights)
    model.train()
    # last, because it takes hold of the parameters as they are
    return model, apply_ddp(model, world.data_group, bucket_cap_mb=config.parallel.bucket_cap_mb)


def build_objective(config: Config) -> Objective:
    """Return what is minimised."""
    return CrossEntropy(max_chunk_bytes=int(config.precision.loss_chunk_mib * 2**20))


def build_optimizer_for(config: Config, model: Decoder) -> torch.optim.AdamW:
    """Return the optimizer over the model's trainable parameters."""
    wanted, possible = config.optimizer.fused, can_fuse(model.parameters())
    if wanted == "on" and not possible:
        raise UserError("no fused AdamW for these parameters", where="optimizer.fused", seen="on", legal="auto, off")
    return build_optimizer(
        model.named_parameters(),
        learning_rate=config.optimizer.learning_rate,
        beta1=config.optimizer.beta1,
        beta2=config.optimizer.beta2,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        fused=possible and wanted != "off",
    )


def build_loader(config: Config, sources: Sequence[RowSource], world: World, samples_seen: int) -> Loader:
    """Return the loader of this data rank, from ``samples_seen`` on."""
    return Loader(
        sources,
        weights=config.data.weights,
        seed=config.train.seed,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=micro_batch_size(config, world.data_degree),
        data_rank=world.data_rank,
        data_degree=world.data_degree,
        num_workers=config.data.num_workers,
        prefetch=config.data.prefetch,
        shuffle=config.data.shuffle,
        samples_seen=samples_seen,
        trim_padding=config.data.trim_padding,
    )


def build_rates(config: Config, spec: ModelSpec, sequence_length: int, world: World) -> Rates:
    """Return the throughput counter, with the device's peak where it is known."""
    peak = None
    if world.device.type == "cuda":
        dtype = "bf16" if pick_dtype(config.precision.compute_dtype, world.device) is torch.bfloat16 else "fp32"
        peak = peak_flops(torch.cuda.get_device_name(world.device), dtype, tf32=config.precision.tf32)
    return Rates(num_devices=world.size, flops_per_token=train_flops_per_token(spec, sequence_length), peak_flops=peak)
