"""The decoder against transformers, family by family, through both of their file formats."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from danlu.checkpoint.convert import load_decoder, save_hf
from danlu.model.decoder import Decoder
from danlu.model.generate import generate
from tiny_models import logits, random_tokens

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
QWEN_EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GPT_SIZES = {"vocab_size": 64, "n_embd": 35, "n_layer": 2, "n_head": 5, "n_positions": 48, "bos_token_id": 1}


def rope(kind: str, **numbers: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 100.0, **numbers}}


LLAMA3 = rope("llama3", factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
YARN = {"factor": 4.0, "original_max_position_embeddings": 16}
CASES: dict[str, Any] = {
    "llama gqa": lambda: LlamaConfig(**SIZES),
    "llama mqa": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 1}),
    "llama mha tied": lambda: LlamaConfig(**{**SIZES, "num_key_value_heads": 4}, tie_word_embeddings=True),
    "llama biases": lambda: LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama head width 10": lambda: LlamaConfig(**SIZES, head_dim=10),
    "llama gelu": lambda: LlamaConfig(**SIZES, hidden_act="gelu_pytorch_tanh"),
    "llama theta": lambda: LlamaConfig(**SIZES, **rope("default")),
    "llama llama3": lambda: LlamaConfig(**SIZES, **LLAMA3),
    "llama linear": lambda: LlamaConfig(**SIZES, **rope("linear", factor=3.0)),
    "llama dynamic": lambda: LlamaConfig(**{**SIZES, "max_position_embeddings": 16}, **rope("dynamic", factor=2.0)),
    "llama yarn": lambda: LlamaConfig(**SIZES, **rope("yarn", **YARN)),
    "llama yarn full": lambda: LlamaConfig(
        **SIZES, **rope("yarn", **YARN, beta_fast=4.0, beta_slow=0.5, mscale=0.7, mscale_all_dim=0.9, truncate=False)
    ),
    "llama yarn factor": lambda: LlamaConfig(**SIZES, **rope("yarn", **YARN, attention_factor=1.3)),
    "qwen2": lambda: Qwen2Config(**SIZES),
    "qwen2 tied": lambda: Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen2 window": lambda: Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    "qwen3": lambda: Qwen3Config(**SIZES, head_dim=12),
    "qwen3 bias tied": lambda: Qwen3Config(**SIZES, head_dim=16, attention_bias=True, tie_word_embeddings=True),
    "mistral window": lambda: MistralConfig(**SIZES, sliding_window=5),
    "mistral nemo": lambda: MistralConfig(**SIZES, sliding_window=None, head_dim=6),
    "mixtral": lambda: MixtralConfig(**SIZES, num_local_experts=4),
    "mixtral mha tied window": lambda: MixtralConfig(
        **{**SIZES, "num_key_value_heads": 4},
        num_local_experts=3,
        num_experts_per_tok=1,
        tie_word_embeddings=True,
        sliding_window=5,
    ),
    "mixtral all experts": lambda: MixtralConfig(**SIZES, num_local_experts=3, num_experts_per_tok=3, head_dim=6),
    "qwen3 moe": lambda: Qwen3MoeConfig(**SIZES, **QWEN_EXPERTS, norm_topk_prob=True, head_dim=12),
    "qwen3 moe not normalised": lambda: Qwen3MoeConfig(**SIZES, **QWEN_EXPERTS, norm_topk_prob=False),
    "qwen3 moe dense layers": lambda: Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 4}, **QWEN_EXPERTS, mlp_only_layers=[3], decoder_sparse_step=2
    ),
    "qwen3 moe tied bias": lambda: Qwen3MoeConfig(
        **SIZES,
        **QWEN_EXPERTS,
        mlp_only_layers=[0],
        norm_topk_prob=True,
        tie_word_embeddings=True,
        attention_bias=True,
    ),
    "gpt2 odd head width": lambda: GPT2Config(**GPT_SIZES),
    "gpt2 gelu untied inner": lambda: GPT2Config(
        **GPT_SIZES, n_inner=40, activation_function="gelu", tie_word_embeddings=False
    ),
}


def random_hf(name: str) -> Any:
    """A transformers model whose every parameter, biases and norms included, is far from its initial value."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CASES[name]()).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(1 + 0.2 * noise if parameter.dim() == 1 else 0.2 * noise)
    return model


