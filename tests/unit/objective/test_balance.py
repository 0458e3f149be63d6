"""The balance loss: the published formula, once, and the same however the tokens are split."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from danlu.base.errors import RunError
from danlu.data.batch import IGNORE, MicroBatch
from danlu.model.decoder import Decoder
from danlu.model.router import RouterRecord
from danlu.objective.balance import add_balance, balance_loss
from danlu.objective.cross_entropy import Loss
from danlu.parallel.data import Reducer
from danlu.train.step import count_tokens, forward_backward
from tiny import Document, balanced_loss, gradients, language_loss, micro_batch, moe_model, random_rows

CPU = torch.device("cpu")
UNEVEN: list[list[Document]] = [
    [[3, 4, 5, 6, 7, 8, 9, 10, 11]], [[9, 10]], [([1, 2, 3, 7, 8], [False, False, True, True, True]), [4, 5]],
    [[20, 21, 22, 23]],
]  # fmt: skip


def routed(logits_TE: Tensor, experts_per_token: int, ids_BS: Tensor) -> RouterRecord:
    record = RouterRecord(ids_BS)
    record.add(0, logits_TE, logits_TE.topk(experts_per_token).indices)
    return record


@pytest.mark.parametrize("experts_per_token", [1, 2, 3])
def test_a_row_has_the_loss_of_transformers(experts_per_token: int) -> None:
    """One layer, one row, some of it padding: the value of transformers' function over the real tokens."""
    logits_TE = torch.randn(12, 5, generator=torch.Generator().manual_seed(0))
    real = torch.tensor([[1] * 9 + [0] * 3])
    found = balance_loss(routed(logits_TE, experts_per_token, real - 1), torch.tensor([1]), num_layers=1)
    expected = load_balancing_loss_func((logits_TE,), 5, experts_per_token, real)
    assert float(found) == pytest.approx(float(expected), rel=1e-6)


def test_even_routing_costs_k_and_collapse_costs_e() -> None:
    """The bounds that the essay states."""
    even = torch.eye(4).repeat(3, 1) * 1e-3
    ids = torch.zeros(1, 12, dtype=torch.int64)
    assert float(balance_loss(routed(even, 1, ids), torch.tensor([1]), num_layers=1)) == pytest.approx(1, rel=1e-3)
    collapsed = torch.tensor([[50.0, 0, 0, 0]]).repeat(12, 1)
    assert float(balance_loss(routed(collapsed, 1, ids), torch.tensor([1]), num_layers=1)) == pytest.approx(4)


def reference(model: Decoder, batch: MicroBatch) -> Tensor:
    """The formula written out, row by row and layer by layer, from the logits that the routers returned."""
    found: list[Tensor] = []
    hooks = [block.mlp.router.register_forward_hook(lambda *at: found.append(at[2])) for block in model.blocks]
    model(batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS)
    for hook in hooks:
        hook.remove()
    total, experts = torch.zeros(()), model.spec.num_experts
    assert experts is not None
    for logits_TE in found:
        for row, logits_SE in enumerate(logits_TE.view(*batch.tokens_BS.shape, experts)):
            real_SE = logits_SE[batch.document_ids_BS[row] >= 0]
            targets = int((batch.labels_BS[row] != IGNORE).sum())
            chosen = real_SE.topk(2).indices
            for expert in range(experts):
                share = (chosen == expert).sum() / len(real_SE)
                total = total + targets * experts * share * real_SE.softmax(-1)[:, expert].mean() / len(found)
    return total


def test_it_reaches_the_router_exactly_once() -> None:
    """Gradient with the loss minus gradient without it = coefficient times that of the formula written out."""
    batch = micro_batch(UNEVEN)
    model = moe_model()

    def gradient(loss: Tensor) -> dict[str, Tensor]:
        model.zero_grad()
        loss.backward()
        return gradients(model)

    alone = gradient(language_loss(model, batch).total)
    both = gradient(balanced_loss(model, batch, coefficient=0.7).total)
    expected = gradient(reference(model, batch))
    routers = [name for name in both if name.endswith("router.weight")]
    assert len(routers) == 2
    for name in routers:
        assert expected[name].norm() > 0.01 * alone[name].norm()
        torch.testing.assert_close(both[name] - alone[name], 0.7 * expected[name], rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        loss, plain = balanced_loss(model, batch, coefficient=0.7), float(reference(model, batch))
    assert loss.parts.keys() == {"loss_ce", "loss_balance"}
    assert float(loss.parts["loss_balance"]) == pytest.approx(plain, rel=1e-5)
    assert float(loss.total) == pytest.approx(float(loss.parts["loss_ce"] + 0.7 * loss.parts["loss_balance"]))


def run(batches: list[MicroBatch]) -> tuple[float, dict[str, Tensor]]:
    model = moe_model()
    targets = sum(count_tokens([batch])[0] for batch in batches)
    reducer = Reducer(list(model.named_parameters()))
    _, parts = forward_backward(partial(balanced_loss, model), batches, reducer, valid_tokens=targets, device=CPU)
    return float(parts["loss_balance"]) / targets, gradients(model)


@pytest.mark.parametrize("cut", [[1, 1, 1, 1], [1, 3], [3, 1], [2, 2]])
def test_br_254_the_router_learns_the_same_however_rows_are_accumulated(cut: list[int]) -> None:
    """Rows of very different lengths, cut in any way: balance and every gradient as in one pass."""
    rows = iter(UNEVEN)
    balance, grads = run([micro_batch([next(rows) for _ in range(size)]) for size in cut])
    whole, expected = run([micro_batch(UNEVEN)])
    assert balance == pytest.approx(whole, rel=1e-6)
    for name, value in grads.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_padding_does_not_count() -> None:
    """Wider rows and rows of nothing but padding change neither the loss nor a gradient."""
    balance, grads = run([micro_batch(UNEVEN, width=40), micro_batch([[], []])])
    tight, expected = run([micro_batch(UNEVEN, width=9)])
    assert balance == pytest.approx(tight, rel=1e-6)
    for name, value in grads.items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_dense_layers_take_no_part() -> None:
    """The mean is over the layers that have experts."""
    model, batch = moe_model(dense_layers=(0,)), micro_batch(random_rows(2, seed=1))
    routers = RouterRecord(batch.document_ids_BS)
    model(batch.tokens_BS, document_ids_BS=batch.document_ids_BS, routers=routers)
    assert set(routers.layers) == {1}
    assert model.spec.num_expert_layers == 1


def test_a_record_that_was_lost_is_an_error() -> None:
    """A wrapper that copies its arguments would train without the loss; it stops instead."""
    batch = micro_batch(UNEVEN)
    with pytest.raises(RunError, match="no record"):
        add_balance(Loss(torch.zeros(())), RouterRecord(batch.document_ids_BS), batch, coefficient=1.0, num_layers=2)
