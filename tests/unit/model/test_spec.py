"""The model's value: sizes, counts and refusals."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from danlu.base.errors import UserError
from danlu.model.decoder import Decoder
from danlu.model.presets import PRESETS
from danlu.model.spec import ModelSpec, RopeScaling
from tiny import MOE_SPEC
from tiny_models import GPT, T0, T1

PUBLISHED = {
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "qwen-1.8b": 1_836_828_672,
    "qwen-7b": 7_721_324_544,
    "qwen-14b": 14_167_290_880,
    "qwen-72b": 72_287_920_128,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b": 7_241_732_096,
    "mistral-nemo-12b": 12_247_782_400,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
}


@pytest.mark.parametrize(("name", "count"), PUBLISHED.items())
def test_presets_have_the_published_parameter_counts(name: str, count: int) -> None:
    """A preset is exactly the published model, to the last parameter."""
    assert PRESETS[name].num_parameters() == count


def test_gpt3_has_175_billion_parameters() -> None:
    """The largest GPT-3 is the paper's 175B, rounded as printed there."""
    assert round(PRESETS["gpt3-175b"].num_parameters() / 1e9) == 175


@pytest.mark.parametrize("name", PRESETS)
def test_shapes_are_the_decoders_and_sum_to_the_count(name: str) -> None:
    """The torch-free table, the built module and the closed-form count agree for every preset."""
    spec = replace(PRESETS[name], num_layers=2, sliding_layers=None)
    with torch.device("meta"):
        model = Decoder(spec)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == spec.parameter_shapes()
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters()


@pytest.mark.parametrize("spec", [T0, T1, GPT], ids=["untied", "tied", "gpt"])
def test_br_087_a_tied_matrix_is_counted_once(spec: ModelSpec) -> None:
    """Tying removes exactly one vocabulary table from the count."""
    other = replace(spec, tied_embeddings=not spec.tied_embeddings)
    difference = abs(other.num_parameters() - spec.num_parameters())
    assert difference == spec.vocab_size * spec.hidden_size


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_layers": 0}, "num_layers = 0"),
        ({"hidden_size": 32.0}, "hidden_size = 32.0"),
        ({"num_kv_heads": 3}, "num_heads a multiple of num_kv_heads"),
        ({"head_dim": 7}, "head_dim = 7"),
        ({"norm_eps": 0.0}, "norm_eps"),
        ({"rope_theta": 0.0}, "rope_theta"),
        ({"norm_bias": True}, "only layernorm has a bias"),
        ({"sliding_window": 0}, "window"),
        ({"sliding_layers": (0,)}, "need a window"),
        ({"sliding_window": 4, "sliding_layers": (2,)}, "0 .. 1"),
        ({"positions": "learned", "rope_scaling": RopeScaling(kind="linear", factor=2.0)}, "rotary positions"),
    ],
)
def test_impossible_sizes_are_refused_by_name(changes: dict[str, object], text: str) -> None:
    """A spec that cannot exist names the field and what it saw."""
    with pytest.raises(UserError, match=text.replace("(", r"\(")):
        replace(T0, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_experts": None}, "experts_per_token = 2, expert_size = 24"),
        ({"num_experts": 0}, "num_experts = 0"),
        ({"expert_size": 0}, "expert_size = 0"),
        ({"experts_per_token": None}, "experts_per_token = None"),
        ({"experts_per_token": 5}, "experts_per_token = 5, num_experts = 4"),
        ({"gated_mlp": False}, "gated_mlp = False"),
        ({"mlp_bias": True}, "mlp_bias = True"),
        ({"dense_layers": (2,)}, "0 .. 1"),
        ({"dense_layers": (0, 1)}, "no layer with experts"),
    ],
)
def test_impossible_experts_are_refused_by_name(changes: dict[str, object], text: str) -> None:
    """Sizes of experts that cannot be, or that a dense model has no use for, name the field and what was seen."""
    with pytest.raises(UserError, match=text):
        replace(MOE_SPEC, **changes)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="normalize_top_k"):
        replace(T0, normalize_top_k=False)


@pytest.mark.parametrize("dense", [None, (0,), (1, 2)])
def test_counts_with_dense_layers_are_the_decoders(dense: tuple[int, ...] | None) -> None:
    """Table, module and closed form agree where some layers are dense; active parameters leave E - K experts out."""
    spec = replace(MOE_SPEC, num_layers=3, dense_layers=dense)
    with torch.device("meta"):
        model = Decoder(spec)
    assert {name: tuple(p.shape) for name, p in model.named_parameters()} == spec.parameter_shapes()
    assert sum(p.numel() for p in model.parameters()) == spec.num_parameters()
    idle = spec.num_expert_layers * 2 * 3 * spec.expert_width * spec.hidden_size
    assert spec.num_active_parameters() == spec.num_parameters() - idle


@pytest.mark.parametrize("scaling", [{"kind": "linear", "factor": 0.5}, {"kind": "llama3", "factor": 8.0}])
def test_incomplete_rope_scaling_is_refused(scaling: dict[str, object]) -> None:
    """A stretching without its numbers is an error, not a default."""
    with pytest.raises(UserError):
        RopeScaling(**scaling)  # type: ignore[arg-type]


def test_windows_follow_the_layers() -> None:
    """Only the listed layers have the window; without a list all have it."""
    some = replace(T0, sliding_window=4, sliding_layers=(1,))
    assert [some.window(layer) for layer in range(2)] == [None, 4]
    assert replace(T0, sliding_window=4).window(0) == 4


def test_specs_import_nothing_heavy() -> None:
    """Planning starts on a laptop at once: spec, families and presets pull in no torch, numpy or transformers."""
    code = (
        "import sys, danlu.model.spec, danlu.model.families, danlu.model.presets, danlu.checkpoint.hub\n"
        "print([name for name in ('torch', 'numpy', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"
