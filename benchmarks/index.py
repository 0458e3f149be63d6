"""Writes ``README.md``, the index of all benchmarks with their headline results, from their results files.

python benchmarks/index.py
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE / "train_vs_peers")]

import machine  # noqa: E402
import report  # noqa: E402


def read(path: str) -> dict[str, Any] | None:
    """Return a results file, or None where that benchmark has not been run."""
    file = HERE / path
    return json.loads(file.read_text(encoding="utf-8")) if file.exists() else None


def main() -> None:
    lines = [
        "# Benchmarks",
        "",
        "Each makes its own data and environments, runs its contestants in turns and writes `results.json` and a page",
        "with command, hardware, versions and date. Run them on a quiet machine, with an interpreter that has danlu.",
        "",
        "Written by `index.py`; do not edit.",
        "",
    ]
    if train := read("train_vs_peers/results.json"):
        lines += ["## [Training against peers](train_vs_peers/README.md)", ""]
        lines += ["`python benchmarks/train_vs_peers/run.py`", "", *report.headline(train), ""]
        lines += [*machine.machine_lines(train["machine"]), ""]
    if data := read("data/results.json"):
        lines += ["## [Data](data/README.md)", "", "`python benchmarks/data/run.py`", ""]
        rows = [
            [name, f"{side['megabytes_per_second']:.2f}", f"{side['tokens_per_second']:,.0f}"]
            for name, side in data["sides"].items()
        ]
        lines += [*machine.table(["tokenise, pack, write", "MB/s", "tokens/s"], rows), ""]
        rates = data["loader_rows_per_second"]
        lines += [f"The loader gives {min(rates.values()):,.0f} rows of 512 tokens a second.", ""]
        lines += [*machine.machine_lines(data["machine"]), ""]
    if pipeline := read("pipeline/results.json"):
        lines += ["## [Utilisation of pipeline schedules](pipeline/README.md)", ""]
        lines += [f"`{pipeline['command']}`", "", "GPipe on eight ranks, by micro-batches in a step:", ""]
        rows = [
            [str(case["micro_batches"]), f"{case['utilisation']:.1%}", f"{case['theory']:.1%}"]
            for case in pipeline["cases"]
            if case["schedule"] == "gpipe"
        ]
        lines += [*machine.table(["micro-batches", "measured", "in theory"], rows), ""]
        lines += [*machine.machine_lines(pipeline["machine"]), ""]
    if start := read("cli_start.json"):
        lines += ["## Start of the command line", "", "`python benchmarks/cli_start.py`", ""]
        rows = [[f"`{command}`", f"{found['median']:.2f}"] for command, found in start["commands"].items()]
        rows.append(["Python alone", f"{start['python_alone']:.2f}"])
        lines += [*machine.table(["command", "median, s"], rows), ""]
        lines += [f"Target: `danlu --help` within {start['target_seconds']} s.", ""]
        lines += [*machine.machine_lines(start["machine"]), ""]
    (HERE / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
