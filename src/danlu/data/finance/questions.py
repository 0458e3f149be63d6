"""One function per task: draw a question about given products and work its answer out in integers.

Each returns a `Question`, or None when the products drawn do not allow it (two equal values cannot be compared); the
caller draws again. ``turn`` counts the accepted questions of a task, language and split: what must be balanced exactly
(yes and no, the position of the better product) is read off it and not left to chance. ``content`` names the facts and
the thing asked, independent of wording and language; two questions with equal content are the same question.

An answer shows its working first: ``transfer fee 7, renewal price 3: 7+3=10=>10 yuan``. Each step of it copies or
computes one thing from what stands close by, which a small model can learn; the final answer alone would have to come
out of one forward pass. What counts is the text behind the marker.

Interest is simple: ``principal * rate * years / 10000`` with the rate in basis points. Principals are multiples of
1000 yuan and rates multiples of 50, so the result is a whole number of yuan and no rounding rule is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from danlu.data.finance.dice import Dice
from danlu.data.finance.templates import MORE_LESS, NOT_STATED, QUESTIONS, SIDES, STATEMENTS, YES_NO
from danlu.data.finance.world import (
    COLUMNS,
    FEES,
    KINDS,
    RATED_KINDS,
    SPACE,
    TERMS,
    TWO_DIGIT,
    YUAN,
    Product,
    format_clause,
    format_comparison,
    format_passage,
    format_value,
)

# How far a bound lies from the value it is compared with, in steps of the term.
MAX_STEPS_APART = 6
# Between the working and the answer; evaluation compares what stands behind it.
ANSWER_MARKER = "=>"
PUNCTUATION = {"en": (", ", ": "), "zh": ("，", "：")}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt and its one right answer; ``content`` identifies facts and question, in any language and wording."""

    prompt: str
    completion: str
    content: str

    @property
    def answer(self) -> str:
        """The answer without its working."""
        return self.completion.rpartition(ANSWER_MARKER)[2]


def _ask(
    products: Sequence[Product], language: str, question: str, working: str, answer: str, content: str
) -> Question:
    passage = (
        format_passage(products[0], language)
        if len(products) == 1
        else format_comparison(products[0], products[1], language)
    )
    return Question(
        prompt=f"{passage}\n{question}\n",
        completion=working + ANSWER_MARKER + answer,
        content="/".join([*sorted(product.key for product in products), content]),
    )


def _wording(task: str, language: str, split: str, dice: Dice) -> str:
    return dice.pick(QUESTIONS[task][language][split])


def ask_lookup(pool: Sequence[Product], language: str, split: str, dice: Dice, turn: int) -> Question | None:
    """Read one stated term."""
    product = dice.pick(pool)
    key, value = dice.pick(product.terms)
    question = _wording("lookup", language, split, dice).format(
        term=TERMS[key].name.of(language), name=product.name(language)
    )
    stated = format_value(key, value, language)
    return _ask([product], language, question, format_clause(key, stated, language), stated, f"term/{key}")


def ask_not_stated(pool: Sequence[Product], language: str, split: str, dice: Dice, turn: int) -> Question | None:
    """A term in the words of a lookup; every second one is missing from the passage."""
    if turn % 2:
        return ask_lookup(pool, language, split, dice, turn)
    product = dice.pick(pool)
    key = dice.pick([key for key in KINDS[product.kind][1] if key not in product.values])
    question = _wording("lookup", language, split, dice).format(
        term=TERMS[key].name.of(language), name=product.name(language)
    )
    return _ask([product], language, question, TERMS[key].name.of(language), NOT_STATED[language], f"term/{key}")


def ask_fee_sum(pool: Sequence[Product], language: str, split: str, dice: Dice, turn: int) -> Question | None:
    """Add two or three fees of one product."""
    product = dice.pick(pool)
    stated = [key for key in product.values if key in FEES]
    count = 3 if turn % 3 == 2 else 2
    if len(stated) < count:
        return None
    keys = dice.sample(stated, count)
    names = [TERMS[key].name.of(language) for key in keys]
    if language == "en":
        fees = ", ".join(names[:-1]) + " and " + names[-1]
    else:
        fees = "".join(f"「{name}」" for name in names)
    question = _wording("fee_sum", language, split, dice).format(fees=fees, name=product.name(language))
    values = [product.values[key] for key in keys]
    comma, colon = PUNCTUATION[language]
    read = comma.join(format_clause(key, product.values[key], language) for key in keys)
    totals = list(accumulate(values))
    sums = comma.join(f"{total}+{value}={total + value}" for total, value in zip(totals, values[1:], strict=False))
    working, answer = read + colon + sums, format_value(keys[0], totals[-1], language)
    return _ask([product], language, question, working, answer, "sum/" + "+".join(sorted(keys)))


