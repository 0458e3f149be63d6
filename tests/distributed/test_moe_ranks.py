"""Experts on several data ranks: the same step as one process, whatever each rank's tokens need."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from danlu.parallel.data import Reducer, ReplicaReducer
from danlu.parallel.mesh import open_world, sum_over
from danlu.train.step import count_tokens, forward_backward
from distributed.pool import RankPool
from tiny import Document, balanced_loss, gradients, micro_batch, moe_model

pytestmark = pytest.mark.timeout(120)


def step(rows: list[list[list[Document]]]) -> tuple[float, dict[str, torch.Tensor], list[int]]:
    """Return the balance, the gradients, and the tokens of each expert in the last layer on this rank, for two steps.

    A gradient that was missing in the first step would show in the second.
    """
    with open_world(device="cpu") as world:
        model = moe_model(num_experts=16, experts_per_token=1)
        named = list(model.named_parameters())
        reducer = ReplicaReducer({0: named}, world.group, bucket_cap_mb=0.01) if world.size > 1 else Reducer(named)
        batches = [micro_batch([row], width=len(row[0])) for row in rows[world.rank]]
        targets = int(sum_over(world.group, count_tokens(batches)[0])[0])
        counts: list[int] = []
        hook = model.blocks[model.spec.num_layers - 1].mlp.experts.register_forward_pre_hook(
            lambda _, at: counts.extend(at[1].tolist())
        )
        for _ in range(2):
            reducer.zero()
            _, parts = forward_backward(
                partial(balanced_loss, model), batches, reducer, valid_tokens=targets, device=torch.device("cpu")
            )
        hook.remove()
        balance = sum_over(world.group, float(parts["loss_balance"]))[0] / targets
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
