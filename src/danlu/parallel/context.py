r"""Context parallelism: every row's sequence is split over c ranks, through attention.

Norms, projections, MLP and loss work token by token, so a rank that holds S/c tokens of every row needs 1/c of the
activations and does 1/c of the work there. Attention needs whole rows. Two ways to give it that:

- **Ulysses** (arXiv:2309.14509): an all-to-all turns (all heads of S/c tokens) into (1/c of the heads of S tokens),
  the single-device attention runs unchanged, and another all-to-all turns its output back. Parts are contiguous.
  c must divide the query heads. Key heads are divided too; where there are fewer than c, they are repeated up to c.
- **Ring** (see `ring_attention`): queries stay, keys and values travel. No limit on c from heads. Parts are zigzag.

Bytes that each rank sends a layer, for B rows, N query and G key heads of width H, e bytes an activation, a bytes a
gradient sum (4, or 8 in fp64), and G' = max(G, c):

    Ulysses  forward and backward each   (c - 1)/c  B (S/c) H (2 N + 2 G') e
    ring     forward                     (c - 1)  2 B (S/c) G H e
             backward                    (c - 1)  2 B (S/c) G H (e + a)

Ulysses' share shrinks with c, the ring's tends to a constant; with few key heads the ring sends less, and it can hide
what it sends behind its products. Once a forward, each rank also sends its document ids ((c - 1) B (S/c) 8 bytes).

Invariants: parts are made from rows whose labels are shifted and whose positions are counted already (`data.batch`), so
nobody shifts or counts within a part; a row is padded at its end with tokens that are no targets; all ranks of the
group see the same rows in the same order. Losses are sums over this rank's targets: divided by the target count of the
whole global batch, their gradients must be *summed* over cp x dp ranks, and nothing is scaled by c.

In shape suffixes of this file and of `ring_attention` S is this rank's part of a row; names that begin with `row_` hold
whole rows.

What it does not do: generate with a KV cache, or balance documents of uneven length between ring ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from danlu.base.errors import RunError, UserError, unknown_name
from danlu.data.batch import IGNORE, MicroBatch
from danlu.model.attention import AttentionPlan, RowPlan
from danlu.model.cache import KVCache
from danlu.model.decoder import Decoder
from danlu.model.documents import count_lengths, count_positions
from danlu.model.router import RouterRecord, RouterSums
from danlu.parallel.ring_attention import Blocks, ring_attention, zigzag_chunks

Method = Literal["ulysses", "ring"]
METHODS: tuple[Method, ...] = get_args(Method)
_PADDING = (0, IGNORE, 0, -1)
"""What fills up tokens, labels, positions and document ids."""


def check_context(method: str, size: int, num_heads: int, num_kv_heads: int) -> None:
    """Refuse what cannot be split.

    Args:
        method: one of `METHODS`.
        size: ranks that a row is split over.
        num_heads: query heads (of this tensor-parallel rank).
        num_kv_heads: key heads (of this tensor-parallel rank).

    Raises:
        UserError: unknown method, or Ulysses with heads that ``size`` does not divide.
    """
    if method not in METHODS:
        raise unknown_name("context-parallel method", method, METHODS, where="parallel.cp_method")
    if size < 1:
        raise UserError("a row is split over at least one rank", where="parallel.cp", seen=size, legal=">= 1")
    if method == "ulysses" and not _divides_heads(size, num_heads, num_kv_heads):
        raise UserError(
            "Ulysses gives each rank as many query and key heads as every other",
            where="parallel.cp",
            seen=f"{size} ranks for {num_heads} query heads and {num_kv_heads} key heads",
            legal=[n for n in range(1, num_heads + 1) if _divides_heads(n, num_heads, num_kv_heads)],
            hint='parallel.cp_method="ring" splits over any number of ranks',
        )


def _divides_heads(size: int, num_heads: int, num_kv_heads: int) -> bool:
    larger, smaller = max(size, num_kv_heads), min(size, num_kv_heads)
    return num_heads % size == 0 and larger % smaller == 0


def row_multiple(size: int, method: Method, multiple_of: int = 1) -> int:
    """Return what the length of a row must be a multiple of, so that each part is a multiple of ``multiple_of``."""
    return math.lcm(2 * size if method == "ring" else size, size * multiple_of)


def slots_of(rank: int, size: int, method: Method, row_length: int) -> Tensor:
    """Return which slots of a row ``rank`` holds, in the order it holds them: [row_length / size], on the CPU."""
    if method == "ulysses":
        return torch.arange(row_length).view(size, -1)[rank]
    return torch.arange(row_length).view(2 * size, -1)[list(zigzag_chunks(rank, size))].flatten()


def split_batch(batch: MicroBatch, rank: int, size: int, method: Method, multiple_of: int = 1) -> MicroBatch:
    """Return this rank's part of every row; rows are padded at the end to a multiple of `row_multiple`.

    Args:
        batch: whole rows, with labels already shifted.
        rank: index of this rank over ``cp``.
        size: number of ranks of ``cp``.
        method: decides which slots a rank holds.
        multiple_of: what the length of a part must be a multiple of (sequence parallelism splits it again).
    """
    length = batch.tokens_BS.shape[1]
    missing = -length % row_multiple(size, method, multiple_of)
    slots = slots_of(rank, size, method, length + missing).to(batch.tokens_BS.device)
    return MicroBatch(
        *(F.pad(x, (0, missing), value=fill).index_select(1, slots) for x, fill in zip(batch, _PADDING, strict=True))
    )


def apply_context(model: Decoder, group: dist.ProcessGroup, method: Method, *, tensor_degree: int = 1) -> Decoder:
    """Let ``model`` work on parts of rows, as `split_batch` makes them, and return it.

    All ranks of ``group`` must then run the same forwards and backwards together. The length of whole rows is not
    checked against the model's positions here: a rank sees its part only.

    Args:
        model: the decoder, not yet wrapped.
        group: the ranks that rows are split over, in the order of `split_batch`.
        method: one of `METHODS`.
        tensor_degree: ranks that share the heads already (tensor parallelism).

    Raises:
        UserError: see `check_context`.
    """
    heads, kv_heads = (max(1, n // tensor_degree) for n in (model.spec.num_heads, model.spec.num_kv_heads))
    check_context(method, group.size(), heads, kv_heads)
    plan: Callable[..., AttentionPlan] = UlyssesPlan if method == "ulysses" else RingPlan

    def plan_part(
        tokens_BS: Tensor, positions_BS: Tensor | None, document_ids_BS: Tensor | None, cache: KVCache | None
    ) -> AttentionPlan:
        if cache is not None:
            raise RunError("a KV cache holds whole rows, context parallelism splits them")
        return plan(tokens_BS, positions_BS, document_ids_BS, group)

    if group.size() > 1:
        model.plan_attention = plan_part
    return model


class _Sum(torch.autograd.Function):
    """The sum over a group, of which every rank then makes a loss of its own: their gradients are summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def join_routers(routers: RouterRecord, group: dist.ProcessGroup) -> None:
    """Make a record of parts of rows one of whole rows: a row's balance is a product of sums over all its tokens."""
    for layer, sums in routers.layers.items():
        both_2BE = torch.stack([sums.counts_BE, sums.shares_BE])
        counts_BE, shares_BE = _Sum.apply(both_2BE, group)
        routers.layers[layer] = RouterSums(counts_BE.detach(), shares_BE)
    routers.num_tokens_B = _Sum.apply(routers.num_tokens_B, group)


