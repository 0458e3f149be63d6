"""Experts on several data ranks: the same step as one process, whatever each rank's tokens need."""

from __future__ import annotations

import pytest
import torch

from danlu.parallel.data import apply_ddp
from danlu.parallel.mesh import open_world, sum_over
from danlu.train.step import count_tokens, forward_backward
from distributed.pool import RankPool
from tiny import Document, balanced_loss, gradients, micro_batch, moe_model

pytestmark = pytest.mark.timeout(120)


def step(rows: list[list[list[Document]]]) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    """Return the balance, the gradients, and the tokens of each expert in the last layer on this rank, for two steps.

    DDP notices in the second step that a gradient was missing in the first.
    """
    with open_world(device="cpu") as world:
        model = moe_model(num_experts=16, experts_per_token=1)
        wrapped = apply_ddp(model, world.data_group)
        batches = [micro_batch([row], width=len(row[0])) for row in rows[world.rank]]
        targets = int(sum_over(world.data_group, count_tokens(batches)[0])[0])
        counts: list[int] = []
        hook = model.blocks[-1].mlp.experts.register_forward_pre_hook(lambda _, at: counts.extend(at[1].tolist()))
        for _ in range(2):
            model.zero_grad()
            _, parts = forward_backward(
                wrapped, balanced_loss, batches, valid_tokens=targets, device=torch.device("cpu")
            )
        hook.remove()
        balance = sum_over(world.data_group, float(parts["loss_balance"]))[0] / targets
        return balance, gradients(model), counts[-16:]


def test_br_257_an_expert_without_tokens_on_one_rank(pool: RankPool) -> None:
    """Ranks use different experts, some none: no hang, and loss and gradients are those of one process."""
    rows: list[list[list[Document]]] = [[[list(range(1, 21))]], [[[40, 41]]]]
    ((balance, expected, _),) = pool.run(1, step, [[row for rank in rows for row in rank]])
    results = pool.run(2, step, rows)
    empty = [{expert for expert, count in enumerate(counts) if not count} for _, _, counts in results]
    assert empty[1] - empty[0]
    for found, grads, _ in results:
        assert found == pytest.approx(balance, rel=1e-6)
        assert grads.keys() == expected.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6, msg=name)
