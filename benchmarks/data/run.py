"""`danlu data build` against `datasets.map`, and how fast the loader feeds a model.

    python benchmarks/data/run.py

Text is invented (see `train_vs_peers/prepare.py`), written as jsonl of documents and tokenised with a tokenizer that is
trained on it. Both sides read the same file with the same tokenizer and number of processes, take turns for some
rounds, write their result to disk and are timed from after their imports to the finished files.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "train_vs_peers")]

import machine  # noqa: E402
from environments import peer_python  # noqa: E402
from prepare import Speaker  # noqa: E402

from danlu.base.log import setup_log  # noqa: E402
from danlu.config.data_build import TokenizerTrain  # noqa: E402
from danlu.data.dataset import PackedDataset  # noqa: E402
from danlu.data.loader import Loader, take_steps  # noqa: E402
from danlu.data.tokenizer_train import build_tokenizer  # noqa: E402

ROW = 512


def write_text(path: Path, megabytes: float) -> int:
    """Write jsonl documents of 5 to 1,000 words until the file has this size; return its bytes."""
    speaker = Speaker(seed=5)
    with path.open("w", encoding="utf-8") as file:
        while file.tell() < megabytes * 1e6:
            file.write(json.dumps({"text": speaker.say(speaker.draw(120.0, 150.0, 5, 1000))}) + "\n")
    return path.stat().st_size


def run(python: Path, script: str, work: Path, processes: int) -> dict[str, Any]:
    """Run one side once, into an empty folder."""
    output = work / "out"
    shutil.rmtree(output, ignore_errors=True)
    command = [str(python), str(HERE / script), "--inputs", str(work / "text.jsonl")]
    command += ["--tokenizer", str(work / "tokenizer"), "--output", str(output)]
    command += ["--row", str(ROW), "--processes", str(processes)]
    environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if script == "danlu_build.py":
        shutil.rmtree(work / "shards", ignore_errors=True)
        output.rename(work / "shards")
    return found


def loader_rates(folder: Path, rows: int) -> dict[str, float]:
    """Return rows/s of danlu's loader in random order, loading in the training process and in two workers."""
    rates = {}
    for workers in (0, 2):
        loader = Loader(
            [PackedDataset(folder)], global_batch_size=8, micro_batch_size=8, num_workers=workers, prefetch=4
        )
        take_steps(loader, 2)
        began = time.perf_counter()
        take_steps(loader, rows // 8)
        rates[f"{workers} workers"] = rows / (time.perf_counter() - began)
    return rates


def model_rows_per_second() -> dict[str, float]:
    """Return what the training benchmark's model consumes, from its results, if there are any."""
    path = HERE.parent / "train_vs_peers" / "results.json"
    if not path.exists():
        return {}
    cases = json.loads(path.read_text(encoding="utf-8"))["cases"]
    return {title: statistics.median(case["peers"]["danlu"]["rates"]) / ROW for title, case in cases.items()}


def write(folder: Path, results: dict[str, Any]) -> None:
    """Write ``results.json`` and ``README.md``."""
    (folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    rows = []
    for name, side in results["sides"].items():
        rows.append(
            [
                name,
                f"{side['megabytes_per_second']:.2f}",
                f"{side['tokens_per_second']:,.0f}",
                f"{side['median_seconds']:.1f}",
                f"{min(side['seconds']):.1f} to {max(side['seconds']):.1f}",
            ]
        )
    header = ["tokenise, pack into rows of 512, write", "MB/s", "tokens/s", "median, s", "range, s"]
    lines = [
        "# danlu's data path against `datasets`",
        "",
        "The same jsonl, tokenizer and number of processes; timed from after the imports to the finished files, in",
        "turns. `datasets`: `load_dataset`, `map` with the fast tokenizer, `map` that joins and cuts, `save_to_disk`.",
        "danlu also keeps documents apart (ids, positions), hashes what it writes and can resume.",
        "",
        "Written by `run.py`; do not edit.",
        "",
        *machine.machine_lines(results["machine"]),
        f"- Command: `python benchmarks/data/run.py`; {results['megabytes']:.1f} MB, {results['processes']} processes, "
        f"{results['rounds']} rounds",
        f"- Versions: {', '.join(f'{name} {version}' for name, version in results['versions'].items())}",
        "",
        *machine.table(header, rows),
        "",
        f"danlu is **{results['ratio']:.2f}** x as fast.",
        "",
        "## Loader",
        "",
        "Rows of 512 tokens in random order, as `danlu train` reads them, against what the model of the training",
        "benchmark (SmolLM2-135M) consumes on this machine.",
        "",
        *machine.table(
            ["", "rows/s"],
            [[f"loader, {name}", f"{rate:,.0f}"] for name, rate in results["loader_rows_per_second"].items()]
            + [[f"model, {name}", f"{rate:.1f}"] for name, rate in results["model_rows_per_second"].items()],
        ),
    ]
    (folder / "README.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks/data"), help="scratch folder")
    parser.add_argument("--megabytes", type=float, default=30.0)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", type=Path, default=HERE, help="folder for results.json and README.md")
    options = parser.parse_args()
    setup_log()
    work: Path = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    size = write_text(work / "text.jsonl", options.megabytes)
    build_tokenizer(
        TokenizerTrain(
            inputs=str(work / "text.jsonl"), output=str(work / "tokenizer"), vocab_size=4000, fields="text", chat=False
        )
    )
    sides = {
        "danlu data build": (Path(sys.executable), "danlu_build.py"),
        "datasets.map": (peer_python(HERE / "requirements.txt", work / "env"), "datasets_map.py"),
    }
    described = machine.describe()
    measured: dict[str, list[dict[str, Any]]] = {name: [] for name in sides}
    for number in range(options.rounds):
        for name, (python, script) in sides.items():
            measured[name].append(run(python, script, work, options.processes))
            print(f"round {number + 1}: {name} {measured[name][-1]['seconds']:.1f} s", file=sys.stderr)
    results: dict[str, Any] = {"machine": described, "processes": options.processes, "rounds": options.rounds}
    results["megabytes"] = size / 1e6
    results["versions"] = machine.versions("danlu", "tokenizers") | {
        line.split("==")[0]: line.split("==")[1]
        for line in (HERE / "requirements.txt").read_text(encoding="utf-8").split()
    }
    results["sides"] = {}
    for name, runs in measured.items():
        seconds = [found["seconds"] for found in runs]
        median = statistics.median(seconds)
        results["sides"][name] = {
            "seconds": seconds,
            "median_seconds": median,
            "megabytes_per_second": size / 1e6 / median,
            "tokens_per_second": runs[0]["tokens"] / median,
            "tokens": runs[0]["tokens"],
        }
    ours, theirs = (results["sides"][name]["median_seconds"] for name in sides)
    results["ratio"] = theirs / ours
    results["loader_rows_per_second"] = loader_rates(work / "shards", rows=4000)
    results["model_rows_per_second"] = model_rows_per_second()
    options.write.mkdir(parents=True, exist_ok=True)
    write(options.write, results)


if __name__ == "__main__":
    main()
