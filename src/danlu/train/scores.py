r"""How good are answers: exact match, how sure we are of it, and what knowing nothing would score.

An answer is right or wrong, twice: strictly (the same text after stripping white space) and normalised (equal under
`danlu.data.answers.normalize_answer`, which forgives spelling of numbers, case and a closing full stop). A share of
right answers without its uncertainty invites stories about noise, so each comes with Wilson's 95 % score interval

    (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n)

(E. B. Wilson, JASA 22, 1927), which stays inside [0, 1] and is honest at 0 and 1, where the usual p +- z s is not.

The majority baseline gives every question the most frequent answer of its own task and language. It is judged by the
normalised rule, the more generous one, so the bar is never set too low. Ties go to the answer that sorts first, never
to the one that the file happens to name first.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from danlu.data.answers import normalize_answer

Stratum = tuple[str | None, str | None]
"""Task and language, None where the file does not say."""


@dataclass(frozen=True, slots=True)
class Rate:
    """``correct`` of ``total``."""

    correct: int
    total: int

    @property
    def value(self) -> float:
        """The share, between 0 and 1."""
        return self.correct / self.total

    def as_json(self) -> dict[str, Any]:
        """Return counts, share and its 95 % interval."""
        low, high = wilson_interval(self.correct, self.total)
        return {"correct": self.correct, "total": self.total, "value": self.value, "low": low, "high": high}


@dataclass(frozen=True, slots=True)
class Reply:
    """What was expected and what was generated for one question."""

    stratum: Stratum
    expected: str
    predicted: str

    @property
    def strict(self) -> bool:
        """The same text, white space around it aside."""
        return self.predicted.strip() == self.expected.strip()

    @property
    def normalized(self) -> bool:
        """The same answer; text that normalises to nothing equals only itself."""
        return self.strict or same_answer(self.predicted, self.expected)


@dataclass(frozen=True, slots=True)
class Score:
    """The scores of one group of questions."""

    name: str
    strict: Rate
    normalized: Rate
    majority: Rate

    def as_json(self) -> dict[str, Any]:
        """Return the score as a JSON object."""
        return {
            "name": self.name,
            "questions": self.strict.total,
            "strict": self.strict.as_json(),
            "normalized": self.normalized.as_json(),
            "majority": self.majority.as_json(),
        }


def wilson_interval(correct: int, total: int, z: float = 1.959963984540054) -> tuple[float, float]:
    """Return the score interval of a share (the module's formula); ``z`` is the normal quantile, default 95 %."""
    if total == 0:
        return 0.0, 1.0
    share, spread = correct / total, z * z / total
    centre = share + spread / 2
    half = z * math.sqrt(share * (1 - share) / total + spread / (4 * total))
    low, high = (centre - half) / (1 + spread), (centre + half) / (1 + spread)
    return 0.0 if correct == 0 else low, 1.0 if correct == total else high  # exact there but for rounding


def final_answer(text: str, marker: str | None) -> str:
    """Return what follows the last ``marker`` in ``text`` (all of it where there is none, or no marker is given)."""
    return text if marker is None else text.rpartition(marker)[2]


def same_answer(one: str, other: str) -> bool:
    """Return whether two texts are the same answer under `normalize_answer`, and an answer at all."""
    normal = normalize_answer(one)
    return normal != "" and normal == normalize_answer(other)


def majority_answers(rows: Sequence[tuple[Stratum, str]]) -> dict[Stratum, str]:
    """Return the most frequent answer (stripped) per stratum, and under ``(None, None)`` that of all rows."""
    counts: defaultdict[Stratum, Counter[str]] = defaultdict(Counter)
    for stratum, answer in rows:
        for key in {stratum, (None, None)}:
            counts[key][answer.strip()] += 1
    return {key: min(count, key=lambda text: (-count[text], text)) for key, count in counts.items()}


def score_replies(replies: Sequence[Reply], majority: Mapping[Stratum, str]) -> Score:
    """Score all replies as one group; see `score_groups`."""
    return _score("all", replies, majority)


def score_groups(replies: Sequence[Reply], majority: Mapping[Stratum, str], *, by: int) -> list[Score]:
    """Score the replies per task (``by=0``) or per language (``by=1``).

    Args:
        replies: at least one.
        majority: the baseline's answer of each stratum, from `majority_answers`; a stratum that it lacks gets the one
            of all rows.
        by: which part of the stratum makes a group.

    Returns:
        One score per name in alphabetical order; empty where no reply has a name.
    """
    groups: defaultdict[str, list[Reply]] = defaultdict(list)
    for reply in replies:
        name = reply.stratum[by]
        if name is not None:
            groups[name].append(reply)
    return [_score(name, groups[name], majority) for name in sorted(groups)]


def _score(name: str, replies: Sequence[Reply], majority: Mapping[Stratum, str]) -> Score:
    total = len(replies)
    constant = [
        Reply(reply.stratum, reply.expected, majority.get(reply.stratum, majority[None, None])) for reply in replies
    ]
    return Score(
        name,
        strict=Rate(sum(reply.strict for reply in replies), total),
        normalized=Rate(sum(reply.normalized for reply in replies), total),
        majority=Rate(sum(reply.normalized for reply in constant), total),
    )
