"""Bytes that a layout sends in one optimizer step: per axis, per operation, per rank.

One convention throughout: bytes that a rank *sends* with ring algorithms (Patarasuk and Yuan, JPDC 69, 2009), as a mean
over all ranks. Over r ranks an all-reduce of x bytes sends 2 (r - 1)/r x, an all-gather to x bytes and a reduce-scatter
of x bytes (r - 1)/r x, an all-to-all of x bytes (r - 1)/r x, a message of x bytes x. `danlu.parallel.volume` counts
what really happens by the same convention; a test holds the two together, to the byte.

With n parameters on a rank after tensor parallelism, M micro-batches of B rows of S tokens, width D, L blocks, e bytes
an activation and 4 bytes a parameter or gradient (r ranks of the axis named):

    data, ZeRO-0      2 (r - 1)/r 4 n                                once a step            arXiv:2006.15704
    data, ZeRO-1      (r - 1)/r 4 n gradients, the same parameters   once a step            arXiv:1910.02054
    data, ZeRO-2      the same, gradients                            M times a step
    data, ZeRO-3      (r - 1)/r 4 (n gradients + g n parameters)     M times a step         g: 1 or 2 gathers
    data, copies      2 (c - 1)/c 4 n/r                              once a step            arXiv:2304.11277 (HSDP)
    tensor            (4 L + 2) 2 (r - 1)/r B (S/cp) D e             M times a step         arXiv:1909.08053, 2205.05198
    vocabulary        3 numbers a target token, all-reduced          M times a step
    context           see `danlu.parallel.context`                   M times a step         arXiv:2309.14509, 2310.01889
    pipeline          B (S/cp) D e a boundary, forward and backward  M times a step         arXiv:1811.06965

The exact numbers have edges that the table leaves out, and the functions below do not: buckets are padded to a multiple
of r; FSDP2 pads the rows of every parameter; its head (and a tied table) is gathered once and not twice; the sum behind
the embedding runs in the parameters' dtype; under sp the gradients of norms, and always those of head norms and of key
heads that several ranks hold, are summed over the tensor parallel ranks.

In a pipeline every stage has buckets of its own, ZeRO-3 gathers and reduces once a step, and a tied table is on two
stages, which exchange its gradient.

What it does not count: the numbers on the host that ranks agree on (`bookkeeping_bytes`), evaluation, checkpoints, the
start of a run. Models with experts are refused: what they send depends on the router. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from danlu.base.errors import UserError
from danlu.base.layout import AXES, Degrees
from danlu.model.spec import ModelSpec
from danlu.parallel.stages import plan_stages

Operation = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"]
_IDS = 8
"""Bytes of a document id."""
_FP32 = 4


@dataclass(frozen=True, slots=True)
class Flow:
    """One reason to communicate.

    Attributes:
        axes: mesh axes of the ranks that talk (those with more than one rank).
        operation: the collective.
        what: what is sent, for people.
        sent_bytes: per rank and step, the mean over all ranks.
    """

    axes: tuple[str, ...]
    operation: Operation
    what: str
    sent_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step is, apart from model and degrees.

    Attributes:
        micro_batches: of one data rank in a step.
        rows: B, rows of a micro-batch.
        length: S, tokens of a whole row, padded as the layout needs it.
        targets: target tokens of a micro-batch; None: every token.
        zero: ZeRO stage.
        reshard_after_forward: as in the config.
        sp: sequence parallelism, with ``tp``.
        cp_method: as in the config.
        stages: blocks of each pipeline stage; None: one stage a rank, balanced.
        stage_to_rank: place in the pipeline of each stage; None: in turn.
        activation_bytes: of one activation.
        parameter_bytes: of one parameter, gathered as it is stored, and of its gradient.
        bucket_cap_mb: as in the config.
    """

    micro_batches: int
    rows: int
    length: int
    targets: int | None = None
    zero: int = 0
    reshard_after_forward: bool = True
    sp: bool = True
    cp_method: Literal["ring", "ulysses"] = "ring"
    stages: Sequence[range] | None = None
    stage_to_rank: Sequence[int] | None = None
    activation_bytes: int = 2
    parameter_bytes: int = 4
    bucket_cap_mb: float = 25.0


# --- collectives -----------------------------------------------------------------------------------------------------


def all_reduce_bytes(tensor_bytes: float, ranks: int) -> float:
    """Return what a rank sends for the sum of a tensor.

    Examples:
        >>> all_reduce_bytes(1000, 4)
        1500.0
    """
    return 2 * (ranks - 1) / ranks * tensor_bytes


def gather_bytes(whole_bytes: float, ranks: int) -> float:
    """Return what a rank sends for an all-gather, reduce-scatter or all-to-all of a whole tensor.

    Examples:
        >>> gather_bytes(1000, 4)
        750.0
    """
    return (ranks - 1) / ranks * whole_bytes


