"""What one optimizer step eats.

A row holds whole documents side by side. Three arrays beside the tokens keep them apart: the document id (attention
stays within equal ids), the position (restarts at each document) and the label. The shift is done here, once, and
nowhere else: ``labels[t]`` is the token at ``t + 1`` if that token is a target *and* belongs to the same document, else
`IGNORE`. So the last token of a document never predicts the first of the next, and no loss function has to know about
documents.

Padding has document id -1, position 0 and no label. A row that does not exist (the tail of an epoch) is a row of
padding: every rank can run the same number of equal shapes without counting anything twice.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from danlu.data.dataset import Rows

IGNORE = -100
"""Label of a position that is not a target (what torch's cross entropy ignores)."""


class MicroBatch(NamedTuple):
    """The rows of one forward pass on one data rank; all four are int64 of shape [B, S]."""

    tokens_BS: torch.Tensor
    labels_BS: torch.Tensor
    positions_BS: torch.Tensor
    document_ids_BS: torch.Tensor


class StepBatch(NamedTuple):
    """One optimizer step's share of one data rank."""

    micro_batches: list[MicroBatch]
    """As many on every rank."""
    first_sample: int
    """Index in the stream of the step's first sample, over all ranks."""
    num_samples: int
    """Samples in the step, over all ranks; fewer than the global batch size only at the end of an epoch."""


def shift_labels(tokens_BS: np.ndarray, mask_BS: np.ndarray, document_ids_BS: np.ndarray) -> np.ndarray:
    """Return int64 labels [B, S]: the next token where it is a target of the same document, else `IGNORE`.

    Args:
        tokens_BS: token ids.
        mask_BS: True where the token itself is to be predicted (not yet shifted).
        document_ids_BS: document of each token, -1 for padding.
    """
    labels_BS = np.full(tokens_BS.shape, IGNORE, dtype=np.int64)
    same = (document_ids_BS[:, 1:] == document_ids_BS[:, :-1]) & (document_ids_BS[:, 1:] >= 0)
    np.copyto(labels_BS[:, :-1], tokens_BS[:, 1:], where=mask_BS[:, 1:] & same)
    return labels_BS


def stack_rows(rows: Rows) -> np.ndarray:
    """Return [4, B, S] int64: tokens, labels, positions, document ids (one array crosses process borders cheaply)."""
    labels_BS = shift_labels(rows.tokens_BS, rows.mask_BS, rows.document_ids_BS)
    return np.stack([rows.tokens_BS, labels_BS, rows.positions_BS, rows.document_ids_BS])


def to_micro_batch(stacked: np.ndarray) -> MicroBatch:
    """View the result of `stack_rows` as torch tensors, without a copy."""
    return MicroBatch(*torch.from_numpy(stacked).unbind(0))


def pad_length(batch: MicroBatch, multiple: int) -> MicroBatch:
    """Return the batch with rows padded at the end to a multiple of ``multiple`` tokens (itself where they are)."""
    missing = -batch.tokens_BS.shape[1] % multiple
    if not missing:
        return batch
    fill = (0, IGNORE, 0, -1)
    padded = (F.pad(tensor, (0, missing), value=value) for tensor, value in zip(batch, fill, strict=True))
    return MicroBatch(*padded)