class _PartPlan:
    """What a rank knows that holds a part of every row: its slots, and the document ids of whole rows.

    Args:
        tokens_BS: this rank's token ids.
        positions_BS: position of each token in its document; None counts them, over whole rows.
        document_ids_BS: this rank's document ids; None (on all ranks alike) is one document a row.
        group: the ranks that rows are split over.
    """

    method: Method

    def __init__(
        self, tokens_BS: Tensor, positions_BS: Tensor | None, document_ids_BS: Tensor | None, group: dist.ProcessGroup
    ) -> None:
        self.group = group
        self.row_length = tokens_BS.shape[1] * group.size()
        if self.method == "ring" and tokens_BS.shape[1] % 2:
            raise RunError(
                "a ring rank holds two chunks of every row",
                seen=f"a part of {tokens_BS.shape[1]} tokens",
                hint="make the parts with split_batch",
            )
        self.slots = slots_of(group.rank(), group.size(), self.method, self.row_length).to(tokens_BS.device)
        self.row_ids_BS = None if document_ids_BS is None else self.join(document_ids_BS)
        if positions_BS is None:
            row_BS = tokens_BS.new_empty(tokens_BS.shape[0], self.row_length)
            positions_BS = count_positions(row_BS, self.row_ids_BS)[:, self.slots]
        self.positions_BS = positions_BS

    def join(self, part_BS: Tensor) -> Tensor:
        """Return whole rows, in the order of their slots, from all ranks' parts (a collective)."""
        size = self.group.size()
        parts = [torch.empty_like(part_BS, memory_format=torch.contiguous_format) for _ in range(size)]
        dist.all_gather(parts, part_BS.contiguous(), group=self.group)
        slots = torch.cat([slots_of(rank, size, self.method, self.row_length) for rank in range(size)])
        row_BS = torch.cat(parts, 1)
        return torch.empty_like(row_BS).index_copy_(1, slots.to(row_BS.device), row_BS)

    def document_lengths(self) -> Tensor:
        """Return the tokens of each token's document, [B or 1, S]; a document may lie on several ranks."""
        return count_lengths(self.join(self.positions_BS), self.row_ids_BS)[:, self.slots]


