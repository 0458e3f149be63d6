"""Logs go to stderr (and rank 0's to a file), results to stdout."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from danlu.base.log import log, print_error, print_json, print_result, setup_log


@pytest.fixture(autouse=True)
def _fresh_log() -> Iterator[None]:
    yield
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.propagate = True


def test_logs_go_to_stderr_and_results_to_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing but results ever reaches stdout, so a pipe into jq works."""
    setup_log()
    log.info("hello %s", "world")
    log.warning("careful")
    print_error("last word")
    print_result("the result")
    out, err = capsys.readouterr()
    assert out == "the result\n"
    assert "hello world" in err
    assert "warning: careful" in err
    assert err.endswith("last word\n")


def test_setting_up_twice_does_not_double_the_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A second run in one process replaces the first one's handlers."""
    setup_log(tmp_path / "first.txt")
    setup_log(tmp_path / "second.txt")
    log.info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "first.txt").read_text() == ""
    assert (tmp_path / "second.txt").read_text().count("once") == 1


def test_other_ranks_speak_from_warning_up_with_their_rank(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 1 is silent on info, names itself on warnings and writes no file."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    setup_log(tmp_path / "log.txt")
    log.info("quiet")
    log.warning("loud")
    err = capsys.readouterr().err
    assert "quiet" not in err
    assert "[rank 1] warning: loud" in err
    assert not (tmp_path / "log.txt").exists()


def test_percent_signs_in_a_message_survive(capsys: pytest.CaptureFixture[str]) -> None:
    """A finished message is not formatted a second time."""
    setup_log()
    log.info("%s", "100 % of %s")
    assert "100 % of %s" in capsys.readouterr().err


def test_json_documents_are_valid_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Text stays readable, and a NaN is refused instead of printed as something that is no JSON."""
    print_json({"名": [1, 2.5, None]})
    out = capsys.readouterr().out
    assert json.loads(out) == {"名": [1, 2.5, None]}
    assert "名" in out
    with pytest.raises(ValueError, match="JSON"):
        print_json({"x": math.nan})
