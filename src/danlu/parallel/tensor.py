"""Tensor parallelism, 1D (Megatron-LM, arXiv:1909.08053), with sequence parallelism (arXiv:2205.05198).

Of each pair of matrices the first is split by columns (output features: heads, MLP width) and the second by rows (input
features), so that a rank computes its heads and its part of the MLP alone, and one sum of partial results a pair is all
that is communicated:

    enter:  x on every rank      forward: nothing      backward: sum of the gradients
    leave:  sum of partial y     forward: sum          backward: nothing

That is 4 all-reduces a block, each of B S D numbers. With sequence parallelism norms, residuals and dropout work on
S / tp tokens a rank: *enter* gathers the sequence and its backward reduce-scatters; *leave* reduce-scatters. The bytes
are the same (an all-reduce is both), and the activations between the regions shrink by tp.

Embedding and head are split by vocabulary. The vocabulary need not divide: every rank holds ceil(V / tp) rows, what is
beyond V is zero, receives no gradient, is not saved, and its logits are minus infinity (`objective.cross_entropy`).
Key/value heads fewer than ranks are held by tp / G ranks each; every copy computes the gradients of its own query
heads, and their sum is the gradient (`Block.gradient`).

Whose gradients are partial here: norms between the regions and biases that are added after the sum, under sequence
parallelism (each rank has seen S / tp tokens); head norms, which see a rank's own heads, always. The optimizer sums
them once a step. Everything else is complete when the backward pass ends.

The model is on meta or materialised; parameters are replaced by local ones, uninitialised: fill them through
`Piece.copy_`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.base.errors import RunError
from danlu.model.decoder import Block as DecoderBlock
from danlu.model.decoder import Decoder, Embedding
from danlu.model.experts import MoE
from danlu.model.linear import Linear
from danlu.model.mlp import MLP
from danlu.model.router import RouterRecord
from danlu.parallel.collectives import all_gather, reduce_scatter
from danlu.parallel.placement import Block


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    dist.all_reduce(x, group=group)
    return x


def _gather(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size, (rows, length, width) = group.size(), x_BSD.shape
    out = x_BSD.new_empty(size, rows, length, width)
    all_gather(out.view(-1), x_BSD.contiguous().view(-1), group)
    return torch.cat(out.unbind(0), dim=1)


def _scatter(x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
    size, (rows, length, width) = group.size(), x_BSD.shape
    parts = x_BSD.view(rows, size, length // size, width).transpose(0, 1).contiguous()
    out = x_BSD.new_empty(rows, length // size, width)
    reduce_scatter(out.view(-1), parts.view(-1), group)
    return out


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _sum(grads[0].clone(), ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        return _sum(x.clone(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class _EnterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _gather(x_BSD, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _scatter(grads[0].contiguous(), ctx.group), None


class _LeaveSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BSD: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _scatter(x_BSD.contiguous(), group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _gather(grads[0], ctx.group), None


class Region:
    """The doors between replicated (or sequence-split) activations and a rank's own heads and columns."""

    def __init__(self, group: dist.ProcessGroup, *, sp: bool) -> None:
        self.group, self.sp = group, sp
        self.rank, self.size = group.rank(), group.size()
        self.kinds: dict[Tensor, Literal["kv", "head_norm", "router"]] = {}
        """Parameters that may be whole on several ranks, and need a word on whose gradient is whose."""

    def enter(self, x_BSD: Tensor) -> Tensor:
        """Return x for every rank, the whole sequence; the backward pass sums the ranks' gradients."""
        y: Tensor = (_EnterSequence if self.sp else _Enter).apply(x_BSD, self.group)
        return y

    def leave(self, x_BSD: Tensor) -> Tensor:
        """Return the sum of the ranks' partial results; under sp this rank's part of the sequence."""
        if self.sp and x_BSD.shape[1] % self.size:
            raise RunError(
                "sequence parallelism splits rows into equal parts",
                seen=f"{x_BSD.shape[1]} tokens on {self.size} ranks",
                hint="pad the rows first (data.batch.pad_length)",
            )
        y: Tensor = (_LeaveSequence if self.sp else _Leave).apply(x_BSD, self.group)
        return y


