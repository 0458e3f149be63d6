"""Turns ``results.json`` into the results page."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import machine  # noqa: E402

NAMES = {"danlu": "danlu", "plain": "plain PyTorch loop", "trainer": "transformers Trainer", "sft": "TRL SFTTrainer"}
CASES = {
    "supervised": "supervised rows (short packed documents, prompts masked)",
    "text": "plain text (one document a row, every token a target)",
}
AIM = 1.3
INTRO = """# danlu's training loop against its peers

Same model (SmolLM2-135M's shape, random weights), same tokenised documents, same batch, dtype, AdamW and clipping;
every contestant in an environment of its own. danlu meets each peer in a heat, in which the two take turns one
optimizer step at a time. A step is all that a loop does from one update to the next. Rates are medians over the timed
steps, ratios medians over the rounds of a heat; memory is the process's largest resident set. Peers get rows that are
packed ahead of time with restarting positions; SFTTrainer packs by itself. bf16 means fp32 parameters and optimizer
with bf16 arithmetic (autocast in the peers).

Written by `run.py`; do not edit.
"""


def best_peer(peers: dict[str, Any]) -> str:
    """Return the peer that danlu leads by least."""
    return min((name for name in peers if name != "danlu"), key=lambda name: peers[name]["danlu_times"])


def headline(results: dict[str, Any]) -> list[str]:
    """Return the table of ratios, also used by the index of all benchmarks."""
    rows = []
    for title, case in results["cases"].items():
        peers = case["peers"]
        name = best_peer(peers)
        ratio = peers[name]["danlu_times"]
        smallest = min(peer["peak_rss_gib"] for other, peer in peers.items() if other != "danlu")
        rows.append(
            [
                title,
                f"{median(peers['danlu']['rates']):,.0f}",
                f"{median(peers[name]['rates']):,.0f} ({NAMES[name]})",
                f"**{ratio:.2f}**" if ratio >= AIM else f"{ratio:.2f}",
                f"{peers['danlu']['peak_rss_gib']:.2f}",
                f"{smallest:.2f}",
            ]
        )
    header = ["case", "danlu, tokens/s", "best peer, tokens/s", "ratio", "danlu, GiB", "leanest peer, GiB"]
    return machine.table(header, rows)


def case_lines(title: str, case: dict[str, Any]) -> list[str]:
    """Return the section of one case and dtype."""
    kind, dtype = title.split()
    peers, first = case["peers"], case["first_step"]
    rows = []
    for name, peer in peers.items():
        rows.append(
            [
                NAMES[name],
                f"{median(peer['rates']):,.0f}",
                f"{median(peer['valid_rates']):,.0f}",
                f"{peer['danlu_times']:.2f}" if name != "danlu" else "",
                f"{median(peer['seconds']):.2f}",
                f"{min(peer['seconds']):.2f} to {max(peer['seconds']):.2f}",
                f"{median(peer['system_seconds']) / median(peer['cpu_seconds']):.0%}",
                f"{peer['peak_rss_gib']:.2f}",
                f"{first[name]['loss']:.5f}",
                f"{first[name]['grad_norm']:.3f}",
            ]
        )
    header = [
        "", "tokens/s", "valid tokens/s", "danlu is x times", "median step, s", "range, s", "CPU time in the kernel",
        "peak RSS, GiB", "first loss", "first gradient norm",
    ]  # fmt: skip
    spread = max(entry["loss"] for entry in first.values()) - min(entry["loss"] for entry in first.values())
    lines = [f"## {CASES[kind]}, {dtype}", "", *machine.table(header, rows), ""]
    return [*lines, f"First-step losses from the same weights differ by at most {spread:.1e}.", ""]


def where_lines(where: dict[str, Any], results: dict[str, Any]) -> list[str]:
    """Return the section on where danlu's time goes."""
    lines = [
        "## Where danlu's time goes",
        "",
        "The floor is every matrix product of the step timed alone on this machine, each shape by its fastest run,",
        "times how often it occurs (attention's products are not in it). Phases are medians of the wall clock; the",
        "groups are torch.profiler's self times of one more step, which profiling itself makes a little longer.",
        "",
    ]
    phases = list(next(iter(where.values()))["phases"])
    rows = []
    for title, parts in where.items():
        total = sum(parts["phases"].values())
        share = parts["floor"]["seconds"] / total
        rate = parts["floor"]["flops"] / parts["floor"]["seconds"] / 1e9
        rows.append(
            [title, f"{total:.2f}", f"{parts['floor']['seconds']:.2f}", f"{share:.0%}", f"{rate:,.0f}"]
            + [f"{parts['phases'][phase]:.2f}" for phase in phases]
        )
    header = ["", "step, s", "matmul floor, s", "floor / step", "floor's GFLOP/s", *[f"{phase}, s" for phase in phases]]
    lines += [*machine.table(header, rows), ""]
    groups = sorted({group for parts in where.values() for group in parts["groups"]})
    rows = []
    for title, parts in where.items():
        total = sum(parts["groups"].values())
        rows.append([title, *[f"{parts['groups'].get(group, 0.0) / total:.0%}" for group in groups]])
    return [*lines, *machine.table(["share of operator time", *groups], rows), ""]


def write(folder: Path) -> None:
    """Write ``README.md`` beside ``results.json`` in ``folder``."""
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    lines = [INTRO, *machine.machine_lines(results["machine"])]
    lines += [
        f"- Command: `{results['command']}`, {results['threads']} threads, {results['rows_per_step']} rows of 512 "
        f"tokens a step, {results['rounds']} timed steps each",
    ]
    peers = next(iter(results["cases"].values()))["peers"]
    for name, peer in peers.items():
        packages = ", ".join(f"{package} {version}" for package, version in peer["versions"].items())
        notes = "; ".join(f"{key}: {value}" for key, value in peer["notes"].items())
        lines.append(f"- {NAMES[name]}: {packages}. {notes}")
    lines += ["", "## In short", "", *headline(results), ""]
    for title, case in results["cases"].items():
        lines += case_lines(title, case)
    if "where" in results:
        lines += where_lines(results["where"], results)
    (folder / "README.md").write_text("\n".join(lines).rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    write(Path(sys.argv[1]) if len(sys.argv) > 1 else HERE)
