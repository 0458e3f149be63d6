"""The numbers on the page about communication are those of the formulas and of the benchmarks."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from danlu.base.layout import Degrees, solve_degrees
from danlu.model.presets import PRESETS
from danlu.plan.communication import Work, plan_communication
from docs.pages import GUIDE, GUIDE_ZH, ROOT, Page

RATES = (450.0, 31.5, 12.5)
"""GB/s: the columns after the first."""


def example_of(page: Page) -> list[list[str]]:
    """Return the rows of the example's table: layout, GB, seconds on each link."""
    rows = [line.strip("| ").split(" | ") for line in page.text.splitlines() if line.startswith("| `")]
    first = next(index for index, row in enumerate(rows) if row[0] == "`dp_replicate = 8`")
    return rows[first:]


def gigabytes(layout: str) -> float:
    """Return what a GPU sends in the example's step, from keys as the page writes them."""
    keys = tomllib.loads("\n".join(re.findall(r"`([^`]+)`", layout)))
    wanted = {axis: keys.pop(axis, None) for axis in ("dp_replicate", "dp_shard")}
    wanted |= {axis: keys.pop(axis, 1) for axis in ("tp", "cp", "pp")}
    degrees: Degrees = solve_degrees(wanted, world_size=8, zero=keys.get("zero", 0))
    work = Work(micro_batches=16 // degrees.data, rows=1, length=8192, **keys)
    return sum(flow.sent_bytes for flow in plan_communication(PRESETS["llama-3.1-8b"], degrees, work)) / 1e9


@pytest.mark.parametrize("guide", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_the_example_is_what_the_formulas_give(guide: Path) -> None:
    """Bytes and seconds of every layout in the table."""
    rows = example_of(Page(guide / "communication.md"))
    assert len(rows) == 12
    for layout, sent, *seconds in rows:
        exact = gigabytes(layout)
        assert float(sent) == pytest.approx(exact, abs=0.051), layout
        for shown, rate in zip(seconds, RATES, strict=True):
            assert float(shown) == pytest.approx(exact / rate, abs=0.051 if rate < 100 else 0.0051), layout


@pytest.mark.parametrize("guide", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_the_memory_is_what_was_measured(guide: Path) -> None:
    """Each row of the table stands in the benchmark's results."""
    text = (ROOT / "benchmarks" / "memory_per_rank" / "results.json").read_text(encoding="utf-8")
    layouts = json.loads(text)["layouts"]
    names = {"tp = 4": "tp 4, sp on", **{f"zero = {zero}": f"zero {zero}" for zero in range(4)}}
    page = Page(guide / "communication.md").text
    for key, name in names.items():
        measured, theory = layouts[name]["measured"], layouts[name]["theory"]
        cells = [f"{measured[kind] / 2**20:.1f}" for kind in ("parameters", "gradients", "optimizer")]
        ratio = sum(measured[kind] for kind in theory) / sum(theory.values())
        assert f"| `{key}` | {' | '.join(cells)} | {ratio:.2f} |" in page


def test_the_python_of_the_page_runs() -> None:
    """Both examples, and their asserts hold."""
    blocks = [block for block in Page(GUIDE / "communication.md").blocks if block.language == "python"]
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block.text, block.where, "exec"), {})
