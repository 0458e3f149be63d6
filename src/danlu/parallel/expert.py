"""Expert parallelism: a layer's experts are spread over ranks, and tokens travel to them (GShard, arXiv:2006.16668).

The ep ranks are data and context parallel ranks that would otherwise hold the same experts, so the world size does
not grow: a rank holds E / ep experts of every layer instead of E, and everything that is no expert as before. Each
rank routes its own tokens; sorted by expert they are already sorted by rank, so one all-to-all brings every token to
its expert and one brings the result back, forward, and the same again backward:

    4 all-to-alls a layer and micro-batch, each of K T D numbers of which (ep - 1) / ep leave the rank on average

for T tokens of a rank. Sizes differ in every pass, so each first exchanges E counts, and the host waits for them once.
Nothing is dropped and nothing is padded; how much a rank computes depends on where the routers send.

A rank's experts have seen the tokens of all ep ranks when the backward pass ends, so their gradients are summed over
the ranks with the same experts only (reduce group / ep), where ZeRO splits them too. Tensor parallel peers hold columns
of the same experts, and each sends the same tokens.

What it does not do: balance load by moving experts, or overlap the all-to-all with computing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from danlu.model.decoder import Decoder
from danlu.model.experts import Experts, MoE
from danlu.parallel.placement import Block


class _AllToAll(torch.autograd.Function):
    """Rows to other ranks; the gradient goes the way back."""

    @staticmethod
    def forward(ctx: Any, rows_PD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _exchange(rows_PD, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        return _exchange(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _exchange(rows_PD: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
    out_QD = rows_PD.new_empty(sum(received), *rows_PD.shape[1:])
    dist.all_to_all_single(out_QD, rows_PD.contiguous(), received, sent, group=group)
    return out_QD


class _Receipt(NamedTuple):
    """What the way back needs: how many rows went to and came from each rank, and how they were sorted here."""

    sent: list[int]
    received: list[int]
    order_Q: Tensor
    place_Q: Tensor


class ExpertDispatch:
    """Brings tokens to the ranks of their experts and back; see `danlu.model.experts.Dispatch`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def send(self, tokens_PD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return the tokens for this rank's experts, sorted by expert, and their counts."""
        size = self.group.size()
        came_RX = torch.empty_like(counts_E)
        dist.all_to_all_single(came_RX, counts_E, group=self.group)  # by rank, then by expert of this rank
        came_RX = came_RX.view(size, -1)
        both_2R = torch.stack([counts_E.view(size, -1).sum(1), came_RX.sum(1)]).tolist()
        sent, received = both_2R
        rows_QD: Tensor = _AllToAll.apply(tokens_PD, sent, received, self.group)
        # what came is sorted by (rank, expert); the experts want it by (expert, rank)
        expert_RX = torch.arange(came_RX.shape[1], device=came_RX.device).expand_as(came_RX)
        expert_Q = expert_RX.flatten().repeat_interleave(came_RX.flatten(), output_size=sum(received))
        order_Q = expert_Q.argsort(stable=True)
        place_Q = torch.empty_like(order_Q)
        place_Q[order_Q] = torch.arange(order_Q.shape[0], device=order_Q.device)
        return _Sorted.apply(rows_QD, order_Q, place_Q), came_RX.sum(0), _Receipt(sent, received, order_Q, place_Q)

    def back(self, out_QD: Tensor, receipt: _Receipt) -> Tensor:
        """Return the results of this rank's own tokens, in the order in which they were sent."""
        rows_QD = _Sorted.apply(out_QD, receipt.place_Q, receipt.order_Q)
        result: Tensor = _AllToAll.apply(rows_QD, receipt.received, receipt.sent, self.group)
        return result


class _Sorted(torch.autograd.Function):
    """rows[order], whose gradient is the gather by the inverse: no atomic additions."""

    @staticmethod
    def forward(ctx: Any, rows_QD: Tensor, order_Q: Tensor, place_Q: Tensor) -> Tensor:
        ctx.save_for_backward(place_Q)
        return rows_QD[order_Q]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0][ctx.saved_tensors[0]], None, None


def apply_expert(model: Decoder, blocks: Mapping[str, Block], group: dist.ProcessGroup) -> dict[str, Block]:
    """Leave this rank's experts in ``model`` (on meta), and return where each parameter lies now.

    Args:
        model: after tensor parallelism; the number of its experts must be a multiple of the group's size.
        blocks: where each parameter lies, as tensor parallelism left it.
        group: the ranks that experts are spread over.

    A group of one changes nothing.
    """
    size, found = group.size(), dict(blocks)
    if size == 1:
        return found
    for layer, moe in _mixtures(model):
        moe.dispatch = ExpertDispatch(group)
        for name in ("gate", "up", "down"):
            linear = getattr(moe.experts, name)
            shape = (linear.weight.shape[0] // size, *linear.weight.shape[1:])
            linear.weight = nn.Parameter(linear.weight.new_empty(shape))
            key = f"blocks.{layer}.mlp.experts.{name}.weight"
            before = blocks[key]
            found[key] = replace(
                before,
                starts=(group.rank() * shape[0], *before.starts[1:]),
                extent=(shape[0], *before.extent[1:]),
                local=(shape[0], *before.local[1:]),
            )
    return found


def expert_modules(model: Decoder) -> list[Experts]:
    """Return the experts of every layer that has some."""
    return [moe.experts for _, moe in _mixtures(model)]


def _mixtures(model: Decoder) -> list[tuple[str, MoE]]:
    return [(layer, block.mlp) for layer, block in model.blocks.items() if isinstance(block.mlp, MoE)]
