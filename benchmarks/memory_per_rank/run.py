"""Memory of each rank, from real allocations, against what ZeRO and tensor parallelism promise.

    python benchmarks/memory_per_rank/run.py

A Llama-shaped model of 34 million parameters, fp32, AdamW, 4 ranks on this machine through gloo, four rows of 256
tokens a step whatever the layout. Parameters, gradients and optimizer state are the bytes of the distinct storages that
model, reducer and optimizer hold (after a backward pass). The peak is that of one step: what is held before it, plus
the highest sum of all allocations and releases of torch's CPU allocator in it, as the profiler records them. The rest
is the peak less the three: activations, whole parameters of the unit at work (ZeRO-3), buckets under way (ZeRO-2),
temporary results of kernels. gloo's own buffers are not torch's and not counted. Numbers are the largest of any rank.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests")]

import machine  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.distributed.tensor import DTensor  # noqa: E402
from torch.profiler import ProfilerActivity, profile  # noqa: E402

from danlu.base.layout import Degrees  # noqa: E402
from danlu.config.rules import solve_layout  # noqa: E402
from danlu.data.dataset import PackedDataset  # noqa: E402
from danlu.data.loader import take_steps  # noqa: E402
from danlu.parallel.mesh import open_world, sum_over  # noqa: E402
from danlu.plan.communication import local_shapes  # noqa: E402
from danlu.train import build  # noqa: E402
from danlu.train.start import plan_start  # noqa: E402
from danlu.train.step import count_tokens, forward_backward  # noqa: E402
from distributed.pool import RankPool  # noqa: E402
from tiny import VOCAB, tiny_config, write_rows  # noqa: E402

RANKS, TOKENS, ROWS = 4, 256, 4
MODEL = (
    "model.num_layers=8", "model.hidden_size=512", "model.num_heads=8", "model.num_kv_heads=4", "model.head_dim=64",
    "model.mlp_size=1536", "model.vocab_size=8192", "model.max_positions=256", f"train.global_batch_size={ROWS}",
    "train.steps=2",
)  # fmt: skip
LAYOUTS = {
    "zero 0": ("parallel.zero=0",),
    "zero 1": ("parallel.zero=1",),
    "zero 2": ("parallel.zero=2",),
    "zero 3": ("parallel.zero=3",),
    "tp 4, sp off": ("parallel.tp=4", "parallel.sp=false"),
    "tp 4, sp on": ("parallel.tp=4",),
}


def storage_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Return the bytes of the distinct storages behind some tensors (of a DTensor: this rank's)."""
    found = {}
    for tensor in tensors:
        if tensor is None:
            continue
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        storage = local.untyped_storage()
        found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def highest_sum(recorded: profile) -> int:
    """Return the highest sum of allocations and releases since the profiler began."""
    kineto = recorded.profiler.kineto_results  # type: ignore[union-attr]
    events = sorted((event.start_ns(), event.nbytes()) for event in kineto.events() if event.name() == "[memory]")
    held = highest = 0
    for _, change in events:
        held += change
        highest = max(highest, held)
    return highest


def rank_memory(data: str, output: str, words: tuple[str, ...]) -> dict[str, int]:
    """Return this rank's bytes by kind in the second step of a training (a job for the pool)."""
    config = tiny_config(data, output, *MODEL, *words)
    sources = [PackedDataset(data)]
    with open_world(solve_layout(config, RANKS), device="cpu") as world:
        start = plan_start(config.model, sources)
        built = build.build_model(config, start, world, TOKENS)
        optimizer = build.build_optimizer(config, built, world)
        forward = build.build_forward(config, built, build.build_objective(config, start.spec, world), world)
        parameters = [parameter for _, parameter in build.named_parameters(built.parts)]
        sizes: dict[str, int] = {}
        for batch in take_steps(build.build_loader(config, sources, world, 0), 2):
            own = count_tokens(batch.micro_batches)[0] if world.counts_rows else 0
            targets = int(sum_over(world.group, own)[0])
            sizes["parameters"] = storage_bytes(parameters)
            sizes["optimizer"] = storage_bytes(
                value for state in optimizer.core.state.values() for value in state.values()
            )
            gradients = [*(p.grad for p in parameters), *(shard.values.grad for shard in optimizer.shards)]
            before = sizes["parameters"] + sizes["optimizer"] + storage_bytes(gradients)
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
                forward_backward(forward, batch.micro_batches, built.reducer, valid_tokens=targets, device=world.device)
                gradients = [*(p.grad for p in parameters), *(shard.values.grad for shard in optimizer.shards)]
                sizes["gradients"] = storage_bytes(gradients)
                del gradients
                optimizer.clip(1.0)
                optimizer.step()
            built.reducer.zero()
            sizes["peak"] = before + highest_sum(recorded)
    sizes["rest"] = sizes["peak"] - sizes["parameters"] - sizes["gradients"] - sizes["optimizer"]
    return sizes


