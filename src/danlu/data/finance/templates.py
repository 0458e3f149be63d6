"""The wordings of questions and documents, by task, language and split.

Every wording belongs to one split. A test question is therefore put in words that no training question used, although
each single word occurs in training: what is tested is reading, not a new vocabulary. 'not_stated' borrows the wordings
of 'lookup' to the letter, so the form of a question never tells whether its answer is stated.

Chinese names and terms stand in corner brackets and English terms keep their two words together. Both give a byte-pair
tokenizer the same pieces in passage and question.
"""

from __future__ import annotations

Wordings = dict[str, tuple[str, ...]]

QUESTIONS: dict[str, dict[str, Wordings]] = {
    "lookup": {
        "en": {
            "train": (
                "What is the {term}?",
                "What is the {term} of {name}?",
                "Please state the {term}.",
                "Tell me the {term} of {name}.",
                "How high is the {term} here?",
                "For {name}, what {term} is stated?",
                "Find the {term} in these terms.",
                "Which {term} does {name} have?",
            ),
            "validation": ("State the {term} of {name}.", "What {term} is stated here?"),
            "test": ("Please tell me the {term} of {name}.", "Which {term} is stated here?", "Find the {term}."),
        },
        "zh": {
            "train": (
                "「{term}」是多少？",
                "「{name}」的「{term}」是多少？",
                "请写出「{term}」。",
                "请告诉我「{name}」的「{term}」。",
                "这里的「{term}」有多高？",
                "「{name}」写明的「{term}」是什么？",
                "在条款中找出「{term}」。",
                "「{name}」有怎样的「{term}」？",
            ),
            "validation": ("请写出「{name}」的「{term}」。", "条款中的「{term}」是多少？"),
            "test": ("请告诉我「{term}」是多少。", "「{name}」的「{term}」有多高？", "请找出「{term}」。"),
        },
    },
    "fee_sum": {
        "en": {
            "train": (
                "What is the total of {fees}?",
                "Add {fees}.",
                "In total, how much are {fees}?",
                "Please add up {fees} of {name}.",
                "Give the sum of {fees}.",
                "For {name}, what is the sum of {fees}?",
                "How much are {fees} together?",
            ),
            "validation": ("Give the total of {fees}.", "For {name}, add {fees}."),
            "test": ("Please give the sum of {fees}.", "How much are {fees} in total?", "Add up {fees} of {name}."),
        },
        "zh": {
            "train": (
                "{fees}合计多少？",
                "请把{fees}相加。",
                "总共要付多少：{fees}？",
                "请算出「{name}」的{fees}之和。",
                "求{fees}的总和。",
                "「{name}」的{fees}合计是多少？",
                "{fees}加起来是多少？",
            ),
            "validation": ("请算出{fees}的总和。", "{fees}总共是多少？"),
            "test": ("请算出{fees}合计多少。", "「{name}」的{fees}加起来是多少？", "求{fees}之和。"),
        },
    },
    "threshold": {
        "en": {
            "train": (
                "Is the {term} {side} {bound}?",
                "Is the {term} of {name} {side} {bound}?",
                "Yes or no: the {term} is {side} {bound}.",
                "For {name}, is the {term} {side} {bound}?",
                "Does {name} have a {term} {side} {bound}?",
                "Check this: is the {term} {side} {bound}?",
            ),
            "validation": ("Yes or no: is the {term} {side} {bound}?", "Check the {term}: is it {side} {bound}?"),
            "test": (
                "Yes or no: does {name} have a {term} {side} {bound}?",
                "Check this for {name}: the {term} is {side} {bound}.",
                "Yes or no: is the {term} of {name} {side} {bound}?",
            ),
        },
        "zh": {
            "train": (
                "「{term}」{side}{bound}吗？",
                "「{name}」的「{term}」{side}{bound}吗？",
                "是或否：「{term}」{side}{bound}。",
                "请判断，「{term}」{side}{bound}吗？",
                "「{name}」的「{term}」是否{side}{bound}？",
                "请判断「{term}」是否{side}{bound}。",
            ),
            "validation": ("请判断，「{term}」是否{side}{bound}？", "是或否：「{name}」的「{term}」{side}{bound}。"),
            "test": (
                "请判断「{name}」的「{term}」是否{side}{bound}。",
                "是或否：「{term}」{side}{bound}吗？",
                "请判断，「{name}」的「{term}」{side}{bound}吗？",
            ),
        },
    },
    "interest": {
        "en": {
            "train": (
                "What is the simple interest on {principal} yuan for {years} years?",
                "How much simple interest do {principal} yuan bring in {years} years?",
                "Find the simple interest: {principal} yuan, {years} years.",
                "For {name}, what is the interest on {principal} yuan in {years} years?",
                "Interest on {principal} yuan over {years} years?",
                "State the simple interest of {principal} yuan after {years} years.",
            ),
            "validation": (
                "State the simple interest on {principal} yuan over {years} years.",
                "How much interest do {principal} yuan bring over {years} years?",
            ),
            "test": (
                "Find the simple interest on {principal} yuan in {years} years.",
                "What interest do {principal} yuan of {name} bring in {years} years?",
                "What is the interest of {principal} yuan after {years} years?",
            ),
        },
        "zh": {
            "train": (
                "{principal}元存续{years}年，单利利息是多少？",
                "{principal}元在{years}年中的利息是多少？",
                "请算出利息：{principal}元，{years}年。",
                "按「{name}」的条款，{principal}元{years}年的利息是多少？",
                "求{principal}元{years}年的单利利息。",
                "{principal}元经过{years}年，利息有多少？",
            ),
            "validation": ("请算出{principal}元{years}年的利息。", "求利息：{principal}元经过{years}年。"),
            "test": (
                "请算出{principal}元存续{years}年的单利利息。",
                "按「{name}」的条款，{principal}元经过{years}年，利息是多少？",
                "求{principal}元在{years}年中的利息。",
            ),
        },
    },
    "clause_comparison": {
        "en": {
            "train": (
                "Which has the {side} {term}, {first} or {second}?",
                "Of {first} and {second}, which has the {side} {term}?",
                "{first} or {second}: which {term} is {side}?",
                "Which of the two has the {side} {term}?",
                "Name the one with the {side} {term}.",
                "Where is the {term} {side}, at {first} or {second}?",
            ),
            "validation": ("{first} or {second}: where is the {term} {side}?", "Which one has the {side} {term}?"),
            "test": (
                "{first} or {second}: which has the {side} {term}?",
                "Of the two, which has the {side} {term}?",
                "Of {first} and {second}, name the one with the {side} {term}.",
            ),
        },
        "zh": {
            "train": (
                "「{first}」和「{second}」，哪个的「{term}」{side}？",
                "哪个的「{term}」{side}，「{first}」还是「{second}」？",
                "「{term}」{side}的是「{first}」还是「{second}」？",
                "两者中哪个的「{term}」{side}？",
                "请写出「{term}」{side}的一个。",
                "比较「{first}」和「{second}」：哪个的「{term}」{side}？",
            ),
            "validation": ("「{first}」还是「{second}」：哪个的「{term}」{side}？", "请写出两者中「{term}」{side}的。"),
            "test": (
                "「{first}」和「{second}」，「{term}」{side}的是哪个？",
                "请写出两者中哪个的「{term}」{side}。",
                "比较「{first}」和「{second}」：「{term}」{side}的是哪个？",
            ),
        },
    },
    "term_list": {
        "en": {
            "train": ("State {terms}.", "Of {name}, state {terms}.", "Please list {terms}."),
            "validation": (),
            "test": (),
        },
        "zh": {
            "train": ("写出{terms}。", "写出「{name}」的{terms}。", "请列出{terms}。"),
            "validation": (),
            "test": (),
        },
    },
    "closed_lookup": {
        "en": {
            "train": (
                "What is the {term} of {name}?",
                "Tell me the {term} of {name}.",
                "For {name}, what {term} is stated?",
                "Which {term} does {name} have?",
                "At {name}, how high is the {term}?",
                "{name}: what is the {term}?",
            ),
            "validation": ("State the {term} of {name}.", "For {name}, how high is the {term}?"),
            "test": ("Please tell me the {term} of {name}.", "What {term} does {name} have?"),
        },
        "zh": {
            "train": (
                "「{name}」的「{term}」是多少？",
                "请告诉我「{name}」的「{term}」。",
                "「{name}」写明的「{term}」是什么？",
                "「{name}」有怎样的「{term}」？",
                "在「{name}」，「{term}」有多高？",
                "「{name}」：「{term}」是多少？",
            ),
            "validation": ("请写出「{name}」的「{term}」。", "在「{name}」，「{term}」是什么？"),
            "test": ("「{name}」的「{term}」有多高？", "请告诉我「{name}」的「{term}」是多少。"),
        },
    },
}

# What a document says of one term of one product.
STATEMENTS: dict[str, tuple[str, ...]] = {
    "en": (
        "The {term} of {name} is {value}.",
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
