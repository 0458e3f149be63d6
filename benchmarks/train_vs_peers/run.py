"""danlu's training loop against a plain loop, transformers' Trainer and TRL's SFTTrainer, side by side.

    python benchmarks/train_vs_peers/run.py

Run it with an interpreter that has danlu. Each peer gets an environment of its own from its file in ``requirements/``
(made once, under ``--work``). For each case and dtype danlu meets each peer in a heat: both start with the same weights
and documents, make one step to warm up, and then take turns, one optimizer step at a time (`contestants/clock.py`),
with the same number of threads, so that what disturbs the machine disturbs both. The ratio is the median over the
rounds of a heat. (All four at once would be simpler, but do not fit into 24 GiB.)

Results go to ``results.json`` and ``README.md`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import machine  # noqa: E402
import report  # noqa: E402
from environments import peer_python  # noqa: E402

PEERS = {"danlu": "danlu_train.py", "plain": "plain.py", "trainer": "trainer.py", "sft": "sft.py"}
CASES = ("supervised", "text")
DTYPES = ("fp32", "bf16")


def python_of(name: str, work: Path) -> Path:
    """Return the interpreter of a peer; danlu runs in this one."""
    if name == "danlu":
        return Path(sys.executable)
    return peer_python(HERE / "requirements" / f"{name}.txt", work / "envs" / name)


@dataclass
class Contestant:
    """A running peer and what it has reported."""

    name: str
    process: subprocess.Popen[str]
    steps: list[dict[str, Any]] = field(default_factory=list)
    end: dict[str, Any] = field(default_factory=dict)

    def read(self) -> None:
        """Wait for the next message."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} ended with code {self.process.wait()}; its output is above")
        message = json.loads(line)
        if message.pop("event") == "step":
            self.steps.append(message)
        else:
            self.end = message

    def go(self) -> None:
        """Let it make its next step (or finish, after the last one)."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        self.read()


def start(name: str, options: argparse.Namespace, case: str, dtype: str, *, steps: int, first: bool) -> Contestant:
    """Start a contestant; it returns after its first step, which is not counted."""
    output = options.work / "runs" / f"{name}-{case}-{dtype}{'-first' if first else ''}"
    subprocess.run(["rm", "-rf", str(output)], check=True)
    command = [
        str(python_of(name, options.work)), str(HERE / "contestants" / PEERS[name]),
        "--work", str(options.work / "data"),
        "--case", case, "--dtype", dtype, "--steps", str(steps), "--rows-per-step", str(options.rows_per_step),
        "--output", str(output), *(["--first-batch-only"] if first else []),
    ]  # fmt: skip
    threads = str(options.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
    environment["TOKENIZERS_PARALLELISM"] = "false"
    log = None if options.verbose else subprocess.DEVNULL
    contestant = Contestant(
        name,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
        ),
    )
    contestant.read()
    return contestant


def measure(options: argparse.Namespace, case: str, dtype: str) -> dict[str, Any]:
    """Run one case in one dtype and return every contestant's numbers, danlu's over all its heats."""
    counted = count(options, case)
    ours: list[dict[str, Any]] = []
    results: dict[str, Any] = {}
    for peer in [name for name in options.peers if name != "danlu"]:
        heat = [start(name, options, case, dtype, steps=1 + options.rounds, first=False) for name in ("danlu", peer)]
        for number in range(options.rounds):
            for contestant in heat:
                contestant.go()
            times = "  ".join(f"{c.name} {c.steps[-1]['seconds']:.2f}" for c in heat)
            print(f"{case} {dtype}: round {number + 1}: {times}", file=sys.stderr)
        for contestant in heat:
            contestant.go()
            contestant.process.wait(timeout=120)
        own, other = (summarise(contestant, counted) for contestant in heat)
        pairs = zip(own["rates"], other["rates"], strict=True)
        results[peer] = other | {"danlu_times": statistics.median(mine / theirs for mine, theirs in pairs)}
        ours.append(own)
    return {"danlu": combine(ours), **results}


def combine(heats: list[dict[str, Any]]) -> dict[str, Any]:
    """Return one contestant's numbers over several heats."""
    joined = dict(heats[0])
    for key, value in heats[0].items():
        if isinstance(value, list) and key not in ("losses", "grad_norms"):
            joined[key] = [entry for heat in heats for entry in heat[key]]
    return joined | {"peak_rss_gib": max(heat["peak_rss_gib"] for heat in heats)}


