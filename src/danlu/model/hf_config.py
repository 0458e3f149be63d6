"""Hugging Face config.json <-> `ModelSpec`: the key names, defaults and refusals of each family.

Three dialects cover all families: the Llama one (llama, qwen2, qwen3, mistral; with experts mixtral and qwen3_moe, see
`danlu.model.hf_experts`), the first Qwen's and GPT-2's. Where a key is absent, the default is the one of the family's
config class in transformers, because files written by it leave defaults out; sizes have no default here and must be
present.

``_NEUTRAL`` holds the refusals as data: for each key the values under which it changes nothing. A key with another
value would change the mathematics, so it raises instead of being dropped. Keys that are not listed are taken to be
bookkeeping (dropout, cache, token ids, training notes), which the forward pass does not depend on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

from danlu.base.errors import UserError
from danlu.model.spec import FamilyName, ModelSpec, RopeScaling

Config = Mapping[str, Any]

_ACTIVATIONS: dict[str, Literal["silu", "gelu", "gelu_tanh"]] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "partial_rotary_factor": (None, 1, 1.0),
    "rotary_pct": (None, 1, 1.0),
    "attn_logit_softcapping": (None, 0),
    "final_logit_softcapping": (None, 0),
    "query_pre_attn_scalar": (None,),
    "num_shared_experts": (None, 0),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "clip_qkv": (None,),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "quantization_config": (None,),
    "attention_chunk_size": (None,),
    "residual_multiplier": (None, 1.0),
    "embedding_multiplier": (None, 1.0),
    "logits_scaling": (None, 1.0),
}
_DENSE: dict[str, tuple[object, ...]] = {"num_local_experts": (None, 0), "num_experts": (None, 0)}
_ROPE_FIELDS: dict[str, dict[str, str]] = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "low_freq_factor": "low_freq_factor",
        "high_freq_factor": "high_freq_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_max_positions",
        "attention_factor": "attention_factor",
        "beta_fast": "beta_fast",
        "beta_slow": "beta_slow",
        "mscale": "mscale",
        "mscale_all_dim": "mscale_all_dim",
        "truncate": "truncate",
    },
}


def read_decoder(config: Config, family: str, experts: Mapping[str, Any] | None = None) -> ModelSpec:
    """Return the spec of a config in the Llama dialect (llama, qwen2, qwen3, mistral, mixtral, qwen3_moe).

    Args:
        config: the parsed config.json.
        family: ``ModelSpec.family``.
        experts: fields of the spec that `danlu.model.hf_experts` has read; None for a dense family.
    """
    _check_neutral(config)
    if experts is None:
        _check_neutral(config, _DENSE)
    width, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = 128 if family == "qwen3" and "head_dim" not in config else _even_share(width, heads)
    kv_heads = config.get(
        "num_key_value_heads", {"mistral": 8, "mixtral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}.get(family)
    )
    max_positions = config.get("max_position_embeddings", 2048 if family == "llama" else None)
    if max_positions is None:
        raise _missing("max_position_embeddings")
    theta, scaling = _read_rope(config, 1e6 if family == "mixtral" else 10000.0)
    attention_bias = bool(config.get("attention_bias", False)) and family in ("llama", "qwen3", "qwen3_moe")
    num_layers = read_size(config, "num_hidden_layers")
    window, layers = _read_window(config, family, num_layers)
    return ModelSpec(
        family=cast(FamilyName, family),
        num_layers=num_layers,
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads if kv_heads is None else kv_heads,
        head_dim=head_dim,
        mlp_size=read_size(config, "intermediate_size"),
        vocab_size=read_size(config, "vocab_size"),
        max_positions=max_positions,
        norm_eps=float(config.get("rms_norm_eps", 1e-5 if family == "mixtral" else 1e-6)),
        activation=_activation(config.get("hidden_act", "silu")),
        rope_theta=theta,
        rope_scaling=scaling,
        qkv_bias=family == "qwen2" or attention_bias,
        output_bias=attention_bias,
        mlp_bias=family == "llama" and bool(config.get("mlp_bias", False)),
        qk_norm=family in ("qwen3", "qwen3_moe"),
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        sliding_window=window,
        sliding_layers=layers,
        **(experts or {}),
    )


def write_decoder(spec: ModelSpec) -> dict[str, Any]:
    """Return the Llama-dialect keys of ``spec``."""
    config: dict[str, Any] = {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.mlp_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": _hf_activation(spec, "gelu_pytorch_tanh"),
        "max_position_embeddings": spec.max_positions,
        "rms_norm_eps": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
        **_write_rope(spec),
    }
    if spec.family in ("llama", "qwen3", "qwen3_moe"):
        config["attention_bias"] = spec.qkv_bias
    if spec.family == "llama":
        config["mlp_bias"] = spec.mlp_bias
    if spec.family in ("mistral", "mixtral"):
        config["sliding_window"] = spec.sliding_window
    if spec.family in ("qwen2", "qwen3"):
        sliding = [layer for layer in range(spec.num_layers) if spec.window(layer) is not None]
        config |= {
            "use_sliding_window": bool(sliding),
            "sliding_window": spec.sliding_window,
            "max_window_layers": min(sliding, default=spec.num_layers),
            "layer_types": [
                "sliding_attention" if layer in sliding else "full_attention" for layer in range(spec.num_layers)
            ],
        }
    return config


def read_qwen(config: Config) -> ModelSpec:
    """Return the spec of a first-generation Qwen config (Qwen-1.8B, 7B, 14B, 72B)."""
    _check_neutral(config)
    width, heads = read_size(config, "hidden_size"), read_size(config, "num_attention_heads")
    head_dim = config.get("kv_channels", 128)
    if head_dim * heads != width:
        raise UserError(
            "the first Qwen's heads fill the model width",
            seen=f"kv_channels = {head_dim}, num_attention_heads = {heads}, hidden_size = {width}",
            legal="kv_channels * num_attention_heads = hidden_size",
        )
    fused = read_size(config, "intermediate_size")
    bias = not config.get("no_bias", True)
    trained = config.get("seq_length", 2048)
    extrapolates = bool(config.get("use_dynamic_ntk", True))
    if extrapolates != bool(config.get("use_logn_attn", True)):
        raise UserError(
            "only the published pairs of length extrapolation are supported",
            seen=f"use_dynamic_ntk = {extrapolates}, use_logn_attn = {not extrapolates}",
            legal="both true or both false",
        )
    return ModelSpec(
        family="qwen",
        num_layers=read_size(config, "num_hidden_layers"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=head_dim,
        mlp_size=_even_share(fused, 2),
        vocab_size=read_size(config, "vocab_size"),
        max_positions=config.get("max_position_embeddings", trained),
        norm_eps=float(config.get("layer_norm_epsilon", 1e-6)),
        rope_theta=float(config.get("rotary_emb_base", 10000.0)),
        qkv_bias=True,
        output_bias=bias,
        mlp_bias=bias,
        tied_embeddings=bool(config.get("tie_word_embeddings", False)),
        eval_max_positions=trained if extrapolates else None,
    )


def write_qwen(spec: ModelSpec) -> dict[str, Any]:
    """Return the first Qwen's keys of ``spec``; its code is not part of transformers and is not copied either."""
    extrapolates = spec.eval_max_positions is not None
    return {
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": 2 * spec.mlp_size,
        "num_hidden_layers": spec.num_layers,
        "num_attention_heads": spec.num_heads,
        "kv_channels": spec.head_dim,
        "max_position_embeddings": spec.max_positions,
        "seq_length": spec.eval_max_positions or spec.max_positions,
        "layer_norm_epsilon": spec.norm_eps,
        "rotary_emb_base": spec.rope_theta,
        "rotary_pct": 1.0,
        "no_bias": not spec.mlp_bias,
        "use_dynamic_ntk": extrapolates,
        "use_logn_attn": extrapolates,
        "scale_attn_weights": True,
        "tie_word_embeddings": spec.tied_embeddings,
    }


