"""Mixture of experts: many MLPs in a layer's place, of which each token passes through K.

    y = sum over the token's K experts of weight * down_e(act(gate_e(x)) * up_e(x))

(sparsely gated experts, arXiv:1701.06538; in a decoder, arXiv:2401.04088.) It trades memory for arithmetic: the layer
holds E MLPs and computes K of them. One matrix of all experts is one parameter [E, out, in], so that the experts split
over ranks along its first dimension. Four steps, each a function of its own:

1. route: a token's K experts and their weights (`danlu.model.router`);
2. permute: K copies of every token, those of expert 0 first, then those of expert 1, ...;
3. compute: one matrix product a group of tokens, all groups in one kernel on CUDA, one after another elsewhere;
4. combine: a token's K results, weighted and added in fp32, at its place.

Between 2 and 3, and 3 and 4, stands `Dispatch`: with all experts at hand it does nothing, expert parallelism sends the
groups to the ranks that hold their experts and the results back. Neither module nor dispatch keeps anything of a call.

Copies and sums are gathers in both directions (each pass knows the other's permutation), never atomic additions, so
the result is the same in every run. An expert without tokens gets a gradient, which is exactly zero: a gradient that
is absent on one rank only would leave the others waiting for it. The kernel for all groups does not write the gradient
of an empty group on every device (pytorch issue 172439), hence the mask.

Not here: shared experts, biases, capacity limits, groups of experts.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from danlu.base.errors import RunError
from danlu.model.linear import Linear
from danlu.model.mlp import gate_up
from danlu.model.router import RouterRecord, route
from danlu.model.spec import ModelSpec


class Permutation(NamedTuple):
    """Where the copies of the tokens lie; P = T * K copies.

    Attributes:
        order_P: for each place in the sorted list, which copy lies there (token * K + its how-manieth expert).
        place_P: for each copy its place in the sorted list.
        counts_E: copies of each expert, int64.
    """

    order_P: Tensor
    place_P: Tensor
    counts_E: Tensor


class Dispatch(Protocol):
    """Carries sorted tokens to where their experts are, and the results back."""

    def send(self, tokens_PD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Take tokens sorted by expert (all E) to their experts.

        Returns:
            The tokens to compute here, sorted by the experts that are here; how many each of these has; and whatever
            `back` needs to know.
        """

    def back(self, out_QD: Tensor, receipt: Any) -> Tensor:
        """Return the results of this rank's own tokens, [P, D], in the order in which they were sent."""


class LocalDispatch:
    """All experts are here, so nothing travels."""

    def send(self, tokens_PD: Tensor, counts_E: Tensor) -> tuple[Tensor, Tensor, Any]:
        """Return the tokens and counts as they are."""
        return tokens_PD, counts_E, None

    def back(self, out_QD: Tensor, receipt: Any) -> Tensor:
        """Return the results as they are."""
        return out_QD


class _Spread(torch.autograd.Function):
    """tokens[order // K], whose gradient is a gather and a sum over the K copies."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, order_P: Tensor, place_P: Tensor) -> Tensor:
        ctx.save_for_backward(place_P)
        ctx.num_tokens = hidden_TD.shape[0]
        copies = order_P.shape[0] // max(1, hidden_TD.shape[0])
        return hidden_TD[order_P // max(1, copies)]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None]:
        (place_P,) = ctx.saved_tensors
        copies = place_P.shape[0] // max(1, ctx.num_tokens)
        return grad_PD[place_P].view(ctx.num_tokens, copies, grad_PD.shape[1]).sum(1), None, None


class _Collect(torch.autograd.Function):
    """out[place], whose gradient is the gather by the inverse permutation."""

    @staticmethod
    def forward(ctx: Any, out_PD: Tensor, order_P: Tensor, place_P: Tensor) -> Tensor:
        ctx.save_for_backward(order_P)
        return out_PD[place_P]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PD: Tensor) -> tuple[Tensor, None, None]:
        (order_P,) = ctx.saved_tensors
        return grad_PD[order_P], None, None


@torch.no_grad()
def permute(experts_TK: Tensor, num_experts: int) -> Permutation:
    """Return how the copies of all tokens are sorted by expert; within an expert they keep the tokens' order."""
    expert_P = experts_TK.flatten()
    order_P = expert_P.argsort(stable=True)
    place_P = torch.empty_like(order_P)
    place_P[order_P] = torch.arange(order_P.shape[0], device=order_P.device)
    counts_E = expert_P.new_zeros(num_experts).scatter_add_(0, expert_P, torch.ones_like(expert_P))
    return Permutation(order_P, place_P, counts_E)