def count(options: argparse.Namespace, case: str) -> dict[str, list[int]]:
    """Return real tokens and targets of each step of those who train on danlu's rows."""
    with np.load(options.work / "data" / f"{case}.npz") as rows:
        shape = (-1, options.rows_per_step, rows["tokens"].shape[1])
        tokens = (rows["documents"] >= 0).reshape(shape).sum(axis=(1, 2))
        targets = (rows["labels"] != -100).reshape(shape).sum(axis=(1, 2))
    return {"tokens": tokens.tolist(), "targets": targets.tolist()}


def summarise(contestant: Contestant, counted: dict[str, list[int]]) -> dict[str, Any]:
    """Return what a contestant did in its timed steps."""
    end, timed = contestant.end, contestant.steps[1:]
    tokens = end.get("tokens", counted["tokens"])[1 : len(timed) + 1]
    targets = end.get("targets", counted["targets"])[1 : len(timed) + 1]
    seconds = [step["seconds"] for step in timed]
    return {
        "rates": [number / second for number, second in zip(tokens, seconds, strict=True)],
        "valid_rates": [number / second for number, second in zip(targets, seconds, strict=True)],
        "seconds": seconds,
        "cpu_seconds": [step["cpu_seconds"] for step in timed],
        "system_seconds": [step["system_seconds"] for step in timed],
        "page_faults": [step["page_faults"] for step in timed],
        "peak_rss_gib": contestant.steps[-1]["peak_rss_bytes"] / 2**30,
        "losses": end["losses"],
        "grad_norms": end["grad_norms"],
        "notes": end["notes"],
        "versions": end["versions"],
    }


def first_step(options: argparse.Namespace, case: str, dtype: str, results: dict[str, Any]) -> dict[str, Any]:
    """Return every contestant's loss and gradient norm on the first batch, from the same weights.

    SFTTrainer packs the documents in its own way, so it gets those of the first batch alone; the others have reported.
    """
    found = {n: {"loss": r["losses"][0], "grad_norm": r["grad_norms"][0]} for n, r in results.items() if n != "sft"}
    if "sft" in results:
        alone = start("sft", options, case, dtype, steps=1, first=True)
        alone.go()
        alone.process.wait(timeout=120)
        found["sft"] = {"loss": alone.end["losses"][0], "grad_norm": alone.end["grad_norms"][0]}
    return found


def where_time_goes(options: argparse.Namespace) -> dict[str, Any]:
    """Return danlu's step taken apart, beside the time of its matrix products alone (see `where.py`)."""
    command = [sys.executable, str(HERE / "where.py"), str(options.work / "data"), "--rows", str(options.rows_per_step)]
    threads = str(options.threads)
    environment = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
    run = subprocess.run(
        [*command, "--cases", *options.cases, "--dtypes", *options.dtypes],
        check=True, stdout=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(run.stdout)
    return found


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks/train_vs_peers"), help="scratch folder")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5, help="timed steps per contestant, case and dtype")
    parser.add_argument("--rows-per-step", type=int, default=4, help="packed rows of 512 tokens per step")
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), default=list(PEERS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--quiet-load", type=float, default=0.0, help="wait for a load below this (0: do not wait)")
    parser.add_argument("--envs-only", action="store_true", help="make environments and work, measure nothing")
    parser.add_argument("--verbose", action="store_true", help="show what contestants write to stderr")
    parser.add_argument("--write", type=Path, default=HERE, help="folder for results.json and README.md")
    options = parser.parse_args()
    options.work = options.work.resolve()
    return options


def main() -> None:
    options = parse()
    rows = options.rows_per_step * (options.rounds + 1)
    subprocess.run(
        [sys.executable, str(HERE / "prepare.py"), str(options.work / "data"), "--rows", str(rows)], check=True
    )
    for name in options.peers:
        python_of(name, options.work)
    if options.envs_only:
        return
    if options.quiet_load:
        machine.wait_for_quiet(options.quiet_load, 3600)
    results: dict[str, Any] = {"machine": machine.describe(), "threads": options.threads, "rounds": options.rounds}
    results["command"] = "python benchmarks/train_vs_peers/run.py"
    results["rows_per_step"], results["cases"] = options.rows_per_step, {}
    for dtype in options.dtypes:
        for case in options.cases:
            numbers = measure(options, case, dtype)
            same = first_step(options, case, dtype, numbers)
            results["cases"][f"{case} {dtype}"] = {"peers": numbers, "first_step": same}
            options.write.mkdir(parents=True, exist_ok=True)
            (options.write / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    results["where"] = where_time_goes(options)
    (options.write / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    report.write(options.write)


if __name__ == "__main__":
    main()
