"""AdamW with the right groups, the learning-rate schedule, and the gradient norm.

Decoupled weight decay belongs on matrices and embeddings; on norms and biases it only shrinks what should keep its
scale. The test is the parameter's number of dimensions, never its name. The schedule is a pure function of the step:
it has no state, so resuming by any number of processes cannot shift it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn


def build_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    *,
    learning_rate: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    fused: bool,
) -> torch.optim.AdamW:
    """Return AdamW (arXiv 1711.05101) over the trainable parameters, its state allocated at once.

    State that is born at the first step is memory that the first step did not announce, and a fresh optimizer into
    which a checkpoint loads nothing; so it is made here, zero.
    """
    trainable = [(name, parameter) for name, parameter in parameters if parameter.requires_grad]
    decayed = [(name, parameter) for name, parameter in trainable if parameter.ndim >= 2]
    plain = [(name, parameter) for name, parameter in trainable if parameter.ndim < 2]
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=learning_rate, betas=(beta1, beta2), eps=eps, fused=fused
    )
    for _, parameter in trainable:
        optimizer.state[parameter] = {
            "step": torch.zeros((), dtype=torch.float32, device=parameter.device if fused else "cpu"),
            "exp_avg": torch.zeros_like(parameter, memory_format=torch.preserve_format),
            "exp_avg_sq": torch.zeros_like(parameter, memory_format=torch.preserve_format),
        }
    return optimizer


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the optimizer's state as ``parameter name.state name`` -> tensor (the live tensors, not copies).

    By name, so that a checkpoint's state follows its parameter whatever the order of registration.
    """
    tensors = {}
    for group in optimizer.param_groups:
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            for key, value in optimizer.state[parameter].items():
                tensors[f"{name}.{key}"] = value
    return tensors


def can_fuse(parameters: Iterable[nn.Parameter]) -> bool:
    """Return whether AdamW has a fused kernel for every parameter's device and dtype."""
    return all(parameter.device.type in ("cpu", "cuda") and parameter.is_floating_point() for parameter in parameters)


def learning_rate_at(
    step: int,
    *,
    kind: str,
    peak: float,
    total_steps: int,
    warmup_steps: int,
    min_ratio: float,
    decay_fraction: float,
) -> float:
    """Return the learning rate of optimizer step ``step`` (the first is 0).

    Warm-up rises linearly so that step ``warmup_steps - 1`` has the peak; the last step of the run has
    ``peak * min_ratio`` (``constant`` excepted).
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if kind == "constant":
        return peak
    start = warmup_steps if kind != "wsd" else max(warmup_steps, total_steps - math.ceil(total_steps * decay_fraction))
    if step < start:
        return peak
    done = min(1.0, (step - start + 1) / max(1, total_steps - start))
    share = 0.5 * (1.0 + math.cos(math.pi * done)) if kind == "cosine" else 1.0 - done
    return peak * (min_ratio + (1.0 - min_ratio) * share)


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale the gradients so that their global norm is at most ``max_norm`` (0: leave them), and return the norm.

    The norm is that of the gradients before clipping, as an fp32 scalar on their device; parameters without a
    gradient count as zero.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in held if parameter.grad is not None])
    if max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(held, max_norm, norm)
    return norm
