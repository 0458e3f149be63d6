"""Causal attention that never crosses a document, over packed rows, padded rows, windows and a KV cache.

Who may see whom is the same in every layer, so it is worked out once a micro-batch as a value that all layers share, an
`AttentionPlan`. A token sees the tokens of its own document that are not after it, and, where the layer has a window of
w, only the w - 1 before it and itself. No real token sees padding (document id -1), and padding sees at most itself: a
softmax over nothing never happens, so there is no NaN to spread (0 * NaN = NaN) in either direction. What comes out at
padding is finite and means nothing.

The plan is also the seam for what spreads a row over ranks. The decoder makes its plans by `Decoder.plan_attention`;
where that is replaced, keys or heads travel inside `attend` and nothing else in the model knows.

Paths, all exact:

- one document a row, no window: the causal kernel, no mask at all;
- packed or padded rows and windows on a CPU: document by document, see `cpu_attention`;
- the same on CUDA: one boolean mask a window, [B, 1, S, S], shared by the layers. A variable-length kernel would take
  this path's place in `RowPlan.attend`;
- with a cache: fresh keys are written first, then slots up to the query's position are visible.

Grouped queries (arXiv:2305.13245) are passed as they are to the causal kernel. The fused kernels that take a mask take
no grouped heads, and without one of them the scores of all heads would exist, [B, N, S, S]: there keys are repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from danlu.base.errors import RunError
from danlu.model.cache import KVCache
from danlu.model.cpu_attention import Piece, attend_documents, plan_pieces
from danlu.model.documents import count_lengths, count_positions
from danlu.model.linear import Linear
from danlu.model.norm import RMSNorm
from danlu.model.rope import Rotation, rotate
from danlu.model.spec import ModelSpec


class AttentionPlan(Protocol):
    """What the layers of one forward pass share: who sees whom, and how it is computed.

    Attributes:
        positions_BS: position of each token of this rank in its document, [B or 1, S].
    """

    positions_BS: Tensor

    def attend(
        self, query_BSNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, *, layer: int, window: int | None
    ) -> Tensor:
        """Return softmax(q k^T / sqrt(H)) v over what each query may see, [B, S, N, H].

        Args:
            query_BSNH: queries of this rank's tokens.
            key_BSGH: their keys; N is a multiple of G.
            value_BSGH: their values.
            layer: index of the layer, for plans that remember keys.
            window: a token sees itself and the ``window - 1`` before it; None sees the whole document.
        """

    def document_lengths(self) -> Tensor:
        """Return for each token of this rank how many tokens its document has, [B or 1, S]."""


PlanAttention = Callable[[Tensor, Tensor | None, Tensor | None, KVCache | None], AttentionPlan]
"""Makes the plan of one forward pass from tokens, positions, document ids and cache (see `plan_attention`)."""


def plan_attention(
    tokens_BS: Tensor, positions_BS: Tensor | None, document_ids_BS: Tensor | None, cache: KVCache | None
) -> AttentionPlan:
    """Return the plan for whole rows on one device.

    Args:
        tokens_BS: token ids.
        positions_BS: position of each token in its document; None counts from each document's start.
        document_ids_BS: equal ids see each other; -1 is padding; None is one document a row.
        cache: keys and values of earlier tokens.
    """
    if positions_BS is None:
        positions_BS = count_positions(tokens_BS, document_ids_BS)
    return RowPlan(document_ids_BS, positions_BS, cache)


class RowPlan:
    """Visibility in whole rows, with the masks or pieces that layers need, each made on first use.

    Args:
        document_ids_BS: equal ids see each other; -1 is padding; None is one document a row.
        positions_BS: the tokens' positions, which are their slots in the cache.
        cache: keys and values of earlier tokens; this chunk's slots are reserved in it.

    Attributes:
        num_keys: slots of the cache that are looked at, this chunk included.
        reads_cache: earlier tokens are in the cache; False for a first chunk, which sees itself only.
    """

    def __init__(self, document_ids_BS: Tensor | None, positions_BS: Tensor, cache: KVCache | None) -> None:
        if document_ids_BS is not None and cache is not None:
            raise RunError("a KV cache holds one document a row", hint="leave document_ids_BS out")
        on_cpu = positions_BS.device.type == "cpu"
        if on_cpu and document_ids_BS is not None and _one_document_a_row(document_ids_BS):
            document_ids_BS = None
        self.document_ids_BS, self.positions_BS, self.cache = document_ids_BS, positions_BS, cache
        self.length = positions_BS.shape[1]
        self.reads_cache = cache is not None and cache.num_filled > 0
        self.num_keys = self.length if cache is None else cache.reserve(self.length)
        self.in_pieces = on_cpu and not self.reads_cache
        self._masks: dict[int | None, Tensor] = {}
        self._pieces: dict[tuple[int, int, int], list[Piece]] = {}

    def attend(
        self, query_BSNH: Tensor, key_BSGH: Tensor, value_BSGH: Tensor, *, layer: int, window: int | None
    ) -> Tensor:
        """See `AttentionPlan.attend`; with a cache, this chunk's keys and values are stored and earlier ones seen."""
        key_BKGH, value_BKGH = self._remembered(layer, key_BSGH, value_BSGH)
        causal, num_heads, num_kv_heads = self.is_causal(window), query_BSNH.shape[2], key_BKGH.shape[2]
        if self.in_pieces and not causal:
            pieces = self.pieces(query_BSNH.shape[0], num_heads, num_kv_heads)
            return attend_documents(query_BSNH, key_BKGH, value_BKGH, pieces, window)
        grouped = num_heads != num_kv_heads
        if grouped and not causal:
            repeats = num_heads // num_kv_heads
            key_BKGH, value_BKGH = (x.repeat_interleave(repeats, dim=2) for x in (key_BKGH, value_BKGH))
        mixed = F.scaled_dot_product_attention(
            query_BSNH.transpose(1, 2),
            key_BKGH.transpose(1, 2),
            value_BKGH.transpose(1, 2),
            attn_mask=None if causal else self.mask(window),
            is_causal=causal,
            enable_gqa=grouped and causal,
        )
        return mixed.transpose(1, 2)

    def document_lengths(self) -> Tensor:
        """See `AttentionPlan.document_lengths`."""
        return count_lengths(self.positions_BS, self.document_ids_BS)

    def _remembered(self, layer: int, key_BSGH: Tensor, value_BSGH: Tensor) -> tuple[Tensor, Tensor]:
        if self.cache is None:
            return key_BSGH, value_BSGH
        self.cache.write(layer, key_BSGH, value_BSGH, self.positions_BS)
        if not self.reads_cache:
            return key_BSGH, value_BSGH
        return self.cache.keys[layer][:, : self.num_keys], self.cache.values[layer][:, : self.num_keys]

    def is_causal(self, window: int | None) -> bool:
        """Return whether plain causal attention over whole rows is right for a layer with ``window``."""
        narrow = window is not None and window < self.length
        return self.document_ids_BS is None and not self.reads_cache and not narrow

    def pieces(self, num_rows: int, num_heads: int, num_kv_heads: int) -> list[Piece]:
        """Return the pieces of `cpu_attention` for layers with these heads."""
        key = (num_rows, num_heads, num_kv_heads)
        if key not in self._pieces:
            ids = self.document_ids_BS
            ids = torch.zeros(num_rows, self.length, dtype=torch.int64) if ids is None else ids
            self._pieces[key] = plan_pieces(ids, num_heads, num_kv_heads)
        return self._pieces[key]

    def mask(self, window: int | None) -> Tensor:
        """Return the boolean mask [B or 1, 1, S, keys], True where visible."""
        if window not in self._masks:
            self._masks[window] = self._cache_mask(window) if self.reads_cache else self._row_mask(window)
        return self._masks[window]

    def _row_mask(self, window: int | None) -> Tensor:
        order = torch.arange(self.length, device=self.positions_BS.device)
        distance_SS = order.unsqueeze(1) - order
        seen = (distance_SS >= 0) if window is None else (distance_SS >= 0) & (distance_SS < window)
        if self.document_ids_BS is None:
            return seen[None, None]
        ids = self.document_ids_BS
        same = (ids.unsqueeze(2) == ids.unsqueeze(1)) & (ids >= 0).unsqueeze(2) | (distance_SS == 0)
        return (same & seen).unsqueeze(1)

    def _cache_mask(self, window: int | None) -> Tensor:
        slots = torch.arange(self.num_keys, device=self.positions_BS.device)
        distance = self.positions_BS.unsqueeze(-1) - slots
        seen = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
        return seen.unsqueeze(1)


