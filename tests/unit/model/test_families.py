"""config.json in and out: both schemas, every family, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.model.families import FAMILIES, hf_from_spec, hf_names, spec_from_hf
from danlu.model.presets import PRESETS
from danlu.model.spec import RopeScaling
from tiny import MOE_SPEC
from tiny_models import GPT, T0

LLAMA = hf_from_spec(T0)
LLAMA3_SCALING = {
    "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip


def edited(**changes: Any) -> dict[str, Any]:
    """The tiny Llama config with changes; a value of ... removes the key."""
    return {key: value for key, value in {**LLAMA, **changes}.items() if value is not ...}


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_survives_its_config_json(name: str) -> None:
    """Spec -> config.json text -> spec is the identity, and the tensor names cover each parameter exactly once."""
    spec = PRESETS[name]
    assert spec_from_hf(json.loads(json.dumps(hf_from_spec(spec)))) == spec
    small = replace(spec, num_layers=12)
    shapes = small.parameter_shapes()
    covered = [(fqn, tensor_map.expert) for tensor_map in hf_names(small) for fqn in tensor_map.fqns]
    assert len(set(covered)) == len(covered)
    numbers = {fqn: range(shape[0]) if len(shape) == 3 else [None] for fqn, shape in shapes.items()}
    assert set(covered) == {(fqn, number) for fqn in shapes for number in numbers[fqn]}
    stacked = [fqn for tensor_map in hf_names(small, stacked_experts=True) for fqn in tensor_map.fqns]
    assert sorted(stacked) == sorted(shapes)


def test_br_244_names_are_exact_so_layers_1_and_11_do_not_mix() -> None:
    """Each HF name maps to its own layer."""
    maps = {tensor_map.hf_name: tensor_map.fqns for tensor_map in hf_names(replace(T0, num_layers=12))}
    assert maps["model.layers.1.mlp.gate_proj.weight"] == ("blocks.1.mlp.gate.weight",)
    assert maps["model.layers.11.mlp.gate_proj.weight"] == ("blocks.11.mlp.gate.weight",)


@pytest.mark.parametrize(
    "schema",
    [
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING}, "rope_parameters": ...},
        {"rope_theta": 1e6, "rope_scaling": {"type": "llama3", **LLAMA3_SCALING}, "rope_parameters": ...},
        {
            "rope_theta": ...,
            "rope_scaling": ...,
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3_SCALING},
        },
        {
            "rope_theta": 1e6,
            "rope_scaling": {"rope_type": "llama3", **LLAMA3_SCALING},
            "rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, **LLAMA3_SCALING},
        },
    ],
    ids=["old", "older", "new", "both"],
)
def test_br_235_both_rope_schemas_give_the_same_spec(schema: dict[str, Any]) -> None:
    """The old and the new way of writing rope settings read alike."""
    spec = spec_from_hf(edited(**schema))
    assert spec.rope_theta == 1e6
    assert spec.rope_scaling == RopeScaling(
        kind="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_positions=64
    )


def test_br_236_the_rope_type_and_all_numbers_are_written_three_times() -> None:
    """rope_type is never written as default beside scaling numbers, and the schemas carry equal values."""
    config = hf_from_spec(spec_from_hf(edited(rope_parameters=..., rope_theta=1e6,
                                              rope_scaling={"rope_type": "llama3", **LLAMA3_SCALING})))  # fmt: skip
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 1e6
    for written in (config["rope_scaling"], config["rope_parameters"]):
        assert written["rope_type"] == "llama3"
        assert {key: written[key] for key in LLAMA3_SCALING} == LLAMA3_SCALING


def test_the_vocabulary_is_the_rows_of_the_config() -> None:
    """BR-081: padding rows count; the tokenizer's length plays no part."""
    assert spec_from_hf(edited(vocab_size=72)).vocab_size == 72


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"model_type": "falcon"}, "legal: .*llama"),
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": ..., "architectures": ["FalconForCausalLM"]}, "LlamaForCausalLM"),
        ({"hidden_size": ...}, "no 'hidden_size'"),
        ({"hidden_act": "relu"}, "relu"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
        ({"quantization_config": {"bits": 4}}, "unquantised"),
        ({"num_local_experts": 8}, "num_local_experts"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"type": "linear"}}, "without its factor"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale|without a meaning"),
        ({"rope_scaling": {"type": "default", **LLAMA3_SCALING}}, "default.* with"),
        ({"rope_theta": 5e5}, "rope_theta disagree"),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            },
            "disagree",
        ),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "between layers"),
        ({"sliding_window": 8}, "no sliding window"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"head_dim": ..., "hidden_size": 33}, "33 / 4"),
    ],
)
def test_what_the_decoder_cannot_compute_is_refused_by_name(changes: dict[str, Any], text: str) -> None:
    """Nothing that changes the mathematics is dropped in silence."""
    with pytest.raises(UserError, match=text) as caught:
        spec_from_hf(edited(**changes), where="somewhere/config.json")
    assert "somewhere/config.json" in str(caught.value)


