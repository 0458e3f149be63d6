"""What must start in a blink imports nothing heavy; asked of fresh interpreters."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

HEAVY = ["torch", "numpy", "transformers"]


def heavy_after(code: str, heavy: list[str]) -> list[str]:
    """Return which of ``heavy`` a fresh interpreter has imported after running ``code``."""
    text = f"import sys, json\n{code}\nprint(json.dumps([name for name in {heavy} if name in sys.modules]))"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True, timeout=60)
    found: list[str] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.parametrize(
    "modules",
    [
        "danlu, danlu.base.errors, danlu.base.env, danlu.base.log, danlu.base.devices",
        "danlu.config.schema, danlu.config.load, danlu.config.rules, danlu.config.pipeline, danlu.config.stages, "
        "danlu.config.data_build",
        "danlu.model.spec, danlu.model.families, danlu.model.presets",
        "danlu.parallel.schedule, danlu.parallel.timeline, danlu.plan.schedule, danlu.plan.timeline_drawing, "
        "danlu.plan.communication",
    ],
)
def test_configs_specs_and_presets_import_nothing_heavy(modules: str) -> None:
    """Planning and config tools work on a laptop at once: no torch, numpy or transformers."""
    assert heavy_after(f"import {modules}", HEAVY) == []


def test_help_imports_neither_torch_nor_transformers_nor_pydantic() -> None:
    """`danlu --help` pays for no library that it does not show."""
    code = (
        "import io, contextlib\n"
        "from danlu.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    try:\n"
        "        app(['--help'])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "assert 'train' in out.getvalue()"
    )
    assert heavy_after(code, [*HEAVY, "pydantic"]) == []


def test_planning_a_schedule_needs_no_library() -> None:
    """`danlu plan schedule` answers without torch, numpy or transformers; pydantic may come with typer's own parser."""
    code = (
        "import io, contextlib\n"
        "from danlu.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "    try:\n"
        "        app(['plan', 'schedule', '--stages', '4', '--micro-batches', '8'])\n"
        "    except SystemExit as end:\n"
        "        assert not end.code, end.code\n"
        "assert 'rank 3' in out.getvalue()"
    )
    assert heavy_after(code, HEAVY) == []


def test_this_test_can_fail() -> None:
    """The probe sees an import that is there."""
    assert heavy_after("import numpy", HEAVY) == ["numpy"]