def ask_threshold(pool: Sequence[Product], language: str, split: str, dice: Dice, turn: int) -> Question | None:
    """Compare a bound with one term; half of the answers are yes."""
    product = dice.pick(pool)
    stated = [key for key in product.values if key in TWO_DIGIT]
    if not stated:
        return None
    key = dice.pick(stated)
    more, yes = dice.below(2) == 0, turn % 2 == 0
    distance = dice.between(TERMS[key].step, MAX_STEPS_APART * TERMS[key].step, TERMS[key].step)
    # 'more than the term' is true where the bound lies above its value; 'less than' the other way round.
    bound = product.values[key] + (distance if more == yes else -distance)
    if not TERMS[key].low <= bound <= TERMS[key].high:
        return None
    value = product.values[key]
    side = MORE_LESS[language][0 if more else 1]
    question = _wording("threshold", language, split, dice).format(
        term=TERMS[key].name.of(language),
        name=product.name(language),
        side=side,
        bound=format_value(key, bound, language),
    )
    content = f"threshold/{key}/{'more' if more else 'less'}/{bound}"
    # The claim in numbers, then how the numbers relate: whether the two agree is the answer.
    relation = f"{bound}{'>' if bound > value else '<'}{value}"
    comma, colon = PUNCTUATION[language]
    claim = SPACE[language].join([str(bound), side, str(value)])
    working = format_clause(key, value, language) + comma + claim + colon + relation
    return _ask([product], language, question, working, YES_NO[language][0 if yes else 1], content)


def ask_interest(pool: Sequence[Product], language: str, split: str, dice: Dice, turn: int) -> Question | None:
    """Simple interest on a round principal at the stated rate."""
    product = dice.pick([product for product in pool if product.kind in RATED_KINDS])
    principal, years = dice.between(1000, 4000, 1000), dice.between(2, 4)
    yearly, rest = divmod(principal * product.values["rate"], 10_000)
    assert rest == 0, "principals and rates are chosen so that interest is a whole number"
    question = _wording("interest", language, split, dice).format(
        principal=principal, years=years, name=product.name(language)
    )
    interest = yearly * years
    answer = f"{interest}{SPACE[language]}{YUAN.of(language)}"
    working = f"{yearly}*{years}={interest}"
    return _ask([product], language, question, working, answer, f"interest/{principal}/{years}")


def ask_clause_comparison(pool: Sequence[Product], language: str, split: str, dice: Dice, turn: int) -> Question | None:
    """Name the institution with the greater or smaller value of a shared term; each place wins half of the time."""
    kind = dice.pick(tuple(KINDS))
    first, second = dice.sample([product for product in pool if product.kind == kind], 2)
    shared = [key for key in first.values if key in second.values and first.values[key] != second.values[key]]
    if not shared or first.institution == second.institution:
        return None
    key = dice.pick(shared)
    greater = dice.below(2) == 0
    winner = first if (first.values[key] > second.values[key]) == greater else second
    other = second if winner is first else first
    # Over four turns the winner takes each place in the sheet and in the question once.
    sheet = [winner, other] if turn % 2 == 0 else [other, winner]
    asked = [winner, other] if turn // 2 % 2 == 0 else [other, winner]
    side = SIDES[TERMS[key].unit.en][language][0 if greater else 1]
    question = _wording("clause_comparison", language, split, dice).format(
        side=side,
        term=TERMS[key].name.of(language),
        first=asked[0].name(language),
        second=asked[1].name(language),
    )
    content = f"compare/{key}/{'greater' if greater else 'smaller'}"
    working = _compare(sheet, key, winner, side, language)
    return _ask(sheet, language, question, working, winner.institution_name(language), content)


def _compare(sheet: Sequence[Product], key: str, winner: Product, side: str, language: str) -> str:
    """Return the working of a comparison: the clause, how its values relate, which column wins."""
    one, other = (product.values[key] for product in sheet)
    relation = f"{one}{'>' if one > other else '<'}{other}"
    column = COLUMNS[language][sheet.index(winner)]
    (comma, colon), space = PUNCTUATION[language], SPACE[language]
    read, best = f"{one}{space}|{space}{other}", space.join([side, column, winner.institution_name(language)])
    return format_clause(key, read, language) + colon + relation + comma + best


Ask = Callable[[Sequence[Product], str, str, Dice, int], Question | None]

OPEN_BOOK_TASKS: dict[str, Ask] = {
    "lookup": ask_lookup,
    "fee_sum": ask_fee_sum,
    "threshold": ask_threshold,
    "interest": ask_interest,
    "clause_comparison": ask_clause_comparison,
    "not_stated": ask_not_stated,
}


def ask_closed_book(product: Product, key: str, wording: str, language: str) -> Question:
    """Ask for one term of a product without its passage."""
    question = wording.format(term=TERMS[key].name.of(language), name=product.name(language))
    value = format_value(key, product.values[key], language)
    said = STATEMENTS[language][-1].format(term=TERMS[key].name.of(language), name=product.name(language), value=value)
    completion = said[:-1] + ANSWER_MARKER + value
    return Question(prompt=f"{question}\n", completion=completion, content=f"closed/{product.key}/term/{key}")


def write_document(product: Product, language: str, dice: Dice) -> str:
    """Return a text that states every term of ``product`` once, in a random order and wording."""
    sentences = [
        dice.pick(STATEMENTS[language]).format(
            term=TERMS[key].name.of(language), name=product.name(language), value=format_value(key, value, language)
        )
        for key, value in dice.shuffled(product.terms)
    ]
    return (" " if language == "en" else "").join(sentences)