def read_gpt2(config: Config) -> ModelSpec:
    """Return the spec of a GPT-2 config."""
    _check_neutral(config)
    width, heads = read_size(config, "n_embd"), read_size(config, "n_head")
    return ModelSpec(
        family="gpt2",
        num_layers=read_size(config, "n_layer"),
        hidden_size=width,
        num_heads=heads,
        num_kv_heads=heads,
        head_dim=_even_share(width, heads),
        mlp_size=config.get("n_inner") or 4 * width,
        vocab_size=read_size(config, "vocab_size"),
        max_positions=read_size(config, "n_positions"),
        norm="layernorm",
        norm_eps=float(config.get("layer_norm_epsilon", 1e-5)),
        activation=_activation(config.get("activation_function", "gelu_new")),
        gated_mlp=False,
        positions="learned",
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        norm_bias=True,
        tied_embeddings=bool(config.get("tie_word_embeddings", True)),
    )


def write_gpt2(spec: ModelSpec) -> dict[str, Any]:
    """Return the GPT-2 keys of ``spec``."""
    return {
        "vocab_size": spec.vocab_size,
        "n_positions": spec.max_positions,
        "n_ctx": spec.max_positions,
        "n_embd": spec.hidden_size,
        "n_layer": spec.num_layers,
        "n_head": spec.num_heads,
        "n_inner": spec.mlp_size,
        "activation_function": _hf_activation(spec, "gelu_new"),
        "layer_norm_epsilon": spec.norm_eps,
        "tie_word_embeddings": spec.tied_embeddings,
    }