class RingPlan(_PartPlan):
    """Keys and values travel; see `ring_attention`."""

    method = "ring"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        size, device = self.group.size(), self.slots.device
        chunk_tokens = self.row_length // (2 * size)
        self._blocks = Blocks(self.row_ids_BS, chunk_tokens, self.group.rank(), size, device)

    def attend(
        self, query_BSNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, *, layer: int, window: int | None
    ) -> Tensor:
        """See `AttentionPlan.attend`; S is this rank's part."""
        return ring_attention(query_BSNH, key_BSGH, value_BSGH, self._blocks, self.group, window)


class UlyssesPlan(_PartPlan):
    """Heads travel: each rank attends over whole rows with its share of them."""

    method = "ulysses"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        order = torch.arange(self.row_length, device=self.slots.device)
        self._row_plan = RowPlan(self.row_ids_BS, order.unsqueeze(0), None)

    def attend(
        self, query_BSNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, *, layer: int, window: int | None
    ) -> Tensor:
        """See `AttentionPlan.attend`; S is this rank's part."""
        size = self.group.size()
        repeats = max(1, size // key_BSGH.shape[2])
        if repeats > 1:
            key_BSGH, value_BSGH = (x.repeat_interleave(repeats, 2) for x in (key_BSGH, value_BSGH))
        shares = [x.unflatten(2, (size, -1)) for x in (query_BSNH, key_BSGH, value_BSGH)]
        sent = torch.cat(shares, 3).movedim(2, 0)  # one message to each rank: its heads of this rank's tokens
        came = _AllToAll.apply(sent, self.group).transpose(0, 1).flatten(1, 2)
        query, key, value = came.split([share.shape[3] for share in shares], 2)
        mixed = self._row_plan.attend(query, key, value, layer=layer, window=window)
        back = _AllToAll.apply(mixed.unflatten(1, (size, -1)).transpose(0, 1), self.group)
        out_BSNH: Tensor = back.movedim(0, 2).flatten(2, 3)
        return out_BSNH


class _AllToAll(torch.autograd.Function):
    """Send x[i] to rank i and return what came from each, [ranks, ...]; it is its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_to_all(x, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _all_to_all(grads[0], ctx.group), None


def _all_to_all(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    x = x.contiguous()
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x, group=group)
    return received
