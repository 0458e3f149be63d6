"""Published model sizes by name, so that ``preset = "qwen-7b"`` plans and trains without a download.

Each value repeats the config.json its makers published (the base model's where base and chat differ); the tests
compare the exact parameter counts with the published ones. GPT-3 follows table 2.1 of arXiv:2005.14165 with dense
attention in every layer (the paper alternates dense and banded layers, which changes no size) and with the two rows
whose printed numbers contradict each other (XL, 13B) read so that heads times head width is the model width.

The ``tiny`` ones are danlu's own: small enough for a test or a first run on a laptop.
"""

from __future__ import annotations

from dataclasses import replace

from danlu.model.spec import FamilyName, ModelSpec, RopeScaling

_LLAMA31_ROPE = RopeScaling(
    kind="llama3", factor=8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
)
_LLAMA32_ROPE = replace(_LLAMA31_ROPE, factor=32.0)


def _llama(
    layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int, positions: int, theta: float = 10000.0
) -> ModelSpec:
    return ModelSpec(
        family="llama", num_layers=layers, hidden_size=width, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=width // heads, mlp_size=mlp, vocab_size=vocab, max_positions=positions, norm_eps=1e-5,
        rope_theta=theta,
    )  # fmt: skip


def _llama3(layers: int, width: int, heads: int, mlp: int, positions: int = 8192) -> ModelSpec:
    return _llama(layers, width, heads, 8, mlp, 128256, positions, 500000.0)


def _llama31(layers: int, width: int, heads: int, mlp: int) -> ModelSpec:
    return replace(_llama3(layers, width, heads, mlp, 131072), rope_scaling=_LLAMA31_ROPE)


def _llama32(layers: int, width: int, heads: int, mlp: int) -> ModelSpec:
    return replace(_llama3(layers, width, heads, mlp, 131072), rope_scaling=_LLAMA32_ROPE, tied_embeddings=True)


def _smollm2(layers: int, width: int, heads: int, kv_heads: int, mlp: int, theta: float) -> ModelSpec:
    return replace(_llama(layers, width, heads, kv_heads, mlp, 49152, 8192, theta), tied_embeddings=True)


def _qwen(
    layers: int, width: int, mlp: int, vocab: int, trained_positions: int | None, positions: int, theta: float = 10000.0
) -> ModelSpec:
    heads = width // 128
    return ModelSpec(
        family="qwen", num_layers=layers, hidden_size=width, num_heads=heads, num_kv_heads=heads, head_dim=128,
        mlp_size=mlp, vocab_size=vocab, max_positions=positions, norm_eps=1e-6, rope_theta=theta, qkv_bias=True,
        eval_max_positions=trained_positions,
    )  # fmt: skip


def _qwen25(
    layers: int, width: int, heads: int, kv_heads: int, mlp: int, vocab: int, positions: int, *,
    tied: bool = False, eps: float = 1e-6,
) -> ModelSpec:  # fmt: skip
    return ModelSpec(
        family="qwen2", num_layers=layers, hidden_size=width, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=width // heads, mlp_size=mlp, vocab_size=vocab, max_positions=positions, norm_eps=eps,
        rope_theta=1e6, qkv_bias=True, tied_embeddings=tied,
    )  # fmt: skip


def _qwen3(layers: int, width: int, heads: int, mlp: int, *, tied: bool = False) -> ModelSpec:
    return ModelSpec(
        family="qwen3", num_layers=layers, hidden_size=width, num_heads=heads, num_kv_heads=8, head_dim=128,
        mlp_size=mlp, vocab_size=151936, max_positions=40960, norm_eps=1e-6, rope_theta=1e6, qk_norm=True,
        tied_embeddings=tied,
    )  # fmt: skip


def _mistral(layers: int, width: int, vocab: int, positions: int, theta: float, window: int | None) -> ModelSpec:
    return ModelSpec(
        family="mistral", num_layers=layers, hidden_size=width, num_heads=32, num_kv_heads=8, head_dim=128,
        mlp_size=14336, vocab_size=vocab, max_positions=positions, norm_eps=1e-5, rope_theta=theta,
        sliding_window=window,
    )  # fmt: skip


def _mixtral(layers: int, width: int, heads: int, mlp: int, vocab: int, positions: int) -> ModelSpec:
    return ModelSpec(
        family="mixtral", num_layers=layers, hidden_size=width, num_heads=heads, num_kv_heads=8, head_dim=128,
        mlp_size=mlp, vocab_size=vocab, max_positions=positions, norm_eps=1e-5, rope_theta=1e6, num_experts=8,
        experts_per_token=2,
    )  # fmt: skip


def _qwen3_moe(layers: int, width: int, heads: int, mlp: int, expert: int) -> ModelSpec:
    return replace(
        _qwen3(layers, width, heads, mlp), family="qwen3_moe", num_kv_heads=4, num_experts=128, experts_per_token=8,
        expert_size=expert,
    )  # fmt: skip


