"""Rotary position embedding (arXiv:2104.09864) and the four ways of stretching it.

Each pair (i, i + H/2) of a head's dimensions is turned by position * frequency_i: the "rotate half" layout of the
Hugging Face checkpoints, which is why no weight is permuted on the way in or out. Angles, cos and sin are fp32 and are
made once a forward, then cast once to the dtype of the heads.

Scaling changes only the frequencies (and, for yarn, multiplies cos and sin), so it is a function of the spec. The one
exception is dynamic NTK, whose base grows with the sequence: here each document gets the base of its own length, so
that packing and batching do not change a result.

The rotation is its own inverse up to the sign of sin. The backward uses that and keeps no activation.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from danlu.model.spec import ModelSpec, RopeScaling


class Rotation(NamedTuple):
    """cos and sin of every position, both [B or 1, S, 1, H / 2], in the dtype of the heads they turn."""

    cos: Tensor
    sin: Tensor


def frequencies(spec: ModelSpec, device: torch.device) -> tuple[Tensor, float]:
    """Return the radians per position of each pair [H / 2] (fp32) and the factor for cos and sin.

    Dynamic scaling is not applied here, see `rotation`.
    """
    width, scaling = spec.head_dim, spec.rope_scaling
    exponents = torch.arange(0, width, 2, device=device).float() / width
    plain = 1.0 / (spec.rope_theta**exponents)
    if scaling is None or scaling.kind == "dynamic":
        return plain, 1.0
    if scaling.kind == "linear":
        return plain / scaling.factor, 1.0
    original = scaling.original_max_positions or spec.max_positions
    if scaling.kind == "llama3":
        return _llama3(plain, scaling, original), 1.0
    return _yarn(plain, scaling, original, spec.rope_theta), _yarn_attention_factor(scaling)


def rotation(spec: ModelSpec, positions_BS: Tensor, dtype: torch.dtype, lengths_BS: Tensor | None = None) -> Rotation:
    """Return cos and sin for ``positions_BS``.

    Args:
        spec: head width, base and scaling.
        positions_BS: token positions, [B, S] or [1, S].
        dtype: dtype of the result; the angles are fp32.
        lengths_BS: tokens in each token's document; needed by dynamic scaling only.
    """
    frequency, factor = frequencies(spec, positions_BS.device)
    if spec.rope_scaling is not None and spec.rope_scaling.kind == "dynamic":
        assert lengths_BS is not None
        frequency = _dynamic(spec, spec.rope_scaling.factor, lengths_BS)
    angles = (positions_BS.unsqueeze(-1).float() * frequency).unsqueeze(2)
    cos, sin = angles.cos(), angles.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    return Rotation(cos.to(dtype), sin.to(dtype))


def rotate(heads_BSNH: Tensor, turn: Rotation) -> Tensor:
    """Return the heads turned by ``turn``; shape and dtype are kept."""
    turned_BSNH: Tensor = _Rotate.apply(heads_BSNH, turn.cos, turn.sin)
    return turned_BSNH


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(heads, cos, sin, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, -1), None, None


def _turn(heads: Tensor, cos: Tensor, sin: Tensor, sign: int) -> Tensor:
    first, second = heads.chunk(2, dim=-1)
    turned = torch.empty(heads.shape, dtype=heads.dtype, device=heads.device)
    turned_first, turned_second = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=turned_first).addcmul_(second, sin, value=-sign)
    torch.mul(second, cos, out=turned_second).addcmul_(first, sin, value=sign)
    return turned


def _dynamic(spec: ModelSpec, factor: float, lengths_BS: Tensor) -> Tensor:
    """Return NTK-aware frequencies [B, S, H / 2] whose base depends on the document's length."""
    width = spec.head_dim
    length = lengths_BS.clamp(min=spec.max_positions).double()
    growth = (factor * length / spec.max_positions - (factor - 1)) ** (width / (width - 2))
    exponents = torch.arange(0, width, 2, device=lengths_BS.device).double() / width
    return (1.0 / ((spec.rope_theta * growth).unsqueeze(-1) ** exponents)).float()


def _llama3(plain: Tensor, scaling: RopeScaling, original: int) -> Tensor:
    """Return frequencies kept above the band, divided by the factor below it, and blended inside."""
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    assert low is not None
    assert high is not None
    turns = original * plain / (2 * math.pi)
    blend = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * plain / scaling.factor + blend * plain


def _yarn(plain: Tensor, scaling: RopeScaling, original: int, theta: float) -> Tensor:
    """Return frequencies kept where they turn often over the trained context, interpolated where they turn rarely."""
    width = 2 * plain.numel()

    def dimension(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.beta_fast or 32), dimension(scaling.beta_slow or 1)
    if scaling.truncate is not False:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(width // 2, device=plain.device).float() - low) / (high - low)).clamp(0, 1)
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_attention_factor(scaling: RopeScaling) -> float:
    if scaling.attention_factor is not None:
        return scaling.attention_factor

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(scaling.factor) + 1.0 if scaling.factor > 1 else 1.0

    if scaling.mscale and scaling.mscale_all_dim:
        return magnitude(scaling.mscale) / magnitude(scaling.mscale_all_dim)
    return magnitude(1.0)
