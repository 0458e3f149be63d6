"""The wordings of questions and documents, by task, language and split.

Every wording belongs to one split. A test question is therefore put in words that no training question used, although
each single word occurs in training: what is tested is reading, not a new vocabulary. 'not_stated' borrows the wordings
of 'lookup' to the letter, so the form of a question never tells whether its answer is stated.

Chinese names, and Chinese terms in questions and documents, stand in corner brackets and English terms keep their two
words together. Both give a byte-pair tokenizer the same pieces in passage and question. The term that is asked for
stands last where the language allows it: a small model finds it sooner when it is near the place where the answer
begins.
"""

from __future__ import annotations

Wordings = dict[str, tuple[str, ...]]

QUESTIONS: dict[str, dict[str, Wordings]] = {
    "lookup": {
        "en": {
            "train": (
                "What is the {term}?",
                "For {name}, what is the {term}?",
                "Please state the {term}.",
                "Of {name}, state the {term}.",
                "How high is the {term}?",
                "For {name}, find the {term}.",
                "Tell me the {term}.",
                "What does {name} state as {term}?",
            ),
            "validation": ("Find the {term}.", "Please tell me the {term}."),
            "test": (
                "For {name}, how high is the {term}?",
                "Please find the {term}.",
                "Of {name}, tell me the {term}.",
            ),
        },
        "zh": {
            "train": (
                "请问「{term}」是多少？",
                "「{name}」的「{term}」是多少？",
                "请写出「{term}」。",
                "请写出「{name}」的「{term}」。",
                "「{term}」有多高？",
                "请找出「{name}」的「{term}」。",
                "请告诉我「{term}」。",
                "「{name}」写明怎样的「{term}」？",
            ),
            "validation": ("请找出「{term}」。", "请问「{name}」的「{term}」是多少？"),
            "test": ("「{name}」的「{term}」有多高？", "请问「{term}」有多高？", "请告诉我「{name}」的「{term}」。"),
        },
    },
    "fee_sum": {
        "en": {
            "train": (
                "What is the total of {fees}?",
                "Add {fees}.",
                "For {name}, add {fees}.",
                "Give the sum of {fees}.",
                "For {name}, what is the sum of {fees}?",
                "How much in total are {fees}?",
            ),
            "validation": ("Give the total of {fees}.", "Please add {fees}."),
            "test": (
                "For {name}, give the sum of {fees}.",
                "What is the sum of {fees}?",
                "Please give the total of {fees}.",
            ),
        },
        "zh": {
            "train": (
                "合计多少：{fees}？",
                "请相加{fees}。",
                "请相加「{name}」的{fees}。",
                "求总和：{fees}。",
                "「{name}」合计多少：{fees}？",
                "总共要付多少：{fees}？",
            ),
            "validation": ("请问合计多少：{fees}？", "求「{name}」的总和：{fees}。"),
            "test": ("「{name}」总共要付多少：{fees}？", "请问总共多少：{fees}？", "请求总和：{fees}。"),
        },
    },
    "threshold": {
        "en": {
            "train": (
                "Is {bound} {side} the {term}?",
                "For {name}, is {bound} {side} the {term}?",
                "Yes or no: {bound} is {side} the {term}.",
                "Check: is {bound} {side} the {term}?",
                "Tell me, is {bound} {side} the {term}?",
            ),
            "validation": (
                "Yes or no: is {bound} {side} the {term}?",
                "Check for {name}: {bound} is {side} the {term}.",
            ),
            "test": (
                "Yes or no, for {name}: is {bound} {side} the {term}?",
                "Check: {bound} is {side} the {term}.",
                "Of {name}, tell me: is {bound} {side} the {term}?",
            ),
        },
        "zh": {
            "train": (
                "{bound}{side}「{term}」吗？",
                "请问{bound}{side}「{name}」的「{term}」吗？",
                "是或否：{bound}{side}「{term}」。",
                "请判断：{bound}{side}「{term}」吗？",
                "按「{name}」的条款，{bound}{side}「{term}」吗？",
            ),
            "validation": ("是或否：{bound}{side}「{name}」的「{term}」。", "请问：{bound}{side}「{term}」吗？"),
            "test": (
                "请判断：{bound}{side}「{name}」的「{term}」吗？",
                "是或否：{bound}{side}「{term}」吗？",
                "请判断：{bound}{side}「{term}」。",
            ),
        },
    },
    "interest": {
        "en": {
            "train": (
                "What is the simple interest on {principal} yuan for {years} years?",
                "How much interest do {principal} yuan bring in {years} years?",
                "Find the interest: {principal} yuan, {years} years.",
                "For {name}, what is the interest on {principal} yuan in {years} years?",
                "State the interest of {principal} yuan for {years} years.",
            ),
            "validation": (
                "State the simple interest on {principal} yuan in {years} years.",
                "For {name}, find the interest: {principal} yuan, {years} years.",
            ),
            "test": (
                "Find the simple interest on {principal} yuan in {years} years.",
                "For {name}, how much interest do {principal} yuan bring in {years} years?",
                "What is the interest of {principal} yuan in {years} years?",
            ),
        },
        "zh": {
            "train": (
                "{principal}元存{years}年，单利利息是多少？",
                "{principal}元在{years}年中的利息是多少？",
                "请算出利息：{principal}元，{years}年。",
                "按「{name}」的条款，{principal}元在{years}年中的利息是多少？",
                "求利息：{principal}元存{years}年。",
            ),
            "validation": ("请算出利息：{principal}元存{years}年。", "求{principal}元在{years}年中的利息。"),
            "test": (
                "请算出{principal}元存{years}年的利息。",
                "按「{name}」的条款，{principal}元存{years}年，利息是多少？",
                "求单利利息：{principal}元，{years}年。",
            ),
        },
    },
    "clause_comparison": {
        "en": {
            "train": (
                "Which has the {side} {term}?",
                "{first} or {second}: which has the {side} {term}?",
                "Of the two, which has the {side} {term}?",
                "Name the one with the {side} {term}.",
                "Tell me, {first} or {second}: where is the {side} {term}?",
            ),
            "validation": (
                "{first} or {second}: where is the {side} {term}?",
                "Name the one that has the {side} {term}.",
            ),
            "test": (
                "Of {first} and {second}, which has the {side} {term}?",
                "Of the two, name the one with the {side} {term}.",
                "Tell me which has the {side} {term}.",
            ),
        },
        "zh": {
            "train": (
                "哪个有{side}的「{term}」？",
                "「{first}」和「{second}」，哪个有{side}的「{term}」？",
                "两者之中，哪个有{side}的「{term}」？",
                "请写出哪个有{side}的「{term}」。",
                "请比较「{first}」和「{second}」：谁有{side}的「{term}」？",
            ),
            "validation": ("「{first}」和「{second}」，谁有{side}的「{term}」？", "两者之中，谁有{side}的「{term}」？"),
            "test": (
                "请比较「{first}」和「{second}」：哪个有{side}的「{term}」？",
                "两者之中，请写出哪个有{side}的「{term}」。",
                "请问哪个有{side}的「{term}」？",
            ),
        },
    },
    "closed_lookup": {
        "en": {
            "train": (
                "For {name}, what is the {term}?",
                "Of {name}, state the {term}.",
                "For {name}, find the {term}.",
                "What does {name} state as {term}?",
                "At {name}, what is the {term}?",
                "{name}: what is the {term}?",
            ),
            "validation": ("At {name}, find the {term}.", "{name}: state the {term}."),
            "test": ("For {name}, how high is the {term}?", "Of {name}, tell me the {term}."),
        },
        "zh": {
            "train": (
                "「{name}」的「{term}」是多少？",
                "请写出「{name}」的「{term}」。",
                "请找出「{name}」的「{term}」。",
                "「{name}」写明怎样的「{term}」？",
                "在「{name}」，「{term}」是多少？",
                "「{name}」：「{term}」是多少？",
            ),
            "validation": ("请问「{name}」的「{term}」是多少？", "在「{name}」，请找出「{term}」。"),
            "test": ("「{name}」的「{term}」有多高？", "请告诉我「{name}」的「{term}」。"),
        },
    },
}

# What a document says of one term of one product.
STATEMENTS: dict[str, tuple[str, ...]] = {
    "en": (
        "For {name}, the {term} is {value}.",
        "{name} has the {term} {value}.",
        "At {name}, the {term} is {value}.",
        "{name}: the {term} is {value}.",
    ),
    "zh": (
        "「{name}」的「{term}」是{value}。",
        "「{name}」有「{term}」：{value}。",
        "在「{name}」，「{term}」是{value}。",
        "「{name}」：「{term}」{value}。",
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