def spread(hidden_TD: Tensor, permutation: Permutation) -> Tensor:
    """Return K copies of every token sorted by expert, [P, D]."""
    out_PD: Tensor = _Spread.apply(hidden_TD, permutation.order_P, permutation.place_P)
    return out_PD


def combine(out_PD: Tensor, permutation: Permutation, weights_TK: Tensor) -> Tensor:
    """Return each token's weighted sum over its K results, [T, D], added in fp32, in the results' dtype."""
    own_PD: Tensor = _Collect.apply(out_PD, permutation.order_P, permutation.place_P)
    own_TKD = own_PD.view(*weights_TK.shape, out_PD.shape[1])
    return (own_TKD * weights_TK.unsqueeze(-1)).sum(1).to(out_PD.dtype)


class Groups:
    """Rows in consecutive groups, one a matrix, and their products.

    Args:
        counts_E: rows of each group.
        in_one_kernel: all groups in one kernel; else one after another, which needs the counts on the host.
    """

    def __init__(self, counts_E: Tensor, *, in_one_kernel: bool) -> None:
        self.ends_E = counts_E.cumsum(0, dtype=torch.int32) if in_one_kernel else None
        self.is_empty_E = counts_E == 0
        self.slices: list[slice] = []
        if not in_one_kernel:
            start = 0
            for size in counts_E.tolist():
                self.slices.append(slice(start, start := start + size))
            self.num_rows = start

    def multiply(self, rows_PI: Tensor, matrix_EIO: Tensor) -> Tensor:
        """Return each row times its group's matrix (cast to the rows' dtype), [P, O]."""
        if self.ends_E is not None:
            return F.grouped_mm(rows_PI, matrix_EIO.to(rows_PI.dtype), offs=self.ends_E)
        if rows_PI.shape[0] != self.num_rows:
            raise RunError("tokens were lost on their way to the experts", seen=f"{rows_PI.shape[0]}/{self.num_rows}")
        out_PO = rows_PI.new_empty(rows_PI.shape[0], matrix_EIO.shape[2])
        for expert, rows in enumerate(self.slices):
            if rows.stop > rows.start:
                torch.mm(rows_PI[rows], matrix_EIO[expert].to(rows_PI.dtype), out=out_PO[rows])
        return out_PO

    def outer(self, left_PO: Tensor, right_PI: Tensor, dtype: torch.dtype) -> Tensor:
        """Return for each group the sum over its rows of left x right, [E, O, I]; zero for an empty group."""
        if self.ends_E is not None and left_PO.shape[0]:
            product_EOI = F.grouped_mm(left_PO.t(), right_PI, offs=self.ends_E).to(dtype)
            return product_EOI.masked_fill_(self.is_empty_E[:, None, None], 0)
        shape = (self.is_empty_E.shape[0], left_PO.shape[1], right_PI.shape[1])
        sums_EOI = left_PO.new_zeros(shape, dtype=dtype)
        for expert, rows in enumerate(self.slices):
            if rows.stop > rows.start:
                sums_EOI[expert] = left_PO[rows].t() @ right_PI[rows]
        return sums_EOI