def _read_rope(config: Config, default_theta: float) -> tuple[float, RopeScaling | None]:
    new = dict(config.get("rope_parameters") or {})
    old = dict(config.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in new.values()):
        raise UserError("rope parameters that differ between layers are not supported", seen=f"rope_parameters = {new}")
    theta = agreed("rope_theta", [config.get("rope_theta"), new.pop("rope_theta", None), old.pop("rope_theta", None)])
    scaling_new, scaling_old = _scaling(new, config), _scaling(old, config)
    if new and old and scaling_new != scaling_old:
        raise UserError("rope_scaling and rope_parameters disagree", seen=f"{old} and {new}", legal="equal values")
    return float(default_theta if theta is None else theta), scaling_new or scaling_old


def _scaling(values: dict[str, Any], config: Config) -> RopeScaling | None:
    """Return the scaling that one rope dictionary (without its theta) describes; None for an empty or default one."""
    given = {key: value for key, value in values.items() if value is not None}
    kind = agreed("rope_type", [given.pop("rope_type", None), given.pop("type", None)]) or "default"
    if given.pop("partial_rotary_factor", 1.0) != 1.0:
        raise UserError("partial rotary positions are not supported", seen=f"partial_rotary_factor in {values}")
    if kind == "default" and not given:
        return None
    names = _ROPE_FIELDS.get(kind)
    if names is None:
        seen = f"rope_type = {kind!r}" + (f" with {sorted(given)}" if given else "")
        raise UserError("unsupported rope scaling", seen=seen, legal=["default (without further keys)", *_ROPE_FIELDS])
    unknown = sorted(set(given) - set(names))
    if unknown or "factor" not in given:
        what = "a rope scaling without its factor" if not unknown else "rope scaling keys without a meaning here"
        raise UserError(what, seen=f"{kind}: {values}", legal=names)
    if "original_max_position_embeddings" in names:
        outer = config.get("original_max_position_embeddings") or config.get("max_position_embeddings")
        given.setdefault("original_max_position_embeddings", outer)
    return RopeScaling(kind=cast(Any, kind), **{names[key]: value for key, value in given.items()})