@pytest.mark.parametrize(
    "changes", [{"scale_attn_by_inverse_layer_idx": True}, {"scale_attn_weights": False}, {"add_cross_attention": True}]
)
def test_gpt2_variants_with_other_attention_are_refused(changes: dict[str, Any]) -> None:
    """GPT-2's rarely used attention switches change the result, so they raise."""
    with pytest.raises(UserError, match=next(iter(changes))):
        spec_from_hf({**hf_from_spec(GPT), **changes})


def test_qwen_halves_the_intermediate_size_and_keeps_its_limit() -> None:
    """The first Qwen's config counts gate and up together, and its inference tricks bound the evaluated length."""
    config = {
        "model_type": "qwen", "hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32,
        "kv_channels": 128, "intermediate_size": 22016, "vocab_size": 151936, "seq_length": 8192,
        "max_position_embeddings": 32768, "layer_norm_epsilon": 1e-6, "rotary_emb_base": 10000, "no_bias": True,
        "use_dynamic_ntk": True, "use_logn_attn": True, "tie_word_embeddings": False,
    }  # fmt: skip
    assert spec_from_hf(config) == PRESETS["qwen-7b"]
    with pytest.raises(UserError, match="use_logn_attn"):
        spec_from_hf({**config, "use_logn_attn": False})
    with pytest.raises(UserError, match="rotary_pct"):
        spec_from_hf({**config, "rotary_pct": 0.25})


def test_absent_keys_mean_what_transformers_takes_them_for() -> None:
    """Files written by transformers leave defaults out; the reader knows them (window, kv heads, head width)."""
    mistral = {key: value for key, value in LLAMA.items() if key not in ("sliding_window", "head_dim")}
    spec = spec_from_hf({**mistral, "model_type": "mistral"})
    assert spec.sliding_window == 4096
    assert spec.head_dim == 8
    assert spec_from_hf({**mistral, "model_type": "qwen3"}).head_dim == 128


def test_qwen_windows_begin_at_their_layer() -> None:
    """max_window_layers and layer_types say the same, and an unused window is none."""
    base = {**LLAMA, "model_type": "qwen2", "sliding_window": 4, "use_sliding_window": True}
    assert spec_from_hf({**base, "max_window_layers": 1}).sliding_layers == (1,)
    types = ["sliding_attention", "full_attention"]
    assert spec_from_hf({**base, "layer_types": types}).sliding_layers == (0,)
    assert spec_from_hf({**base, "max_window_layers": 2}).sliding_window is None
    assert spec_from_hf({**base, "use_sliding_window": False}).sliding_window is None


