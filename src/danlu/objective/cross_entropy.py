r"""Cross-entropy from hidden states, in chunks of tokens.

The logits of T tokens over a vocabulary of V entries are the largest tensor of a language model by far: 8,192 tokens at
V = 151,936 in fp32 are 4.6 GiB, and an eager loss keeps three such tensors. Here they never exist: for one chunk of
tokens at a time the logits are made, turned into the chunk's loss *and at once* into the gradients

    d loss / d logits = softmax(logits) - onehot(label)

of hidden states and head, and dropped (the idea of Liger-Kernel, arXiv 2410.10989, in plain torch). The backward pass
only scales what the forward pass has stored. Tokens that are no targets are left out before the first matmul, so a
masked prompt costs nothing here.

Invariants: the loss is a *sum* over target tokens, never a mean (the step divides by the global count once); logits,
softmax and loss are fp32 whatever the hidden states are; no chunk takes more than the given memory (or it is one
token). Not here: vocabulary shards, label smoothing, z-loss, soft caps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
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


def plan_chunk_tokens(vocab_size: int, max_bytes: int) -> int:
    """Return how many tokens' fp32 logits fit into ``max_bytes`` (at least one token)."""
    return max(1, max_bytes // (4 * vocab_size))


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, chunk_tokens: int) -> Tensor:
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        compute_weight_VD = weight_VD.to(hidden_TD.dtype)
        grad_hidden_TD = torch.empty_like(hidden_TD) if need_hidden else None
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=torch.float32) if need_weight else None
        total = hidden_TD.new_zeros((), dtype=torch.float32)
        for start in range(0, hidden_TD.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            chunk_CD, labels_C = hidden_TD[rows], labels_T[rows, None]
            logits_CV = (chunk_CD @ compute_weight_VD.T).float()
            normaliser_C1 = logits_CV.logsumexp(dim=-1, keepdim=True)
            total += (normaliser_C1 - logits_CV.gather(1, labels_C)).sum()
            if not (need_hidden or need_weight):
                continue
            grad_CV = logits_CV.sub_(normaliser_C1).exp_()  # softmax, in the logits' own memory
            grad_CV.scatter_add_(1, labels_C, grad_CV.new_full(labels_C.shape, -1.0))
            grad_CV = grad_CV.to(hidden_TD.dtype)
            if grad_hidden_TD is not None:
                grad_hidden_TD[rows] = grad_CV @ compute_weight_VD
            if grad_weight_VD is not None:
                if grad_CV.dtype == torch.float32:
                    grad_weight_VD.addmm_(grad_CV.T, chunk_CD)
                else:
                    grad_weight_VD += grad_CV.T @ chunk_CD
        # Plain attributes, not saved tensors: the backward pass scales them in place, since a copy of the head's
        # gradient is among the largest tensors of a step.
        ctx.grads, ctx.weight_dtype = (grad_hidden_TD, grad_weight_VD), weight_VD.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        if ctx.grads is None:
            raise RuntimeError("chunked cross-entropy can be differentiated only once per forward pass")
        grad_hidden_TD, grad_weight_VD = ctx.grads
        ctx.grads = None
        (scale,) = grad_outputs
        if grad_hidden_TD is not None:
            grad_hidden_TD.mul_(scale)
        if grad_weight_VD is not None:
            grad_weight_VD = grad_weight_VD.mul_(scale).to(ctx.weight_dtype)
        return grad_hidden_TD, grad_weight_VD, None, None


def chunked_cross_entropy(hidden_TD: Tensor, head_weight_VD: Tensor, labels_T: Tensor, *, max_bytes: int) -> Tensor:
    """Return the cross-entropy summed over the target tokens, as an fp32 scalar.

    Args:
        hidden_TD: final hidden states of T tokens.
        head_weight_VD: head weight; may be of another dtype than the hidden states (it is cast for the matmul).
        labels_T: next token of each, or `IGNORE`.
        max_bytes: most memory for one chunk of logits.
    """
    targets = labels_T != IGNORE
    picked_TD, labels_T = hidden_TD[targets], labels_T[targets]
    chunk_tokens = plan_chunk_tokens(head_weight_VD.shape[0], max_bytes)
    total: Tensor = _ChunkedCrossEntropy.apply(picked_TD, head_weight_VD, labels_T, chunk_tokens)
    return total


class CrossEntropy:
    """The plain language-model objective."""

    def __init__(self, *, max_chunk_bytes: int = 64 * 2**20) -> None:
        self.max_chunk_bytes = max_chunk_bytes

    def __call__(self, hidden_BSD: Tensor, head_weight_VD: Tensor, batch: MicroBatch) -> Loss:
        """Return the summed cross-entropy of one micro-batch; all-masked batches give exactly 0."""
        total = chunked_cross_entropy(
            hidden_BSD.flatten(0, 1), head_weight_VD, batch.labels_BS.flatten(), max_bytes=self.max_chunk_bytes
        )
        return Loss(total)
