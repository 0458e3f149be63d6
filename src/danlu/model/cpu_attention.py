"""Exact causal attention over documents on a CPU, faster than torch's own kernel there.

On a CPU torch's fused kernel (2.11 to 2.13) spends most of its time outside the matrix products, its bf16 backward
above all, and it knows no packed rows: a mask makes it compute every pair of tokens of a row. Here attention is a
sequence of small problems, planned once a micro-batch:

- `plan_pieces` sorts the documents by length and cuts them into pieces: several short documents of similar length
  (padded at the end to the longest; causality already hides what comes after a token, so this needs no mask), or some
  key heads of one long document. Work is proportional to the sum of squared document lengths, not to rows * S^2.
- The forward runs torch's kernel on each piece: with whole documents it needs no mask (a window adds one).
- The backward is written here. It keeps q, k, v and recomputes the probabilities, as FlashAttention does
  (arXiv:2205.14135). Queries go in blocks; a block meets only the keys before its end (and, with a window, not those
  before its start). A piece is sized so that its scores stay in cache. Query heads that share a key head form one
  matrix, so grouped-query attention repeats nothing.

Precision: scores and softmax are fp32 also for bf16 inputs. For those the backward's products run with oneDNN's switch
that lets fp32 matrices multiply in bf16 with fp32 accumulation and output: bf16 values lose nothing by it,
probabilities are rounded as everywhere. The switch is restored after each call.

Padding tokens (id -1) are in no piece: their output and their gradients are zero. CUDA needs none of this; the seam is
`attention.attend`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

# a flat optimum between 64 and 256 rows and 0.5 and 4 MiB, for documents of 20 to 512 tokens on a core with 2 MiB of L2
_QUERY_BLOCK = 128
_SCORE_BYTES = 2**20
# documents share a piece down to this part of the longest one's length, or within this many tokens of it
_SIMILAR = 0.75
_CLOSE = 8


@dataclass(frozen=True, slots=True)
class Piece:
    """Some documents and key heads that are worked on together.

    Attributes:
        length: slots a document, L.
        heads: key heads.
        gather: tokens of the slots, [documents * L]; a slice where they lie in order. Padding repeats a real token.
        scatter: the same, with padding slots pointing behind the last token.
        padding: which slots are padding, [documents, L], or None.
    """

    length: int
    heads: slice
    gather: slice | Tensor
    scatter: slice | Tensor
    padding: Tensor | None


def plan_pieces(document_ids_BS: Tensor, num_heads: int, num_kv_heads: int) -> list[Piece]:
    """Cut the attention of a micro-batch into pieces.

    Args:
        document_ids_BS: equal ids in a row form a document; -1 is padding and is in no piece.
        num_heads: query heads.
        num_kv_heads: key heads.
    """
    rows, length = document_ids_BS.shape
    flat = document_ids_BS.flatten()
    order_T = torch.arange(rows * length)
    key_T = order_T // length * (int(flat.max()) + 1) + flat
    tokens_T = order_T[flat >= 0]
    sorted_T = tokens_T[key_T[tokens_T].argsort(stable=True)]
    _, counts_T = key_T[sorted_T].unique_consecutive(return_counts=True)
    counts, starts = counts_T.tolist(), (counts_T.cumsum(0) - counts_T).tolist()
    documents = sorted(zip(counts, starts, strict=True), key=lambda document: (-document[0], document[1]))
    pieces = []
    while documents:
        longest = documents[0][0]
        bytes_a_head = 4 * (num_heads // num_kv_heads) * min(longest, _QUERY_BLOCK) * longest
        fitting = max(1, _SCORE_BYTES // bytes_a_head)  # heads times documents
        shortest = min(int(longest * _SIMILAR), longest - _CLOSE)
        similar = next((i for i, (count, _) in enumerate(documents) if count < shortest), len(documents))
        size = min(similar, max(1, fitting // num_kv_heads))
        gather, scatter, padding = _slots(documents[:size], sorted_T, rows * length)
        step = num_kv_heads if size > 1 else min(fitting, num_kv_heads)
        for head in range(0, num_kv_heads, step):
            heads = slice(head, min(head + step, num_kv_heads))
            pieces.append(Piece(longest, heads, gather, scatter, padding))
        documents = documents[size:]
    return pieces


def _slots(
    documents: list[tuple[int, int]], sorted_T: Tensor, num_tokens: int
) -> tuple[slice | Tensor, slice | Tensor, Tensor | None]:
    """Return gather, scatter and padding of documents given as (tokens, start in ``sorted_T``)."""
    counts = torch.tensor([count for count, _ in documents]).unsqueeze(1)
    starts = torch.tensor([start for _, start in documents]).unsqueeze(1)
    slot = torch.arange(documents[0][0])
    gather = sorted_T[(starts + slot.minimum(counts - 1)).flatten()]
    padded = slot >= counts
    if padded.any():
        return gather, gather.masked_fill(padded.flatten(), num_tokens), padded
    first = int(gather[0])
    if torch.equal(gather, torch.arange(first, first + gather.numel())):
        in_order = slice(first, first + gather.numel())
        return in_order, in_order, None
    return gather, gather, None


def attend_documents(
    query_BSNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, pieces: list[Piece], window: int | None
) -> Tensor:
    """Return causal attention within each document, [B, S, N, H].

    Args:
        query_BSNH: queries.
        key_BSGH: keys; N is a multiple of G.
        value_BSGH: values.
        pieces: from `plan_pieces`.
        window: a token sees itself and the ``window - 1`` before it; None sees the whole document.
    """
    mixed_BSNH: Tensor = _Attend.apply(query_BSNH, key_BSGH, value_BSGH, pieces, window)
    return mixed_BSNH


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, pieces: list[Piece], window: int | None) -> Tensor:
        query, key, value = query.contiguous(), key.contiguous(), value.contiguous()
        ctx.save_for_backward(query, key, value)
        ctx.pieces, ctx.window = pieces, window
        mixed, groups = _zeros(query), key.shape[2]
        for piece in pieces:
            q, k, v = (_take(x, piece, groups).flatten(2, 3).transpose(1, 2) for x in (query, key, value))
            whole = slice(0, piece.length)
            seen = None if window is None else ~_hidden(whole, whole, window)
            out = F.scaled_dot_product_attention(
                q, k, v, attn_mask=seen, is_causal=seen is None, enable_gqa=q.shape[1] != k.shape[1]
            )
            _put(mixed, out.transpose(1, 2).unflatten(2, (k.shape[1], -1)), piece, groups, whole)
        return mixed[:-1].view(query.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        query, key, value = ctx.saved_tensors
        grad, groups = grad.contiguous(), key.shape[2]
        grads = tuple(_zeros(x) for x in (query, key, value))
        with _products_in(query.dtype):
            for piece in ctx.pieces:
                _piece_backward(query, key, value, grad, grads, piece, groups, ctx.window)
        dq, dk, dv = (total[:-1].view(x.shape) for total, x in zip(grads, (query, key, value), strict=True))
        return dq, dk, dv, None, None


def _piece_backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    grad: Tensor,
    grads: tuple[Tensor, ...],
    piece: Piece,
    groups: int,
    window: int | None,
) -> None:
    """Add one piece's part to the gradients of query, key and value."""
    whole, scale = slice(0, piece.length), query.shape[3] ** -0.5
    slots_k, slots_v = _take(key, piece, groups), _take(value, piece, groups)
    k, v = _stack_heads(slots_k), _stack_heads(slots_v)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for start in range(0, piece.length, _QUERY_BLOCK):
        rows = slice(start, min(start + _QUERY_BLOCK, piece.length))
        seen = slice(0 if window is None else max(0, start - window + 1), rows.stop)
        q = _stack_heads(_take(query, piece, groups, rows)).mul_(scale)
        slots_g = _take(grad, piece, groups, rows)
        if piece.padding is not None:  # padding rows repeat a real token; its gradient must not count twice
            slots_g.masked_fill_(piece.padding[:, rows, None, None, None], 0.0)
        g = _stack_heads(slots_g)
        p = _probabilities(q, k[:, seen], rows, seen, window)
        dv[:, seen] += torch.bmm(p.transpose(1, 2), g)
        ds = torch._softmax_backward_data(torch.bmm(g, v[:, seen].transpose(1, 2)), p, -1, p.dtype)
        dk[:, seen] += torch.bmm(ds.transpose(1, 2), q)
        dq = torch.bmm(ds, k[:, seen]).mul_(scale)
        _put(grads[0], _split_heads(dq, slots_g), piece, groups, rows)
    for total, part in zip(grads[1:], (dk, dv), strict=True):
        _put(total, _split_heads(part, slots_k), piece, groups, whole)


