"""Bytes that ranks send in one optimizer step, counted on real ranks, against the formulas of the planner.

    python benchmarks/communication/run.py

Ranks are processes on this machine that talk through gloo; what a layout sends does not depend on what carries it. The
model is tiny (two blocks, or as many as a pipeline needs), because the ratio does not depend on the size either.
Counted is every collective that is called, FSDP2's too (`danlu.parallel.volume`); compared is with
`danlu.plan.communication`. Results go to ``results.json`` and ``README.md`` beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE.parent), str(ROOT / "tests")]

import machine  # noqa: E402

from danlu.config.rules import solve_layout  # noqa: E402
from danlu.plan.communication import plan_communication  # noqa: E402
from distributed.counting import by_operation, mean_traffic, spec_of, split_bookkeeping, work_of  # noqa: E402
from distributed.pool import RankPool  # noqa: E402
from tiny import VOCAB, tiny_config, write_rows  # noqa: E402

TOKENS = 22
COMMON = ("train.micro_batch_size=1", "train.global_batch_size=8")
LAYOUTS = [
    (4, ""),
    (4, "parallel.zero=1"),
    (4, "parallel.zero=2"),
    (4, "parallel.zero=3"),
    (4, "parallel.zero=3 parallel.reshard_after_forward=false"),
    (4, "parallel.zero=3 parallel.dp_replicate=2"),
    (4, "parallel.tp=4 parallel.sp=false"),
    (4, "parallel.tp=4"),
    (4, "parallel.cp=4"),
    (4, "parallel.cp=4 parallel.cp_method=ulysses"),
    (4, "parallel.pp=4 model.num_layers=4"),
    (4, "parallel.pp=2 parallel.pp_schedule=zbv parallel.tp=2 model.num_layers=4"),
    (8, "parallel.tp=2 parallel.cp=2 parallel.zero=3"),
    (8, "parallel.pp=2 parallel.tp=2 parallel.zero=2"),
]


def measure(pool: RankPool, work: Path, ranks: int, words: list[str], data: Path) -> dict[str, Any]:
    """Return the rows of one layout: axes, operation, bytes counted, bytes by formula."""
    config = tiny_config(data, work / "run", *COMMON, *words)
    degrees, spec = solve_layout(config, ranks), spec_of(config)
    step = work_of(config, spec, degrees, tokens=TOKENS)
    planned = by_operation(plan_communication(spec, degrees, step))
    counted, other = split_bookkeeping(mean_traffic(pool, ranks, data, work / "run", *COMMON, *words))
    rows = [
        {"axes": list(key[0]), "operation": key[1], "counted": counted.get(key, 0.0), "formula": planned.get(key, 0.0)}
        for key in sorted({*planned, *counted})
    ]
    return {"ranks": ranks, "words": words, "rows": rows, "other_bytes": other}


def write(folder: Path, results: dict[str, Any]) -> None:
    """Write ``results.json`` and ``README.md``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    rows = []
    for layout in results["layouts"]:
        name = " ".join(word.removeprefix("parallel.") for word in layout["words"]) or "dp_replicate"
        for index, row in enumerate(layout["rows"]):
            cells = [f"{layout['ranks']}", f"`{name}`"] if index == 0 else ["", ""]
            ratio = row["counted"] / row["formula"] if row["formula"] else float("inf")
            cells += [" x ".join(row["axes"]), row["operation"], f"{row['counted']:,.0f}", f"{row['formula']:,.0f}"]
            rows.append([*cells, f"{ratio:.4f}"])
    most = max(layout["other_bytes"] for layout in results["layouts"])
    found = ", ".join(f"{name} {version}" for name, version in results["versions"].items())
    lines = [
        "# Bytes on the wire against the formulas",
        "",
        "What a rank sends in one optimizer step, the mean over the ranks: counted on real ranks (every collective",
        "that is called, FSDP2's too), and by `danlu.plan.communication`. Ring convention, see the",
        "[guide](../../docs/communication.md). Eight rows of 22 tokens a step in micro-batches of one row, fp32, a",
        "model of width 32: small, so that bytes of padding and of norms show.",
        "",
        "Written by `run.py`; do not edit.",
        "",
        *machine.machine_lines(results["machine"]),
        f"- Command: `{results['command']}`",
        f"- Versions: {found}",
        "",
        *machine.table(["ranks", "layout", "axes", "operation", "counted, bytes", "formula, bytes", "ratio"], rows),
        "",
        f"Beside tensors, ranks agree on token counts, the norm and losses: at most {most:.0f} bytes a step here.",
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, default=HERE, help="folder for results.json and README.md")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "machine": machine.describe(),
        "command": "python benchmarks/communication/run.py",
        "versions": machine.versions("danlu", "torch", "numpy"),
        "layouts": [],
    }
    pool = RankPool()
    try:
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            rows = [[[(row + place) % VOCAB for place in range(TOKENS)]] for row in range(24)]
            data = write_rows(work / "data", rows)
            for number, (ranks, words) in enumerate(LAYOUTS):
                results["layouts"].append(measure(pool, work / str(number), ranks, words.split(), data))
    finally:
        pool.close()
    write(options.write, results)


if __name__ == "__main__":
    main()
