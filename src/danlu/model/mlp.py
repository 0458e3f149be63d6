"""The block's MLP: gated (arXiv:2002.05202, SwiGLU and GeGLU) or plain.

The gated product act(gate) * up is four tensors of width F if autograd composes it; the function here keeps two (gate
and up) and recomputes the activation in the backward, which costs one elementwise pass and saves a quarter of a
block's activation memory. The result is the same to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from danlu.model.linear import Linear
from danlu.model.spec import ModelSpec

_ACTIVATE: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}
_ACTIVATE_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": torch.ops.aten.silu_backward.default,
    "gelu": torch.ops.aten.gelu_backward.default,
    "gelu_tanh": lambda grad, x: torch.ops.aten.gelu_backward.default(grad, x, approximate="tanh"),
}


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, activation: str) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.activation = activation
        return _ACTIVATE[activation](gate).mul_(up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        grad_up = _ACTIVATE[ctx.activation](gate).mul_(grad)
        return _ACTIVATE_BACKWARD[ctx.activation](grad * up, gate), grad_up, None


def gate_up(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """Return act(gate) * up, [..., F], keeping only the two inputs for the backward pass."""
    inner: Tensor = _Gated.apply(gate, up, activation)
    return inner


class MLP(nn.Module):
    """down(act(gate(x)) * up(x)), or down(act(up(x))) where the spec is not gated."""

    def __init__(self, spec: ModelSpec) -> None:
        super().__init__()
        self.gate = Linear(spec.hidden_size, spec.mlp_size, bias=spec.mlp_bias) if spec.gated_mlp else None
        self.up = Linear(spec.hidden_size, spec.mlp_size, bias=spec.mlp_bias)
        self.down = Linear(spec.mlp_size, spec.hidden_size, bias=spec.mlp_bias)
        self.activation = spec.activation

    def forward(self, hidden_BSD: Tensor) -> Tensor:
        """Return the MLP's output, [B, S, D]."""
        up_BSF = self.up(hidden_BSD)
        if self.gate is None:
            inner_BSF = _ACTIVATE[self.activation](up_BSF)
        else:
            inner_BSF = gate_up(self.gate(hidden_BSD), up_BSF, self.activation)
        out_BSD: Tensor = self.down(inner_BSF)
        return out_BSD
