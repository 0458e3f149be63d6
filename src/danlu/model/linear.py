"""A Linear whose parameters may be wider than its arithmetic.

Mixed precision without autocast: the weight is cast to the dtype of the input at the moment of use, so fp32 parameters
(what the optimizer needs: small updates are lost in bf16) compute in bf16, and the gradient arrives in the parameter's
dtype. It is explicit, it works the same on every device, and what computes in which dtype can be read off the code.
With equal dtypes the cast is no operation. The cast copy lives only as long as autograd needs it.

The gradient of a Linear's weight is needed by nobody before the optimizer, that of its input by the layer before.
Pipelines that fill their idle time split the two (arXiv 2401.10241): with a `WeightGradients` set, the backward pass
gives the input's gradient and writes down what the weight's takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable


class WeightGradients:
    """Products that a backward pass has left for later, in the order in which it came by."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def take(self) -> list[Callable[[], None]]:
        """Return what is waiting, and forget it."""
        taken, self.waiting = self.waiting, []
        return taken


class _InputFirst(torch.autograd.Function):
    """x W^T, whose backward pass leaves the weight's gradient for later."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: nn.Parameter, later: WeightGradients) -> Tensor:
        ctx.save_for_backward(x)
        ctx.weight, ctx.later = weight, later
        return F.linear(x, weight.to(x.dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, None]:
        (x,), weight, grad = ctx.saved_tensors, ctx.weight, grads[0]
        ctx.later.waiting.append(lambda: _add_product(weight, grad, x))
        return grad @ weight.to(grad.dtype) if ctx.needs_input_grad[0] else None, None, None


@torch.no_grad()
def _add_product(weight: nn.Parameter, grad: Tensor, x: Tensor) -> None:
    product = grad.flatten(0, -2).t() @ x.flatten(0, -2)
    if weight.grad is None:
        weight.grad = product.to(weight.dtype)
    else:
        weight.grad += product


class Linear(nn.Module):
    """y = x W^T + b with weight [out, in] cast to x's dtype; parameters are uninitialised until loaded or drawn.

    Attributes:
        later: where weight gradients are left for later; None computes them in the backward pass.
    """

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.later: WeightGradients | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for ``x`` [..., in], in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.later is None:
            return F.linear(x, self.weight.to(x.dtype), bias)
        y = self.product(x)
        return y if bias is None else y + bias

    def product(self, x: Tensor) -> Tensor:
        """Return x W^T without the bias."""
        if self.later is None or not self.weight.requires_grad:
            return F.linear(x, self.weight.to(x.dtype))
        y: Tensor = _InputFirst.apply(x, self.weight, self.later)
        return y
