"""Answer normalisation: what counts as the same answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from danlu.data.answers import normalize_answer


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("１２３", "123"),
        ("1,000", "1000"),
        ("１，０００元", "1000"),
        ("12,345,678.50 yuan", "12345678.5"),
        ("7 yuan", "7元"),
        ("35 days.", "35天"),
        ("250 basis points", "250 基点。"),
        ("Yes.", "yes"),
        ("是。", "是"),
        ("“否”", "否"),
        ("NOT  STATED", "not stated"),
        ("「港湾·琥珀」", "港湾·琥珀"),
        ("未 说明。", "未说明"),
        ("¥18.00", "18"),
        ("-¥18.00", "-18"),
        ("5%", "5 percent"),
        ("007", "7"),
        ("-0.0", "0"),
        ("\u22125", "-5"),
        ("ＡＢＣ！", "abc"),
    ],
)
def test_equal_answers_normalize_to_the_same_text(written, meant):
    """Spellings a reader takes for the same answer are equal after normalising, in both languages."""
    assert normalize_answer(written) == normalize_answer(meant)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("7", "-7"),
        ("7", "70"),
        ("1,00", "100"),
        ("3万元", "3元"),
        ("3 million yuan", "3 yuan"),
        ("yes", "no"),
        ("是", "不是"),
        ("1.05", "1.5"),
        ("Harbor Amber", "Amber Harbor"),
        ("1/2", "12"),
        ("not stated", "stated"),
    ],
)
def test_different_answers_stay_different(one, other):
    """Normalising never joins answers that mean different things."""
    assert normalize_answer(one) != normalize_answer(other)


@given(st.text())
def test_normalizing_twice_changes_nothing(text):
    """The function is idempotent on any text."""
    once = normalize_answer(text)
    assert normalize_answer(once) == once
