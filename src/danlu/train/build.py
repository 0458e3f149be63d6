"""The recipe: config in, things ready to train out. The only place where techniques meet, and their order.

Functions here are the only ones that read the config and hand plain values to the layers below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from danlu.base.devices import peak_flops
from danlu.base.errors import UserError
from danlu.checkpoint.convert import fill_from_hf
from danlu.config.rules import (
    micro_batch_size,
    router_balance,
)
from danlu.config.schema import Config
from danlu.data.batch import MicroBatch, pad_length
from danlu.data.dataset import RowSource
from danlu.data.loader import Loader
from danlu.model.decoder import Decoder, initial_value
from danlu.model.flops import train_flops_per_token
from danlu.model.spec import ModelSpec
from danlu.objective.cross_entropy import CrossEntropy, Objective, VocabularyShard
from danlu.parallel.context import apply_context, join_routers, split_batch
from danlu.parallel.data import LATE, JointReducer, Named, Reducer, ReplicaReducer, check_replicas
from danlu.parallel.expert import apply_expert, expert_modules
from danlu.parallel.mesh import World
from danlu.parallel.pipeline import Channels, Pipeline
from danlu.parallel.placement import Block, Piece
from danlu.parallel.shard import FullShardReducer, ShardedGradientReducer, ShardedReducer, local_range
from danlu.parallel.tensor import apply_tensor
from danlu.train.forward import Forward
from danlu.train.layout import num_virtual_stages, plan_layers, reshards_after_forward
from danlu.train.load import DTYPES, fill_from_checkpoint
from danlu.train.metrics import Rates
from danlu.train.optimizer import HybridOptimizer, can_fuse
from danlu.train.start import Start

TABLE = "embedding.weight"
"""The parameter that tied embeddings share."""


def pick_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the compute dtype; ``auto`` is bf16 where the device multiplies bf16 matrices in hardware."""
    if name != "auto":
        return DTYPES[name]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float32
    return (
        torch.bfloat16 if torch.backends.mkldnn.is_available() and torch.cpu._is_amx_tile_supported() else torch.float32
    )


@dataclass(frozen=True)
class Built:
    """A model on this rank, ready to train."""

    parts: Mapping[int, Decoder]
    """This rank's pipeline stages; the whole model, as stage 0, where there is no pipeline."""
    blocks: Mapping[str, Block]
    """Where each of its parameters lies in the whole model, before ZeRO."""
    reducer: Reducer
    """Sums gradients over ranks."""
    pipeline: Pipeline | None
    """Runs the stages."""

    def pieces(self) -> dict[str, Piece]:
        """Return FQN -> what this rank holds of the whole parameter (live)."""
        return model_pieces(self.parts, self.blocks)

    @property
    def spec(self) -> ModelSpec:
        """The whole model's shape."""
        return next(iter(self.parts.values())).spec

    @property
    def compute_dtype(self) -> torch.dtype:
        """Dtype of the activations."""
        return next(iter(self.parts.values())).compute_dtype


def model_pieces(parts: Mapping[int, Decoder], blocks: Mapping[str, Block]) -> dict[str, Piece]:
    """Return FQN -> what this rank holds of the whole parameter (live)."""
    return {name: Piece(blocks[name], *local_range(parameter)) for name, parameter in named_parameters(parts)}


def named_parameters(parts: Mapping[int, Decoder]) -> list[tuple[str, torch.nn.Parameter]]:
    """Return the parameters of all parts, each once."""
    return [entry for part in parts.values() for entry in part.named_parameters()]


