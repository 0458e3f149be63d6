"""RMSNorm and LayerNorm with fp32 statistics, and an RMSNorm that is cheap on a CPU.

RMSNorm (arXiv:1910.07467) is y = x * rstd * w with rstd = 1 / sqrt(mean(x^2) + eps). PyTorch fuses it on CUDA but
composes it from about ten passes over memory on a CPU, where it then costs as much as a projection. Two passes forward
are enough, and the backward is the one of LayerNorm, whose fused CPU kernel we reuse:

    LayerNorm backward with mean 0:   rstd * (g*w - mean(g*w) - n * mean(g*w * n)),   n = x * rstd
    RMSNorm backward:                 rstd * (g*w             - n * mean(g*w * n))

so the second is the first plus rstd * mean(g*w), where mean(g*w) is one matrix-vector product. The weight's gradient,
sum(g * n), is the same in both. Only x, the weight and one rstd a row are kept for the backward.

Invariant: statistics are fp32 (or wider) whatever the input's dtype, in torch's fused kernels too; the result has the
input's dtype; the weight may be fp32 while activations are bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default


class _RMSNormCPU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
        rstd = norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, rstd)
        return torch.mul(x, rstd).mul_(weight).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight, rstd = ctx.saved_tensors
        grad = grad.contiguous()
        mask = [True, ctx.needs_input_grad[1], False]
        zero = torch.zeros_like(rstd)
        grad_x, grad_weight, _ = _layer_norm_backward(grad, x, [x.shape[-1]], zero, rstd, weight, None, mask)
        row_mean = (grad @ weight.to(grad.dtype)).unsqueeze(-1).to(rstd.dtype).div_(x.shape[-1])
        return grad_x.add_(row_mean.mul_(rstd)), grad_weight, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return x / rms(x) * weight over the last dimension, in x's dtype with fp32 statistics.

    Args:
        x: any shape [..., D].
        weight: [D], any floating dtype.
        eps: added to the mean square.
    """
    if x.device.type == "cpu":
        y: Tensor = _RMSNormCPU.apply(x, weight, eps)
        return y
    return F.rms_norm(x, (x.shape[-1],), weight.to(x.dtype), eps)


class RMSNorm(nn.Module):
    """RMSNorm with a learned scale of width ``width``."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """LayerNorm (arXiv:1607.06450) with a learned scale and an optional bias."""

    def __init__(self, width: int, eps: float, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension of ``x``."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.layer_norm(x, (x.shape[-1],), self.weight.to(x.dtype), bias, self.eps)
