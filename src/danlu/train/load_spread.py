"""Open a trained model over several ranks: for one that fits on no single device.

Each rank builds its own part on meta, then reads just that part, from a run's checkpoint of any layout or from an HF
folder. What comes out is used like a whole model, by all ranks together.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from danlu.base.layout import check_tensor
from danlu.checkpoint.convert import fill_from_hf, load_hf
from danlu.checkpoint.hub import local_folder, resolve_model
from danlu.objective.cross_entropy import CrossEntropy, VocabularyShard
from danlu.parallel.generation import SpreadDecoder
from danlu.parallel.mesh import World
from danlu.parallel.pipeline import Channels, Pipeline
from danlu.parallel.placement import Piece
from danlu.parallel.stages import plan_stages
from danlu.parallel.tensor import apply_tensor
from danlu.train.forward import Forward
from danlu.train.load import (
    DTYPES,
    TrainedModel,
    describe_checkpoint,
    fill_from_checkpoint,
    find_checkpoint,
    has_tokenizer,
    spec_from_record,
)


def load_spread(name: str, world: World, *, dtype: str) -> TrainedModel:
    """Open a trained model in eval mode, spread over the pipeline and tensor ranks of ``world``.

    Args:
        name: as for `danlu.train.load.load_model`.
        world: the ranks.
        dtype: of parameters and computation: ``fp32``, ``bf16`` or ``fp16``.

    Raises:
        UserError: as `load_model`, or heads or layers that do not spread so.
    """
    saved = find_checkpoint(name)
    folder = local_folder(resolve_model(name)) if saved is None else saved.folder
    spec = load_hf(folder) if saved is None else spec_from_record(saved.record["identity"]["model"], name)
    for width in {spec.mlp_size, spec.expert_width if spec.num_experts else spec.mlp_size}:
        check_tensor(world.degrees.tp, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, mlp_size=width)
    layers = plan_stages(spec, world.degrees.pp, sequence_length=1)[world.place("pp")]
    with torch.device("meta"):
        model = SpreadDecoder(
            spec, layers=layers, compute_dtype=DTYPES[dtype], channels=_channels(world),
            pipeline_group=world.axis_group("pp"), tensor_group=world.axis_group("tp"),
        )  # fmt: skip
    blocks = apply_tensor(model, world.axis_group("tp"), sp=False)
    model.to(DTYPES[dtype]).to_empty(device=world.device)  # cast before it has memory: fp32 would take twice as much
    pieces = {fqn: Piece(blocks[fqn], parameter) for fqn, parameter in model.named_parameters()}
    if saved is not None:
        fill_from_checkpoint(pieces, saved, world.checkpoint_group)
        return describe_checkpoint(name, saved, model=model)
    with torch.no_grad():
        fill_from_hf(spec, pieces, folder)
    tokenizer = folder if has_tokenizer(folder) else None
    return TrainedModel(model.eval(), name, folder, None, None, tokenizer, {})


def spread_forward(opened: TrainedModel, world: World) -> Forward:
    """Return what makes a micro-batch's loss with a model that `load_spread` or `load_model` opened."""
    shard = VocabularyShard.of(world.axis_group("tp"), opened.spec.vocab_size) if world.degrees.tp > 1 else None
    channels = _channels(world)
    pipeline = None if channels is None else Pipeline(channels, schedule="gpipe", num_virtual=1)
    parts = {world.place("pp"): opened.model}
    return Forward(parts, CrossEntropy(shard=shard), device=world.device, pipeline=pipeline)


def _channels(world: World) -> Channels | None:
    if world.up is None or world.down is None:
        return None
    ranks = tuple(dist.get_process_group_ranks(world.axis_group("pp")))
    return Channels(ranks, world.place("pp"), world.up, world.down)