def theory(words: tuple[str, ...], work: Path) -> dict[str, float]:
    """Return the bytes by kind that fp32 AdamW needs: n of 4 bytes a kind, moments twice, split as ZeRO says."""
    config = tiny_config("unused", work / "unused", *MODEL, *words)
    degrees: Degrees = solve_layout(config, RANKS)
    spec = plan_start(config.model, []).spec
    numel = sum(torch.Size(shape).numel() for shape in local_shapes(spec, degrees.tp).values())
    zero, split = config.parallel.zero, degrees.dp_shard
    return {
        "parameters": 4 * numel / (split if zero == 3 else 1),
        "gradients": 4 * numel / (split if zero >= 2 else 1),
        "optimizer": 8 * numel / (split if zero >= 1 else 1),
    }


def write(folder: Path, results: dict[str, Any]) -> None:
    """Write ``results.json`` and ``README.md``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    kinds = ("parameters", "gradients", "optimizer")
    rows = []
    for name, layout in results["layouts"].items():
        measured, expected = layout["measured"], layout["theory"]
        cells = [f"{measured[kind] / 2**20:.1f} ({measured[kind] / expected[kind]:.2f})" for kind in kinds]
        together = sum(measured[kind] for kind in kinds)
        cells.append(f"{together / 2**20:.1f} ({together / sum(expected.values()):.2f})")
        rows.append([name, *cells, f"{measured['rest'] / 2**20:.1f}", f"{measured['peak'] / 2**20:.1f}"])
    found = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Memory of each rank",
        "",
        "MiB of the fullest of 4 ranks, and in brackets the ratio to theory (fp32 AdamW, n parameters on a rank before",
        "ZeRO, r = 4 ranks that split: 16 n, 8 n + 8 n / r, 4 n + 12 n / r, 16 n / r bytes for ZeRO 0, 1, 2, 3; with",
        f"tp n is a rank's part). {results['parameters']:,} parameters, {ROWS} rows of {TOKENS} tokens a step in every",
        "layout: data ranks have one row each, tensor parallel ranks all four.",
        "",
        "Written by `run.py`; do not edit. How it is measured is said at the top of that file.",
        "",
        *machine.machine_lines(results["machine"]),
        f"- Command: `{results['command']}`",
        f"- Versions: {found}",
        "",
        *machine.table(
            ["layout", "parameters", "gradients", "optimizer state", "the three", "rest at the peak", "peak"], rows
        ),
        "",
        "- *rest at the peak*: activations, and what lives for a moment: under ZeRO-2 buckets on their way, under",
        "  ZeRO-3 whole parameters and gradients of the units at work.",
        "- ZeRO-1 holds the whole gradients and beside them a reduced part, which the formula leaves out.",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=HERE, help="folder for results.json and README.md")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "command": "python benchmarks/memory_per_rank/run.py",
        "versions": machine.versions("danlu", "torch", "numpy"),
        "layouts": {},
    }
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            rows = [[[(row + place) % VOCAB for place in range(TOKENS)]] for row in range(2 * ROWS)]
            data = write_rows(work / "data", rows, sequence_length=TOKENS)
            spec = plan_start(tiny_config(data, work / "unused", *MODEL).model, []).spec
            results["parameters"] = spec.num_parameters()
            for name, words in LAYOUTS.items():
                answers = pool.run(RANKS, rank_memory, str(data), str(work / name), words, timeout=300)
                measured = {kind: max(answer[kind] for answer in answers) for kind in answers[0]}
                results["layouts"][name] = {"words": words, "measured": measured, "theory": theory(words, work)}
    finally:
        pool.close()
    write(options.write, results)


if __name__ == "__main__":
    main()
