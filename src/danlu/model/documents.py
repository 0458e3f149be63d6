"""Where documents begin and how long they are, read off the document ids of packed rows.

Both are properties of whole rows: on a rank that holds a part of every row, ask them of the row, then take the part.
"""

from __future__ import annotations

import torch
from torch import Tensor


def count_positions(tokens_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor:
    """Return positions that restart at every change of document id, [B, S] ([1, S] without documents)."""
    order = torch.arange(tokens_BS.shape[1], device=tokens_BS.device).unsqueeze(0)
    if document_ids_BS is None:
        return order
    starts = torch.ones_like(document_ids_BS, dtype=torch.bool)
    starts[:, 1:] = document_ids_BS[:, 1:] != document_ids_BS[:, :-1]
    return order - torch.where(starts, order, 0).cummax(dim=1).values


def count_lengths(positions_BS: Tensor, document_ids_BS: Tensor | None) -> Tensor:
    """Return for each token the length of its document, [B, S]: the largest position in it plus one."""
    if document_ids_BS is None:
        return positions_BS.amax(dim=1, keepdim=True).expand_as(positions_BS) + 1
    ids = document_ids_BS - document_ids_BS.min()
    longest = torch.zeros(ids.shape[0], int(ids.max()) + 1, dtype=positions_BS.dtype, device=ids.device)
    longest.scatter_reduce_(1, ids, positions_BS.expand_as(ids), reduce="amax")
    return longest.gather(1, ids) + 1
