"""Chunked cross-entropy against torch's own, in value, gradients, dtypes and memory."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from danlu.data.batch import IGNORE
from danlu.objective.cross_entropy import chunked_cross_entropy, plan_chunk_tokens
from tiny import VOCAB, language_loss, micro_batch, random_rows, tiny_model

V, D, T = 50, 16, 37


def inputs(dtype: torch.dtype = torch.float32, *, masked: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, head and labels (a share of them no target)."""
    draw = torch.Generator().manual_seed(0)
    hidden_TD = torch.randn(T, D, generator=draw).to(dtype).requires_grad_()
    head_VD = torch.randn(V, D, generator=draw).requires_grad_()
    labels_T = torch.randint(V, (T,), generator=draw)
    labels_T[torch.rand(T, generator=draw) < masked] = IGNORE
    return hidden_TD, head_VD, labels_T


def reference(hidden_TD: Tensor, head_VD: Tensor, labels_T: Tensor, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss and both gradients of the eager loss in fp64."""
    hidden, head = (value.detach().double().requires_grad_() for value in (hidden_TD, head_VD))
    loss = F.cross_entropy(hidden @ head.T, labels_T, ignore_index=IGNORE, reduction="sum")
    (loss * scale).backward()
    assert hidden.grad is not None
    assert head.grad is not None
    return loss, hidden.grad, head.grad


@pytest.mark.parametrize("tokens_per_chunk", [1, 2, 7, 36, 37, 1000])
def test_chunks_equal_the_eager_loss(tokens_per_chunk: int) -> None:
    """Value and both gradients equal torch's cross entropy in fp64, for every way to cut the tokens."""
    hidden, head, labels = inputs()
    loss = chunked_cross_entropy(hidden, head, labels, max_bytes=tokens_per_chunk * 4 * V)
    (loss * 0.37).backward()
    expected, hidden_grad, head_grad = reference(hidden, head, labels, 0.37)
    assert hidden.grad is not None
    assert head.grad is not None
    torch.testing.assert_close(loss.double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(hidden.grad.double(), hidden_grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(head.grad.double(), head_grad, rtol=1e-5, atol=1e-6)


def test_br_041_bf16_hidden_states_give_an_fp32_loss_and_an_fp32_head_gradient() -> None:
    """Under bf16 compute the loss is fp32 and within 1e-3 of the value of fp32 logits; the head's gradient is fp32."""
    hidden, head, labels = inputs(torch.bfloat16)
    loss = chunked_cross_entropy(hidden, head, labels, max_bytes=5 * 4 * V)
    loss.backward()
    expected, _, head_grad = reference(hidden, head, labels, 1.0)
    assert hidden.grad is not None
    assert head.grad is not None
    assert loss.dtype == torch.float32
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-3)
    assert hidden.grad.dtype == torch.bfloat16
    assert head.grad.dtype == torch.float32
    assert float((head.grad - head_grad).norm() / head_grad.norm()) < 1e-2


def test_br_041_the_whole_model_in_bf16_stays_near_its_fp32_loss() -> None:
    """T0 with bf16 compute: the same final hidden states through fp32 logits give the loss within 1e-3."""
    model = tiny_model()
    model.compute_dtype = torch.bfloat16
    batch = micro_batch(random_rows(4, seed=0))
    loss = language_loss(model, batch).total.detach()
    hidden = model(batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS)
    logits = hidden.float() @ model.head_weight_VD.T
    expected = F.cross_entropy(logits.flatten(0, 1), batch.labels_BS.flatten(), reduction="sum").detach()
    assert loss.dtype == torch.float32
    assert float(loss) == pytest.approx(float(expected), rel=1e-3)


@pytest.mark.parametrize(("hidden_learns", "head_learns"), [(True, False), (False, True), (False, False)])
def test_frozen_sides_get_no_gradient(hidden_learns: bool, head_learns: bool) -> None:
    """A frozen head (or trunk) costs and receives nothing, and the other side's gradient is unchanged."""
    hidden, head, labels = inputs()
    _, hidden_grad, head_grad = reference(hidden, head, labels, 1.0)
    hidden.requires_grad_(hidden_learns)
    head.requires_grad_(head_learns)
    loss = chunked_cross_entropy(hidden, head, labels, max_bytes=700)
    assert loss.requires_grad == (hidden_learns or head_learns)
    if loss.requires_grad:
        loss.backward()
    for value, learns, expected in ((hidden, hidden_learns, hidden_grad), (head, head_learns, head_grad)):
        assert (value.grad is not None) == learns
        if value.grad is not None:
            torch.testing.assert_close(value.grad.double(), expected, rtol=1e-5, atol=1e-6)


def test_all_masked_is_exactly_zero_with_zero_gradients() -> None:
    """No target: loss 0.0, gradients exactly 0, no NaN; the graph is there, so every rank takes part in a reduction."""
    hidden, head, labels = inputs(masked=2.0)
    loss = chunked_cross_entropy(hidden, head, labels, max_bytes=700)
    loss.backward()
    assert float(loss.detach()) == 0.0
    assert hidden.grad is not None
    assert head.grad is not None
    assert not hidden.grad.any()
    assert not head.grad.any()


def test_without_gradients_the_value_is_the_same() -> None:
    """Evaluation takes the short way to the same number."""
    hidden, head, labels = inputs()
    trained = chunked_cross_entropy(hidden, head, labels, max_bytes=700)
    with torch.no_grad():
        evaluated = chunked_cross_entropy(hidden, head, labels, max_bytes=700)
    assert torch.equal(trained.detach(), evaluated)


def test_a_second_backward_is_refused() -> None:
    """The stored gradients are scaled in place, so using them twice would be wrong: it raises."""
    hidden, head, labels = inputs()
    loss = chunked_cross_entropy(hidden, head, labels, max_bytes=700)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="only once"):
        loss.backward()


def test_extreme_logits_stay_finite() -> None:
    """Logits of a thousand neither overflow the loss nor its gradients."""
    hidden = torch.full((3, 4), 100.0, requires_grad=True)
    head = torch.tensor([[3.0] * 4, [-3.0] * 4], requires_grad=True)
    loss = chunked_cross_entropy(hidden, head, torch.tensor([0, 1, 0]), max_bytes=8)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(2400.0)
    assert hidden.grad is not None
    assert hidden.grad.isfinite().all()


@given(st.integers(1, 300_000), st.integers(0, 2**34))
def test_br_200_a_chunk_never_exceeds_its_cap(vocab_size: int, max_bytes: int) -> None:
    """For any vocabulary and cap a chunk's logits fit, or it is a single token; and one more token would not fit."""
    tokens = plan_chunk_tokens(vocab_size, max_bytes)
    assert tokens >= 1
    assert tokens * vocab_size * 4 <= max_bytes or tokens == 1
    assert (tokens + 1) * vocab_size * 4 > max_bytes


def test_br_200_the_cap_holds_at_run_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of logits that the loss really makes is larger than the cap."""
    seen = []
    plain = torch.softmax

    def spy(logits: Tensor, dim: int, *, dtype: torch.dtype) -> Tensor:
        seen.append(logits.numel() * logits.element_size())
        return plain(logits, dim, dtype=dtype)

    monkeypatch.setattr(torch, "softmax", spy)
    hidden, head, labels = inputs()
    chunked_cross_entropy(hidden, head, labels, max_bytes=3 * 4 * V + 5)
    assert max(seen) == 3 * 4 * V
    assert sum(seen) == int((labels != IGNORE).sum()) * 4 * V


def test_loss_is_a_sum_over_target_tokens() -> None:
    """A batch's loss is the sum of its rows' losses: no mean hides in it."""
    model = tiny_model()
    rows = random_rows(4, seed=3)
    whole = float(language_loss(model, micro_batch(rows)).total.detach())
    parts = sum(float(language_loss(model, micro_batch([row])).total.detach()) for row in rows)
    assert whole == pytest.approx(parts, rel=1e-6)
    assert model.spec.vocab_size == VOCAB
