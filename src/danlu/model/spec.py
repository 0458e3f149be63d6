"""The shape of a model as a frozen value: what a config.json says, in one vocabulary for all families.

Everything that reasons about a model without running it (planner, presets, converters, config checks) works on this
value; so it imports no torch, and the parameter table (`ModelSpec.parameter_shapes`) is derived here, once, from the
sizes. The decoder builds exactly these names and shapes (a test compares them), which makes the parameter count of a
405B model a few additions instead of an allocation.

A spec is checked when it is made: sizes that cannot exist raise `UserError` naming the field, the value and the rule.
It carries no training choices (dropout, dtype, initial values) and no token ids: those belong to the run and to the
tokenizer. Two specs are equal iff they describe the same function of the same weights.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, cast

from danlu.base.errors import UserError

FamilyName = Literal["llama", "qwen", "qwen2", "qwen3", "mistral", "gpt2", "mixtral", "qwen3_moe"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the trained context; fields a kind does not use are None.

    Sources: linear, position interpolation (arXiv:2306.15595); dynamic, NTK-aware scaling by sequence length; llama3,
    the Llama 3.1 model card's frequency bands; yarn (arXiv:2309.00071).

    Attributes:
        kind: which formula.
        factor: how many times longer the context becomes.
        original_max_positions: trained context in tokens (llama3, yarn); None means the model's ``max_positions``.
        low_freq_factor: llama3; waves longer than original / low_freq_factor are divided by ``factor``.
        high_freq_factor: llama3; waves shorter than original / high_freq_factor are left alone.
        attention_factor: yarn; multiplies cos and sin. None derives it from ``factor`` (and the two mscales).
        beta_fast: yarn; rotations over the trained context above which a frequency is left alone (default 32).
        beta_slow: yarn; rotations below which a frequency is fully interpolated (default 1).
        mscale: yarn; numerator weight of the derived attention factor.
        mscale_all_dim: yarn; denominator weight of the derived attention factor.
        truncate: yarn; round the band's edges to whole dimensions (default true).
    """

    kind: Literal["linear", "dynamic", "llama3", "yarn"]
    factor: float
    original_max_positions: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        self.check_fields()

    def check_fields(self) -> None:
        """Raise `UserError` where the factor is impossible or a llama3 band is incomplete or empty."""
        if not self.factor >= 1:
            raise UserError("rope scaling must not shrink the context", seen=f"factor = {self.factor}", legal=">= 1")
        if self.kind == "llama3":
            low, high = self.low_freq_factor, self.high_freq_factor
            if low is None or high is None or not 0 < low < high:
                raise UserError(
                    "llama3 rope scaling needs its frequency band",
                    seen=f"low_freq_factor = {low}, high_freq_factor = {high}",
                    legal="0 < low_freq_factor < high_freq_factor",
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """Sizes and choices of one decoder; the same fields for every family.

    Attributes:
        family: the entry of `families.FAMILIES` it is read from and written as.
        num_layers: blocks.
        hidden_size: model width D.
        num_heads: query heads N.
        num_kv_heads: key/value heads G; N is a multiple of G.
        head_dim: head width H; N * H need not equal D.
        mlp_size: MLP width F of dense layers, and of the experts where they have no width of their own.
        vocab_size: embedding rows V as stored, padding rows included (not the tokenizer's length).
        max_positions: tokens the model was made for; rows of the position table where positions are learned.
        norm: which normalisation; always before attention, before the MLP and at the end.
        norm_eps: added to the variance.
        activation: MLP non-linearity; "gelu_tanh" is the tanh approximation, "gelu" the exact one.
        gated_mlp: down(act(gate(x)) * up(x)) instead of down(act(up(x))).
        positions: rotary, or a learned table added to the embedding.
        rope_theta: base of the rotary frequencies (unused with learned positions).
        rope_scaling: context stretching, or None.
        qkv_bias: query, key and value projections have a bias.
        output_bias: the attention's output projection has a bias.
        mlp_bias: the MLP projections have a bias.
        norm_bias: norms have a bias (layernorm only).
        qk_norm: RMSNorm over each query and key head before rotation.
        tied_embeddings: the output head is the embedding matrix.
        sliding_window: a token sees itself and the ``sliding_window - 1`` before it; None is the whole document.
        sliding_layers: the layers that use the window; None means all of them.
        eval_max_positions: longest input in tokens for which the family's published inference code adds no length
            extrapolation (first Qwen: dynamic NTK and log-n attention); longer inputs are refused outside training.
        num_experts: MLPs E that a token can be sent to; None is a dense model.
        experts_per_token: experts K that each token is sent to.
        expert_size: MLP width of an expert; None is ``mlp_size``.
        dense_layers: layers that have one MLP instead of experts; None means none of them.
        normalize_top_k: the weights of a token's K experts add up to 1 (softmax over their K logits) instead of being
            their share among all E.
    """

    family: FamilyName
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    vocab_size: int
    max_positions: int
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = 1e-6
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated_mlp: bool = True
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = False
    qk_norm: bool = False
    tied_embeddings: bool = False
    sliding_window: int | None = None
    sliding_layers: tuple[int, ...] | None = None
    eval_max_positions: int | None = None
    num_experts: int | None = None
    experts_per_token: int | None = None
    expert_size: int | None = None
    dense_layers: tuple[int, ...] | None = None
    normalize_top_k: bool = True

    @property
    def longest_input(self) -> int:
        """Tokens that the model takes outside training, prompt and continuation together."""
        return min(self.max_positions, self.eval_max_positions or self.max_positions)

    def __post_init__(self) -> None:
        self.check_sizes()
        self.check_choices()
        self.check_experts()

    def check_sizes(self) -> None:
        """Raise `UserError` where a size is not a positive whole number or heads do not divide."""
        sizes = [
            "num_layers",
            "hidden_size",
            "num_heads",
            "num_kv_heads",
            "head_dim",
            "mlp_size",
            "vocab_size",
            "max_positions",
        ]
        self._check_positive(*sizes)
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                "every key/value head must serve the same number of query heads",
                seen=f"num_heads = {self.num_heads}, num_kv_heads = {self.num_kv_heads}",
                legal="num_heads a multiple of num_kv_heads",
            )
        if self.positions == "rope" and self.head_dim % 2:
            raise UserError(
                "rotary positions turn pairs of dimensions", seen=f"head_dim = {self.head_dim}", legal="an even number"
            )
        if not self.norm_eps > 0:
            raise UserError("the norm's epsilon must be positive", seen=f"norm_eps = {self.norm_eps}")
        if not self.rope_theta > 1:
            raise UserError("the rotary base must be above 1", seen=f"rope_theta = {self.rope_theta}")

    def _check_positive(self, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise UserError("a model size must be a positive whole number", seen=f"{name} = {value!r}")

    def check_choices(self) -> None:
        """Raise `UserError` where two choices exclude each other, so that none is silently without effect."""
        if self.rope_scaling is not None and self.positions != "rope":
            raise UserError("rope scaling needs rotary positions", seen=f"positions = {self.positions!r}")
        if self.norm_bias and self.norm != "layernorm":
            raise UserError("only layernorm has a bias", seen=f"norm = {self.norm!r}, norm_bias = True")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise UserError("a window must hold at least the token itself", seen=f"{self.sliding_window = }")
        if self.sliding_layers is not None:
            if self.sliding_window is None:
                raise UserError("sliding layers need a window", seen=f"sliding_layers = {self.sliding_layers}")
            if any(not 0 <= layer < self.num_layers for layer in self.sliding_layers):
                raise UserError(
                    "a sliding layer does not exist",
                    seen=f"sliding_layers = {self.sliding_layers}",
                    legal=f"0 .. {self.num_layers - 1}",
                )

    def check_experts(self) -> None:
        """Raise `UserError` where the experts' sizes are impossible, or given for a dense model."""
        given = {name: getattr(self, name) for name in ("experts_per_token", "expert_size", "dense_layers")}
        if self.num_experts is None:
            left = [f"{name} = {value}" for name, value in given.items() if value is not None]
            if left := left + ([] if self.normalize_top_k else ["normalize_top_k = False"]):
                raise UserError("a model without experts has no sizes of experts", seen=", ".join(left))
            return
        self._check_positive(
            "num_experts", "experts_per_token", *(["expert_size"] if self.expert_size is not None else [])
        )
        if cast(int, self.experts_per_token) > self.num_experts:
            raise UserError(
                "a token cannot be sent to more experts than there are",
                seen=f"experts_per_token = {self.experts_per_token}, num_experts = {self.num_experts}",
            )
        if not self.gated_mlp or self.mlp_bias:
            raise UserError(
                "experts are gated and without bias", seen=f"gated_mlp = {self.gated_mlp}, mlp_bias = {self.mlp_bias}"
            )
        dense = self.dense_layers or ()
        if any(not 0 <= layer < self.num_layers for layer in dense) or len(set(dense)) == self.num_layers:
            raise UserError(
                "the dense layers do not exist, or leave no layer with experts",
                seen=f"dense_layers = {dense}",
                legal=f"some of 0 .. {self.num_layers - 1}",
            )

    @property
    def num_expert_layers(self) -> int:
        """Layers that have experts."""
        return sum(self.has_experts(layer) for layer in range(self.num_layers))

    @property
    def expert_width(self) -> int:
        """MLP width F of one expert."""
        return self.expert_size or self.mlp_size

    def has_experts(self, layer: int) -> bool:
        """Return whether ``layer`` sends its tokens to experts."""
        return self.num_experts is not None and layer not in (self.dense_layers or ())

    def window(self, layer: int) -> int | None:
        """Return the attention window of ``layer`` in tokens, or None where it sees its whole document."""
        return self.sliding_window if self.sliding_layers is None or layer in self.sliding_layers else None

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return every parameter's FQN and shape in the decoder's own order; a tied head is not listed twice."""
        width = self.hidden_size
        shapes: dict[str, tuple[int, ...]] = {"embedding.weight": (self.vocab_size, width)}
        if self.positions == "learned":
            shapes["position_embedding.weight"] = (self.max_positions, width)
        for layer in range(self.num_layers):
            for name, shape in self._block_shapes(experts=self.has_experts(layer)).items():
                shapes[f"blocks.{layer}.{name}"] = shape
        shapes |= self._norm_shapes("final_norm", width)
        if not self.tied_embeddings:
            shapes["head.weight"] = (self.vocab_size, width)
        return shapes

    def num_parameters(self) -> int:
        """Return the exact number of parameters; tied embeddings count once."""
        return self._count(self.num_experts or 0)

    def num_active_parameters(self) -> int:
        """Return the parameters that one token passes through: of the experts only its K."""
        return self._count(self.experts_per_token or 0)

    def _count(self, num_experts: int) -> int:
        """Return the number of parameters with ``num_experts`` experts in each layer that has some."""
        sparse = self.num_expert_layers
        blocks = (self.num_layers - sparse) * sum(map(math.prod, self._block_shapes(experts=False).values()))
        if sparse:
            shapes = self._block_shapes(experts=True).values()
            blocks += sparse * sum(
                num_experts * math.prod(shape[1:]) if len(shape) == 3 else math.prod(shape) for shape in shapes
            )
        norm = sum(math.prod(shape) for shape in self._norm_shapes("final_norm", self.hidden_size).values())
        tables = self.vocab_size * (1 if self.tied_embeddings else 2)
        tables += self.max_positions if self.positions == "learned" else 0
        return blocks + norm + tables * self.hidden_size

    def _norm_shapes(self, name: str, width: int) -> dict[str, tuple[int, ...]]:
        shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (width,)}
        return shapes | ({f"{name}.bias": (width,)} if self.norm_bias else {})

    def _block_shapes(self, *, experts: bool) -> dict[str, tuple[int, ...]]:
        width, heads, groups = self.hidden_size, self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        shapes = self._norm_shapes("attention_norm", width)
        linears = [
            ("attention.query", heads, width, self.qkv_bias),
            ("attention.key", groups, width, self.qkv_bias),
            ("attention.value", groups, width, self.qkv_bias),
            ("attention.output", width, heads, self.output_bias),
        ]
        mlp = [("mlp.gate", self.mlp_size, width, self.mlp_bias)] if self.gated_mlp else []
        mlp += [("mlp.up", self.mlp_size, width, self.mlp_bias), ("mlp.down", width, self.mlp_size, self.mlp_bias)]
        for name, rows, columns, bias in linears:
            shapes |= _linear_shapes(name, rows, columns, bias=bias)
        if self.qk_norm:
            shapes |= {"attention.query_norm.weight": (self.head_dim,), "attention.key_norm.weight": (self.head_dim,)}
        shapes |= self._norm_shapes("mlp_norm", width)
        if experts:
            return shapes | self._expert_shapes()
        for name, rows, columns, bias in mlp:
            shapes |= _linear_shapes(name, rows, columns, bias=bias)
        return shapes

    def _expert_shapes(self) -> dict[str, tuple[int, ...]]:
        num, width, inner = cast(int, self.num_experts), self.hidden_size, self.expert_width
        return {
            "mlp.router.weight": (num, width),
            "mlp.experts.gate.weight": (num, inner, width),
            "mlp.experts.up.weight": (num, inner, width),
            "mlp.experts.down.weight": (num, width, inner),
        }


def _linear_shapes(name: str, rows: int, columns: int, *, bias: bool) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": (rows, columns)}
    return shapes | ({f"{name}.bias": (rows,)} if bias else {})
