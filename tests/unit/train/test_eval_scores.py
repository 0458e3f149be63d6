"""Scores: intervals, baselines and what counts as right."""

from __future__ import annotations

import pytest

from danlu.train.scores import Reply, majority_answers, score_groups, score_replies, wilson_interval


@pytest.mark.parametrize(
    ("correct", "total", "low", "high"),
    [
        # Newcombe, Statistics in Medicine 17 (1998), table I, method 3
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_wilson_interval_has_the_published_values(correct: int, total: int, low: float, high: float) -> None:
    """The interval is the one of the literature, to its four decimals."""
    assert wilson_interval(correct, total) == pytest.approx((low, high), abs=5e-5)


def test_wilson_interval_stays_inside_the_unit_interval() -> None:
    """The ends are shares, the share lies between them, and no question means no knowledge."""
    for total in (1, 7, 500):
        for correct in (0, 1, total):
            low, high = wilson_interval(correct, total)
            assert 0 <= low <= correct / total <= high <= 1
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_strict_is_text_and_normalised_is_meaning() -> None:
    """A number written otherwise is right under the normalised rule only; white space never matters."""
    stratum = (None, None)
    assert Reply(stratum, "1,250 yuan", " 1,250 yuan\n").strict
    other = Reply(stratum, "1,250 yuan", "1250")
    assert not other.strict
    assert other.normalized
    assert not Reply(stratum, "1,250 yuan", "1251").normalized


def test_empty_answers_are_never_right() -> None:
    """Text that normalises to nothing equals only itself, so silence does not score."""
    assert not Reply((None, None), "?", "").normalized
    assert not Reply((None, None), "?", "!").normalized
    assert Reply((None, None), "?", "?").normalized


def test_majority_is_per_task_and_language_with_ties_by_text() -> None:
    """Each stratum has its own constant answer, unknown strata get that of all rows, and file order decides nothing."""
    rows = [(("a", "en"), "no"), (("a", "en"), "yes"), (("b", "en"), "7"), (("b", "en"), "7 "), (("b", "en"), "8")]
    majority = majority_answers(rows)
    assert majority == majority_answers(rows[::-1])
    assert majority == {("a", "en"): "no", ("b", "en"): "7", (None, None): "7"}
    replies = [Reply(("a", "en"), "no", "x"), Reply(("b", "en"), "8", "x"), Reply(("c", "zh"), "7", "7")]
    assert score_replies(replies, majority).majority.correct == 2


def test_groups_add_up() -> None:
    """Every reply is in one task and one language, and the groups' counts add up to the whole."""
    replies = [Reply((task, lang), "1", "1" if lang == "en" else "2") for task in "ab" for lang in ("en", "zh")]
    majority = majority_answers([(reply.stratum, "1") for reply in replies])
    whole = score_replies(replies, majority)
    for by in (0, 1):
        scores = score_groups(replies, majority, by=by)
        assert sum(score.strict.correct for score in scores) == whole.strict.correct == 2
        assert sum(score.strict.total for score in scores) == whole.strict.total
    assert [score.name for score in score_groups(replies, majority, by=1)] == ["en", "zh"]


def test_files_without_tasks_have_no_groups() -> None:
    """Rows without a task are scored together and nothing is invented for them."""
    replies = [Reply((None, None), "1", "1")]
    assert score_groups(replies, {(None, None): "1"}, by=0) == []
