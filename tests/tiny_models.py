"""Tiny models shared by the model tests, and the plain references they are compared with."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from danlu.model.decoder import Decoder
from danlu.model.spec import ModelSpec

T0 = ModelSpec(
    family="llama", num_layers=2, hidden_size=32, num_heads=4, num_kv_heads=2, head_dim=8, mlp_size=64, vocab_size=64,
    max_positions=128,
)  # fmt: skip
T1 = replace(T0, tied_embeddings=True)
GPT = ModelSpec(
    family="gpt2", num_layers=2, hidden_size=35, num_heads=5, num_kv_heads=5, head_dim=7, mlp_size=48, vocab_size=64,
    max_positions=64, norm="layernorm", norm_eps=1e-5, activation="gelu_tanh", gated_mlp=False, positions="learned",
    qkv_bias=True, output_bias=True, mlp_bias=True, norm_bias=True, tied_embeddings=True,
)  # fmt: skip


def build(spec: ModelSpec, seed: int = 0, *, spread: float = 1.8) -> Decoder:
    """A model with random weights large enough that attention is far from uniform and biases and norms matter."""
    model = Decoder(spec)
    model.init_weights(seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
            else:
                parameter.mul_(spread)
    return model.eval()


def logits(model: Decoder, tokens_BS: Tensor, **kwargs: Tensor) -> Tensor:
    """Logits in fp32, [B, S, V]."""
    return (model(tokens_BS, **kwargs) @ model.head_weight_VD.T.to(model.compute_dtype)).float()


def random_tokens(*shape: int, seed: int = 1, vocab: int = 64) -> Tensor:
    return torch.randint(0, vocab, shape, generator=torch.Generator().manual_seed(seed))
