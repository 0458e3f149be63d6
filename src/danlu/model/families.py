"""What is particular to each model family: its config keys and its tensor names, as data.

A `Family` is one entry: how a Hugging Face config.json becomes a `ModelSpec` and back, and how the names in its
checkpoints map to danlu's. The decoder never asks which family it runs; everything it needs is in the spec. So adding
a family that fits the spec's choices is one entry here and one parity test against transformers.

Reading is strict in the direction that matters: a key whose value changes the mathematics in a way the decoder does
not implement (partial rotary, logit soft caps, unknown rope types) raises `UserError`; keys that cannot
change the forward pass (dropout, cache, initializer_range) are the run's business and are left alone. Writing is
checked by reading back: `hf_from_spec` raises where the family's config cannot express the spec, so an export never
describes another model than the one trained.

Rope settings are written three times with equal values, ``rope_theta`` and ``rope_scaling`` for transformers < 5 and
``rope_parameters`` for >= 5, because a reader that meets only the other schema falls back to base 10000 in silence.

Tensor names match exactly, never by substring: `hf_names` lists every name of a checkpoint, with the slices and the
transposition that turn it into the decoder's parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from danlu.base.errors import UserError, unknown_name
from danlu.model.hf_config import read_decoder, read_gpt2, read_qwen, write_decoder, write_gpt2, write_qwen
from danlu.model.hf_experts import read_mixtral, read_qwen3_moe, write_mixtral, write_qwen3_moe
from danlu.model.spec import ModelSpec

Config = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TensorMap:
    """One tensor of a HF checkpoint and the parameters it holds.

    Attributes:
        hf_name: exact name in the checkpoint.
        fqns: danlu's parameters, in the order in which their rows are stacked.
        rows: rows of each parameter along the outputs' dim of the (already transposed) tensor.
        transpose: the checkpoint stores [in, out] (GPT-2's Conv1D) instead of [out, in].
        expert: the tensor is this expert's matrix of the parameters, which hold all experts [E, out, in]; None where
            a tensor holds whole parameters.
    """

    hf_name: str
    fqns: tuple[str, ...]
    rows: tuple[int, ...]
    transpose: bool = False
    expert: int | None = None

    def hf_shape(self, shapes: Mapping[str, Sequence[int]]) -> tuple[int, ...]:
        """Return the tensor's shape in the checkpoint, from the shapes of the parameters."""
        whole = shapes[self.fqns[0]]
        shape = (*(whole[:-2] if self.expert is None else ()), sum(self.rows), *whole[max(1, len(whole) - 1) :])
        return shape[::-1] if self.transpose else shape


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """How a family's checkpoints name a layer with experts, under its block.

    Attributes:
        router: the router's matrix.
        gate: an expert's gate matrix, with ``{}`` where its number stands.
        up: the same for its up matrix.
        down: the same for its down matrix.
    """

    router: str
    gate: str
    up: str
    down: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family: config reader and writer, and the tables its tensor names are made of.

    Attributes:
        model_type: ``model_type`` in config.json.
        architecture: the causal-LM class named in ``architectures``.
        read: config -> spec (raises `UserError`).
        write: spec -> the family's own config keys.
        prefix: module that holds everything but the head; absent in checkpoints of the bare model.
        layers: name of the block list under the prefix.
        tables: HF name under the prefix -> FQN for embeddings and the final norm.
        block: HF name under a block -> FQNs under danlu's block, several where HF fuses them.
        transposed: block names stored as [in, out].
        block_extras: non-parameter buffers that old checkpoints carry per block; skipped by exact name.
        extras: the same under the prefix.
        experts: names in layers with experts; None for a dense family.
    """

    model_type: str
    architecture: str
    read: Callable[[Config], ModelSpec]
    write: Callable[[ModelSpec], dict[str, Any]]
    prefix: str
    layers: str
    tables: Mapping[str, str]
    block: Mapping[str, tuple[str, ...]]
    transposed: frozenset[str] = frozenset()
    block_extras: tuple[str, ...] = ()
    extras: tuple[str, ...] = ()
    experts: ExpertNames | None = None


_LLAMA_TABLES = {"embed_tokens": "embedding", "norm": "final_norm"}
_LLAMA_BLOCK = {
    "input_layernorm": ("attention_norm",),
    "self_attn.q_proj": ("attention.query",),
    "self_attn.k_proj": ("attention.key",),
    "self_attn.v_proj": ("attention.value",),
    "self_attn.o_proj": ("attention.output",),
    "self_attn.q_norm": ("attention.query_norm",),
    "self_attn.k_norm": ("attention.key_norm",),
    "post_attention_layernorm": ("mlp_norm",),
    "mlp.gate_proj": ("mlp.gate",),
    "mlp.up_proj": ("mlp.up",),
    "mlp.down_proj": ("mlp.down",),
}
_MIXTRAL_EXPERTS = ExpertNames(
    "block_sparse_moe.gate", *(f"block_sparse_moe.experts.{{}}.{matrix}" for matrix in ("w1", "w3", "w2"))
)
_QWEN_EXPERTS = ExpertNames("mlp.gate", *(f"mlp.experts.{{}}.{part}_proj" for part in ("gate", "up", "down")))
_STACKED_ROUTER = "mlp.gate.weight"
_STACKED = {"mlp.experts.gate_up_proj": ("gate", "up"), "mlp.experts.down_proj": ("down",)}
_FUSED_QKV = ("attention.query", "attention.key", "attention.value")


def _llama_like(
    name: str,
    architecture: str,
    read: Callable[[Config], ModelSpec] | None = None,
    write: Callable[[ModelSpec], dict[str, Any]] = write_decoder,
    experts: ExpertNames | None = None,
) -> Family:
    return Family(
        model_type=name,
        architecture=architecture,
        read=read or (lambda config: read_decoder(config, name)),
        write=write,
        prefix="model",
        layers="layers",
        tables=_LLAMA_TABLES,
        block=_LLAMA_BLOCK,
        block_extras=("self_attn.rotary_emb.inv_freq",),
        extras=("rotary_emb.inv_freq",),
        experts=experts,
    )


FAMILIES: dict[str, Family] = {
    "llama": _llama_like("llama", "LlamaForCausalLM"),
    "qwen2": _llama_like("qwen2", "Qwen2ForCausalLM"),
    "qwen3": _llama_like("qwen3", "Qwen3ForCausalLM"),
    "mistral": _llama_like("mistral", "MistralForCausalLM"),
    "mixtral": _llama_like("mixtral", "MixtralForCausalLM", read_mixtral, write_mixtral, _MIXTRAL_EXPERTS),
    "qwen3_moe": _llama_like("qwen3_moe", "Qwen3MoeForCausalLM", read_qwen3_moe, write_qwen3_moe, _QWEN_EXPERTS),
    "qwen": Family(
        model_type="qwen",
        architecture="QWenLMHeadModel",
        read=read_qwen,
        write=write_qwen,
        prefix="transformer",
        layers="h",
        tables={"wte": "embedding", "ln_f": "final_norm"},
        block={
            "ln_1": ("attention_norm",),
            "attn.c_attn": _FUSED_QKV,
            "attn.c_proj": ("attention.output",),
            "ln_2": ("mlp_norm",),
            "mlp.w1": ("mlp.up",),
            "mlp.w2": ("mlp.gate",),
            "mlp.c_proj": ("mlp.down",),
        },
        block_extras=("attn.masked_bias", "attn.rotary_emb.inv_freq"),
        extras=("rotary_emb.inv_freq",),
    ),
    "gpt2": Family(
        model_type="gpt2",
        architecture="GPT2LMHeadModel",
        read=read_gpt2,
        write=write_gpt2,
        prefix="transformer",
        layers="h",
        tables={"wte": "embedding", "wpe": "position_embedding", "ln_f": "final_norm"},
        block={
            "ln_1": ("attention_norm",),
            "attn.c_attn": _FUSED_QKV,
            "attn.c_proj": ("attention.output",),
            "ln_2": ("mlp_norm",),
            "mlp.c_fc": ("mlp.up",),
            "mlp.c_proj": ("mlp.down",),
        },
        transposed=frozenset({"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"}),
        block_extras=("attn.bias", "attn.masked_bias"),
    ),
}
"""Family name (``ModelSpec.family``) -> its entry."""


def spec_from_hf(config: Config, *, where: str = "config.json") -> ModelSpec:
    """Return the spec that a parsed HF config.json describes.

    Args:
        config: the parsed JSON, in the old (rope_theta, rope_scaling) or the transformers 5 (rope_parameters) schema.
        where: the file's name, for messages.

    Raises:
        UserError: unknown architecture, missing size, or an option the decoder does not implement.
    """
    by_type = {family.model_type: family for family in FAMILIES.values()}
    by_architecture = {family.architecture: family for family in FAMILIES.values()}
    kind = config.get("model_type")
    if kind is None:
        architectures = config.get("architectures") or ["(none given)"]
        family = by_architecture.get(architectures[0])
        if family is None:
            raise unknown_name("model architecture", architectures[0], by_architecture, where=where)
    elif kind not in by_type:
        raise unknown_name("model_type", str(kind), by_type, where=where)
    else:
        family = by_type[kind]
    try:
        return family.read(config)
    except UserError as error:
        raise error if error.where else UserError(str(error), where=where) from error


def hf_from_spec(spec: ModelSpec) -> dict[str, Any]:
    """Return the config.json content for ``spec``, readable by transformers < 5 and >= 5 (token ids not included).

    Raises:
        UserError: the family's config cannot express a choice of the spec; the message names the fields.
    """
    family = FAMILIES[spec.family]
    config = {"model_type": family.model_type, "architectures": [family.architecture], **family.write(spec)}
    read_back = family.read(config)
    if read_back != spec:
        lost = [
            f"{field.name} = {getattr(spec, field.name)!r}"
            for field in fields(spec)
            if getattr(spec, field.name) != getattr(read_back, field.name)
        ]
        raise UserError(f"a {spec.family} config.json cannot express this model", seen=", ".join(lost))
    return config


def hf_names(spec: ModelSpec, *, stacked_experts: bool = False) -> list[TensorMap]:
    """Return every tensor of a HF checkpoint of ``spec``; together they cover each parameter exactly once.

    Args:
        spec: the model.
        stacked_experts: the names under which transformers >= 5 holds a layer's experts in memory, and writes them
            where it is told to; what is published has a tensor for every matrix of every expert.
    """
    family = FAMILIES[spec.family]
    shapes = spec.parameter_shapes()
    modules: list[tuple[str, tuple[str, ...], bool]] = [
        (f"{family.prefix}.{hf}", (table,), False) for hf, table in family.tables.items()
    ]
    for layer in range(spec.num_layers):
        for hf, parts in family.block.items():
            ours = tuple(f"blocks.{layer}.{part}" for part in parts)
            modules.append((f"{family.prefix}.{family.layers}.{layer}.{hf}", ours, hf in family.transposed))
    modules.append(("lm_head", ("head",), False))
    maps = []
    for hf, ours, transposed in modules:
        for leaf in ("weight", "bias"):
            fqns = tuple(f"{part}.{leaf}" for part in ours)
            if fqns[0] in shapes:
                rows = tuple(shapes[fqn][0] for fqn in fqns)
                maps.append(TensorMap(f"{hf}.{leaf}", fqns, rows, transposed and leaf == "weight"))
    for layer in range(spec.num_layers):
        if spec.has_experts(layer):
            maps += _expert_maps(spec, layer, stacked=stacked_experts)
    return maps


def _expert_maps(spec: ModelSpec, layer: int, *, stacked: bool) -> list[TensorMap]:
    family = FAMILIES[spec.family]
    names, num_experts = family.experts, spec.num_experts
    if names is None or num_experts is None:
        raise UserError(f"a {spec.family} checkpoint has no names for experts", seen=f"{num_experts = }")
    theirs, ours = f"{family.prefix}.{family.layers}.{layer}", f"blocks.{layer}.mlp"
    rows = {"gate": spec.expert_width, "up": spec.expert_width, "down": spec.hidden_size}
    router = _STACKED_ROUTER if stacked else f"{names.router}.weight"
    maps = [TensorMap(f"{theirs}.{router}", (f"{ours}.router.weight",), (num_experts,))]
    if stacked:
        for hf, parts in _STACKED.items():
            fqns = tuple(f"{ours}.experts.{part}.weight" for part in parts)
            maps.append(TensorMap(f"{theirs}.{hf}", fqns, tuple(rows[part] for part in parts)))
        return maps
    for expert in range(num_experts):
        for part, pattern in (("gate", names.gate), ("up", names.up), ("down", names.down)):
            hf = f"{theirs}.{pattern.format(expert)}.weight"
            maps.append(TensorMap(hf, (f"{ours}.experts.{part}.weight",), (rows[part],), expert=expert))
    return maps


def hf_extras(spec: ModelSpec) -> frozenset[str]:
    """Return the exact names of buffers that a checkpoint may carry although the decoder computes them itself."""
    family = FAMILIES[spec.family]
    blocks = (f"{family.prefix}.{family.layers}.{layer}" for layer in range(spec.num_layers))
    names = [f"{block}.{extra}" for block in blocks for extra in family.block_extras]
    return frozenset(names + [f"{family.prefix}.{extra}" for extra in family.extras])
