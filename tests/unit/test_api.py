"""The Python interface."""

from __future__ import annotations

import doctest
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import danlu
from danlu import api


def test_the_example_runs(learned_run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The example of the module's docstring does what it says, in a folder that holds a data set."""
    (tmp_path / "shards").symlink_to(learned_run.parent / "data")
    monkeypatch.chdir(tmp_path)
    result = doctest.testmod(api)
    assert result.attempted > 5
    assert result.failed == 0
    assert (tmp_path / "first-hf" / "config.json").is_file()


def test_public_names_are_documented_and_typed() -> None:
    """Each name of the interface has a docstring, and each function the types of all its parameters."""
    for name in api.__all__:
        value = getattr(api, name)
        assert inspect.getdoc(value), name
        if inspect.isfunction(value):
            signature = inspect.signature(value)
            assert all(parameter.annotation is not parameter.empty for parameter in signature.parameters.values())
            assert signature.return_annotation is not signature.empty
    assert {"__version__", *api.__all__} >= set(danlu.__all__)


def test_train_can_be_called_under_either_meaning(tmp_path: Path) -> None:
    """``danlu.train`` is a function at first and the package of that name once it is imported; both train."""
    from danlu.train.loop import train as function

    config = danlu.Config(train={"output": str(tmp_path), "steps": 1})
    for train in (function, danlu.train, sys.modules["danlu.train"], api.train):
        with pytest.raises(danlu.base.errors.UserError, match=r"data.train"):
            train(config)


def test_importing_danlu_is_light() -> None:
    """``import danlu`` loads no torch; a name that does not exist is an AttributeError that says so."""
    code = "import sys, danlu; assert 'torch' not in sys.modules; danlu.nothing"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60)
    assert "module 'danlu' has no attribute 'nothing'" in done.stderr
