"""How much of a step the ranks of a pipeline are at work: danlu's executor against theory, schedule by schedule.

    python benchmarks/pipeline/run.py

Eight processes on one machine cannot compute side by side on fewer cores, so stages here do not compute: they sleep for
a stated time in forward, input gradient and weight gradient. Everything else is what training runs: the orders, the
executor, autograd and real messages over gloo. A schedule that waits where it need not, or an executor that posts a
receive too late, shows as a utilisation below theory.

Utilisation is the stated work of a rank over the time from the moment when all ranks have met to the end of the last
rank's last action. What the operating system oversleeps counts as loss; the fastest of a few steps is given, because a
busy machine wakes sleepers late.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

import machine  # noqa: E402

from danlu.base import env  # noqa: E402
from danlu.base.layout import Degrees  # noqa: E402
from danlu.model.linear import WeightGradients  # noqa: E402
from danlu.parallel.mesh import World, open_world  # noqa: E402
from danlu.parallel.pipeline import Channels, Pipeline, Traced  # noqa: E402
from danlu.parallel.schedule import SCHEDULES, build_schedule  # noqa: E402
from danlu.parallel.timeline import equal_costs, simulate  # noqa: E402

RANKS = 8
MICRO_BATCHES = (6, 8, 16, 25)
VIRTUAL = {name: facts.min_virtual for name, facts in SCHEDULES.items()}


@dataclass(frozen=True)
class Work:
    """Seconds of one micro-batch on one stage, and where weight gradients wait, if they do."""

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    later: WeightGradients | None


class Sleep(torch.autograd.Function):
    """Passes its input on, and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, work: Work) -> Tensor:
        """Return the input, later."""
        ctx.work = work
        time.sleep(work.forward_seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient, later; the weight's may be left for still later."""
        work: Work = ctx.work
        if work.later is None:
            time.sleep(work.input_seconds + work.weight_seconds)
        else:
            time.sleep(work.input_seconds)
            work.later.waiting.append(lambda: time.sleep(work.weight_seconds))
        return grads[0], None


def one_step(pipeline: Pipeline, num_micro_batches: int, milliseconds: list[float], world: World) -> float:
    """Run a step and return its seconds, over all ranks."""
    seconds = [value / 1000 / pipeline.num_virtual for value in milliseconds]
    work, last = Work(*seconds, pipeline.later), pipeline.num_stages - 1

    def forward(stage: int, _: int, hidden_BSD: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x_BSD = torch.zeros(1, 1, 8, requires_grad=True) if hidden_BSD is None else hidden_BSD
        y_BSD: Tensor = Sleep.apply(x_BSD, work)
        return y_BSD, y_BSD.sum() if stage == last else None

    trace: list[Traced] = []
    pipeline.run(
        lambda _: torch.empty(1, 1, 8), num_micro_batches, forward, after_backward=lambda *_: None, trace=trace
    )
    end = torch.tensor(trace[-1].end_seconds)
    dist.all_reduce(end, op=dist.ReduceOp.MAX, group=world.group)
    return float(end)


def measure(file: Path, milliseconds: list[float], repeats: int, priority: int) -> None:
    """Do every case as one of the ranks; the first writes the seconds of each step."""
    os.nice(-priority)
    with open_world(Degrees(pp=RANKS), device="cpu") as world:
        assert world.up is not None
        assert world.down is not None
        channels = Channels(tuple(range(world.size)), world.rank, world.up, world.down)
        pipelines = {
            name: Pipeline(channels, schedule=name, num_virtual=num_virtual) for name, num_virtual in VIRTUAL.items()
        }
        for pipeline in pipelines.values():
            pipeline.adopt({})
            pipeline.open(world.device, tied=False)
        cases = [(name, count) for name in pipelines for count in MICRO_BATCHES]
        seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
        for number in range(repeats):  # in turns, so that a busy moment of the machine does not hit one case only
            for name, count in cases:
                seconds[name, count].append(one_step(pipelines[name], count, milliseconds, world))
            if world.rank == 0:
                print(f"round {number + 1} of {repeats}", file=sys.stderr)
        found = [
            {"schedule": name, "virtual": VIRTUAL[name], "micro_batches": count, "seconds": values}
            for (name, count), values in seconds.items()
        ]
        if world.rank == 0:
            file.write_text(json.dumps(found), encoding="utf-8")


def summary(case: dict[str, Any], milliseconds: list[float]) -> dict[str, Any]:
    """Add utilisation, of the fastest step, lowest and highest, and in theory."""
    forward, back, weight = (value / 1000 / case["virtual"] for value in milliseconds)
    count = case["micro_batches"]
    costs = equal_costs(
        RANKS * case["virtual"],
        forward_seconds=forward,
        input_gradient_seconds=back,
        weight_gradient_seconds=weight,
    )
    theory = simulate(build_schedule(case["schedule"], RANKS, case["virtual"], count), costs)
    busy = count * sum(milliseconds) / 1000
    shares = sorted(busy / seconds for seconds in case["seconds"])
    return {
        **case,
        "utilisation": shares[-1],
        "range": [shares[0], shares[-1]],
        "theory": 1 - theory.bubble_fraction,
    }


def table_of(cases: list[dict[str, Any]]) -> list[str]:
    """Return the table of measured and theoretical utilisation."""
    rows = []
    for name, num_virtual in VIRTUAL.items():
        found = {case["micro_batches"]: case for case in cases if case["schedule"] == name}
        cells = [f"{found[m]['utilisation']:.1%} / {found[m]['theory']:.1%}" for m in MICRO_BATCHES]
        rows.append([f"`{name}`", str(num_virtual), *cells])
    return machine.table(["schedule", "stages a rank", *(f"m = {count}" for count in MICRO_BATCHES)], rows)


def write_page(results: dict[str, Any]) -> None:
    cases, milliseconds = results["cases"], results["milliseconds"]
    gpipe = {case["micro_batches"]: case for case in cases if case["schedule"] == "gpipe"}
    widest = max(case["theory"] - case["utilisation"] for case in cases)
    lines = [
        "# Utilisation of pipeline schedules",
        "",
        *(__doc__ or "").split("\n\n", 1)[1].split("\n\n", 1)[1].strip().splitlines(),
        "",
        "Written by `run.py`; do not edit.",
        "",
        *machine.machine_lines(results["machine"]),
        f"- Command: `{results['command']}`; {RANKS} processes, gloo on one machine; a rank sleeps "
        f"{', '.join(f'{value:g}' for value in milliseconds)} ms for F, I, W of a micro-batch; the fastest of "
        f"{results['repeats']} steps, taken in turns",
        f"- Versions: {', '.join(f'{name} {number}' for name, number in results['versions'].items())}",
        "",
        "Measured / in theory, with m micro-batches in a step:",
        "",
        *table_of(cases),
        "",
        f"The widest gap to theory is {100 * widest:.1f} points. It grows with the number of actions, and so with the",
        "stages a rank: each action here is short and has its message, its wake-up and its Python. `dualpipev` can be",
        "above theory: its whole backwards pass the input's gradient on before they make the weights', which the",
        "simulation does not know.",
        "",
        "## From 46 % to 78 %",
        "",
        "A utilisation that rises from about 45 % to 78 % is what GPipe gives on eight stages when a step has 25",
        "micro-batches instead of 6: m / (m + 7). Here, measured and in theory:",
        "",
        *machine.table(
            ["micro-batches", "measured", "m / (m + 7)"],
            [[str(m), f"{gpipe[m]['utilisation']:.1%}", f"{m / (m + 7):.1%}"] for m in (6, 25)],
        ),
    ]
    (HERE / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--milliseconds", type=float, nargs=3, default=[30.0, 30.0, 30.0], help="of F, I, W on a rank")
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--priority", type=int, default=0, help="by which ranks raise theirs: they must wake in time")
    parser.add_argument("--file", type=Path, default=HERE / "seconds.json", help="where ranks leave their times")
    options = parser.parse_args()
    if env.ranks().launched:
        measure(options.file, options.milliseconds, options.repeats, options.priority)
        return
    about = machine.describe()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", __file__]
    command += ["--repeats", str(options.repeats), "--priority", str(options.priority), "--file", str(options.file)]
    command += ["--milliseconds", *map(str, options.milliseconds)]
    subprocess.run(command, check=True)
    cases = json.loads(options.file.read_text(encoding="utf-8"))
    options.file.unlink()
    results = {
        "machine": about,
        "command": shlex.join(["python", "benchmarks/pipeline/run.py", *sys.argv[1:]]),
        "versions": machine.versions("danlu", "torch"),
        "milliseconds": options.milliseconds,
        "repeats": options.repeats,
        "cases": [summary(case, options.milliseconds) for case in cases],
    }
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    write_page(results)


if __name__ == "__main__":
    main()
