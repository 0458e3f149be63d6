"""The page on parity lists what is tested, with numbers that were measured, in words that are generated."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from distributed.parity_layouts import LAYOUTS, LOSS_TOLERANCE, WEIGHT_TOLERANCE
from distributed.parity_page import CHINESE, COMMANDS, ENGLISH, HOW
from docs.pages import GUIDE, GUIDE_ZH, Page

ROW = re.compile(r"^\| ([\w.]+) \| (\d+) \| `([^`]*)` \| (\S+) \| (\S+) \|$", re.M)


@pytest.mark.parametrize("guide", [GUIDE, GUIDE_ZH], ids=["en", "zh"])
def test_the_page_lists_exactly_the_tested_layouts(guide: Path) -> None:
    """Same layouts, same order; every number is a measurement within the tolerance."""
    rows = ROW.findall(Page(guide / "parity.md").text)
    assert [f"{family}-{ranks}: {words}" for family, ranks, words, _, _ in rows] == [layout.name for layout in LAYOUTS]
    for *_, loss, weights in rows:
        assert 0 <= float(loss) < LOSS_TOLERANCE
        assert 0 <= float(weights) < WEIGHT_TOLERANCE
    assert max(float(weights) for *_, weights in rows) > 1e-8


@pytest.mark.parametrize(("guide", "words"), [(GUIDE, ENGLISH), (GUIDE_ZH, CHINESE)], ids=["en", "zh"])
def test_the_words_are_generated(guide: Path, words: str) -> None:
    """What stands before the measurements is the generator's text: a change there is a change here."""
    expected = words.partition("{facts}")[0].format(commands=COMMANDS, how=HOW)
    assert Page(guide / "parity.md").text.startswith(expected)


def test_both_languages_have_the_same_measurements() -> None:
    """One run, two pages."""
    assert ROW.findall(Page(GUIDE / "parity.md").text) == ROW.findall(Page(GUIDE_ZH / "parity.md").text)