def _gpt(layers: int, width: int, heads: int, positions: int = 1024) -> ModelSpec:
    return ModelSpec(
        family="gpt2", num_layers=layers, hidden_size=width, num_heads=heads, num_kv_heads=heads,
        head_dim=width // heads, mlp_size=4 * width, vocab_size=50257, max_positions=positions, norm="layernorm",
        norm_eps=1e-5, activation="gelu_tanh", gated_mlp=False, positions="learned", qkv_bias=True, output_bias=True,
        mlp_bias=True, norm_bias=True, tied_embeddings=True,
    )  # fmt: skip


def _tiny(family: FamilyName, **changes: object) -> ModelSpec:
    base = ModelSpec(
        family=family, num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_size=128,
        vocab_size=512, max_positions=512, tied_embeddings=True,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


PRESETS: dict[str, ModelSpec] = {
    "tiny": _tiny("llama"),
    "tiny-qwen3": _tiny("qwen3", qk_norm=True),
    "tiny-moe": _tiny("qwen3_moe", qk_norm=True, num_experts=8, experts_per_token=2, expert_size=64),
    "tiny-gpt2": replace(_gpt(2, 64, 4, 512), vocab_size=512),
    "smollm2-135m": _smollm2(30, 576, 9, 3, 1536, 100000.0),
    "smollm2-360m": _smollm2(32, 960, 15, 5, 2560, 100000.0),
    "smollm2-1.7b": _smollm2(24, 2048, 32, 32, 8192, 130000.0),
    "llama-2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
    "llama-2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
    "llama-2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
    "llama-3-8b": _llama3(32, 4096, 32, 14336),
    "llama-3-70b": _llama3(80, 8192, 64, 28672),
    "llama-3.1-8b": _llama31(32, 4096, 32, 14336),
    "llama-3.1-70b": _llama31(80, 8192, 64, 28672),
    "llama-3.1-405b": _llama31(126, 16384, 128, 53248),
    "llama-3.2-1b": _llama32(16, 2048, 32, 8192),
    "llama-3.2-3b": _llama32(28, 3072, 24, 8192),
    "qwen-1.8b": _qwen(24, 2048, 5504, 151936, 8192, 8192),
    "qwen-7b": _qwen(32, 4096, 11008, 151936, 8192, 32768),
    "qwen-14b": _qwen(40, 5120, 13696, 152064, 2048, 8192),
    "qwen-72b": _qwen(80, 8192, 24576, 152064, None, 32768, 1e6),
    "qwen2.5-0.5b": _qwen25(24, 896, 14, 2, 4864, 151936, 32768, tied=True),
    "qwen2.5-1.5b": _qwen25(28, 1536, 12, 2, 8960, 151936, 131072, tied=True),
    "qwen2.5-3b": _qwen25(36, 2048, 16, 2, 11008, 151936, 32768, tied=True),
    "qwen2.5-7b": _qwen25(28, 3584, 28, 4, 18944, 152064, 131072),
    "qwen2.5-14b": _qwen25(48, 5120, 40, 8, 13824, 152064, 131072, eps=1e-5),
    "qwen2.5-32b": _qwen25(64, 5120, 40, 8, 27648, 152064, 131072, eps=1e-5),
    "qwen2.5-72b": _qwen25(80, 8192, 64, 8, 29568, 152064, 131072, eps=1e-5),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600),
    "qwen3-30b-a3b": _qwen3_moe(48, 2048, 32, 6144, 768),
    "qwen3-235b-a22b": _qwen3_moe(94, 4096, 64, 12288, 1536),
    "mistral-7b": _mistral(32, 4096, 32000, 32768, 10000.0, 4096),
    "mistral-nemo-12b": _mistral(40, 5120, 131072, 131072, 1e6, None),
    "mixtral-8x7b": _mixtral(32, 4096, 32, 14336, 32000, 32768),
    "mixtral-8x22b": _mixtral(56, 6144, 48, 16384, 32000, 65536),
    "gpt2": _gpt(12, 768, 12),
    "gpt2-medium": _gpt(24, 1024, 16),
    "gpt2-large": _gpt(36, 1280, 20),
    "gpt2-xl": _gpt(48, 1600, 25),
    "gpt3-125m": _gpt(12, 768, 12, 2048),
    "gpt3-350m": _gpt(24, 1024, 16, 2048),
    "gpt3-760m": _gpt(24, 1536, 16, 2048),
    "gpt3-1.3b": _gpt(24, 2048, 16, 2048),
    "gpt3-2.7b": _gpt(32, 2560, 32, 2048),
    "gpt3-6.7b": _gpt(32, 4096, 32, 2048),
    "gpt3-13b": _gpt(40, 5120, 40, 2048),
    "gpt3-175b": _gpt(96, 12288, 96, 2048),
}
"""Name -> spec; names are lower case, ``maker-size``."""
