"""Hugging Face config.json <-> `ModelSpec` for families with experts; the rest of such a config is the Llama dialect.

Mixtral has experts in every layer, ``intermediate_size`` is their width, and the weights of a token's experts add up to
1. Qwen3-MoE has a width of its own for experts, may leave layers dense (``mlp_only_layers``, and all but every n-th
by ``decoder_sparse_step``; both become one list of layers, written as the former), and says in ``norm_topk_prob``
whether the weights add up to 1. The number of experts is called ``num_experts`` or ``num_local_experts`` depending on
the version of transformers that wrote the file: either is read, both are written where both were ever used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from danlu.base.errors import UserError
from danlu.model.hf_config import agreed, read_decoder, read_size, write_decoder
from danlu.model.spec import ModelSpec

Config = Mapping[str, Any]


def read_mixtral(config: Config) -> ModelSpec:
    """Return the spec of a Mixtral config."""
    return read_decoder(config, "mixtral", _read_counts(config))


def write_mixtral(spec: ModelSpec) -> dict[str, Any]:
    """Return the Mixtral keys of ``spec``."""
    return {
        **write_decoder(spec),
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
    }


def read_qwen3_moe(config: Config) -> ModelSpec:
    """Return the spec of a Qwen3-MoE config."""
    step, num_layers = config.get("decoder_sparse_step", 1), read_size(config, "num_hidden_layers")
    if isinstance(step, bool) or not isinstance(step, int) or step < 1:
        raise UserError("every n-th layer has experts", seen=f"decoder_sparse_step = {step!r}", legal=">= 1")
    listed = config.get("mlp_only_layers") or []
    dense = tuple(layer for layer in range(num_layers) if layer in listed or (layer + 1) % step)
    fields = {
        "expert_size": read_size(config, "moe_intermediate_size"),
        "dense_layers": dense or None,
        "normalize_top_k": bool(config.get("norm_topk_prob", False)),
    }
    return read_decoder(config, "qwen3_moe", {**_read_counts(config), **fields})


def write_qwen3_moe(spec: ModelSpec) -> dict[str, Any]:
    """Return the Qwen3-MoE keys of ``spec``."""
    return {
        **write_decoder(spec),
        "num_experts": spec.num_experts,
        "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.experts_per_token,
        "moe_intermediate_size": spec.expert_size,
        "norm_topk_prob": spec.normalize_top_k,
        "decoder_sparse_step": 1,
        "mlp_only_layers": list(spec.dense_layers or ()),
        "use_sliding_window": False,
    }


def _read_counts(config: Config) -> dict[str, Any]:
    given = {name: config[name] for name in ("num_experts", "num_local_experts") if config.get(name) is not None}
    count = agreed("num_experts", list(given.values()))
    return {
        "num_experts": read_size(config, "num_experts") if count is None else count,
        "experts_per_token": read_size(config, "num_experts_per_tok"),
    }