def build_model(config: Config, start: Start, world: World, sequence_length: int) -> Built:
    """Return this rank's part of the model, filled, and what reduces its gradients."""
    parallel, dtype = config.parallel, pick_dtype(config.precision.compute_dtype, world.device)
    shard_group, copies = world.shard_group, world.axis_group("dp_replicate")
    pipeline = build_pipeline(config, world)
    layers = plan_layers(config, start.spec, world.degrees, sequence_length)
    held = [0] if pipeline is None else pipeline.stages
    blocks: dict[str, Block] = {}
    with torch.device("meta"):  # a shape without memory, so that what splits it later never sees the whole
        parts = {
            stage: Decoder(start.spec, compute_dtype=dtype, dropout=config.model.dropout, layers=layers[stage])
            for stage in held
        }
    for part in parts.values():
        # tensor parallelism first: it changes the parameters' shapes, which everything after it takes as they are
        blocks |= apply_tensor(part, world.axis_group("tp"), sp=parallel.sp)
        if world.experts is not None:
            blocks = apply_expert(part, blocks, world.experts.group)
        if world.degrees.cp > 1:
            apply_context(part, world.axis_group("cp"), parallel.cp_method, tensor_degree=world.degrees.tp)
    if pipeline is not None:
        pipeline.adopt(parts)
        pipeline.open(world.device, tied=start.spec.tied_embeddings)
    reducer: Reducer | None = None
    if parallel.zero == 3:  # while still on meta: no rank ever holds the whole
        reducer = FullShardReducer(
            parts, shard_group, copies, reshard_after_forward=reshards_after_forward(config),
            prefetch=parallel.prefetch, device=world.device,
            expert_groups=None if world.experts is None else (world.experts.shard_group, world.experts.replicate_group),
        )  # fmt: skip
    else:
        for part in parts.values():
            part.to_empty(device=world.device)
    _clear_padding(parts, blocks)
    _fill(model_pieces(parts, blocks), start, world, config.train.seed)
    for part in parts.values():
        part.train()
    if reducer is None:  # last, because it takes hold of the parameters as they are
        reducer = _build_reducer(parts, config, world)
    return Built(parts, blocks, reducer, pipeline)


def build_pipeline(config: Config, world: World) -> Pipeline | None:
    """Return what runs this rank's stages; None where there is no pipeline."""
    if world.up is None or world.down is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(world.axis_group("pp")))
    channels = Channels(ranks, world.place("pp"), world.up, world.down)
    return Pipeline(channels, schedule=config.parallel.pp_schedule, num_virtual=num_virtual_stages(config))


@torch.no_grad()
def _clear_padding(parts: Mapping[int, Decoder], blocks: Mapping[str, Block]) -> None:
    """Give zeros to what is in no piece: fresh memory may hold NaN, and 0 x NaN reaches every gradient."""
    for name, parameter in named_parameters(parts):
        if blocks[name].local != blocks[name].extent:
            local_range(parameter)[0].zero_()


@torch.no_grad()
def _fill(pieces: Mapping[str, Piece], start: Start, world: World, seed: int) -> None:
    """Give every parameter its first value, one whole tensor at a time."""
    if isinstance(start.weights, Path):
        fill_from_hf(start.spec, pieces, start.weights)
    elif start.weights is not None:
        fill_from_checkpoint(pieces, start.weights, world.checkpoint_group)
    else:  # from seed and name alone: the same model for every layout
        for name, piece in pieces.items():
            if len(piece.shape) == 3:  # experts, of which most may be elsewhere
                for index in piece.indices:
                    piece[index].copy_(initial_value(start.spec, f"{name}.{index}", piece.shape[1:], seed))
            else:
                piece.copy_(initial_value(start.spec, name, piece.shape, seed))


