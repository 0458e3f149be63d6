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
from torch import Tensor

from danlu.base.errors import RunError
from danlu.data.batch import IGNORE, MicroBatch
from danlu.objective.cross_entropy import Loss
from danlu.parallel.data import Reducer
from danlu.parallel.mesh import World, sum_over
from danlu.parallel.pipeline import Traced
from danlu.train.forward import Forward


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


def forward_backward_pipelined(
    forward: Forward,
    batches: Sequence[MicroBatch],
    reducer: Reducer,
    *,
    valid_tokens: int,
    device: torch.device,
    trace: list[Traced] | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Do what `forward_backward` does, as one rank of a pipeline: the loss is what this rank's stages have of it.

    Args:
        forward: of this rank's stages, with its pipeline.
        batches: this data rank's micro-batches; every rank of the pipeline has the same.
        reducer: sums the gradients over ranks.
        valid_tokens: target tokens of the global batch.
        device: where the model is.
        trace: is filled with the time of each action.
    """
    assert forward.pipeline is not None
    sums = LossSums(device)
    prepared = [forward.prepare(batch) for batch in batches]

    def run(stage: int, index: int, hidden_BSD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        hidden_BSD, loss = forward.stage(stage, prepared[index], hidden_BSD)
        if loss is None:
            return hidden_BSD, None
        sums.add(loss)
        return hidden_BSD, loss.total / max(valid_tokens, 1)

    reducer.begin()
    forward.pipeline.run(
        lambda index: forward.empty(prepared[index]), len(prepared), run,
        after_backward=lambda stage, last: reducer.after_backward(stage, last=last), trace=trace,
    )  # fmt: skip
    reducer.finish()
    return sums.total, sums.parts


class LossSums:
    """Losses added up over micro-batches, without gradients."""

    def __init__(self, device: torch.device) -> None:
        self.total = torch.zeros((), dtype=torch.float32, device=device)
        self.parts: dict[str, Tensor] = {}

    def add(self, loss: Loss) -> None:
        """Add one micro-batch's."""
        self.total += loss.total.detach()
        for name, value in loss.parts.items():
            self.parts[name] = self.parts.get(name, torch.zeros_like(self.total)) + value.detach()


def forward_backward(
    compute_loss: Callable[[MicroBatch], Loss],
    batches: Sequence[MicroBatch],
    reducer: Reducer,
    *,
    valid_tokens: int,
    device: torch.device,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Accumulate the gradients of all micro-batches and return the summed loss and its parts.

    Args:
        compute_loss: gives the loss of one micro-batch, summed over target tokens.
        batches: this rank's micro-batches; every rank has the same number.
        reducer: sums the gradients over ranks.
        valid_tokens: target tokens of the global batch.
        device: where the model is.
    """
    sums = LossSums(device)
    for index, batch in enumerate(batches):
        with reducer.micro_batch(last=index == len(batches) - 1):
            loss = compute_loss(batch)
            (loss.total / max(valid_tokens, 1)).backward()
        sums.add(loss)
    return sums.total, sums.parts


def find_culprits(loss_sum: Tensor, samples: Sequence[int], world: World) -> list[tuple[int, float, list[int]]]:
    """Return (data rank, loss sum, sample numbers) of each data rank whose own loss is not finite."""
    mine = (world.data_rank, float(loss_sum) if world.counts_losses else 0.0, list(samples))
    everyone: list[tuple[int, float, list[int]]] = [mine] * world.size
    dist.all_gather_object(everyone, mine, group=world.group)
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


def reduce_losses(result: StepResult, world: World) -> dict[str, float]:
    """Return the mean loss per target token and its parts over all ranks, each token once (one all-reduce)."""
    names = sorted(result.parts)
    if world.degrees.pp > 1:  # another stage may have others
        everyone: list[list[str]] = [names] * world.size
        dist.all_gather_object(everyone, names, group=world.group)
        names = sorted({name for each in everyone for name in each})
    own = [float(result.loss_sum), *(float(result.parts.get(name, 0.0)) for name in names)]
    sums = sum_over(world.group, *(value if world.counts_losses else 0.0 for value in own))
    count = max(result.valid_tokens, 1)
    return {"loss": sums[0] / count, **{name: value / count for name, value in zip(names, sums[1:], strict=True)}}
