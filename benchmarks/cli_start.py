"""How long a user waits for `danlu --help` and `danlu config schema`: the median of some starts.

    python benchmarks/cli_start.py

Each start is a new process of the installed command; the first one, which may have to read files from the disk, is not
counted. Results go to ``cli_start.json`` and into the index of the benchmarks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import machine  # noqa: E402

COMMANDS = (("--help",), ("train", "--help"), ("config", "schema"))
TARGET_SECONDS = 0.4


def start_seconds(command: list[str]) -> float:
    """Return the wall time of one run."""
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=10)
    parser.add_argument("--write", type=Path, default=HERE, help="folder for cli_start.json")
    options = parser.parse_args()
    danlu = Path(sys.executable).parent / "danlu"
    results: dict[str, Any] = {"machine": machine.describe(), "target_seconds": TARGET_SECONDS, "commands": {}}
    for words in COMMANDS:
        times = [start_seconds([str(danlu), *words]) for _ in range(options.starts + 1)][1:]
        results["commands"][" ".join(("danlu", *words))] = {"median": statistics.median(times), "seconds": times}
    empty = [start_seconds([sys.executable, "-c", ""]) for _ in range(options.starts)]
    results["python_alone"] = statistics.median(empty)
    (options.write / "cli_start.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    for command, found in results["commands"].items():
        print(f"{command}: {found['median']:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
