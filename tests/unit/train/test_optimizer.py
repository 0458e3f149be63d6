"""AdamW against the paper in fp64, its groups and state, the schedules at their edges, and clipping."""

from __future__ import annotations

import ast
import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

import danlu
from danlu.train.optimizer import learning_rate_at
from tiny import gradients, language_loss, micro_batch, random_rows, state_of, tiny_model, tiny_optimizer


@pytest.mark.parametrize("fused", [False, True])
def test_five_steps_equal_a_hand_written_adamw_in_fp64(fused: bool) -> None:
    """Decoupled decay, bias correction and epsilon as in the paper (arXiv 1711.05101); decay of matrices only."""
    model = nn.Linear(3, 4)
    optimizer = tiny_optimizer(model, fused=fused)
    weights = {name: value.detach().double().clone() for name, value in model.named_parameters()}
    first = {name: torch.zeros_like(value) for name, value in weights.items()}
    second = {name: torch.zeros_like(value) for name, value in weights.items()}
    draw = torch.Generator().manual_seed(0)
    for step in range(1, 6):
        for name, parameter in model.named_parameters():
            grad = parameter.grad = torch.randn(parameter.shape, generator=draw)
            weights[name] *= 1 - 1e-2 * (0.1 if name == "weight" else 0.0)
            first[name] = 0.9 * first[name] + 0.1 * grad.double()
            second[name] = 0.95 * second[name] + 0.05 * grad.double() ** 2
            root = (second[name] / (1 - 0.95**step)).sqrt() + 1e-8
            weights[name] -= 1e-2 * first[name] / (1 - 0.9**step) / root
        optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach().double(), weights[name], rtol=1e-5, atol=1e-7)


def test_only_matrices_and_embeddings_are_decayed() -> None:
    """By number of dimensions: norms and biases are in the group without decay, nothing is in two or none."""
    model = tiny_model(family="qwen2", qkv_bias=True)
    groups = tiny_optimizer(model).core.param_groups
    decay = {name: group["weight_decay"] for group in groups for name in group["param_names"]}
    assert decay.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        assert decay[name] == (0.1 if parameter.ndim == 2 else 0.0), name
    assert decay["blocks.0.attention.query.bias"] == 0.0
    assert decay["final_norm.weight"] == 0.0
    assert decay["embedding.weight"] == 0.1


def test_frozen_parameters_have_no_state() -> None:
    """What does not train costs no optimizer memory and is never decayed."""
    model = tiny_model()
    model.embedding.weight.requires_grad_(False)
    names = {name.rsplit(".", 1)[0] for name in state_of(tiny_optimizer(model))}
    assert names == dict(model.named_parameters()).keys() - {"embedding.weight"}


def test_br_201_state_is_there_before_the_first_step() -> None:
    """Both moments of every parameter are allocated (zero) at once, and the first step uses just them."""
    model = tiny_model()
    optimizer = tiny_optimizer(model)
    before = state_of(optimizer)
    assert sum(value.numel() for value in before.values()) == sum(2 * p.numel() + 1 for p in model.parameters())
    assert not any(value.any() for value in before.values())
    language_loss(model, micro_batch(random_rows(2, seed=0))).total.backward()
    optimizer.step()
    after = state_of(optimizer)
    assert {name: value.data_ptr() for name, value in after.items()} == {
        name: value.data_ptr() for name, value in before.items()
    }
    assert all(value.any() for value in after.values())


def test_br_087_a_tied_weight_has_one_state_and_both_gradients() -> None:
    """The tied gradient is the embedding's plus the head's; the weight is counted, stored and updated once."""
    tied, untied = tiny_model(tied_embeddings=True), tiny_model()
    with torch.no_grad():
        for name, parameter in untied.named_parameters():
            parameter.copy_(dict(tied.named_parameters())[name.replace("head.weight", "embedding.weight")])
    batch = micro_batch(random_rows(4, seed=0))
    for model in (tied, untied):
        language_loss(model, batch).total.backward()
    parts = gradients(untied)
    torch.testing.assert_close(
        gradients(tied)["embedding.weight"], parts["embedding.weight"] + parts["head.weight"], rtol=1e-5, atol=1e-6
    )
    names = [name for name in state_of(tiny_optimizer(tied)) if name.startswith(("embedding", "head"))]
    assert names == ["embedding.weight.step", "embedding.weight.exp_avg", "embedding.weight.exp_avg_sq"]
    assert sum(p.numel() for p in tied.parameters()) == tied.spec.num_parameters()


