"""A Linear whose parameters may be wider than its arithmetic.

Mixed precision without autocast: the weight is cast to the dtype of the input at the moment of use, so fp32 parameters
(what the optimizer needs: small updates are lost in bf16) compute in bf16, and the gradient arrives in the parameter's
dtype. It is explicit, it works the same on every device, and what computes in which dtype can be read off the code.
With equal dtypes the cast is no operation. The cast copy lives only as long as autograd needs it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Linear(nn.Module):
    """y = x W^T + b with weight [out, in] cast to x's dtype; parameters are uninitialised until loaded or drawn."""

    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out] for ``x`` [..., in], in x's dtype."""
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)