class RowLinear(Linear):
    """A Linear split by input features: partial products are summed, then the bias is added once."""

    def __init__(self, linear: Linear, region: Region) -> None:
        super().__init__(linear.in_features // region.size, linear.out_features, bias=linear.bias is not None)
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        """Return [B, S, out] (S / tp under sp) for ``x`` [B, S, in / tp]."""
        y = self.region.leave(self.product(x))
        return y if self.bias is None else y + self.bias.to(x.dtype)


class VocabularyEmbedding(Embedding):
    """A table split by rows; foreign ids give zeros, and the sum over ranks is the lookup."""

    def __init__(self, rows: int, width: int, region: Region) -> None:
        super().__init__(rows, width)
        self.region = region

    def forward(self, index: Tensor) -> Tensor:
        """Return the rows at ``index`` [B, S] as [B, S, D] (S / tp under sp)."""
        local = index - self.region.rank * self.weight.shape[0]
        foreign = (local < 0) | (local >= self.weight.shape[0])
        found = F.embedding(local.masked_fill(foreign, 0), self.weight)
        return self.region.leave(found.masked_fill(foreign.unsqueeze(-1), 0.0))


class _Scale(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


class TensorMoE(MoE):
    """Experts whose width F is split, as an MLP's is; every rank routes all tokens, and finds the same.

    A rank's expert outputs are parts of a sum, so what reaches the routing weights is a part too: it is summed there,
    once. The router's own gradient (and what it passes on to the hidden states) is then whole on every rank; at the
    door, where the ranks' gradients are summed, each brings its share of it.
    """

    def __init__(self, moe: MoE, region: Region) -> None:
        nn.Module.__init__(self)
        self.region, self.router, self.experts, self.dispatch = region, moe.router, moe.experts, moe.dispatch
        self.layer, self.num_experts, self.experts_per_token = moe.layer, moe.num_experts, moe.experts_per_token
        self.normalize = moe.normalize
        for linear in (self.experts.gate, self.experts.up):
            num_experts, rows, width = linear.weight.shape
            linear.weight = nn.Parameter(linear.weight.new_empty(num_experts, rows // region.size, width))
        num_experts, width, rows = self.experts.down.weight.shape
        weight_EDF = self.experts.down.weight.new_empty(num_experts, width, rows // region.size)
        self.experts.down.weight = nn.Parameter(weight_EDF)
        self.experts.inner = rows // region.size

    def forward(self, hidden_BSD: Tensor, routers: RouterRecord | None = None) -> Tensor:
        """See `MoE.forward`; S / tp tokens in and out under sp."""
        hidden_BSD = self.region.enter(hidden_BSD)
        hidden_TD = hidden_BSD.flatten(0, 1)
        experts_TK, weights_TK = self.choose(_Scale.apply(hidden_TD, 1 / self.region.size), routers)
        weights_TK = _Enter.apply(weights_TK, self.region.group)
        return self.region.leave(self.mix(hidden_TD, experts_TK, weights_TK).view_as(hidden_BSD))


def apply_tensor(model: Decoder, group: dist.ProcessGroup, *, sp: bool) -> dict[str, Block]:
    """Split ``model`` over ``group`` in place and return every parameter's block.

    Args:
        model: on meta; its sizes must have passed `base.layout.check_tensor`.
        group: the tensor parallel ranks.
        sp: split norms and residuals by sequence; row lengths must then be multiples of the group's size.

    A group of one changes nothing.
    """
    if group.size() == 1:
        return {name: Block.of(parameter.shape) for name, parameter in model.named_parameters()}
    whole = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    region = Region(group, sp=sp)
    with torch.device(next(model.parameters()).device):
        for block in model.blocks:
            _split_block(block, region)
        rows = -(-model.spec.vocab_size // region.size)
        if model.embedding is not None:
            model.embedding = VocabularyEmbedding(rows, model.spec.hidden_size, region)
        if model.head is not None:
            model.head = Embedding(rows, model.spec.hidden_size)
    if sp and model.position_embedding is not None:
        model.position_embedding.register_forward_pre_hook(_own_tokens(region))
    if model.final_norm is not None:  # a copy and no view: FSDP2 hangs its hooks on what its modules return
        model.final_norm.register_forward_hook(lambda _m, _args, y: region.enter(y) if sp else region.enter(y).clone())
    parameters = dict(model.named_parameters())
    return {name: _place(shape, parameters[name], region, model.spec.num_kv_heads) for name, shape in whole.items()}


def _own_tokens(region: Region) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Tensor]]:
    def cut(_: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor]:
        index: Tensor = args[0]
        return (index.chunk(region.size, dim=1)[region.rank],)

    return cut


def _split_block(block: DecoderBlock, region: Region) -> None:
    attention = block.attention
    _set_rows(attention.query, attention.query.out_features // region.size)
    for linear in (attention.key, attention.value):
        _set_rows(linear, max(linear.out_features // region.size, attention.head_dim))
        region.kinds |= dict.fromkeys(linear.parameters(), "kv")
    for norm in (attention.query_norm, attention.key_norm):
        if norm is not None:
            region.kinds[norm.weight] = "head_norm"
    attention.output = RowLinear(attention.output, region)
    attention.register_forward_pre_hook(_entering(region))
    if isinstance(block.mlp, MoE):
        region.kinds[block.mlp.router.weight] = "router"
        block.mlp = TensorMoE(block.mlp, region)
    else:
        _split_mlp(block.mlp, region)


def _split_mlp(mlp: MLP, region: Region) -> None:
    for linear in (mlp.gate, mlp.up):
        if linear is not None:
            _set_rows(linear, linear.out_features // region.size)
    mlp.down = RowLinear(mlp.down, region)
    mlp.register_forward_pre_hook(_entering(region))


def _entering(region: Region) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    return lambda _module, args: (region.enter(args[0]), *args[1:])


def _set_rows(linear: Linear, rows: int) -> None:
    linear.out_features = rows
    linear.weight = nn.Parameter(linear.weight.new_empty(rows, linear.in_features))
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias.new_empty(rows))


def _place(whole: tuple[int, ...], parameter: Tensor, region: Region, num_kv_heads: int) -> Block:
    """Return the block of one parameter: the dimension in which local and whole differ is the one that is split."""
    local = tuple(parameter.shape)
    kind = region.kinds.get(parameter)
    if local == whole:
        partial = kind != "router" and (region.sp or kind is not None)
        return Block.of(whole, copies=region.size, partial=partial)
    dim = next(dim for dim, (left, right) in enumerate(zip(whole, local, strict=True)) if left != right)
    copies = max(1, region.size // num_kv_heads) if kind == "kv" else 1
    start = min(whole[dim], region.rank // copies * local[dim])
    starts = tuple(start if index == dim else 0 for index in range(len(whole)))
    extent = tuple(min(local[dim], whole[dim] - start) if index == dim else n for index, n in enumerate(whole))
    return Block(whole, starts, extent, local, copies, "partial_copies" if copies > 1 else "full")
