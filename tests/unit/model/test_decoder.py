"""The decoder's parts: initial values, ties, mixed precision, and the hand-written backwards."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from danlu.base.errors import UserError
from danlu.model.decoder import Decoder
from danlu.model.mlp import _Gated
from danlu.model.norm import rms_norm
from danlu.model.rope import Rotation, rotate
from danlu.model.spec import ModelSpec
from danlu.model.vocabulary import add_tokens, untie_head
from tiny_models import GPT, T0, T1, build, logits, random_tokens


@pytest.mark.parametrize("spec", [T0, T1, GPT], ids=["untied", "tied", "gpt"])
def test_initial_weights_depend_on_the_seed_alone(spec: ModelSpec) -> None:
    """Same seed, same values, also by way of meta; another seed, other values; residual writers are smaller."""
    direct = Decoder(spec)
    direct.init_weights(3)
    with torch.device("meta"):
        late = Decoder(spec)
    late.to_empty(device="cpu")
    late.init_weights(3)
    other = Decoder(spec)
    other.init_weights(4)
    for (name, a), b, c in zip(direct.named_parameters(), late.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name
        assert a.dim() == 1 or not torch.equal(a, c), name
    assert direct.blocks[0].attention.query.weight.std() > 1.5 * direct.blocks[0].attention.output.weight.std()


def test_init_does_not_touch_the_global_generator() -> None:
    """Drawing weights neither reads nor moves torch's own random state."""
    before = torch.get_rng_state()
    Decoder(T0).init_weights(0)
    assert torch.equal(before, torch.get_rng_state())


def test_br_087_a_tied_gradient_is_the_input_part_plus_the_output_part() -> None:
    """One parameter, one gradient: the sum of what an untied twin gets in its two tables; one optimizer state."""
    tied = build(T1)
    twin = Decoder(T0)
    twin.load_state_dict({**tied.state_dict(), "head.weight": tied.embedding.weight})
    tokens, labels = random_tokens(2, 10), random_tokens(2, 10, seed=5)
    for model in (tied, twin):
        F.cross_entropy(logits(model, tokens).flatten(0, 1), labels.flatten()).backward()
    assert twin.head is not None
    assert tied.embedding.weight.grad is not None
    parts = twin.embedding.weight.grad + twin.head.weight.grad
    assert (tied.embedding.weight.grad - parts).abs().max() < 1e-6
    optimizer = torch.optim.AdamW(tied.parameters())
    optimizer.step()
    assert len(optimizer.state) == len(list(tied.parameters())) == len(T1.parameter_shapes())


def test_br_088_meta_then_materialise_keeps_the_tie() -> None:
    """The head is the embedding's own Parameter object before and after to_empty."""
    with torch.device("meta"):
        model = Decoder(T1)
    assert model.head_weight_VD is model.embedding.weight
    model.to_empty(device="cpu")
    assert model.head_weight_VD is model.embedding.weight
    assert "head.weight" not in model.state_dict()


@pytest.mark.parametrize("spec", [T0, GPT, replace(T0, family="qwen3", qk_norm=True)], ids=["llama", "gpt", "qk"])
def test_bf16_compute_keeps_fp32_parameters_and_gradients(spec: ModelSpec) -> None:
    """Activations are bf16, parameters and their gradients stay fp32, and the result is near the fp32 one."""
    exact = build(spec, spread=4.0)
    model = Decoder(spec, compute_dtype=torch.bfloat16)
    model.load_state_dict(exact.state_dict())
    tokens = random_tokens(2, 12)
    hidden = model(tokens)
    hidden.float().sum().backward()
    assert hidden.dtype == torch.bfloat16
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)
    expected = exact(tokens)
    assert (hidden - expected).norm() < 0.05 * expected.norm()


def test_dropout_acts_in_training_only() -> None:
    """Eval is deterministic and equal to no dropout; training is not."""
    plain, model = build(T0), Decoder(T0, dropout=0.5)
    model.load_state_dict(plain.state_dict())
    tokens = random_tokens(1, 8)
    assert torch.equal(model.eval()(tokens), plain(tokens))
    assert not torch.equal(model.train()(tokens), model(tokens))


