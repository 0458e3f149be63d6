r"""Cross-entropy from hidden states, in chunks of tokens.

The logits of T tokens over a vocabulary of V entries are the largest tensor of a language model by far: 8,192 tokens at
V = 151,936 in fp32 are 4.6 GiB, and an eager loss keeps three such tensors. Here they never exist: for one chunk of
tokens at a time the logits are made, turned into the chunk's loss *and at once* into the gradients

    d loss / d logits = softmax(logits) - onehot(label)

of hidden states and head, and dropped (the idea of Liger-Kernel, arXiv 2410.10989, in plain torch). The backward pass
only scales what the forward pass has stored. Tokens that are no targets are left out before the first matmul, so a
masked prompt costs nothing here.

A chunk should be as large as memory allows: every chunk after the first adds a pass over the head's gradient.

A head that is split by rows over a group (`VocabularyShard`) stays split: each rank makes the logits of its own rows,
and the ranks exchange three numbers a token. Rows of padding have logits of minus infinity and never count.

Invariants: the loss is a *sum* over target tokens, never a mean (the step divides by the global count once); softmax
and loss are fp32 whatever the hidden states are; no chunk's logits take more than the given memory (or it is one
token). Not here: label smoothing, z-loss, soft caps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from danlu.data.batch import IGNORE, MicroBatch


@dataclass(frozen=True)
class Loss:
    """A micro-batch's loss, summed over its target tokens (scalar, fp32), and its named parts for the metrics."""

    total: Tensor
    parts: Mapping[str, Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """The seam for cross-entropy and distillation alike."""

    def __call__(self, hidden_BSD: Tensor, head_weight_VD: Tensor, batch: MicroBatch) -> Loss:
        """Return the summed loss of one micro-batch."""


_CACHE_BYTES = 2**21


def plan_chunk_tokens(vocab_size: int, max_bytes: int, itemsize: int = 4) -> int:
    """Return how many tokens' logits of ``itemsize`` bytes each fit into ``max_bytes`` (at least one token)."""
    return max(1, max_bytes // (itemsize * vocab_size))


def _to_gradients(logits_CV: Tensor, labels_C1: Tensor) -> Tensor:
    """Turn logits into softmax - onehot(label), in their own memory, and return their summed loss (fp32).

    On a CPU a few rows at a time, so that what is fp32 in between stays in the cache. The normaliser log(sum(exp)) is
    taken at the largest logit, whose probability is at least 1 / V: no underflow, and no second exp.
    """
    num_rows = logits_CV.shape[0]
    if logits_CV.device.type == "cpu":
        num_rows = plan_chunk_tokens(logits_CV.shape[1], _CACHE_BYTES)
    total = logits_CV.new_zeros((), dtype=torch.float32)
    for rows, labels in zip(logits_CV.split(num_rows), labels_C1.split(num_rows), strict=True):
        softmax = torch.softmax(rows, -1, dtype=torch.float32)
        normaliser = rows.amax(-1, keepdim=True).float() - softmax.amax(-1, keepdim=True).log()
        total += (normaliser - rows.gather(1, labels)).sum()
        rows.copy_(softmax.scatter_add_(1, labels, softmax.new_full(labels.shape, -1.0)))
    return total


@dataclass(frozen=True)
class VocabularyShard:
    """This rank's rows of a head that is split over a group: ``rows`` of them from ``first`` on, then padding."""

    group: dist.ProcessGroup
    first: int
    rows: int

    @classmethod
    def of(cls, group: dist.ProcessGroup, vocab_size: int) -> VocabularyShard:
        """Return the shard of this rank where each holds ceil(vocab_size / ranks) rows."""
        each = -(-vocab_size // group.size())
        first = min(vocab_size, group.rank() * each)
        return cls(group, first, min(each, vocab_size - first))


def _to_gradients_sharded(logits_CV: Tensor, labels_C1: Tensor, shard: VocabularyShard) -> Tensor:
    """Do the work of `_to_gradients` on this rank's part of the vocabulary; the loss is the whole one on every rank.

    Three numbers a token cross the wire: the largest logit, then the sum of exponentials and the label's own logit.
    """
    logits_CV[:, shard.rows :] = -math.inf
    largest_C1 = logits_CV.amax(-1, keepdim=True).float()
    dist.all_reduce(largest_C1, op=dist.ReduceOp.MAX, group=shard.group)
    shifted_CV = logits_CV.float() - largest_C1
    local_C1 = labels_C1 - shard.first
    foreign_C1 = (local_C1 < 0) | (local_C1 >= shard.rows)
    local_C1 = local_C1.masked_fill(foreign_C1, 0)
    own_C1 = shifted_CV.gather(1, local_C1).masked_fill(foreign_C1, 0.0)
    sums_2C1 = torch.stack([shifted_CV.exp_().sum(-1, keepdim=True), own_C1])
    dist.all_reduce(sums_2C1, group=shard.group)
    softmax_CV = shifted_CV.div_(sums_2C1[0])
    logits_CV.copy_(softmax_CV.scatter_add_(1, local_C1, foreign_C1.float() - 1.0))
    return (sums_2C1[0].log() - sums_2C1[1]).sum()


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TD: Tensor,
        weight_VD: Tensor,
        labels_T: Tensor,
        chunk_tokens: int,
        shard: VocabularyShard | None,
    ) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        compute_weight_VD = weight_VD.to(hidden_TD.dtype)
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        grad_weight_VD: Tensor | None = None
        memory_CV = hidden_TD.new_empty(min(chunk_tokens, hidden_TD.shape[0]), weight_VD.shape[0])
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk_CD, labels_C1 = hidden_TD[rows], labels_T[rows, None]
            grad_CV = torch.mm(chunk_CD, compute_weight_VD.T, out=memory_CV[: chunk_CD.shape[0]])
            total += (
                _to_gradients(grad_CV, labels_C1) if shard is None else _to_gradients_sharded(grad_CV, labels_C1, shard)
            )
            if grad_hidden_TD is not None:
                torch.mm(grad_CV, compute_weight_VD, out=grad_hidden_TD[rows])
            if need_weight:
                grad_weight_VD = _accumulate(grad_weight_VD, grad_CV, chunk_CD)
        if need_weight and grad_weight_VD is None:
            grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32)
        # Plain attributes, not saved tensors: the backward pass scales them in place, since a copy of the head's
        # gradient is among the largest tensors of a step.
        ctx.grads, ctx.weight_dtype = (grad_hidden_TD, grad_weight_VD), weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        if ctx.grads is None:
            raise RuntimeError("chunked cross-entropy can be differentiated only once per forward pass")
        grad_hidden_TD, grad_weight_VD = ctx.grads
        ctx.grads = None
        (scale,) = grad_outputs
        if grad_hidden_TD is not None:
            grad_hidden_TD.mul_(scale)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden_TD, grad_weight_VD, None, None, None


def _accumulate(total_VD: Tensor | None, grad_CV: Tensor, hidden_CD: Tensor) -> Tensor:
    """Return the head's gradient in fp32 with one more chunk in it; the first chunk starts it."""
    if total_VD is None:
        return (grad_CV.T @ hidden_CD).float()
    if grad_CV.dtype == torch.float32:
        return total_VD.addmm_(grad_CV.T, hidden_CD)
    return total_VD.add_(grad_CV.T @ hidden_CD)


def chunked_cross_entropy(
    hidden_TD: Tensor,
    head_weight_VD: Tensor,
    labels_T: Tensor,
    *,
    max_bytes: int,
    shard: VocabularyShard | None = None,
) -> Tensor:
    """Return the cross-entropy summed over the target tokens, as an fp32 scalar.

    Args:
        hidden_TD: final hidden states of T tokens.
        head_weight_VD: head weight; may be of another dtype than the hidden states (it is cast for the matmul).
        labels_T: next token of each, or `IGNORE`.
        max_bytes: most memory for one chunk of logits.
        shard: which rows of the head ``head_weight_VD`` holds, where it is split over ranks; the hidden states'
            gradient is then this rank's part of a sum.
    """
    targets = labels_T != IGNORE
    picked_TD, labels_T = hidden_TD[targets], labels_T[targets]
    chunk_tokens = plan_chunk_tokens(head_weight_VD.shape[0], max_bytes, hidden_TD.element_size())
    total: Tensor = _ChunkedCrossEntropy.apply(picked_TD, head_weight_VD, labels_T, chunk_tokens, shard)
    return total


class CrossEntropy:
    """The plain language-model objective."""

    def __init__(self, *, max_chunk_bytes: int = 64 * 2**20, shard: VocabularyShard | None = None) -> None:
        self.max_chunk_bytes, self.shard = max_chunk_bytes, shard

    def __call__(self, hidden_BSD: Tensor, head_weight_VD: Tensor, batch: MicroBatch) -> Loss:
        """Return the summed cross-entropy of one micro-batch; all-masked batches give exactly 0."""
        total = chunked_cross_entropy(
            hidden_BSD.flatten(0, 1), head_weight_VD, batch.labels_BS.flatten(), max_bytes=self.max_chunk_bytes,
            shard=self.shard,
        )  # fmt: skip
        return Loss(total)
