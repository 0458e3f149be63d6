"""What inspect shows is what is in the rows."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.data.inspect import as_json, as_text, inspect


@pytest.fixture
def folder(run_build: Callable[..., dict[str, Any]], tmp_path: Path) -> Path:
    """A data set of two short samples in one row."""
    run_build({"a.csv": "prompt,completion\n问,答\nask,answer\n"})
    return tmp_path / "out"


def test_plain_text_marks_targets_and_documents(folder: Path) -> None:
    """Without colour targets stand between [[ and ]], under the number of their document."""
    text = as_text(*inspect(folder), color=False)
    assert "--- document 0\n问[[答<|im_end|>]]\n--- document 1\nask[[answer<|im_end|>]]" in text
    assert "\x1b" not in text


def test_colour_is_for_terminals(folder: Path) -> None:
    """With colour targets are green and unmarked."""
    text = as_text(*inspect(folder), color=True)
    assert "\x1b[32m答<|im_end|>" in text
    assert "[[" not in text


def test_json_has_statistics_and_runs(folder: Path) -> None:
    """The JSON document holds the counts and every run with its token count."""
    document = json.loads(json.dumps(as_json(*inspect(folder, verify=True))))
    statistics, runs = document["statistics"], document["rows"][0]["runs"]
    assert [run["target"] for run in runs] == [False, True, False, True]
    assert sum(run["num_tokens"] for run in runs) == statistics["num_tokens"]
    assert statistics["num_documents"] == 2
    assert statistics["target_tokens"] == sum(run["num_tokens"] for run in runs if run["target"])


def test_row_beyond_the_end_is_refused(folder: Path) -> None:
    """A row number that does not exist is named with the legal range."""
    with pytest.raises(UserError, match="no such row"):
        inspect(folder, rows=[1])
    assert list(inspect(folder, rows=range(3))[1]) == [0], "a range that begins inside ends at the last row"
