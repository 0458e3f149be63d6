r"""Ring attention: each rank keeps its queries, keys and values travel round the ring of ranks (arXiv:2310.01889).

A row of S tokens is 2c chunks for c ranks. Rank r holds chunks r and 2c - 1 - r (zigzag): under a causal mask chunk i
needs i + 1 blocks of work, so every rank has (r + 1) + (2c - r) = 2c + 1 of them, and two in every step after the
first. A contiguous split would let the last rank do 2c - 1 times the work of the first.

Softmax over keys that arrive in pieces is exact. A block of keys gives its own output o' and its own
l' = log(sum(exp(scores))); what is known so far, (o, l), is merged with it (online softmax, arXiv:1805.02867):

    L = log(exp(l) + exp(l'));    o <- exp(l - L) o + exp(l' - L) o';    l <- L

The backward keeps q, k, v, o and l, and recomputes the probabilities p = exp(scores - l) block by block
(arXiv:2205.14135). With g the gradient of o and d = sum(g o):

    dv = p^T g;    ds = p (g v^T - d);    dq = ds k / sqrt(H);    dk = ds^T q / sqrt(H)

dq stays at home. dk and dv are sums over all ranks: they travel behind their keys, each rank adds its part, and the
last hop brings them home. Bytes that each rank sends a layer, for B rows, G key heads of width H (not repeated for the
query heads that share them), e bytes an activation and a bytes an accumulator (4, or 8 in fp64):

    forward (c - 1) 2 B (S/c) G H e;    backward (c - 1) 2 B (S/c) G H (e + a)

The next transfer is posted before the current block is computed, so only the last hop of the backward stands alone.
The volume does not depend on masks: a block in which nothing is visible is not computed, but its keys travel on, since
the next rank may need them. Which blocks those are is read off the document ids of whole rows, once a forward
(`Blocks`): no rank asks another, and no layer waits for the device. Rows of a block that see no key have l' = -inf and
weigh nothing; a token that sees no key at all (padding) has output and gradients 0.

Scores, softmax and sums are fp32 (fp64 for fp64), the scores in tiles, so that S/c x S/c of them never exist. This is
plain torch on every device. What it does not do: use a fused kernel. The seam for one is `_tile_forward` (it must
return o' and l') and `_tile_backward` (it must take the l of the whole row).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

# scores of one tile: large enough for full matrix products, small beside the activations of a long row
_TILE_BYTES = 2**26


def zigzag_chunks(rank: int, size: int) -> tuple[int, int]:
    """Return the chunks, of ``2 * size`` a row, that ``rank`` holds, in order."""
    return rank, 2 * size - 1 - rank


class Blocks:
    """Which blocks (a chunk of queries, a chunk of keys) a rank computes, and what is hidden inside them.

    Args:
        row_ids_BS: document ids of whole rows, known to every rank; -1 is padding; None is one document a row.
        chunk_tokens: tokens of a chunk; a row has ``2 * size`` chunks.
        rank: index of this rank in the ring.
        size: number of ranks.
        device: where the queries are.
    """

    def __init__(
        self, row_ids_BS: Tensor | None, chunk_tokens: int, rank: int, size: int, device: torch.device
    ) -> None:
        self.row_ids_BS, self.chunk_tokens, self.rank, self.size = row_ids_BS, chunk_tokens, rank, size
        self.device = device
        self._shared = self._alike = [[True] * (2 * size)] * (2 * size)
        if row_ids_BS is not None:
            self._shared, self._alike = _compare_chunks(row_ids_BS.unflatten(1, (2 * size, chunk_tokens)))

    def is_seen(self, queries: int, keys: int, window: int | None) -> bool:
        """Return False where no query of a chunk sees any key of another."""
        nearest = max(0, (queries - keys - 1) * self.chunk_tokens + 1)
        return keys <= queries and (window is None or nearest < window) and self._shared[queries][keys]

    def is_whole(self, queries: int, keys: int, window: int | None) -> bool:
        """Return True where every query of a chunk sees every key of another, so that no mask is needed."""
        farthest = (queries - keys + 1) * self.chunk_tokens - 1
        return keys < queries and (window is None or farthest < window) and self._alike[queries][keys]

    def hidden(self, queries: int, keys: int, rows: slice, window: int | None) -> Tensor:
        """Return which keys of a chunk some rows of a chunk of queries must not see, [B or 1, rows, keys]."""
        chunk = self.chunk_tokens
        query_slots = slice(queries * chunk + rows.start, queries * chunk + rows.stop)
        key_slots = slice(keys * chunk, (keys + 1) * chunk)
        order = torch.arange(self.chunk_tokens * 2 * self.size, device=self.device)
        distance = order[query_slots].unsqueeze(1) - order[key_slots]
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        if self.row_ids_BS is None:
            return hidden.unsqueeze(0)
        query_ids, key_ids = self.row_ids_BS[:, query_slots], self.row_ids_BS[:, key_slots]
        return hidden | (query_ids.unsqueeze(2) != key_ids.unsqueeze(1)) | (query_ids < 0).unsqueeze(2)

    def of_step(self, step: int, window: int | None) -> Iterator[tuple[int, int, int, int]]:
        """Yield the blocks to compute when keys have made ``step`` hops.

        Each is (half of this rank's queries, half of the travelling keys, chunk of the queries, chunk of the keys).
        """
        source = (self.rank - step) % self.size
        for query_half, queries in enumerate(zigzag_chunks(self.rank, self.size)):
            for key_half, keys in enumerate(zigzag_chunks(source, self.size)):
                if self.is_seen(queries, keys, window):
                    yield query_half, key_half, queries, keys


def _compare_chunks(ids_BCT: Tensor) -> tuple[list[list[bool]], list[list[bool]]]:
    """Return for each pair of chunks whether any row may have a document in both, and whether all rows have only one.

    The first is decided by ranges of ids. Where ids of a row come in any order it may say True too often, which costs
    time and changes nothing.
    """
    lowest, highest = ids_BCT.amin(2), ids_BCT.amax(2)
    first = ids_BCT.masked_fill(ids_BCT < 0, torch.iinfo(ids_BCT.dtype).max).amin(2)
    shared = (first.unsqueeze(2) <= highest.unsqueeze(1)) & (first.unsqueeze(1) <= highest.unsqueeze(2))
    alike = (lowest == highest) & (lowest >= 0)
    same = alike.unsqueeze(2) & alike.unsqueeze(1) & (lowest.unsqueeze(2) == lowest.unsqueeze(1))
    both: list[list[list[bool]]] = torch.stack([shared.any(0), same.all(0)]).tolist()
    return both[0], both[1]


def ring_attention(
    query_BSNH: Tensor,
    key_BSGH: Tensor,
    value_BSGH: Tensor,
    blocks: Blocks,
    group: dist.ProcessGroup,
    window: int | None,
) -> Tensor:
    """Return softmax(q k^T / sqrt(H)) v over whole rows, for this rank's queries, [B, S, N, H].

    S is this rank's part of the row here: its two chunks. All ranks of ``group`` must call this together, and run
    its backward together.

    Args:
        query_BSNH: queries.
        key_BSGH: keys; N is a multiple of G.
        value_BSGH: values.
        blocks: who sees whom.
        group: the ring; ranks are in its order.
        window: a token sees itself and the ``window - 1`` before it; None sees the whole document.
    """
    mixed_BSNH: Tensor = _Ring.apply(query_BSNH, key_BSGH, value_BSGH, blocks, group, window)
    return mixed_BSNH


class _Transfer:
    """Tensors on their way to the next rank and from the previous one; sent ones must not change before `wait`."""

    def __init__(self, tensors: list[Tensor], group: dist.ProcessGroup) -> None:
        rank, size = group.rank(), group.size()
        self._sent, self._received = tensors, [torch.empty_like(tensor) for tensor in tensors]
        # several messages between the same two ranks are matched by their order
        sends = [dist.P2POp(dist.isend, x, group=group, group_peer=(rank + 1) % size) for x in self._sent]
        receives = [dist.P2POp(dist.irecv, x, group=group, group_peer=(rank - 1) % size) for x in self._received]
        self._works = dist.batch_isend_irecv(sends + receives) if tensors else []

    def wait(self) -> list[Tensor]:
        """Return what came from the previous rank."""
        for work in self._works:
            work.wait()
        return self._received


class _Ring(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        blocks: Blocks,
        group: dist.ProcessGroup,
        window: int | None,
    ) -> Tensor:
        shared = _by_key_head(query, key.shape[2])
        wide = torch.promote_types(query.dtype, torch.float32)
        mixed = torch.zeros(shared.shape, dtype=wide, device=query.device)
        log_total = mixed.new_full(shared.shape[:4], float("-inf"))
        pair = _stack(key, value)
        for step in range(blocks.size):
            transfer = _Transfer([pair] if step + 1 < blocks.size else [], group)
            for tile in _tiles(shared, pair, blocks, step, window):
                place = (slice(None), slice(None), slice(None), tile.rows)
                _merge(mixed[place], log_total[place], *_tile_forward(tile))
            received = transfer.wait()
            pair = received[0] if received else pair
        out = mixed.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype, memory_format=torch.contiguous_format)
        ctx.save_for_backward(query, key, value, out, log_total)
        ctx.blocks, ctx.group, ctx.window = blocks, group, window
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, log_total = ctx.saved_tensors
        blocks, group, num_kv_heads = ctx.blocks, ctx.group, key.shape[2]
        grads, shared = _by_key_head(grad, num_kv_heads), _by_key_head(query, num_kv_heads)
        dots = (grads.to(log_total.dtype) * _by_key_head(out, num_kv_heads)).sum(-1)
        # a token that sees nothing has scores of -inf only: any finite number makes its probabilities 0
        finite = log_total.masked_fill(log_total == float("-inf"), 0.0)
        grad_query = torch.zeros(shared.shape, dtype=log_total.dtype, device=query.device)
        pair = _stack(key, value)
        home = travelling = torch.zeros(pair.shape, dtype=log_total.dtype, device=query.device)
        for step in range(blocks.size):
            # at this step the next rank adds to what this rank has just added to
            transfer = _Transfer(([pair] if step + 1 < blocks.size else []) + ([travelling] if step > 1 else []), group)
            part = home if step == 0 else torch.zeros_like(home)
            for tile in _tiles(shared, pair, blocks, step, ctx.window):
                place = (slice(None), slice(None), slice(None), tile.rows)
                grad_query[place] += _tile_backward(tile, grads[place], finite[place], dots[place], part)
            received = transfer.wait()
            travelling = part.add_(received[-1]) if step > 1 else part
            pair = received[0] if received else pair
        if blocks.size > 1:
            home += _Transfer([travelling], group).wait()[0]
        grad_key, grad_value = home.transpose(2, 3).to(key.dtype).unbind(0)
        grad_query = grad_query.permute(0, 3, 1, 2, 4).flatten(2, 3).to(query.dtype)
        return grad_query, grad_key, grad_value, None, None, None


def _by_key_head(x_BSNH: Tensor, num_kv_heads: int) -> Tensor:
    """Return a view [B, G, N/G, S, H]: query heads under the key head that they share."""
    shared: Tensor = x_BSNH.unflatten(2, (num_kv_heads, -1))
    return shared.permute(0, 2, 3, 1, 4)


def _stack(key_BSGH: Tensor, value_BSGH: Tensor) -> Tensor:
    """Return keys and values as one message, [2, B, G, S, H]."""
    return torch.stack([key_BSGH, value_BSGH]).transpose(2, 3).contiguous()


class _Tile(NamedTuple):
    """Some queries, already scaled, and the chunk of keys and values that they meet; Z is batch times key heads."""

    rows: slice
    """Places of the queries in this rank's part of the row."""
    keys: slice
    """Places of the keys in the travelling part."""
    query_ZQH: Tensor
    """Q is query heads a key head times rows."""
    key_ZKH: Tensor
    value_ZKH: Tensor
    hidden: Tensor | None
    """[B or 1, rows, K], or None where everything is visible."""
    shape: tuple[int, int, int, int]
    """B, G, N/G, rows."""
    scale: float

    def scores(self) -> Tensor:
        """Return the scores [Z, Q, K], -inf where hidden."""
        scores: Tensor = torch.bmm(self.query_ZQH, self.key_ZKH.transpose(1, 2))
        if self.hidden is not None:
            scores.view(*self.shape, -1).masked_fill_(self.hidden[:, None, None], float("-inf"))
        return scores


def _tiles(query: Tensor, pair: Tensor, blocks: Blocks, step: int, window: int | None) -> Iterator[_Tile]:
    """Yield the tiles of all blocks of a step.

    Args:
        query: this rank's queries, [B, G, N/G, S, H].
        pair: keys and values that have made ``step`` hops, [2, B, G, S, H].
        blocks: who sees whom.
        step: hops.
        window: see `ring_attention`.
    """
    batch, groups, shared, _, width = query.shape
    wide, chunk = torch.promote_types(query.dtype, torch.float32), blocks.chunk_tokens
    num_rows = max(1, _TILE_BYTES // (wide.itemsize * batch * groups * shared * chunk))
    scale = width**-0.5
    for query_half, key_half, queries, keys in blocks.of_step(step, window):
        key_slots = slice(key_half * chunk, (key_half + 1) * chunk)
        key, value = pair[:, :, :, key_slots].to(wide).flatten(1, 2).unbind(0)
        whole = blocks.is_whole(queries, keys, window)
        for start in range(0, chunk, num_rows):
            rows = slice(start, min(start + num_rows, chunk))
            place = slice(query_half * chunk + rows.start, query_half * chunk + rows.stop)
            tile = query[:, :, :, place].to(wide).flatten(2, 3).flatten(0, 1) * scale
            hidden = None if whole else blocks.hidden(queries, keys, rows, window)
            shape = (batch, groups, shared, rows.stop - rows.start)
            yield _Tile(place, key_slots, tile, key, value, hidden, shape, scale)


def _tile_forward(tile: _Tile) -> tuple[Tensor, Tensor]:
    """Return the output over this tile's keys alone, [B, G, N/G, rows, H], and the log of its total weight."""
    scores = tile.scores()
    top = scores.amax(-1, keepdim=True)
    top.masked_fill_(top == float("-inf"), 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    # where anything is visible the largest weight is 1, so the bound only guards rows that see nothing
    mixed = torch.bmm(weights, tile.value_ZKH).div_(total.clamp_min(1.0))
    return mixed.view(*tile.shape, -1), (top + total.log()).view(tile.shape)


def _merge(mixed: Tensor, log_total: Tensor, more: Tensor, more_log_total: Tensor) -> None:
    """Merge the output over more keys into what is known, in place."""
    merged = torch.logaddexp(log_total, more_log_total)
    finite = merged.masked_fill(merged == float("-inf"), 0.0)
    mixed.mul_((log_total - finite).exp_().unsqueeze(-1))
    mixed.add_(more.mul_((more_log_total - finite).exp_().unsqueeze(-1)))
    log_total.copy_(merged)


def _tile_backward(tile: _Tile, grad: Tensor, log_total: Tensor, dots: Tensor, grad_pair: Tensor) -> Tensor:
    """Return the gradient of a tile's queries and add those of its keys and values to ``grad_pair``.

    Args:
        tile: what was computed.
        grad: gradient of the output at the tile's rows, [B, G, N/G, rows, H].
        log_total: log of the total weight over the whole row, finite, [B, G, N/G, rows].
        dots: sum of gradient times output, [B, G, N/G, rows].
        grad_pair: gradients of keys and values, [2, B, G, S, H].
    """
    grad_ZQH = grad.to(tile.query_ZQH.dtype).flatten(2, 3).flatten(0, 1)
    log_total_ZQ1, dots_ZQ1 = (x.reshape(len(grad_ZQH), -1, 1) for x in (log_total, dots))
    weights = tile.scores().sub_(log_total_ZQ1).exp_()
    slots = grad_pair[:, :, :, tile.keys]
    slots[1] += torch.bmm(weights.transpose(1, 2), grad_ZQH).view(slots[1].shape)
    grad_scores = torch.bmm(grad_ZQH, tile.value_ZKH.transpose(1, 2)).sub_(dots_ZQ1).mul_(weights)
    slots[0] += torch.bmm(grad_scores.transpose(1, 2), tile.query_ZQH).view(slots[0].shape)
    return torch.bmm(grad_scores, tile.key_ZKH).mul_(tile.scale).view(*tile.shape, -1)
