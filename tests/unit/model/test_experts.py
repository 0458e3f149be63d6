"""Experts against a plain sum over all of them; ties, empty experts, recompute, and the seam for many ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from danlu.base.errors import RunError
from danlu.model import experts as experts_module
from danlu.model.decoder import Decoder, initial_value
from danlu.model.experts import Groups, LocalDispatch, MoE, permute
from danlu.model.flops import matmul_parameters, train_flops_per_token
from danlu.model.presets import PRESETS
from danlu.model.router import RouterRecord, route
from tiny import MOE_SPEC, balanced_loss, gradients, micro_batch, moe_model, random_rows


def drawn_layer(*, seed: int = 0, **changes: Any) -> MoE:
    """One layer of experts with weights large enough to matter."""
    layer = MoE(replace(MOE_SPEC, **changes), 0)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.0, 0.3, generator=generator)
    return layer


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def plain(layer: MoE, hidden_TD: Tensor) -> Tensor:
    """Every token through every expert, weighted with zero where the router did not choose it."""
    logits_TE = hidden_TD @ layer.router.weight.T
    chosen_TK = logits_TE.topk(layer.experts_per_token).indices
    probabilities_TE = logits_TE.softmax(-1)
    weights_TE = torch.zeros_like(logits_TE).scatter(1, chosen_TK, probabilities_TE.gather(1, chosen_TK))
    if layer.normalize:
        weights_TE = weights_TE / weights_TE.sum(-1, keepdim=True)
    parts = layer.experts
    total = torch.zeros_like(hidden_TD)
    for expert in range(layer.num_experts):
        gate, up, down = (matrix.weight[expert] for matrix in (parts.gate, parts.up, parts.down))
        total = total + weights_TE[:, expert, None] * ((F.silu(hidden_TD @ gate.T) * (hidden_TD @ up.T)) @ down.T)
    return total


@pytest.mark.parametrize("kernel", [False, True], ids=["one by one", "one kernel"])
@pytest.mark.parametrize("chosen", [1, 2, 4])
@pytest.mark.parametrize("normalize", [True, False])
def test_outputs_and_gradients_equal_the_sum_over_all_experts(
    kernel: bool, chosen: int, normalize: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sorting, grouped products and gathering change nothing: output, input and weight gradients to 1e-5."""
    monkeypatch.setattr(experts_module, "has_group_kernel", lambda *_: kernel)
    layer = drawn_layer(experts_per_token=chosen, normalize_top_k=normalize)
    hidden, weight = draw(3, 7, 32), draw(3, 7, 32, seed=2)
    found: list[dict[str, Tensor]] = []
    for run in (layer, lambda x: plain(layer, x.flatten(0, 1)).view_as(x)):
        x = hidden.clone().requires_grad_()
        out = run(x)
        layer.zero_grad()
        (out * weight).sum().backward()
        assert x.grad is not None
        found.append({"out": out.detach(), "hidden": x.grad, **gradients(layer)})
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], rtol=1e-5, atol=1e-5, msg=name)


def test_equal_logits_go_to_the_experts_with_the_lowest_index() -> None:
    """Ties are decided by a rule, not by a kernel: 0, 1 of four equal ones; 1, 3 where they share the maximum."""
    logits_TE = torch.tensor([[0.5, 0.5, 0.5, 0.5], [0.0, 2.0, 1.0, 2.0]])
    experts_TK, weights_TK = route(logits_TE, 2, normalize=True)
    assert experts_TK.tolist() == [[0, 1], [1, 3]]
    assert torch.equal(weights_TK, torch.full((2, 2), 0.5))
    many_TE = torch.zeros(300, 128)
    assert route(many_TE, 8, normalize=False)[0].tolist() == [list(range(8))] * 300


def test_the_router_decides_in_fp32_whatever_is_computed_in() -> None:
    """Logits that bf16 cannot tell apart are still told apart."""
    layer = drawn_layer(experts_per_token=1)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = torch.tensor([1.0, 1.001, 1.0005, 0.5])
    record = RouterRecord(torch.zeros(1, 5, dtype=torch.int64))
    layer(torch.ones(1, 5, 32, dtype=torch.bfloat16), record)
    assert record.layers[0].counts_BE.tolist() == [[0, 5, 0, 0]]


