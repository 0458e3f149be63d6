"""Where the time of danlu's training step goes, against what its matrix products alone would take on this machine.

The floor is measured, not looked up: every matrix product of the step (forward, input gradient, weight gradient, for
each distinct shape) is timed alone in the dtype of the run, with its operands in the layout that autograd gives it, and
multiplied by how often it occurs. Products of the head count for target tokens only, which is what danlu computes;
those of attention count the visible pairs. The rest of the step is then sorted by torch.profiler's operators.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from danlu.base.host_memory import ask_for_huge_pages, keep_freed_memory
from danlu.checkpoint.convert import load_decoder
from danlu.data.batch import stack_rows, to_micro_batch
from danlu.data.dataset import PackedDataset
from danlu.model.decoder import Decoder
from danlu.objective.cross_entropy import CrossEntropy
from danlu.parallel.data import Reducer
from danlu.train.optimizer import HybridOptimizer

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
GROUPS = {
    "matrix products": ("aten::mm", "aten::addmm", "aten::addmm_", "aten::linear"),
    "attention (products and softmax)": (
        "aten::bmm",
        "aten::baddbmm",
        "aten::_softmax",
        "aten::_softmax_backward_data",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
    ),
    "copies and casts": ("aten::copy_", "aten::index_select", "aten::index_copy_", "aten::fill_", "aten::zero_"),
    "optimizer and clipping": ("aten::_fused_adamw_", "aten::linalg_vector_norm", "aten::_foreach_norm"),
}
REST = "elementwise, norms and the rest"


def best_seconds(work: Callable[[], Any], repeats: int = 7) -> float:
    """Return the fastest of some runs: the machine's rate, free of what disturbs it."""
    work()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def linear_seconds(tokens: int, inputs: int, outputs: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return seconds and FLOPs of one Linear's three products."""
    x, weight = torch.randn(tokens, inputs).to(dtype), torch.randn(outputs, inputs).to(dtype)
    grad = torch.randn(tokens, outputs).to(dtype)
    products: list[Callable[[], Tensor]] = [lambda: x @ weight.T, lambda: grad @ weight, lambda: grad.T @ x]
    return sum(best_seconds(product) for product in products), 6.0 * tokens * inputs * outputs


def floor(model: Decoder, tokens: int, targets: int, dtype: torch.dtype) -> dict[str, float]:
    """Return seconds and FLOPs of all Linear products and of the head, each shape timed alone."""
    shapes: dict[tuple[int, int, int], int] = defaultdict(int)
    for name, parameter in model.blocks.named_parameters():
        if parameter.ndim == 2 and name:
            shapes[(tokens, parameter.shape[1], parameter.shape[0])] += 1
    shapes[(targets, model.spec.hidden_size, model.spec.vocab_size)] += 1
    seconds = flops = 0.0
    for (count, inputs, outputs), times in shapes.items():
        one, work = linear_seconds(count, inputs, outputs, dtype)
        seconds, flops = seconds + one * times, flops + work * times
    return {"seconds": seconds, "flops": flops}


def take_apart(model: Decoder, batch: Any) -> dict[str, Any]:
    """Return seconds of a step, of its phases, and of its operators by group."""
    objective = CrossEntropy()
    targets = int((batch.labels_BS != -100).sum())
    reducer = Reducer(list(model.named_parameters()))
    optimizer = HybridOptimizer(
        reducer, learning_rate=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1, fused=True
    )
    phases: dict[str, list[float]] = defaultdict(list)

    def step() -> None:
        times = [time.perf_counter()]
        hidden = model(batch.tokens_BS, positions_BS=batch.positions_BS, document_ids_BS=batch.document_ids_BS)
        times.append(time.perf_counter())
        loss = objective(hidden, model.head_weight_VD, batch).total
        times.append(time.perf_counter())
        (loss / targets).backward()
        times.append(time.perf_counter())
        optimizer.clip(1.0)
        optimizer.step()
        reducer.zero()
        times.append(time.perf_counter())
        names = ("blocks forward", "head and loss, both directions", "blocks backward", "clipping and optimizer")
        for name, began, ended in zip(names, times, times[1:], strict=False):
            phases[name].append(ended - began)

    for _ in range(4):
        step()
    medians = {name: float(np.median(values[1:])) for name, values in phases.items()}
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        step()
    groups: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        group = next((group for group, names in GROUPS.items() if event.key in names), REST)
        groups[group] += event.self_cpu_time_total / 1e6
    return {"phases": medians, "groups": dict(groups), "targets": targets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--cases", nargs="+", default=["supervised", "text"])
    parser.add_argument("--dtypes", nargs="+", default=["fp32", "bf16"])
    options = parser.parse_args()
    ask_for_huge_pages()  # as `danlu train` does
    keep_freed_memory()
    found: dict[str, Any] = {}
    for dtype in options.dtypes:
        model = load_decoder(options.work / "model", compute_dtype=DTYPES[dtype])
        model.train()
        for case in options.cases:
            batch = to_micro_batch(stack_rows(PackedDataset(options.work / case).rows(np.arange(options.rows))))
            parts = take_apart(model, batch)
            parts["floor"] = floor(model, batch.tokens_BS.numel(), parts["targets"], DTYPES[dtype])
            found[f"{case} {dtype}"] = parts
    print(json.dumps(found))


if __name__ == "__main__":
    main()
