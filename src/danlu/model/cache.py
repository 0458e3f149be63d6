"""The keys and values of the tokens seen so far, allocated once.

A slot's index is its token's position, in every row. That makes ragged batches exact without left padding: rows of
different length are padded on the right, a pad's keys land in slots beyond its row's end, no query reads a slot beyond
its own position, and the row's next real token overwrites the slot before it becomes visible.

Memory: 2 * layers * B * G * H * capacity elements; rows that are finished are dropped with `keep_rows`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from danlu.base.errors import RunError
from danlu.model.spec import ModelSpec


class KVCache:
    """Keys and values by layer, each [B, capacity, G, H]; slots below ``num_filled`` may hold tokens.

    Args:
        spec: the model.
        batch_size: rows.
        capacity: slots of a row.
        dtype: of the keys and values.
        device: where they live.
        layers: the layers that are here; None is all.
        num_kv_heads: key/value heads that are here; None is all.
    """

    def __init__(
        self,
        spec: ModelSpec,
        *,
        batch_size: int,
        capacity: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        layers: range | None = None,
        num_kv_heads: int | None = None,
    ) -> None:
        shape = (batch_size, capacity, num_kv_heads or spec.num_kv_heads, spec.head_dim)
        here = range(spec.num_layers) if layers is None else layers
        self.keys = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in here}
        self.values = {layer: torch.zeros(shape, dtype=dtype, device=device) for layer in here}
        self.capacity = capacity
        self.num_filled = 0

    def write(self, layer: int, key_BSGH: Tensor, value_BSGH: Tensor, positions_BS: Tensor) -> None:
        """Store one chunk of ``layer`` in the slots ``positions_BS`` ([B or 1, S])."""
        rows = torch.arange(key_BSGH.shape[0], device=key_BSGH.device).unsqueeze(1)
        self.keys[layer][rows, positions_BS] = key_BSGH
        self.values[layer][rows, positions_BS] = value_BSGH

    def reserve(self, num_tokens: int) -> int:
        """Count ``num_tokens`` more slots as filled and return how many are now.

        Raises:
            RunError: they do not fit.
        """
        if self.num_filled + num_tokens > self.capacity:
            seen = f"{self.num_filled} + {num_tokens} tokens"
            raise RunError("the KV cache is too small", seen=seen, legal=f"<= {self.capacity}")
        self.num_filled += num_tokens
        return self.num_filled

    def keep_rows(self, rows: Tensor) -> None:
        """Keep only the rows with these indices, in this order."""
        self.keys = {layer: key.index_select(0, rows) for layer, key in self.keys.items()}
        self.values = {layer: value.index_select(0, rows) for layer, value in self.values.items()}
