"""One optimizer step: every target token of the global batch weighs the same, whatever it is cut into."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from danlu.data.batch import MicroBatch
from danlu.model.decoder import Decoder
from danlu.objective.cross_entropy import Loss
from danlu.parallel.data import Reducer
from danlu.parallel.mesh import World, open_world
from danlu.train.step import (
    StepResult,
    count_tokens,
    find_culprits,
    forward_backward,
    nonfinite_error,
    reduce_losses,
)
from tiny import Document, gradients, language_loss, micro_batch, random_rows, tiny_model

CPU = torch.device("cpu")
UNEVEN: list[list[Document]] = [[[3, 4, 5, 6, 7, 8]], [[9, 10]], [[1, 2, 3], [4, 5]], [[20, 21, 22, 23]]]


@pytest.fixture
def world() -> Iterator[World]:
    with open_world(device="cpu") as joined:
        yield joined


def step(model: Decoder, batches: list[MicroBatch], targets: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    reducer = Reducer(list(model.named_parameters()))
    return forward_backward(partial(language_loss, model), batches, reducer, valid_tokens=targets, device=CPU)


def run(batches: list[MicroBatch], **changes: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the mean loss and the gradients of one step of T0 over these micro-batches."""
    model = tiny_model(**changes)
    targets = sum(count_tokens([batch])[0] for batch in batches)
    loss_sum, _ = step(model, batches, targets)
    return float(loss_sum) / targets, gradients(model)


def assert_equal(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], *, tolerance: float = 1e-6) -> None:
    assert left.keys() == right.keys()
    for name, value in left.items():
        torch.testing.assert_close(value, right[name], rtol=1e-5, atol=tolerance)


def test_br_001_sums_of_12_over_3_tokens_and_5_over_1_make_17_over_4(world: World) -> None:
    """The loss is 4.25, not the 4.5 of averaged means, and the gradient is that of the four tokens together."""
    weight = nn.Parameter(torch.ones(()))
    sums = iter([12.0, 5.0])
    batches = [micro_batch([[[1, 2, 3, 4]]]), micro_batch([[[1, 2]]])]
    targets, tokens = count_tokens(batches)
    assert (targets, tokens) == (4, 6)
    loss_sum, parts = forward_backward(
        lambda _: Loss(next(sums) * weight), batches, Reducer([]), valid_tokens=targets, device=CPU
    )
    result = StepResult(loss_sum, targets, 0.0, False, parts)
    assert reduce_losses(result, world) == {"loss": 4.25}
    assert weight.grad is not None
    assert float(weight.grad) == 4.25


@pytest.mark.parametrize("cut", [[1, 1, 1, 1], [1, 3], [3, 1], [2, 2]])
def test_br_001_accumulated_gradients_equal_the_whole_batch(cut: list[int]) -> None:
    """Rows of very different lengths, cut in any way: loss and every gradient as in one pass."""
    rows = iter(UNEVEN)
    loss, grads = run([micro_batch([next(rows) for _ in range(size)]) for size in cut])
    whole_loss, whole_grads = run([micro_batch(UNEVEN)])
    assert loss == pytest.approx(whole_loss, rel=1e-6)
    assert_equal(grads, whole_grads)


def test_br_005_nothing_is_normalised_twice() -> None:
    """The gradient norm with 4 micro-batches is that of the merged batch."""
    norms = []
    for batches in ([micro_batch(UNEVEN)], [micro_batch([row]) for row in UNEVEN]):
        model = tiny_model()
        targets, _ = count_tokens(batches)
        step(model, batches, targets)
        norms.append(torch.cat([grad.flatten() for grad in gradients(model).values()]).norm())
    assert float(norms[1] / norms[0]) == pytest.approx(1.0, rel=1e-5)


def test_br_006_one_micro_batch_of_activations_lives_at_a_time() -> None:
    """The peak of what autograd has saved is the same for 1 and for 8 micro-batches."""

    def peak(num: int) -> int:
        live = {"now": 0, "peak": 0}

        class Saved:
            value: torch.Tensor

        def forget(size: int) -> None:
            live["now"] -= size

        def pack(value: torch.Tensor) -> Saved:
            saved, size = Saved(), value.numel() * value.element_size()
            saved.value = value
            live["now"] += size
            live["peak"] = max(live["peak"], live["now"])
            weakref.finalize(saved, forget, size)
            return saved

        batches = [micro_batch(random_rows(2, seed=0))] * num
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda saved: saved.value):
            step(tiny_model(), batches, 10)
        gc.collect()
        assert live["now"] == 0
        return live["peak"]

    assert peak(1) > 10_000
    assert peak(8) <= 1.1 * peak(1)


def test_br_008_rows_without_targets_contribute_exactly_zero() -> None:
    """A masked micro-batch changes neither loss nor gradients by one bit, and alone it gives 0 and no NaN."""
    masked = micro_batch([[([1, 2, 3, 4], [False] * 4)]])
    empty_row = micro_batch([[]])
    loss, grads = run([micro_batch(UNEVEN)])
    with_masked_loss, with_masked = run([micro_batch(UNEVEN), masked, empty_row])
    assert with_masked_loss == loss
    assert all(torch.equal(grads[name], with_masked[name]) for name in grads)
    model = tiny_model()
    loss_sum, _ = step(model, [masked], 0)
    assert float(loss_sum) == 0.0
    assert not any(grad.any() for grad in gradients(model).values())


def test_packed_documents_equal_one_document_a_row() -> None:
    """The same documents side by side or each in a row of its own: same loss, same gradients."""
    documents: list[Document] = [[5, 6, 7, 8], [9, 10, 11], [30, 29], [1, 2, 3, 4, 5, 6], [7]]
    packed_loss, packed = run([micro_batch([documents[:3], documents[3:]])])
    alone_loss, alone = run([micro_batch([[document] for document in documents])])
    assert packed_loss == pytest.approx(alone_loss, rel=1e-6)
    assert_equal(packed, alone)


def test_loss_parts_are_summed_and_divided_like_the_loss(world: World) -> None:
    """Named parts of an objective reach the metrics with the same weights as the total."""
    batches = [micro_batch([[[1, 2, 3, 4]]]), micro_batch([[[1, 2]]])]
    values = iter([(12.0, 8.0), (5.0, 2.0)])

    def compute(batch: MicroBatch) -> Loss:
        total, part = next(values)
        return Loss(torch.tensor(total, requires_grad=True), {"loss_ce": torch.tensor(part)})

    loss_sum, parts = forward_backward(compute, batches, Reducer([]), valid_tokens=4, device=CPU)
    assert reduce_losses(StepResult(loss_sum, 4, 0.0, False, parts), world) == {
        "loss": 4.25,
        "loss_ce": 2.5,
    }


def test_br_037_the_error_names_step_rank_and_samples(world: World) -> None:
    """A non-finite loss is blamed on its rank and samples; a finite loss with a bad gradient says so."""
    nan, fine = torch.tensor(torch.nan), torch.tensor(2.0)
    assert find_culprits(fine, range(3), world) == []
    (culprit,) = find_culprits(nan, range(4, 6), world)
    text = str(nonfinite_error(3, torch.nan, [culprit]))
    for part in ("step 3", "rank 0", "[4, 5]", "nan", 'on_nonfinite="skip"'):
        assert part in text
    assert "every rank's loss is finite" in str(nonfinite_error(3, torch.inf, []))