# --- parameters of a rank ---------------------------------------------------------------------------------------------

_SPLIT_DIM = {
    **{f"attention.{name}.{leaf}": 0 for name in ("query", "key", "value") for leaf in ("weight", "bias")},
    **{f"mlp.{name}.{leaf}": 0 for name in ("gate", "up") for leaf in ("weight", "bias")},
    "attention.output.weight": 1,
    "mlp.down.weight": 1,
}
"""Which dimension of a block's parameter tensor parallelism splits; others are whole on every rank."""
_KEY_HEADS = frozenset(f"attention.{name}.{leaf}" for name in ("key", "value") for leaf in ("weight", "bias"))
_HEAD_NORMS = frozenset({"attention.query_norm.weight", "attention.key_norm.weight"})
_TABLES = frozenset({"embedding.weight", "head.weight"})


def _in_block(name: str) -> str:
    """Return a parameter's name inside its block, or its whole name outside of blocks."""
    return name.split(".", 2)[2] if name.startswith("blocks.") else name


def local_shapes(spec: ModelSpec, tp: int) -> dict[str, tuple[int, ...]]:
    """Return what a tensor parallel rank holds of every parameter, in the decoder's order.

    Key heads fewer than ranks are held by several; the vocabulary is padded to ceil(V / tp) rows a rank.
    """
    shapes = {}
    for name, whole in spec.parameter_shapes().items():
        short, local = _in_block(name), list(whole)
        if short in _TABLES:
            local[0] = -(-whole[0] // tp)
        elif short in _KEY_HEADS:
            local[0] = max(whole[0] // tp, min(whole[0], spec.head_dim))
        elif short in _SPLIT_DIM:
            local[_SPLIT_DIM[short]] //= tp
        shapes[name] = tuple(local)
    return shapes


def bucketed_numel(shapes: Iterable[Sequence[int]], *, cap_bytes: float, multiple: int, parameter_bytes: int) -> int:
    """Return the numbers in all gradient buckets, each padded to ``multiple`` (see `danlu.parallel.data`)."""
    total = held = 0
    for numel in reversed([math.prod(shape) for shape in shapes]):
        if held and (held + numel) * parameter_bytes > cap_bytes:
            total, held = total + -(-held // multiple) * multiple, 0
        held += numel
    return total + -(-held // multiple) * multiple


def padded_numel(shapes: Iterable[Sequence[int]], ranks: int) -> int:
    """Return the numbers that FSDP2 moves for parameters of these shapes: rows are padded to equal parts."""
    return sum(-(-shape[0] // ranks) * ranks * math.prod(shape[1:]) for shape in shapes)


# --- axes ------------------------------------------------------------------------------------------------------------


def _axes(degrees: Degrees, *names: str) -> tuple[str, ...]:
    return tuple(axis for axis, size in zip(AXES, degrees.shape, strict=True) if axis in names and size > 1)


def stage_ranks(degrees: Degrees, work: Work) -> list[int]:
    """Return the place in the pipeline of each stage."""
    if work.stage_to_rank is not None:
        return list(work.stage_to_rank)
    return [stage % degrees.pp for stage in range(len(work.stages or range(degrees.pp)))]


def stage_shapes(spec: ModelSpec, degrees: Degrees, work: Work) -> list[dict[str, tuple[int, ...]]]:
    """Return the local shapes of what each part reduces on its own: the stages, then a table that two of them share.

    The shared table is listed once for each rank that has it.
    """
    shapes, places = local_shapes(spec, degrees.tp), stage_ranks(degrees, work)
    if degrees.pp == 1:
        return [shapes]
    layers = work.stages or plan_stages(spec, len(places), sequence_length=work.length)
    parts: list[dict[str, tuple[int, ...]]] = [
        {f"blocks.{layer}.{name}": shape for layer in held for name, shape in _block(shapes, layer).items()}
        for held in layers
    ]
    outside = {name: shape for name, shape in shapes.items() if not name.startswith("blocks.")}
    shared = {"embedding.weight": outside.pop("embedding.weight")}
    first = {name: outside.pop(name) for name in ("position_embedding.weight",) if name in outside}
    parts[-1] |= outside
    if spec.tied_embeddings:
        parts[0] = first | parts[0]
        return parts + [shared] * len({places[0], places[-1]})
    parts[0] = shared | first | parts[0]
    return parts


def _block(shapes: Mapping[str, tuple[int, ...]], layer: int) -> dict[str, tuple[int, ...]]:
    prefix = f"blocks.{layer}."
    return {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}


def data_flows(parts: Sequence[Mapping[str, Sequence[int]]], degrees: Degrees, work: Work) -> list[Flow]:
    """Return the flows of data parallelism, ZeRO 0 to 2: gradients, and parameters after the update.

    Args:
        parts: see `stage_shapes`.
        degrees: ranks per axis.
        work: the step.
    """
    split, copies, size = degrees.dp_shard * degrees.cp, degrees.dp_replicate, work.parameter_bytes
    axes = _axes(degrees, "dp_replicate", "dp_shard", "cp")
    if work.zero == 0 or split == 1:
        numel = sum(math.prod(shape) for part in parts for shape in part.values())
        return [Flow(axes, "all_reduce", "gradients", all_reduce_bytes(numel * size / degrees.pp, split * copies))]
    cap, inside = work.bucket_cap_mb * 2**20, _axes(degrees, "dp_shard", "cp")
    stages = len(parts) if degrees.pp == 1 else len(stage_ranks(degrees, work))
    moved = reduced = 0.0
    for index, part in enumerate(parts):
        whole = bucketed_numel(part.values(), cap_bytes=cap, multiple=split, parameter_bytes=size) * size / degrees.pp
        moved += whole
        reduced += whole * (work.micro_batches if work.zero == 2 and index < stages else 1)
    return [
        Flow(inside, "reduce_scatter", "gradients", gather_bytes(reduced, split)),
        Flow(inside, "all_gather", "updated parameters", gather_bytes(moved, split)),
        Flow(_axes(degrees, "dp_replicate"), "all_reduce", "gradients", all_reduce_bytes(moved / split, copies)),
    ]


def full_shard_flows(parts: Sequence[Mapping[str, Sequence[int]]], degrees: Degrees, work: Work) -> list[Flow]:
    """Return the flows of ZeRO-3: parameters of each unit for every forward and backward pass, gradients after it.

    Units are those of `danlu.parallel.shard.FullShardReducer`. What stays whole from the forward to the backward pass
    is gathered once: the head, which belongs to the root, with a tied embedding and a table of positions.

    Args:
        parts: see `stage_shapes`.
        degrees: ranks per axis.
        work: the step.

    Raises:
        UserError: parameters are freed after the forward pass in a pipeline; how often depends on the schedule then.
    """
    if degrees.pp > 1 and work.reshard_after_forward:
        raise UserError(
            "how often a pipeline gathers freed parameters depends on its schedule",
            where="reshard_after_forward",
            seen=True,
            legal="False, with pp",
        )
    split, copies = degrees.dp_shard * degrees.cp, degrees.dp_replicate
    units = once = 0
    for part in parts:
        root = {"head.weight", "position_embedding.weight"} | (set() if "head.weight" in part else {"embedding.weight"})
        units += padded_numel((shape for name, shape in part.items() if name not in root), split)
        once += padded_numel((shape for name, shape in part.items() if name in root), split)
    times = work.micro_batches if degrees.pp == 1 else 1
    gathered = (units * (2 if work.reshard_after_forward else 1) + once) * work.parameter_bytes / degrees.pp
    whole, inside = (units + once) * _FP32 / degrees.pp, _axes(degrees, "dp_shard", "cp")
    return [
        Flow(inside, "all_gather", "parameters", times * gather_bytes(gathered, split)),
        Flow(inside, "reduce_scatter", "gradients", times * gather_bytes(whole, split)),
        Flow(_axes(degrees, "dp_replicate"), "all_reduce", "gradients", all_reduce_bytes(whole / split, copies)),
    ]


def tensor_flows(spec: ModelSpec, degrees: Degrees, work: Work) -> list[Flow]:
    """Return the flows of tensor parallelism (per rank of a pipeline: the mean)."""
    tp, tokens = degrees.tp, work.rows * work.length / degrees.cp
    table = tokens * spec.hidden_size * work.parameter_bytes
    blocks = tokens * spec.hidden_size * work.activation_bytes * spec.num_layers
    last = tokens * spec.hidden_size * work.activation_bytes
    times = work.micro_batches / degrees.pp
    targets = work.rows * work.length if work.targets is None else work.targets
    numbers = 3 * targets / degrees.cp * _FP32
    axes = _axes(degrees, "tp")
    loss = Flow(axes, "all_reduce", "largest logit, sum, label's logit", times * all_reduce_bytes(numbers, tp))
    partial = _partial_numel(spec, degrees, work) * work.parameter_bytes
    norms = Flow(axes, "all_reduce", "partial gradients", all_reduce_bytes(partial, tp))
    if not work.sp:
        return [
            Flow(axes, "all_reduce", "blocks", times * all_reduce_bytes(4 * blocks, tp)),
            Flow(axes, "all_reduce", "embedding, last norm", times * all_reduce_bytes(table + last, tp)),
            loss,
            norms,
        ]
    flows = []
    for operation in ("all_gather", "reduce_scatter"):
        flows += [
            Flow(axes, operation, "blocks", times * gather_bytes(4 * blocks, tp)),
            Flow(axes, operation, "embedding, last norm", times * gather_bytes(table + last, tp)),
        ]
    return [*flows, loss, norms]


def _partial_numel(spec: ModelSpec, degrees: Degrees, work: Work) -> float:
    """Return the numbers whose gradients are summed over tp: of what one rank updates, the mean over ranks."""
    total = 0
    for name, local in local_shapes(spec, degrees.tp).items():
        short = _in_block(name)
        if short in _KEY_HEADS and degrees.tp > spec.num_kv_heads:
            total += math.prod(local) * spec.num_kv_heads  # one slot for each key head
        elif short in _HEAD_NORMS or (work.sp and short not in _TABLES and short not in _SPLIT_DIM):
            total += math.prod(local)
    return total / degrees.pp / (degrees.dp_shard * degrees.cp if work.zero else 1)


def context_flows(spec: ModelSpec, degrees: Degrees, work: Work) -> list[Flow]:
    """Return the flows of context parallelism: keys or heads in every block, document ids once a forward."""
    cp, e, axes = degrees.cp, work.activation_bytes, _axes(degrees, "cp")
    heads, kv_heads = spec.num_heads // degrees.tp, max(1, spec.num_kv_heads // degrees.tp)
    tokens, layers = work.rows * work.length / cp, spec.num_layers / degrees.pp
    plans = work.micro_batches * len(stage_ranks(degrees, work)) / degrees.pp
    ids = Flow(axes, "all_gather", "document ids", plans * (cp - 1) * tokens * _IDS)
    if work.cp_method == "ulysses":
        each = tokens * spec.head_dim * (2 * heads + 2 * max(kv_heads, cp)) * e
        return [Flow(axes, "all_to_all", "heads", work.micro_batches * layers * 2 * gather_bytes(each, cp)), ids]
    pair = 2 * tokens * kv_heads * spec.head_dim
    sent = work.micro_batches * layers * (cp - 1) * pair * (2 * e + max(e, _FP32))
    return [Flow(axes, "send", "keys and values, their gradients", sent), ids]


def pipeline_flows(spec: ModelSpec, degrees: Degrees, work: Work) -> list[Flow]:
    """Return the flows of a pipeline: hidden states forward, their gradient back, wherever two ranks' stages meet."""
    places, axes = stage_ranks(degrees, work), _axes(degrees, "pp")
    boundaries = sum(left != right for left, right in itertools.pairwise(places))
    part = degrees.cp * (degrees.tp if work.sp else 1)
    message = work.rows * work.length / part * spec.hidden_size * work.activation_bytes
    sent = 2 * boundaries * work.micro_batches * message / degrees.pp
    flows = [Flow(axes, "send", "hidden states, their gradients", sent)]
    if spec.tied_embeddings and places[0] != places[-1]:
        table = math.prod(local_shapes(spec, degrees.tp)["embedding.weight"]) * work.parameter_bytes
        each = table / (degrees.dp_shard * degrees.cp if work.zero else 1)
        flows.append(Flow(axes, "send", "gradient of the tied table", 2 * each / degrees.pp))
    return flows


def plan_communication(spec: ModelSpec, degrees: Degrees, work: Work) -> list[Flow]:
    """Return everything that a step sends; what has one rank, or sends nothing, is left out.

    Args:
        spec: the model.
        degrees: ranks per axis.
        work: the step.

    Raises:
        UserError: ``work.zero`` is no ZeRO stage, a count is not positive, the model has experts, or see
            `full_shard_flows`.
    """
    if work.zero not in (0, 1, 2, 3):
        raise UserError("no such ZeRO stage", where="zero", seen=work.zero, legal="0, 1, 2, 3")
    for name in ("micro_batches", "rows", "length"):
        if getattr(work, name) < 1:
            raise UserError("a step has at least one", where=name, seen=getattr(work, name), legal=">= 1")
    if spec.num_experts is not None:
        raise UserError("what experts send depends on the router", where="model", seen=spec.family, legal="no experts")
    parts = stage_shapes(spec, degrees, work)
    flows = (full_shard_flows if work.zero == 3 else data_flows)(parts, degrees, work)
    flows += tensor_flows(spec, degrees, work) if degrees.tp > 1 else []
    flows += context_flows(spec, degrees, work) if degrees.cp > 1 else []
    flows += pipeline_flows(spec, degrees, work) if degrees.pp > 1 else []
    return [flow for flow in flows if flow.axes and flow.sent_bytes]


def bookkeeping_bytes(world_size: int, *, loss_parts: int = 0) -> float:
    """Return what a step sends beside tensors: token counts and stop flag, the squared norm, the losses of the log."""
    return all_reduce_bytes(8 * (3 + 1 + 1 + loss_parts), world_size)