@pytest.mark.parametrize("name", CASES)
def test_br_238_logits_equal_transformers_in_both_directions(name: str, tmp_path: Path) -> None:
    """Their files give our logits, our files give theirs (1e-5 in fp32), and the round trip is bit-equal."""
    theirs = random_hf(name)
    theirs.save_pretrained(tmp_path / "theirs")
    ours = load_decoder(tmp_path / "theirs")
    tokens = random_tokens(2, 30)
    with torch.no_grad():
        expected = theirs(tokens).logits
        assert (logits(ours, tokens) - expected).abs().max() < 1e-5
        save_hf(ours, tmp_path / "ours")
        again, info = AutoModelForCausalLM.from_pretrained(tmp_path / "ours", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert torch.equal(again.eval()(tokens).logits, expected)
    back = load_decoder(tmp_path / "ours")
    assert back.spec == ours.spec
    for (name_a, a), (name_b, b) in zip(ours.named_parameters(), back.named_parameters(), strict=True):
        assert name_a == name_b
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("mixtral", "qwen3 moe"))])
def test_experts_stacked_in_the_file_are_the_same_model(name: str, tmp_path: Path) -> None:
    """Experts in the file one tensor a matrix, or stacked as transformers >= 5 holds them: the same parameters."""
    theirs = random_hf(name)
    theirs.save_pretrained(tmp_path / "each")
    theirs.save_pretrained(tmp_path / "stacked", save_original_format=False)
    each, stacked = load_decoder(tmp_path / "each"), load_decoder(tmp_path / "stacked")
    for (name_a, a), (name_b, b) in zip(each.named_parameters(), stacked.named_parameters(), strict=True):
        assert name_a == name_b
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["llama gqa", "llama llama3", "qwen2 window", "qwen3", "mistral window",
                                  "gpt2 odd head width", "mixtral", "qwen3 moe dense layers"])  # fmt: skip
def test_greedy_generation_equals_transformers(name: str, tmp_path: Path) -> None:
    """The KV cache generates the tokens that transformers generates."""
    theirs = random_hf(name)
    theirs.save_pretrained(tmp_path)
    prompts = [random_tokens(length, seed=length).tolist() for length in (4, 9, 1)]
    expected = []
    for prompt in prompts:
        out = theirs.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt)), max_new_tokens=16, do_sample=False,
            eos_token_id=63, pad_token_id=0,
        )  # fmt: skip
        expected.append([token for token in out[0, len(prompt) :].tolist() if token != 63])
    assert generate(load_decoder(tmp_path), prompts, max_new_tokens=16, stop_ids=[63]) == expected


@pytest.mark.parametrize("name", ["llama biases", "qwen3", "gpt2 odd head width", "mistral window", "mixtral",
                                  "qwen3 moe", "qwen3 moe not normalised"])  # fmt: skip
def test_gradients_equal_transformers(name: str, tmp_path: Path) -> None:
    """Training starts from the same gradients, not only the same logits."""
    theirs = random_hf(name)
    theirs.save_pretrained(tmp_path)
    ours = load_decoder(tmp_path)
    tokens, labels = random_tokens(2, 24), random_tokens(2, 24, seed=2)
    F.cross_entropy(theirs(tokens).logits.flatten(0, 1), labels.flatten()).backward()
    F.cross_entropy(logits(ours, tokens).flatten(0, 1), labels.flatten()).backward()
    embedding = theirs.get_input_embeddings().weight.grad
    assert (ours.embedding.weight.grad - embedding).abs().max() < 1e-5 * embedding.abs().max()


