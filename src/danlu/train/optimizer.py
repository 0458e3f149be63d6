"""AdamW with the right groups, the learning-rate schedule, and the gradient norm.

Decoupled weight decay belongs on matrices and embeddings; on norms and biases it only shrinks what should keep its
scale. The test is the parameter's number of dimensions, never its name. The schedule is a pure function of the step:
it has no state, so resuming by any number of processes cannot shift it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.parallel.data import Reducer, Shard
from danlu.parallel.placement import Block, Piece


class HybridOptimizer:
    """AdamW (arXiv 1711.05101) over this rank's shards of the parameters: one update over all parallel axes.

    What a step needs from other ranks, in this order: the sum of gradients that tensor parallel ranks each hold a part
    of; one all-reduce of the squared norm over all ranks, in fp64, in which a number that several ranks hold counts
    once; after the update the gathering of parameters whose owners are spread (ZeRO-1 and 2). The norm is the same
    number on every rank, and so is every decision made from it.

    The state is born here, zero: state that is born at the first step is memory that the first step did not announce,
    and a fresh optimizer into which a checkpoint loads nothing.

    Attributes:
        core: torch's AdamW; its parameters are the shards.
    """

    def __init__(
        self,
        reducer: Reducer,
        *,
        blocks: Mapping[str, Block] | None = None,
        group: dist.ProcessGroup | None = None,
        tensor_group: dist.ProcessGroup | None = None,
        tied: Mapping[str, Callable[[Tensor], None]] | None = None,
        learning_rate: float,
        beta1: float,
        beta2: float,
        eps: float,
        weight_decay: float,
        fused: bool,
    ) -> None:
        """Take over the shards of ``reducer``.

        Args:
            reducer: holds the gradients.
            blocks: where each parameter's local tensor lies in the whole; None where it is the whole.
            group: all ranks; None for this one alone.
            tensor_group: the tensor parallel ranks; None for none.
            tied: parameters of which another pipeline stage has a copy, with what sums a gradient over the two.
            learning_rate: until the first `set_learning_rate`.
            beta1: decay of the first moment.
            beta2: decay of the second moment.
            eps: added to the root of the second moment.
            weight_decay: decoupled decay of parameters of two dimensions and more.
            fused: one kernel for all parameters.
        """
        self.reducer, self.group, self.tensor_group, self.tied = reducer, group, tensor_group, tied or {}
        self.blocks = blocks or {name: Block.of(parameter.shape) for name, parameter in reducer.parameters}
        self.shards = reducer.shards()
        decayed = [(shard.name, shard.values) for shard in self.shards if shard.parameter.ndim >= 2]
        plain = [(shard.name, shard.values) for shard in self.shards if shard.parameter.ndim < 2]
        groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
        self.core = torch.optim.AdamW(
            # a rank may own nothing of one kind; torch wants one group at least
            [entry for entry in groups if entry["params"]] or [groups[0] | {"params": [torch.zeros(0)]}],
            lr=learning_rate,
            betas=(beta1, beta2),
            eps=eps,
            fused=fused,
        )
        for shard in self.shards:
            values = shard.values
            self.core.state[values] = {
                "step": torch.zeros((), dtype=torch.float32, device=values.device if fused else "cpu"),
                "exp_avg": torch.zeros_like(values, memory_format=torch.preserve_format),
                "exp_avg_sq": torch.zeros_like(values, memory_format=torch.preserve_format),
            }

    def set_learning_rate(self, rate: float) -> None:
        """Use ``rate`` from the next update on."""
        for entry in self.core.param_groups:
            entry["lr"] = rate

    @torch.no_grad()
    def clip(self, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most ``max_norm`` (0: leave them); return the norm before."""
        self._sum_partial()
        for shard in self.shards:
            if shard.name in self.tied and shard.values.grad is not None:
                self.tied[shard.name](shard.values.grad)
        gradients = [shard.values.grad for shard in self.shards if shard.values.grad is not None]
        shares = [1 / self._copies(shard) for shard in self.shards if shard.values.grad is not None]
        # also on a rank that owns nothing: where the sum is taken says which backend takes it
        device = self.reducer.parameters[0][1].device if self.reducer.parameters else "cpu"
        square = torch.zeros((), dtype=torch.float64, device=device)
        if gradients:
            norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32)).double()
            square = (norms.square() * torch.tensor(shares, dtype=torch.float64, device=norms.device)).sum()
        if self.group is not None and self.group.size() > 1:
            dist.all_reduce(square, group=self.group)
        norm = float(square.sqrt())
        scale = max_norm / (norm + 1e-6)
        if max_norm > 0 and scale < 1:
            torch._foreach_mul_(gradients, scale)
        return norm

    def step(self) -> None:
        """Update the shards and make all ranks' parameters whole again."""
        self.core.step()
        self.reducer.gather()

    def tensors(self) -> dict[str, Piece]:
        """Return the state as ``parameter name.state name`` -> this rank's piece of it (live, not copied).

        By name, so that a checkpoint's state follows its parameter whatever the order of registration or the layout.
        """
        pieces = {}
        for shard in self.shards:
            for key, value in self.core.state[shard.values].items():
                block, first = (self.blocks[shard.name], shard.first) if value.ndim else (Block.of(()), 0)
                pieces[f"{shard.name}.{key}"] = Piece(block, value, first)
        return pieces

    def _copies(self, shard: Shard) -> int:
        return shard.copies * self.blocks[shard.name].copies * (2 if shard.name in self.tied else 1)

    def _sum_partial(self) -> None:
        """Sum what tensor parallel ranks hold parts of; peers hold the same ranges, so the order is the same."""
        if self.tensor_group is None or self.tensor_group.size() == 1:
            return
        for kind in ("partial", "partial_copies"):
            held = [shard for shard in self.shards if self.blocks[shard.name].gradient == kind]
            gradients = [shard.values.grad for shard in held if shard.values.grad is not None]
            if not gradients:
                continue
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            copies = self.blocks[held[0].name].copies if kind == "partial_copies" else self.tensor_group.size()
            slots = flat.new_zeros(self.tensor_group.size() // copies, flat.numel())
            slots[self.tensor_group.rank() // copies] = flat
            dist.all_reduce(slots, group=self.tensor_group)
            summed = slots[self.tensor_group.rank() // copies].split([gradient.numel() for gradient in gradients])
            for gradient, part in zip(gradients, summed, strict=True):
                gradient.copy_(part.view_as(gradient))


def can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether AdamW has a fused kernel for every parameter's device and dtype."""
    return all(parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() for parameter in parameters)


def learning_rate_at(
    step: int,
    *,
    kind: str,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float,
    decay_fraction: float,
) -> float:
    """Return the learning rate of optimizer step ``step`` (the first is 0).

    Warm-up rises linearly so that step ``warmup_steps - 1`` has the peak; the last step of the run has
    ``peak * min_ratio`` (``constant`` excepted).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant":
        return peak
    start = warmup_steps if kind != "wsd" else max(warmup_steps, total_steps - math.ceil(total_steps * decay_fraction))
    if step < start:
        return peak
    done = min(1.0, (step - start + 1) / max(1, total_steps - start))
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if kind == "cosine" else 1.0 - done
    return peak * (min_ratio + (1.0 - min_ratio) * share)