@contextmanager
def _products_in(dtype: torch.dtype) -> Iterator[None]:
    """Let fp32 products run in bf16 inside, where the data came as bf16; else leave the user's setting alone."""
    switch = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = switch.fp32_precision
    if dtype is torch.bfloat16:
        switch.fp32_precision = "bf16"
    try:
        yield
    finally:
        switch.fp32_precision = before


def _zeros(x_BSNH: Tensor) -> Tensor:
    """Return zeros for every token of ``x`` and one more, where padding slots write: [T + 1, heads, H]."""
    return x_BSNH.new_zeros(x_BSNH.shape[0] * x_BSNH.shape[1] + 1, *x_BSNH.shape[2:])


def _take(x_BSNH: Tensor, piece: Piece, groups: int, rows: slice = slice(None)) -> Tensor:
    """Return the slots of a piece, [documents, rows, key heads, R, H]: R heads share a key head. A copy if gathered."""
    tokens: Tensor = x_BSNH.flatten(0, 1).unflatten(1, (groups, -1))[:, piece.heads]
    if isinstance(piece.gather, slice):
        return tokens[piece.gather].view(-1, piece.length, *tokens.shape[1:])[:, rows]
    index = piece.gather.view(-1, piece.length)[:, rows]
    return tokens.index_select(0, index.flatten()).view(*index.shape, *tokens.shape[1:])


