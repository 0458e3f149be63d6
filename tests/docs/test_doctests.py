"""Examples in docstrings run."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

from docs.pages import ROOT

SOURCE = ROOT / "src"
ELSEWHERE = {"danlu.api"}
"""Needs a data set: tests/unit/test_api.py runs it."""


def module_name(path: Path) -> str:
    """Return the import name of a source file."""
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")


def test_examples_run() -> None:
    """Every example gives what its docstring says."""
    names = {module_name(path) for path in SOURCE.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8")}
    assert names >= ELSEWHERE
    for name in sorted(names - ELSEWHERE):
        result = doctest.testmod(importlib.import_module(name))
        assert result.attempted > 0, name
        assert result.failed == 0, name
