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
from danlu.model.decoder import Decoder
from danlu.model.router import RouterRecord
from danlu.objective.balance import add_balance
from danlu.objective.cross_entropy import Loss, Objective
from danlu.parallel.data import Reducer
from danlu.parallel.mesh import World, sum_over


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


class Forward:
    """A micro-batch's summed loss: moved to the device, laid out for this rank, through model and objective."""

    def __init__(
        self,
        model: Decoder,
        objective: Objective,
        *,
        device: torch.device,
        lay_out: Callable[[MicroBatch], MicroBatch] = lambda batch: batch,
        router_balance: float = 0.0,
        join_routers: Callable[[RouterRecord], None] = lambda _: None,
    ) -> None:
        """Bind what stays the same.

        Args:
            model: this rank's part of the model.
            objective: gives the summed loss; it owns the head.
            device: where the model is.
            lay_out: cuts or pads a micro-batch for this rank.
            router_balance: coefficient of the routers' balance loss in training; 0 leaves it out.
            join_routers: makes a record of this rank's parts of rows one of whole rows.
        """
        self.model, self.objective, self.device, self.lay_out = model, objective, device, lay_out
        self.router_balance, self.join_routers = router_balance, join_routers

    def __call__(self, batch: MicroBatch) -> Loss:
        """Return the loss of one micro-batch (host tensors), summed over its target tokens."""
        batch = self.lay_out(batch)
        moved = MicroBatch(*(tensor.to(self.device, non_blocking=True) for tensor in batch))
        balanced = self.router_balance and self.model.training
        routers = RouterRecord(moved.document_ids_BS) if balanced else None
        hidden_BSD = self.model(
            moved.tokens_BS, positions_BS=moved.positions_BS, document_ids_BS=moved.document_ids_BS, routers=routers
        )
        loss = self.objective(hidden_BSD, self.model.head_weight_VD, moved)
        if routers is None:
            return loss
        self.join_routers(routers)
        num_layers = self.model.spec.num_expert_layers
        return add_balance(loss, routers, moved, coefficient=self.router_balance, num_layers=num_layers)


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
    loss_sum = torch.zeros((), dtype=torch.float32, device=device)
    parts: dict[str, Tensor] = {}
    for index, batch in enumerate(batches):
        with reducer.micro_batch(last=index == len(batches) - 1):
            loss = compute_loss(batch)
            (loss.total / max(valid_tokens, 1)).backward()
        loss_sum += loss.total.detach()
        for name, value in loss.parts.items():
            parts[name] = parts.get(name, torch.zeros_like(loss_sum)) + value.detach()
    return loss_sum, parts


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
    own = [float(result.loss_sum), *(float(result.parts[name]) for name in names)]
    sums = sum_over(world.group, *(value if world.counts_losses else 0.0 for value in own))
    count = max(result.valid_tokens, 1)
    return {"loss": sums[0] / count, **{name: value / count for name, value in zip(names, sums[1:], strict=True)}}