def test_too_long_inputs_are_refused() -> None:
    """Learned positions end with their table; the first Qwen is limited in eval, where its own code extrapolates."""
    with pytest.raises(UserError, match="65 tokens"):
        build(GPT)(random_tokens(1, 65))
    qwen = replace(T0, family="qwen", num_kv_heads=4, qkv_bias=True, eval_max_positions=8)
    model = build(qwen)
    with pytest.raises(UserError, match="<= 8"):
        model(random_tokens(1, 9))
    model.train()(random_tokens(1, 9))
    build(T0)(random_tokens(1, T0.max_positions + 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_its_definition(dtype: torch.dtype) -> None:
    """Values and both gradients equal the composed formula, for a weight of either dtype."""
    torch.manual_seed(0)
    x, weight = torch.randn(3, 5, 24).to(dtype).requires_grad_(), torch.randn(24, requires_grad=True)
    y = rms_norm(x, weight, 1e-5)
    wide = x.detach().double().requires_grad_()
    expected = wide * (wide.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    grad = torch.randn_like(y)
    ours = torch.autograd.grad(y, (x, weight), grad)
    theirs = torch.autograd.grad(expected, (wide, weight), grad.double())
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    assert y.dtype == dtype
    for a, b in zip((y, *ours), (expected, *theirs), strict=True):
        assert (a - b).detach().abs().max() < tolerance * max(1.0, float(b.detach().abs().max()))


def test_rotation_equals_its_definition_and_gradient() -> None:
    """Turning pairs (i, i + H/2) matches complex multiplication, forwards and backwards."""
    torch.manual_seed(0)
    x = torch.randn(2, 6, 3, 8, dtype=torch.float64, requires_grad=True)
    angles = torch.randn(2, 6, 1, 4, dtype=torch.float64)
    turn = Rotation(angles.cos(), angles.sin())
    expected = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones_like(angles), angles)
    assert (rotate(x, turn) - torch.cat([expected.real, expected.imag], -1)).abs().max() < 1e-12
    assert torch.autograd.gradcheck(lambda y: rotate(y, turn), (x,))


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh"])
def test_the_gated_product_has_the_right_gradients(activation: str) -> None:
    """The recomputing backward passes the numeric gradient check for every activation."""
    torch.manual_seed(0)
    gate, up = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    assert torch.autograd.gradcheck(lambda a, b: _Gated.apply(a, b, activation), (gate, up))


@pytest.mark.parametrize(("num_new", "rows"), [(3, 64), (6, 72)])
@pytest.mark.parametrize("spec", [T0, T1], ids=["untied", "tied"])
def test_br_163_added_tokens_start_as_the_mean_and_nothing_else_moves(num_new: int, rows: int, spec: ModelSpec) -> None:
    """Tokenizer 60, table 64: new ids get the mean of the used rows, other rows keep their bits, ties stay."""
    model = build(spec)
    before = [table.detach().clone() for table in (model.embedding.weight, model.head_weight_VD)]
    add_tokens(model, num_used=60, num_new=num_new)
    assert model.spec.vocab_size == rows
    assert (model.head_weight_VD is model.embedding.weight) is spec.tied_embeddings
    for table, old in zip((model.embedding.weight, model.head_weight_VD), before, strict=True):
        assert table.shape[0] == rows
        assert torch.equal(table[:60], old[:60])
        assert torch.equal(table[60 + num_new : 64], old[60 + num_new :])
        assert (table[60 : 60 + num_new] - old[:60].mean(0)).abs().max() < 1e-6
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == model.spec.parameter_shapes()
    with pytest.raises(UserError, match="num_used = 99"):
        add_tokens(model, num_used=99, num_new=1)


def test_untying_copies_the_table_once() -> None:
    """A freed head starts equal, is a parameter of its own, and the spec says so."""
    model = build(T1)
    tokens = random_tokens(1, 6)
    before = logits(model, tokens)
    untie_head(model)
    untie_head(model)
    assert torch.equal(logits(model, tokens), before)
    assert model.spec == T0
    assert model.head_weight_VD is not model.embedding.weight


def saved_bytes(model: Decoder, tokens: Tensor) -> int:
    """Bytes that autograd keeps for the backward, parameters left out."""
    own = {parameter.data_ptr() for parameter in model.parameters()}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(tokens)
    del output
    return sum(kept.values())


def test_the_backward_keeps_a_modest_part_of_the_activations() -> None:
    """Per layer and token: six of width D, q, k, v and the heads' output, two of width F, and the MLP's product."""
    spec = replace(T0, num_layers=4)
    tokens = random_tokens(2, 64)
    a, b = (saved_bytes(build(s), tokens) for s in (spec, T0))
    per_token = (a - b) / 2 / tokens.numel() / 4
    width, mlp, heads = spec.hidden_size, spec.mlp_size, spec.num_heads * spec.head_dim
    assert per_token <= 4 * width + 4 * heads + 3 * mlp + 32