def _write_rope(spec: ModelSpec) -> dict[str, Any]:
    scaling = spec.rope_scaling
    if scaling is None:
        new: dict[str, Any] = {"rope_type": "default", "rope_theta": spec.rope_theta}
        return {"rope_theta": spec.rope_theta, "rope_scaling": None, "rope_parameters": new}
    values = {key: getattr(scaling, field) for key, field in _ROPE_FIELDS[scaling.kind].items()}
    values = {key: value for key, value in values.items() if value is not None}
    return {
        "rope_theta": spec.rope_theta,
        "rope_scaling": {"rope_type": scaling.kind, "type": scaling.kind, **values},
        "rope_parameters": {"rope_type": scaling.kind, "rope_theta": spec.rope_theta, **values},
    }


def _read_window(config: Config, family: str, num_layers: int) -> tuple[int | None, tuple[int, ...] | None]:
    """Return the window and the layers that use it (None: all of them)."""
    types = config.get("layer_types")
    if types is not None and (
        len(types) != num_layers or not set(types) <= {"full_attention", "sliding_attention"} or family == "llama"
    ):
        legal = f"one of full_attention, sliding_attention for each of {num_layers} layers (qwen2, qwen3)"
        raise UserError("unsupported attention layer types", seen=f"layer_types = {types}", legal=legal)
    if family == "llama":
        if config.get("sliding_window") is not None:
            raise UserError("llama has no sliding window", seen=f"sliding_window = {config['sliding_window']}")
        return None, None
    window = config.get("sliding_window", None if family == "mixtral" else 4096)
    if family in ("mistral", "mixtral"):
        if types is not None and set(types) != {"full_attention" if window is None else "sliding_attention"}:
            raise UserError(f"{family} layers share one attention type", seen=f"layer_types = {types}")
        return window, None
    if window is None or not config.get("use_sliding_window", False):
        return None, None
    if family == "qwen3_moe":
        what = "which layers of a qwen3_moe have a window depends on the version of transformers"
        raise UserError(what, seen="use_sliding_window = true", legal="false")
    first = config.get("max_window_layers", 28)
    sliding = tuple(
        layer for layer in range(num_layers) if (layer >= first if types is None else types[layer][0] == "s")
    )
    if len(sliding) == num_layers:
        return window, None
    return (window, sliding) if sliding else (None, None)


def _check_neutral(config: Config, keys: Mapping[str, tuple[object, ...]] = _NEUTRAL) -> None:
    for key, neutral in keys.items():
        if config.get(key) not in neutral:
            hint = "load the unquantised weights" if key == "quantization_config" else None
            raise UserError(
                "this option changes the model in a way danlu does not implement",
                seen=f"{key} = {config[key]!r}",
                legal=" or ".join("absent" if value is None else repr(value) for value in neutral),
                hint=hint,
            )


def _missing(key: str) -> UserError:
    return UserError("a size is missing", seen=f"no {key!r}", legal=f"{key} = a positive whole number")


def read_size(config: Config, key: str) -> int:
    """Return a size that must be there; `UserError` where it is not."""
    if config.get(key) is None:
        raise _missing(key)
    return cast(int, config[key])


def _even_share(total: int, parts: int) -> int:
    if parts < 1 or total % parts:
        raise UserError("a size does not divide evenly", seen=f"{total} / {parts}", legal="a whole number")
    return total // parts


def agreed(name: str, values: list[Any]) -> Any:
    """Return the one value that several keys give, or None where none does; `UserError` where they disagree."""
    given = [value for value in values if value is not None]
    if any(value != given[0] for value in given):
        raise UserError(f"two values of {name} disagree", seen=given, legal="equal values")
    return given[0] if given else None


def _activation(name: str) -> Literal["silu", "gelu", "gelu_tanh"]:
    if name not in _ACTIVATIONS:
        raise UserError("unsupported activation", seen=name, legal=_ACTIVATIONS)
    return _ACTIVATIONS[name]


def _hf_activation(spec: ModelSpec, tanh_name: str) -> str:
    return tanh_name if spec.activation == "gelu_tanh" else spec.activation
