"""The wordings of questions and documents, by task, language and split.

A question is an opening ("For {name}: ") and a request ("find the {term}."). Each split has its own pairs of the two,
taken from a Latin square: a test question puts together an opening and a request that no training question put
together, while training has each of them with several partners. What is tested is reading, not a new vocabulary.
'not_stated' borrows the wordings of 'lookup' to the letter, so the form of a question never tells whether its answer is
stated; 'closed_lookup' borrows those that name the product.

Chinese names, and Chinese terms in questions and documents, stand in corner brackets and English terms keep their two
words together. Both give a byte-pair tokenizer the same pieces in passage and question. The term that is asked for
stands last where the language allows it: a small model finds it sooner when it is near the place where the answer
begins.
"""

from __future__ import annotations

Wordings = dict[str, tuple[str, ...]]

# Openings of questions about one product, and of questions about two.
ONE = {
    "en": ("Question: ", "For {name}: ", "At {name}: ", "{name}: ", "About {name}: "),
    "zh": ("问：", "「{name}」：", "关于「{name}」：", "在「{name}」，", "按「{name}」的条款，"),
}
TWO = {
    "en": (
        "Question: ",
        "{first} or {second}: ",
        "Of the two: ",
        "Compare {first} and {second}: ",
        "Of both clauses: ",
    ),
    "zh": ("问：", "「{first}」和「{second}」，", "两者之中，", "请比较「{first}」和「{second}」：", "按两份条款，"),
}

REQUESTS: dict[str, dict[str, tuple[str, ...]]] = {
    "lookup": {
        "en": (
            "what is the {term}?",
            "how high is the {term}?",
            "state the {term}.",
            "find the {term}.",
            "tell me the {term}.",
        ),
        "zh": (
            "「{term}」是多少？",
            "「{term}」有多高？",
            "请写出「{term}」。",
            "请找出「{term}」。",
            "请告诉我「{term}」。",
        ),
    },
    "fee_sum": {
        "en": (
            "what is the total of {fees}?",
            "add {fees}.",
            "give the sum of {fees}.",
            "find the total of {fees}.",
            "how much in total are {fees}?",
        ),
        "zh": (
            "合计多少：{fees}？",
            "请相加{fees}。",
            "求总和：{fees}。",
            "总共要付多少：{fees}？",
            "请算出总数：{fees}。",
        ),
    },
    "threshold": {
        "en": (
            "is {bound} {side} the {term}?",
            "yes or no, is {bound} {side} the {term}?",
            "check whether {bound} is {side} the {term}.",
            "tell me if {bound} is {side} the {term}.",
            "decide: {bound} is {side} the {term}.",
        ),
        "zh": (
            "{bound}{side}「{term}」吗？",
            "是否{bound}{side}「{term}」？",
            "请判断：{bound}{side}「{term}」。",
            "请核对：{bound}{side}「{term}」吗？",
            "请回答是或否：{bound}{side}「{term}」。",
        ),
    },
    "interest": {
        "en": (
            "what is the simple interest on {principal} yuan for {years} years?",
            "how much interest do {principal} yuan bring in {years} years?",
            "find the interest: {principal} yuan, {years} years.",
            "state the interest of {principal} yuan for {years} years.",
            "work out the simple interest on {principal} yuan in {years} years.",
        ),
        "zh": (
            "{principal}元存{years}年，单利利息是多少？",
            "{principal}元在{years}年中的利息是多少？",
            "请算出利息：{principal}元，{years}年。",
            "求利息：{principal}元存{years}年。",
            "请写出{principal}元存{years}年的单利利息。",
        ),
    },
    "clause_comparison": {
        "en": (
            "which institution has the {side} {term}?",
            "where is the {side} {term}?",
            "name the institution with the {side} {term}.",
            "tell me which has the {side} {term}.",
            "find the one with the {side} {term}.",
        ),
        "zh": (
            "哪家有{side}的「{term}」？",
            "谁有{side}的「{term}」？",
            "请写出哪家有{side}的「{term}」。",
            "请告诉我谁有{side}的「{term}」。",
            "请找出哪家有{side}的「{term}」。",
        ),
    },
}


def _pair(openings: tuple[str, ...], requests: tuple[str, ...]) -> Wordings:
    """Deal all pairs to the splits: one diagonal of the square to test, one to validation, the others to train."""
    assert len(openings) == len(requests), "a Latin square has as many rows as columns"
    split_of = {0: "test", 1: "validation"}
    wordings: dict[str, list[str]] = {"train": [], "validation": [], "test": []}
    for row, opening in enumerate(openings):
        for column, request in enumerate(requests):
            diagonal = (row + column) % len(requests)
            wordings[split_of.get(diagonal, "train")].append(opening + request)
    return {split: tuple(found) for split, found in wordings.items()}


QUESTIONS: dict[str, dict[str, Wordings]] = {
    task: {
        language: _pair((TWO if task == "clause_comparison" else ONE)[language], requests)
        for language, requests in by_language.items()
    }
    for task, by_language in REQUESTS.items()
}
QUESTIONS["closed_lookup"] = {
    language: {split: tuple(text for text in texts if "{name}" in text) for split, texts in wordings.items()}
    for language, wordings in QUESTIONS["lookup"].items()
}

# What a document says of one term of one product; the last one is what a closed-book answer recites.
STATEMENTS: dict[str, tuple[str, ...]] = {
    "en": (
        "For {name}, the {term} is {value}.",
        "{name} has the {term} {value}.",
        "At {name}: {term} {value}.",
        "{term} of {name}: {value}.",
    ),
    "zh": (
        "「{name}」的「{term}」是{value}。",
        "「{name}」有「{term}」：{value}。",
        "在「{name}」，「{term}」{value}。",
        "{term}在「{name}」：{value}。",
    ),
}

NOT_STATED = {"en": "not stated", "zh": "未说明"}
YES_NO = {"en": ("yes", "no"), "zh": ("是", "否")}
MORE_LESS = {"en": ("more than", "less than"), "zh": ("高于", "低于")}
# The direction words of a comparison by unit: (greater, smaller).
SIDES = {
    "yuan": {"en": ("higher", "lower"), "zh": ("更高", "更低")},
    "days": {"en": ("longer", "shorter"), "zh": ("更长", "更短")},
    "basis points": {"en": ("higher", "lower"), "zh": ("更高", "更低")},
}