class _GroupedLinear(torch.autograd.Function):
    """y = x W_e^T, the weights cast where they are used: no cast copy of all experts is kept for the backward."""

    @staticmethod
    def forward(ctx: Any, x_PI: Tensor, weight_EOI: Tensor, groups: Groups) -> Tensor:
        ctx.save_for_backward(x_PI, weight_EOI)
        ctx.groups = groups
        return groups.multiply(x_PI, weight_EOI.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_PO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_PI, weight_EOI = ctx.saved_tensors
        groups, grad_PO = ctx.groups, grad_PO.contiguous()
        grad_x = groups.multiply(grad_PO, weight_EOI) if ctx.needs_input_grad[0] else None
        grad_weight = groups.outer(grad_PO, x_PI, weight_EOI.dtype) if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None


def grouped_linear(x_PI: Tensor, weight_EOI: Tensor, groups: Groups) -> Tensor:
    """Return each row times the transposed matrix of its group, [P, O], in the rows' dtype."""
    out_PO: Tensor = _GroupedLinear.apply(x_PI, weight_EOI, groups)
    return out_PO


def has_group_kernel(x_PD: Tensor, inner: int) -> bool:
    """Return whether one kernel multiplies all groups: bf16 on Ampere or newer, rows of whole 16 bytes."""
    if not x_PD.is_cuda or x_PD.dtype != torch.bfloat16 or not x_PD.shape[0] or x_PD.shape[1] % 8 or inner % 8:
        return False
    return torch.cuda.get_device_capability(x_PD.device) >= (8, 0)


class ExpertLinear(nn.Module):
    """One matrix of every expert, [E, out, in]; uninitialised until loaded or drawn."""

    def __init__(self, num_experts: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, out_features, in_features))

    def forward(self, x_PI: Tensor, groups: Groups) -> Tensor:
        """Return [P, out] for rows sorted by expert."""
        return grouped_linear(x_PI, self.weight, groups)


class Experts(nn.Module):
    """The MLPs of a layer's experts, or of those that are here."""

    def __init__(self, spec: ModelSpec, num_experts: int) -> None:
        super().__init__()
        self.gate = ExpertLinear(num_experts, spec.hidden_size, spec.expert_width)
        self.up = ExpertLinear(num_experts, spec.hidden_size, spec.expert_width)
        self.down = ExpertLinear(num_experts, spec.expert_width, spec.hidden_size)
        self.activation, self.inner = spec.activation, spec.expert_width

    def forward(self, tokens_PD: Tensor, counts_E: Tensor) -> Tensor:
        """Return every token's result, [P, D].

        Args:
            tokens_PD: tokens sorted by expert.
            counts_E: tokens of each expert here; they add up to P.
        """
        groups = Groups(counts_E, in_one_kernel=has_group_kernel(tokens_PD, self.inner))
        inner_PF = gate_up(self.gate(tokens_PD, groups), self.up(tokens_PD, groups), self.activation)
        out_PD: Tensor = self.down(inner_PF, groups)
        return out_PD


class MoE(nn.Module):
    """A layer's router and experts, called like an MLP.

    Attributes:
        dispatch: how tokens reach their experts; replaced by expert parallelism.
    """

    def __init__(self, spec: ModelSpec, layer: int) -> None:
        super().__init__()
        assert spec.num_experts is not None
        assert spec.experts_per_token is not None
        self.router = Linear(spec.hidden_size, spec.num_experts)
        self.experts = Experts(spec, spec.num_experts)
        self.dispatch: Dispatch = LocalDispatch()
        self.layer, self.num_experts, self.experts_per_token = layer, spec.num_experts, spec.experts_per_token
        self.normalize = spec.normalize_top_k

    def forward(self, hidden_BSD: Tensor, routers: RouterRecord | None = None) -> Tensor:
        """Return the experts' output, [B, S, D].

        Args:
            hidden_BSD: normalised hidden states.
            routers: where to write down what the router did; None where nobody asks.
        """
        hidden_TD = hidden_BSD.flatten(0, 1)
        experts_TK, weights_TK = self.choose(hidden_TD, routers)
        return self.mix(hidden_TD, experts_TK, weights_TK).view_as(hidden_BSD)

    def choose(self, hidden_TD: Tensor, routers: RouterRecord | None) -> tuple[Tensor, Tensor]:
        """Return each token's experts and weights, both [T, K]."""
        logits_TE = self.router(hidden_TD.float())
        experts_TK, weights_TK = route(logits_TE, self.experts_per_token, normalize=self.normalize)
        if routers is not None:
            routers.add(self.layer, logits_TE, experts_TK)
        return experts_TK, weights_TK

    def mix(self, hidden_TD: Tensor, experts_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """Return each token's weighted sum over its experts, [T, D]."""
        permutation = permute(experts_TK, self.num_experts)
        tokens, counts, receipt = self.dispatch.send(spread(hidden_TD, permutation), permutation.counts_E)
        out_PD = self.dispatch.back(self.experts(tokens, counts), receipt)
        return combine(out_PD, permutation, weights_TK)