def _one_document_a_row(document_ids_BS: Tensor) -> bool:
    first_B1 = document_ids_BS[:, :1]
    return bool(((document_ids_BS == first_B1) & (first_B1 >= 0)).all())


class Attention(nn.Module):
    """Projections, optional head norms, rotation and attention of one layer."""

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        width, head_dim = spec.hidden_size, spec.head_dim
        self.query = Linear(width, spec.num_heads * head_dim, bias=spec.qkv_bias)
        self.key = Linear(width, spec.num_kv_heads * head_dim, bias=spec.qkv_bias)
        self.value = Linear(width, spec.num_kv_heads * head_dim, bias=spec.qkv_bias)
        self.output = Linear(spec.num_heads * head_dim, width, bias=spec.output_bias)
        self.query_norm = RMSNorm(head_dim, spec.norm_eps) if spec.qk_norm else None
        self.key_norm = RMSNorm(head_dim, spec.norm_eps) if spec.qk_norm else None
        self.head_dim, self.layer, self.window = head_dim, layer, spec.window(layer)

    def forward(self, hidden_BSD: Tensor, plan: AttentionPlan, turn: Rotation | None) -> Tensor:
        """Return the layer's attention output, [B, S, D].

        Args:
            hidden_BSD: normalised hidden states.
            plan: visibility, shared by all layers.
            turn: rotary angles, or None where positions are learned.
        """
        heads = (*hidden_BSD.shape[:2], -1, self.head_dim)
        query_BSNH = self.query(hidden_BSD).view(heads)
        key_BSGH, value_BSGH = self.key(hidden_BSD).view(heads), self.value(hidden_BSD).view(heads)
        if self.query_norm is not None and self.key_norm is not None:
            query_BSNH, key_BSGH = self.query_norm(query_BSNH), self.key_norm(key_BSGH)
        if turn is not None:
            query_BSNH, key_BSGH = rotate(query_BSNH, turn), rotate(key_BSGH, turn)
        mixed_BSNH = plan.attend(query_BSNH, key_BSGH, value_BSGH, layer=self.layer, window=self.window)
        out_BSD: Tensor = self.output(mixed_BSNH.flatten(2))
        return out_BSD