def plain_qwen(ours: Decoder, fused: dict[str, Tensor], tokens_BS: Tensor) -> Tensor:
    """The first Qwen written out by hand from its published formulas, on its own checkpoint's names, in fp64."""
    spec = ours.spec
    weights = {name: tensor.double() for name, tensor in fused.items()}

    def norm(x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + spec.norm_eps).sqrt() * weights[name]

    def turn(x: Tensor) -> Tensor:  # [B, S, N, H]
        half = spec.head_dim // 2
        inverse = spec.rope_theta ** (-torch.arange(half).double() * 2 / spec.head_dim)
        angle = torch.outer(torch.arange(x.shape[1]).double(), inverse)[None, :, None]
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    x = weights["transformer.wte.weight"][tokens_BS]
    hidden = torch.ones(tokens_BS.shape[1], tokens_BS.shape[1]).triu(1).bool()
    for layer in range(spec.num_layers):
        at = f"transformer.h.{layer}."
        mixed = norm(x, at + "ln_1.weight") @ weights[at + "attn.c_attn.weight"].T + weights[at + "attn.c_attn.bias"]
        q, k, v = (part.unflatten(-1, (spec.num_heads, spec.head_dim)) for part in mixed.chunk(3, -1))
        scores = torch.einsum("bqnh,bknh->bnqk", turn(q), turn(k)) / spec.head_dim**0.5
        probabilities = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        x = x + torch.einsum("bnqk,bknh->bqnh", probabilities, v).flatten(2) @ weights[at + "attn.c_proj.weight"].T
        inner = norm(x, at + "ln_2.weight")
        first, second = inner @ weights[at + "mlp.w1.weight"].T, inner @ weights[at + "mlp.w2.weight"].T
        x = x + (first * F.silu(second)) @ weights[at + "mlp.c_proj.weight"].T
    return norm(x, "transformer.ln_f.weight") @ weights["lm_head.weight"].T


def test_the_first_qwen_equals_an_independent_reference(tmp_path: Path) -> None:
    """Fused c_attn, the order of w1 and w2, and the halved intermediate size are read and written right."""
    from safetensors.torch import load_file, save_file

    from danlu.checkpoint.hf_files import write_json

    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> Tensor:
        return 0.3 * torch.randn(*shape, generator=generator)

    fused: dict[str, Tensor] = {"transformer.wte.weight": draw(64, 24), "lm_head.weight": draw(64, 24)}
    for layer in range(2):
        at = f"transformer.h.{layer}."
        shapes = {"attn.c_attn": (72, 24), "attn.c_proj": (24, 24), "mlp.w1": (20, 24), "mlp.w2": (20, 24)}
        shapes["mlp.c_proj"] = (24, 20)
        fused |= {f"{at}{name}.weight": draw(*shape) for name, shape in shapes.items()}
        fused |= {f"{at}{name}.weight": 1 + draw(24) for name in ("ln_1", "ln_2")}
        fused[f"{at}attn.c_attn.bias"] = draw(72)
    fused["transformer.ln_f.weight"] = 1 + draw(24)
    save_file(fused, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {
        "architectures": ["QWenLMHeadModel"], "model_type": "qwen", "hidden_size": 24, "num_attention_heads": 3,
        "kv_channels": 8, "num_hidden_layers": 2, "intermediate_size": 40, "vocab_size": 64, "seq_length": 40,
        "max_position_embeddings": 64, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000, "no_bias": True,
        "use_dynamic_ntk": True, "use_logn_attn": True, "tie_word_embeddings": False,
    })  # fmt: skip
    ours, tokens = load_decoder(tmp_path), random_tokens(2, 30)
    with torch.no_grad():
        assert (logits(ours, tokens) - plain_qwen(ours, fused, tokens)).abs().max() < 1e-5
    save_hf(ours, tmp_path / "out")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert written.keys() == fused.keys()
    assert all(torch.equal(written[name], fused[name]) for name in fused)
