"""When two short answers say the same thing.

Evaluation counts an answer twice: strict (the same text after stripping white space) and normalised (the same text
after `normalize_answer` on both sides). Normalising forgives what a reader would not call a mistake: full-width
characters, case, spacing, a closing full stop, quotation marks, thousands separators, trailing zeros of a decimal
fraction, and the unit behind a number. It forgives nothing else: no synonym, no rounding, no sentence around the
answer, and no multiplier (万 and 'million' are part of the number, not units).

The unit is dropped and not compared, so '7 days' equals '7 yuan' under this rule and only there; the strict score
beside it tells them apart. The function is idempotent.
"""

from __future__ import annotations

import re
import unicodedata

_UNITS = (
    "yuan|rmb|cny|usd|dollars?|eur|euros?|basis points?|bps?|percent|days?|months?|years?|times?"
    "|元|人民币|块|美元|欧元|个?基点|百分点|天|日|个月|月|年|次|%"
)
_NUMBER_AND_UNIT = re.compile(rf"(?P<number>[-+]?\d+(?:\.\d+)?)\s*(?:{_UNITS})")
_CURRENCY_AND_NUMBER = re.compile(r"(?P<sign>[-+]?)\s*[¥$€£]\s*(?P<number>[-+]?\d.*)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?![\d,])")
_PLAIN_NUMBER = re.compile(r"(?P<sign>[-+]?)0*(?P<whole>\d+)(?:\.(?P<fraction>\d+))?")
# Signs that open a value (minus, plus, currency) or close one (percent) belong to it and stay.
_KEPT_AT_START, _KEPT_AT_END = "-+¥$€£", "%"
_CJK = "\u3400-\u4dbf\u4e00-\u9fff"
_SPACE_BESIDE_CJK = re.compile(rf"(?<=[{_CJK}])\s+|\s+(?=[{_CJK}])")


def normalize_answer(text: str) -> str:
    """Return the form of ``text`` in which equal answers are equal strings.

    Args:
        text: an answer as written or generated, in English or Chinese.

    Returns:
        NFKC, case-folded text without outer punctuation; a lone number comes back plain ('1,000.50 元' -> '1000.5').
        Text that is nothing but punctuation comes back as an empty string.
    """
    # Case folding can leave NFKC (and the other way round), hence once more.
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", text).casefold()).replace("\u2212", "-")
    text = _SPACE_BESIDE_CJK.sub("", " ".join(text.split()))
    text = _THOUSANDS.sub(lambda found: found.group().replace(",", ""), _strip_outer_punctuation(text))
    with_sign = _CURRENCY_AND_NUMBER.fullmatch(text)
    if with_sign:
        text = with_sign["sign"] + with_sign["number"]
    with_unit = _NUMBER_AND_UNIT.fullmatch(text)
    if with_unit:
        text = with_unit["number"]
    plain = _PLAIN_NUMBER.fullmatch(text)
    return _plain_number(plain["sign"], plain["whole"], plain["fraction"] or "") if plain else text


def _plain_number(sign: str, whole: str, fraction: str) -> str:
    fraction = fraction.rstrip("0")
    number = f"{whole}.{fraction}" if fraction else whole
    return f"-{number}" if sign == "-" and number != "0" else number


def _strip_outer_punctuation(text: str) -> str:
    start, end = 0, len(text)
    while start < end and _is_outer(text[start], _KEPT_AT_START):
        start += 1
    while end > start and _is_outer(text[end - 1], _KEPT_AT_END):
        end -= 1
    return text[start:end]


def _is_outer(character: str, kept: str) -> bool:
    return character.isspace() or (character not in kept and unicodedata.category(character)[0] in "PS")