def _put(total_TNH: Tensor, slots: Tensor, piece: Piece, groups: int, rows: slice) -> None:
    """Write slots, laid out as `_take` returns them, to their tokens."""
    tokens = total_TNH.unflatten(1, (groups, -1))[:, piece.heads]
    if isinstance(piece.scatter, slice):
        tokens[piece.scatter].unflatten(0, (-1, piece.length))[:, rows].copy_(slots)
    else:
        index = piece.scatter.view(-1, piece.length)[:, rows].flatten()
        tokens.index_copy_(0, index, slots.to(total_TNH.dtype).flatten(0, 1))


def _stack_heads(slots: Tensor) -> Tensor:
    """Return [documents * key heads, R * rows, H], at least fp32: one matrix for the heads that share a key head."""
    wide = torch.promote_types(slots.dtype, torch.float32)
    stacked = slots.permute(0, 2, 3, 1, 4).to(wide, memory_format=torch.contiguous_format, copy=True)
    return stacked.flatten(2, 3).flatten(0, 1)


def _split_heads(stacked: Tensor, like: Tensor) -> Tensor:
    """Return the inverse of `_stack_heads` as a view, in the shape of ``like``."""
    documents, rows, heads, shared, width = like.shape
    return stacked.view(documents, heads, shared, rows, width).permute(0, 3, 1, 2, 4)


def _hidden(rows: slice, keys: slice, window: int | None) -> Tensor:
    """Return which keys each query row must not see, [rows, keys]."""
    distance = torch.arange(rows.start, rows.stop).unsqueeze(1) - torch.arange(keys.start, keys.stop)
    return distance < 0 if window is None else (distance < 0) | (distance >= window)


def _probabilities(q: Tensor, k: Tensor, rows: slice, seen: slice, window: int | None) -> Tensor:
    """Return softmax probabilities [Z, R * rows, keys] of one block of queries."""
    scores = torch.bmm(q, k.transpose(1, 2))
    last = rows if window is None else seen  # without a window, only the square on the diagonal hides anything
    hidden = _hidden(rows, last, window)
    by_row = scores.view(len(q), -1, hidden.shape[0], k.shape[1])
    by_row[..., -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
    return torch.softmax(scores, -1)