@pytest.mark.parametrize("kernel", [False, True], ids=["one by one", "one kernel"])
def test_br_257_experts_without_tokens_have_gradients_that_are_zero(
    kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All tokens to experts 0 and 1: the gradients of 2 and 3 exist and are exactly zero, those of 0 and 1 are not."""
    monkeypatch.setattr(experts_module, "has_group_kernel", lambda *_: kernel)
    layer = drawn_layer()
    with torch.no_grad():
        layer.router.weight.zero_()
    (layer(draw(2, 5, 32)) * draw(2, 5, 32, seed=3)).sum().backward()
    for matrix in (layer.experts.gate, layer.experts.up, layer.experts.down):
        assert matrix.weight.grad is not None
        assert matrix.weight.grad[2:].eq(0).all()
        assert matrix.weight.grad[:2].flatten(1).norm(dim=1).gt(0).all()


def test_br_257_no_tokens_at_all_leave_zero_gradients_too() -> None:
    """A rank whose experts get nothing still has every gradient, and an output without rows."""
    experts = drawn_layer().experts
    out = experts(torch.zeros(0, 32, requires_grad=True), torch.zeros(4, dtype=torch.int64))
    assert out.shape == (0, 32)
    out.sum().backward()
    assert all(grad.eq(0).all() for grad in gradients(experts).values())
    assert len(gradients(experts)) == 3


class Counting(LocalDispatch):
    """Writes down how many tokens each expert got, call by call."""

    def __init__(self) -> None:
        self.counts: list[list[int]] = []

    def send(self, tokens_PD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        self.counts.append(counts_E.tolist())
        return tokens_PD, counts_E, None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
def test_br_137_recompute_sends_every_token_where_it_went(
    dtype: torch.dtype, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With equal logits too: both passes have the same counts, and all gradients are bit-equal to no recompute."""
    batch = micro_batch(random_rows(3, seed=5))

    def run() -> tuple[dict[str, Tensor], list[list[list[int]]]]:
        model = moe_model()
        model.compute_dtype = dtype
        for block in model.blocks:
            block.mlp.dispatch = Counting()
            if tied:
                torch.nn.init.zeros_(block.mlp.router.weight)
        balanced_loss(model, batch).total.backward()
        return gradients(model), [block.mlp.dispatch.counts for block in model.blocks]

    expected, once = run()
    with monkeypatch.context() as patch:
        plain_call = torch.nn.Module.__call__

        def recomputed(module: torch.nn.Module, *arguments: Any, **named: Any) -> Any:
            if type(module).__name__ == "Block":
                return checkpoint(lambda *inner: plain_call(module, *inner), *arguments, use_reentrant=False)
            return plain_call(module, *arguments, **named)

        patch.setattr(torch.nn.Module, "__call__", recomputed)
        found, twice = run()
    assert [counts * 2 for counts in once] == twice
    assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


def test_initial_weights_of_an_expert_depend_on_its_number_alone() -> None:
    """A rank that holds some experts can draw just those, and two experts differ."""
    whole = Decoder(MOE_SPEC)
    whole.init_weights(3)
    for name, parameter in whole.named_parameters():
        if parameter.dim() == 3:
            drawn = initial_value(MOE_SPEC, f"{name}.2", parameter.shape[1:], 3)
            assert torch.equal(drawn, parameter[2])
    stack = whole.blocks[0].mlp.experts.gate.weight
    assert not torch.equal(stack[0], stack[1])


class Reversed:
    """Experts live in reverse order: tokens travel, are computed elsewhere, and come back."""

    def send(self, tokens_PD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        parts = tokens_PD.split(counts_E.tolist())
        return torch.cat(parts[::-1]), counts_E.flip(0), counts_E.tolist()[::-1]

    def back(self, out_QD: Tensor, receipt: Any) -> Tensor:
        return torch.cat(out_QD.split(receipt)[::-1])


def test_a_dispatch_may_carry_tokens_elsewhere_and_back() -> None:
    """Between sorting and computing anything may happen to the groups, if `back` undoes it."""
    layer, hidden = drawn_layer(), draw(2, 9, 32)
    expected = layer(hidden)
    with torch.no_grad():
        for matrix in (layer.experts.gate, layer.experts.up, layer.experts.down):
            matrix.weight.copy_(matrix.weight.flip(0))
    layer.dispatch = Reversed()
    torch.testing.assert_close(layer(hidden), expected)


def test_tokens_lost_on_the_way_are_an_error() -> None:
    """Counts that do not add up to the rows raise instead of leaving rows uncomputed."""
    groups = Groups(torch.tensor([2, 1]), in_one_kernel=False)
    with pytest.raises(RunError, match="4/3"):
        groups.multiply(torch.zeros(4, 8), torch.zeros(2, 8, 8))


def test_permutation_keeps_the_tokens_order_within_an_expert() -> None:
    """Sorted by expert, then by token; places are the inverse; counts add up."""
    order_P, place_P, counts_E = permute(torch.tensor([[2, 0], [0, 2], [3, 0]]), 4)
    assert order_P.tolist() == [1, 2, 5, 0, 3, 4]
    assert order_P[place_P].tolist() == list(range(6))
    assert counts_E.tolist() == [3, 0, 2, 1]


def test_only_a_tokens_own_experts_count() -> None:
    """Active parameters and FLOPs are those of a dense model whose MLP is K experts wide, and the routers."""
    spec = replace(MOE_SPEC, num_experts=16, experts_per_token=3)
    dense = replace(
        spec, family="qwen3", num_experts=None, experts_per_token=None, expert_size=None, mlp_size=3 * spec.expert_width
    )
    routers = spec.num_layers * 16 * spec.hidden_size
    assert spec.num_active_parameters() == dense.num_parameters() + routers
    assert matmul_parameters(spec) == matmul_parameters(dense) + routers
    assert train_flops_per_token(spec, 64) == train_flops_per_token(dense, 64) + 6 * routers
    assert spec.num_parameters() > 3 * spec.num_active_parameters() / 2


@pytest.mark.parametrize(("name", "billions"), [("mixtral-8x7b", 12.9), ("mixtral-8x22b", 39.2), ("qwen3-30b-a3b", 3.4),
                                                ("qwen3-235b-a22b", 22.2)])  # fmt: skip
def test_presets_have_the_published_active_parameters(name: str, billions: float) -> None:
    """12.9 and 39 billion for Mixtral, 3.3 and 22 for Qwen3 (with the embedding)."""
    assert round(PRESETS[name].num_active_parameters() / 1e9, 1) == billions