def test_br_088_to_empty_keeps_the_tie() -> None:
    """Meta, materialise, initialise: embedding and head are one Parameter, and it trains as one."""
    straight = tiny_model(tied_embeddings=True)
    with torch.device("meta"):
        model = type(straight)(straight.spec)
    model.to_empty(device="cpu")
    model.init_weights(0)
    assert model.head_weight_VD is model.embedding.weight
    batch = micro_batch(random_rows(4, seed=0))
    for each in (model, straight):
        language_loss(each, batch).total.backward()
    assert torch.equal(gradients(model)["embedding.weight"], gradients(straight)["embedding.weight"])


def schedule(kind: str, *, total: int = 10, warmup: int = 2, ratio: float = 0.1, decay: float = 0.3) -> list[float]:
    return [
        learning_rate_at(
            step, kind=kind, peak=1.0, total_steps=total, warmup_steps=warmup, min_ratio=ratio, decay_fraction=decay
        )
        for step in range(total)
    ]


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
def test_schedules_at_their_edges(kind: str) -> None:
    """Warm-up starts above 0 and ends at the peak; the last step has the minimum (constant: the peak)."""
    rates = schedule(kind)
    assert rates[:2] == [0.5, 1.0]
    assert rates[-1] == pytest.approx(1.0 if kind == "constant" else 0.1)
    assert all(later <= earlier for earlier, later in itertools.pairwise(rates[1:]))
    assert schedule(kind, warmup=0)[0] > (0.9 if kind != "linear" else 0.8)


def test_schedules_in_the_middle() -> None:
    """Cosine and linear by their formulas, wsd flat until its share of the run is left."""
    cosine, linear, wsd = schedule("cosine"), schedule("linear"), schedule("wsd")
    for step in range(2, 10):
        done = (step - 1) / 8
        assert cosine[step] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
        assert linear[step] == pytest.approx(0.1 + 0.9 * (1 - done))
    assert wsd[1:7] == [1.0] * 6
    assert wsd[7:] == pytest.approx([0.7, 0.4, 0.1])


@pytest.mark.parametrize("kind", ["cosine", "linear", "constant", "wsd"])
@pytest.mark.parametrize(("total", "warmup"), [(1, 0), (1, 1), (3, 3), (2, 1), (1, 2)])
def test_schedules_of_very_short_runs(kind: str, total: int, warmup: int) -> None:
    """One step, or nothing but warm-up: always a finite rate in (0, peak]; beyond the end it stays at the minimum."""
    assert all(0 < rate <= 1.0 for rate in schedule(kind, total=total, warmup=warmup))
    beyond = learning_rate_at(
        99, kind=kind, peak=1.0, total_steps=total, warmup_steps=warmup, min_ratio=0.1, decay_fraction=0.1
    )
    assert beyond == pytest.approx(1.0 if kind == "constant" else 0.1)


def test_clipping_scales_all_gradients_by_one_factor() -> None:
    """Norm 13 clipped to 6.5 halves every entry; below the limit, and with 0, nothing changes."""
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = tiny_optimizer(nn.ParameterDict({"first": first, "second": second}))
    for limit, expected in ((6.5, [2.5, 6.0]), (20.0, [5.0, 12.0]), (0.0, [5.0, 12.0])):
        first.grad, second.grad = torch.tensor([5.0]), torch.tensor([12.0])
        assert optimizer.clip(limit) == 13.0
        assert [float(first.grad), float(second.grad)] == pytest.approx(expected, rel=1e-5)


def test_br_023_clipping_with_a_frozen_trunk_counts_only_what_trains() -> None:
    """Parameters without a gradient count as zero and stay as they are; the trainable ones are scaled exactly once."""
    model = tiny_model()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("norm.weight"))
    language_loss(model, micro_batch(random_rows(2, seed=0))).total.backward()
    before = gradients(model)
    norm = torch.cat([grad.flatten() for grad in before.values()]).norm()
    assert tiny_optimizer(model).clip(float(norm) / 4) == pytest.approx(float(norm))
    after = gradients(model)
    assert after.keys() == before.keys()
    for name, grad in after.items():
        torch.testing.assert_close(grad, before[name] / 4, rtol=1e-4, atol=1e-9)


def test_br_204_the_step_path_never_empties_the_cache() -> None:
    """`empty_cache` scans every allocator block: no file of the training or parallel code calls it."""
    root = Path(danlu.__file__).parent
    files = [
        path
        for layer in ("train", "parallel", "objective", "model", "checkpoint")
        for path in (root / layer).rglob("*.py")
    ]
    calls = {
        path.name: node.attr
        for path in files
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Attribute) and node.attr == "empty_cache"
    }
    assert len(files) > 20
    assert calls == {}
