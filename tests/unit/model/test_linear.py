"""Linear: weight gradients that wait are those of a backward pass that does not let them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from danlu.model.linear import Linear, WeightGradients


def build(bias: bool) -> Linear:
    """Return a Linear of 5 to 3 numbers, drawn."""
    torch.manual_seed(0)
    linear = Linear(5, 3, bias=bias)
    for parameter in linear.parameters():
        torch.nn.init.normal_(parameter)
    return linear


def passed(linear: Linear, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Run forward and backward on each input; return outputs and input gradients."""
    outputs, grads = [], []
    for x in inputs:
        x = x.detach().requires_grad_()
        y = linear(x)
        (y.float() ** 2).sum().backward()
        assert x.grad is not None
        outputs.append(y.detach())
        grads.append(x.grad)
    return outputs, grads


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("shape", [(4, 5), (2, 3, 5), (1, 1, 5)], ids=str)
def test_gradients_that_wait_are_the_plain_ones(dtype: torch.dtype, bias: bool, shape: tuple[int, ...]) -> None:
    """Two passes: outputs, input, bias and weight gradients; the weight's are None until their products are done."""
    inputs = [torch.randn(shape).to(dtype) for _ in range(2)]
    plain, waiting = build(bias), build(bias)
    waiting.later = WeightGradients()
    expected, found = passed(plain, inputs), passed(waiting, inputs)
    tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype is torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
    for left, right in zip(expected[0] + expected[1], found[0] + found[1], strict=True):
        assert left.dtype == right.dtype
        torch.testing.assert_close(right, left, **tolerance)
    assert waiting.weight.grad is None
    products = waiting.later.take()
    assert len(products) == 2
    assert waiting.later.take() == []
    for product in products:
        product()
    assert plain.weight.grad is not None
    assert waiting.weight.grad is not None
    assert waiting.weight.grad.dtype == torch.float32
    torch.testing.assert_close(waiting.weight.grad, plain.weight.grad, **tolerance)
    if bias:
        assert waiting.bias is not None
        assert plain.bias is not None
        torch.testing.assert_close(waiting.bias.grad, plain.bias.grad, **tolerance)


def test_an_input_without_gradient_still_trains_the_weight() -> None:
    """The first Linear of a model: no input gradient is made, the weight's is."""
    linear = build(bias=False)
    linear.later = WeightGradients()
    x = torch.randn(4, 5)
    linear(x).sum().backward()
    (product,) = linear.later.take()
    product()
    torch.testing.assert_close(linear.weight.grad, x.sum(0).expand(3, 5))


def test_a_frozen_weight_leaves_nothing_waiting() -> None:
    """Only the input's gradient is made."""
    linear = build(bias=False)
    linear.later = WeightGradients()
    linear.weight.requires_grad_(False)
    x = torch.randn(4, 5, requires_grad=True)
    linear(x).sum().backward()
    assert linear.later.take() == []
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(4, 5))


def test_the_product_alone_has_no_bias() -> None:
    """`product` is what tensor parallelism sums over ranks before the bias comes on."""
    linear = build(bias=True)
    x = torch.randn(4, 5)
    assert linear.bias is not None
    torch.testing.assert_close(linear.product(x) + linear.bias, linear(x))
