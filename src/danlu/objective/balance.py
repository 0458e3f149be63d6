"""The loss that keeps a router from sending everything to a few experts.

For one layer and one row of n real tokens (Switch Transformer, arXiv:2101.03961, equations 4 to 6, with K experts a
token as `transformers` counts them):

    balance = E * sum_e f_e * P_e,    f_e = (copies sent to e) / n,    P_e = (sum of softmax probabilities of e) / n

It is K where the tokens are spread evenly, and E at worst for K = 1. The gradient reaches the router through P only.
The mean over the layers with experts is taken, so a coefficient means what it means in `transformers`.

f and P are those of a *row*, never of whatever rows happen to share a micro-batch or a rank: a product of two averages
is not the average of products, so any other choice would make the gradient depend on accumulation and layout. Padding
does not count. Rows are weighted by their target tokens, as the language loss weights them: the sum over rows is added
to the summed language loss and divided by the global target count with it. So the step needs no second rule, a row
without targets teaches the router nothing either, and the same tokens give the same gradient however they are split.
"""

from __future__ import annotations

import torch

from danlu.base.errors import RunError
from danlu.data.batch import IGNORE, MicroBatch
from danlu.model.router import RouterRecord
from danlu.objective.cross_entropy import Loss


def balance_loss(routers: RouterRecord, targets_B: torch.Tensor, *, num_layers: int) -> torch.Tensor:
    """Return the balance of each row, averaged over the layers, times the row's targets, summed over rows (fp32).

    Args:
        routers: filled by one forward pass.
        targets_B: target tokens of each row.
        num_layers: layers with experts in the whole model; a pipeline stage records only its own.
    """
    tokens_B1 = routers.num_tokens_B.clamp_min(1).unsqueeze(1)
    total = targets_B.new_zeros((), dtype=torch.float32)
    for sums in routers.layers.values():
        balance_B = sums.shares_BE.shape[1] * (sums.counts_BE * sums.shares_BE / tokens_B1**2).sum(1)
        total = total + (targets_B * balance_B).sum()
    return total / num_layers


def add_balance(
    loss: Loss | None, routers: RouterRecord, batch: MicroBatch, *, coefficient: float, num_layers: int
) -> Loss:
    """Return ``loss`` (None on a pipeline stage without the head) with ``coefficient`` times the balance loss added.

    Its parts tell the two apart: ``loss_balance`` is the balance loss before the coefficient, ``loss_ce`` what the
    objective gave alone, unless it named its own parts.

    Raises:
        RunError: no router wrote anything: the record was lost on its way to the blocks.
    """
    if not routers.layers:
        raise RunError("the routers left no record of this forward pass", hint="this is a fault of danlu; report it")
    balance = balance_loss(routers, (batch.labels_BS != IGNORE).sum(1), num_layers=num_layers)
    if loss is None:
        return Loss(coefficient * balance, {"loss_balance": balance})
    parts = {**(loss.parts or {"loss_ce": loss.total}), "loss_balance": balance}
    return Loss(loss.total + coefficient * balance, parts)