def _build_reducer(parts: Mapping[int, Decoder], config: Config, world: World) -> Reducer:
    """Return what sums the gradients of parameters that are in memory; replicas that differ are made equal first."""
    named = {stage: list(part.named_parameters()) for stage, part in parts.items()}
    if world.degrees.pp > 1 and next(iter(parts.values())).spec.tied_embeddings:
        # first and last stage both add to the table; a bucket of its own is cut alike wherever it is
        table = [entry for each in named.values() for entry in each if entry[0] == TABLE]
        named = {stage: [entry for entry in each if entry[0] != TABLE] for stage, each in named.items()} | {LATE: table}
    groups = (world.reduce_group, world.shard_group, world.axis_group("dp_replicate"))
    spread = world.experts
    if spread is None:
        return _reduce_over(named, groups, config)
    own = {id(value) for part in parts.values() for module in expert_modules(part) for value in module.parameters()}
    rest = {stage: [entry for entry in each if id(entry[1]) not in own] for stage, each in named.items()}
    experts = {stage: [entry for entry in each if id(entry[1]) in own] for stage, each in named.items()}
    expert_groups = (spread.reduce_group, spread.shard_group, spread.replicate_group)
    return JointReducer([_reduce_over(rest, groups, config), _reduce_over(experts, expert_groups, config)])


def _reduce_over(
    named: Mapping[int, Named],
    groups: tuple[dist.ProcessGroup, dist.ProcessGroup, dist.ProcessGroup],
    config: Config,
) -> Reducer:
    reduce_group, shard_group, replicate_group = groups
    everything = [entry for each in named.values() for entry in each]
    if reduce_group.size() == 1:
        return Reducer(everything)
    check_replicas(everything, reduce_group)
    cap = config.parallel.bucket_cap_mb
    if config.parallel.zero == 0 or shard_group.size() == 1:
        return ReplicaReducer(named, reduce_group, bucket_cap_mb=cap)
    kind = ShardedReducer if config.parallel.zero == 1 else ShardedGradientReducer
    return kind(named, shard_group, replicate_group, bucket_cap_mb=cap)


def build_objective(config: Config, spec: ModelSpec, world: World) -> Objective:
    """Return what is minimised."""
    shard = VocabularyShard.of(world.axis_group("tp"), spec.vocab_size) if world.degrees.tp > 1 else None
    return CrossEntropy(max_chunk_bytes=int(config.precision.loss_chunk_mib * 2**20), shard=shard)


def build_forward(config: Config, built: Built, objective: Objective, world: World) -> Forward:
    """Return what makes a micro-batch's loss on this layout."""
    place, size, method = world.place("cp"), world.degrees.cp, config.parallel.cp_method
    tokens = world.degrees.tp if config.parallel.sp else 1

    def lay_out(batch: MicroBatch) -> MicroBatch:
        return split_batch(batch, place, size, method, tokens) if size > 1 else pad_length(batch, tokens)

    balance = router_balance(config.model, built.spec.num_experts)
    join = partial(join_routers, group=world.axis_group("cp")) if size > 1 else (lambda _: None)
    return Forward(
        built.parts, objective, device=world.device, lay_out=lay_out, router_balance=balance, join_routers=join,
        pipeline=built.pipeline, sequence_parts=tokens,
    )  # fmt: skip


def build_optimizer(config: Config, built: Built, world: World) -> HybridOptimizer:
    """Return the optimizer over this rank's shards of the trainable parameters."""
    wanted, possible = config.optimizer.fused, can_fuse(parameter for _, parameter in named_parameters(built.parts))
    if wanted == "on" and not possible:
        raise UserError("no fused AdamW for these parameters", where="optimizer.fused", seen="on", legal="auto, off")
    return HybridOptimizer(
        built.reducer,
        blocks=built.blocks,
        group=world.group,
        tensor_group=world.axis_group("tp"),
        tied=find_tied(built),
        learning_rate=config.optimizer.learning_rate,
        beta1=config.optimizer.beta1,
        beta2=config.optimizer.beta2,
        eps=config.optimizer.eps,
        weight_decay=config.optimizer.weight_decay,
        fused=possible and wanted != "off",
    )


def find_tied(built: Built) -> dict[str, Callable[[torch.Tensor], None]]:
    """Return, on ranks of the first or last stage, the table that both hold and what sums its gradient over the two."""
    pipeline = built.pipeline
    if pipeline is None or not built.spec.tied_embeddings:
        return {}
    peer = pipeline.other_end()
    return {} if peer is None else {TABLE: partial(pipeline.channels.sum_with, peer=peer)}


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