def test_a_config_that_cannot_express_the_model_is_an_error() -> None:
    """Exporting what the family's config has no key for names the lost choice."""
    with pytest.raises(UserError, match="output_bias = True"):
        hf_from_spec(replace(T0, output_bias=True))
    with pytest.raises(UserError, match="head_dim"):
        hf_from_spec(replace(GPT, head_dim=9))


def test_every_family_is_in_the_table_under_its_own_name() -> None:
    """The registry's key is the spec's family."""
    assert {family.model_type for family in FAMILIES.values()} == set(FAMILIES)


def moe(**changes: Any) -> dict[str, Any]:
    """The config of a tiny Qwen3-MoE with changes; a value of ... removes the key."""
    config = hf_from_spec(replace(MOE_SPEC, num_layers=6))
    return {key: value for key, value in {**config, **changes}.items() if value is not ...}


@pytest.mark.parametrize(
    ("changes", "dense"),
    [
        ({}, None),
        ({"mlp_only_layers": [0, 3]}, (0, 3)),
        ({"decoder_sparse_step": 2}, (0, 2, 4)),
        ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, (0, 1, 2, 3, 4)),
        ({"decoder_sparse_step": ..., "mlp_only_layers": None}, None),
    ],
)
def test_dense_layers_among_experts(changes: dict[str, Any], dense: tuple[int, ...] | None) -> None:
    """Listed layers, and all but every n-th, are one list of dense layers, and come back out of it."""
    spec = spec_from_hf(moe(**changes))
    assert spec.dense_layers == dense
    assert spec_from_hf(hf_from_spec(spec)) == spec


def test_absent_keys_of_experts_mean_what_transformers_takes_them_for() -> None:
    """Weights are not normalised unless it says so, and both names of the number of experts are read."""
    assert not spec_from_hf(moe(norm_topk_prob=...)).normalize_top_k
    assert spec_from_hf(moe(num_experts=...)) == spec_from_hf(moe(num_local_experts=...)) == spec_from_hf(moe())
    mixtral = hf_from_spec(PRESETS["mixtral-8x7b"])
    bare = {
        key: value for key, value in mixtral.items() if key not in ("rope_theta", "rope_parameters", "rms_norm_eps")
    }
    assert spec_from_hf(bare) == PRESETS["mixtral-8x7b"]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": ..., "num_local_experts": ...}, "no 'num_experts'"),
        ({"num_experts": 5}, "num_experts disagree"),
        ({"num_experts_per_tok": ...}, "no 'num_experts_per_tok'"),
        ({"moe_intermediate_size": ...}, "no 'moe_intermediate_size'"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step"),
        ({"use_sliding_window": True, "sliding_window": 4}, "use_sliding_window"),
        ({"n_shared_experts": 1}, "n_shared_experts"),
        ({"shared_expert_intermediate_size": 64}, "shared_expert"),
    ],
)
def test_experts_that_the_decoder_does_not_have_are_refused(changes: dict[str, Any], text: str) -> None:
    """Missing and contradicting sizes, shared experts and windows name their key."""
    with pytest.raises(UserError, match=text):
        spec_from_hf(moe(**changes))


def test_experts_that_a_family_cannot_express_are_refused() -> None:
    """A dense family, or a choice that Mixtral has no key for, ends in an error and not in another model."""
    mixtral = replace(MOE_SPEC, family="mixtral", qk_norm=False, expert_size=None)
    assert spec_from_hf(hf_from_spec(mixtral)) == mixtral
    with pytest.raises(UserError, match="expert_size = 8"):
        hf_from_spec(replace(mixtral, expert_size=8))
    with pytest.raises(UserError, match="normalize_top_k = False"):
        hf_from_spec(replace(mixtral, normalize_top_k=False))
    with pytest.raises(UserError, match="num_experts = 4"):
        hf_from_spec(replace(MOE_SPEC, family="qwen3"))
    with pytest.raises(UserError, match="no names for experts"):
        hf_names(replace(MOE_SPEC, family="qwen3"))
