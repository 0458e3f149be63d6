"""One optimizer step: token-weighted gradients, one norm, one decision.

The target tokens of the whole global batch are counted first; every micro-batch's summed loss is divided by that one
number. So the result does not depend on how rows are spread over ranks, micro-batches or padding, each micro-batch's
graph is freed by its own backward pass, and a rank whose rows hold no target contributes exactly zero.

Whether a step is good is decided from the reduced gradient's norm, which is the same number on every rank: a NaN on one
rank reaches all of them through the sum. Only when it is bad do the ranks compare losses to name the culprit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.base.errors import RunError
from danlu.data.batch import IGNORE, MicroBatch
from danlu.objective.cross_entropy import Loss
from danlu.parallel.data import accumulating
from danlu.parallel.mesh import sum_over


@dataclass(frozen=True)
class StepResult:
    """What one step did. Tensors are on the device and this rank's own until `reduce_losses`."""

    loss_sum: Tensor
    """Sum of this rank's losses over its target tokens."""
    valid_tokens: int
    """Target tokens over all data ranks."""
    grad_norm: float
    """Global gradient norm before clipping."""
    skipped: bool
    parts: dict[str, Tensor] = field(default_factory=dict)
    """Named loss parts, summed like ``loss_sum``."""


def count_tokens(batches: Sequence[MicroBatch]) -> tuple[int, int]:
    """Return the targets and the tokens that are no padding in this rank's micro-batches (host tensors)."""
    targets = sum(int((batch.labels_BS != IGNORE).sum()) for batch in batches)
    return targets, sum(int((batch.document_ids_BS >= 0).sum()) for batch in batches)


def forward_backward(
    model: nn.Module,
    compute_loss: Callable[[nn.Module, MicroBatch], Loss],
    batches: Sequence[MicroBatch],
    *,
    valid_tokens: int,
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Accumulate the gradients of all micro-batches and return the summed loss and its parts.

    Args:
        model: the (possibly wrapped) model, in training mode.
        compute_loss: runs the model on one micro-batch and returns the loss summed over target tokens.
        batches: this rank's micro-batches; every rank has the same number.
        valid_tokens: target tokens of the global batch.
        device: where the model is.
    """
    loss_sum = torch.zeros((), dtype=torch.float32, device=device)
    parts: dict[str, Tensor] = {}
    for index, batch in enumerate(batches):
        with accumulating(model, last=index == len(batches) - 1):
            loss = compute_loss(model, batch)
            (loss.total / max(valid_tokens, 1)).backward()
        loss_sum += loss.total.detach()
        for name, value in loss.parts.items():
            parts[name] = parts.get(name, torch.zeros_like(loss_sum)) + value.detach()
    return loss_sum, parts


def find_culprits(
    loss_sum: Tensor, samples: Sequence[int], group: dist.ProcessGroup
) -> list[tuple[int, float, list[int]]]:
    """Return (data rank, loss sum, sample numbers) of each rank whose own loss is not finite."""
    mine = (group.rank(), float(loss_sum), list(samples))
    everyone: list[tuple[int, float, list[int]]] = [mine] * group.size()
    dist.all_gather_object(everyone, mine, group=group)
    return [entry for entry in everyone if not math.isfinite(entry[1])]


def nonfinite_error(step: int, grad_norm: float, culprits: list[tuple[int, float, list[int]]]) -> RunError:
    """Return the error that ends a run whose gradient is not finite."""
    if culprits:
        seen = "; ".join(f"data rank {rank}: loss {loss}, samples {samples}" for rank, loss, samples in culprits)
    else:
        seen = f"every rank's loss is finite, but the gradient norm is {grad_norm}"
    return RunError(
        f"loss or gradient is not finite at step {step}",
        where="train.on_nonfinite",
        seen=seen,
        hint="lower the learning rate or look at these samples with `danlu data inspect`; "
        'train.on_nonfinite="skip" leaves such steps out on all ranks',
    )


def reduce_losses(result: StepResult, group: dist.ProcessGroup) -> dict[str, float]:
    """Return the mean loss per target token and its parts over all data ranks (one all-reduce)."""
    names = sorted(result.parts)
    sums = sum_over(group, float(result.loss_sum), *(float(result.parts[name]) for name in names))
    count = max(result.valid_tokens, 1)
    return {"loss": sums[0] / count, **{name: value / count for name, value in zip(names, sums[1:], strict=True)}}
