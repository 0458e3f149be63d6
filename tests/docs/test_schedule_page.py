"""What the page on pipeline schedules shows is what danlu prints and computes."""

from __future__ import annotations

import itertools
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from danlu.parallel.schedule import SCHEDULES, theoretical_bubble
from docs.pages import GUIDE, GUIDE_ZH, Block, Page

PAGE = Page(GUIDE / "pipeline-schedules.md")
SHOWN = [
    (command, output)
    for command, output in itertools.pairwise(PAGE.blocks)
    if (command.language, output.language) == ("bash", "text")
]


def words_of(command: Block) -> list[str]:
    """Return the words after ``danlu`` of the block's only command."""
    return shlex.split(command.text.replace("\\\n", " "))[1:]


@pytest.mark.parametrize(("command", "output"), SHOWN, ids=lambda block: block.where)
def test_shown_output_is_what_the_command_prints(
    command: Block, output: Block, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each output on the page stands below the command that gives it."""
    monkeypatch.setenv("COLUMNS", "100")
    words = [sys.executable, "-m", "danlu", *words_of(command)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == output.text


def test_outputs_are_found() -> None:
    """The test above compares something."""
    assert len(SHOWN) == 3


def test_the_python_of_the_page_runs() -> None:
    """The order written by hand passes its check and is faster than 1F1B, as its asserts say."""
    (block,) = [block for block in PAGE.blocks if block.language == "python"]
    exec(compile(block.text, block.where, "exec"), {})


@pytest.mark.parametrize("guide", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_tables_are_complete_and_true(guide: Path) -> None:
    """Every schedule has its row of advice and its formula; shares of work are those of the formula."""
    text = Page(guide / "pipeline-schedules.md").text
    rows = re.findall(r"^\| (`\w+`.*?) \|", text, re.M)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted([*SCHEDULES, *SCHEDULES])
    shares = re.findall(r"^\| (\d+) \| ([\d.]+)% \|", text, re.M)
    assert len(shares) == 5
    for number, percent in shares:
        idle = theoretical_bubble("gpipe", 8, 1, int(number))
        assert idle is not None
        assert float(percent) == pytest.approx(100 * (1 - idle), abs=0.5)
