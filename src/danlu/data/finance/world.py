"""The closed fictional world: who sells what on which terms.

A product is an institution, a brand and a kind (account, card, deposit, loan, policy, fund) with two or three of the
six terms its kind can have; the terms it leaves out are what 'not stated' questions ask for. Every number is an
integer: fees and amounts in whole yuan, periods in days, rates in basis points (multiples of 50). Ranges are small and
steps coarse on purpose. The set must teach a model of a few million weights, from nothing, within minutes, to find a
term in a passage, add, compare and multiply; wider ranges would test patience and not danlu.

Splits are made here, once, on names: a pair (institution, brand) belongs to exactly one of train, validation, test and
closed, with all its products. The single words of a name occur in every split, so a model has seen each word but never
the product. Products of the closed pool are the ones whose terms are learned from documents.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from danlu.data.finance.dice import Dice

LANGUAGES = ("en", "zh")
SPACE = {"en": " ", "zh": ""}
SPLITS = ("train", "validation", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Text:
    """The same words in both languages."""

    en: str
    zh: str

    def of(self, language: str) -> str:
        """Return the words in ``language``."""
        return self.en if language == "en" else self.zh


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """A term of a contract: its name, unit and the legal values ``low, low + step, ..., high``."""

    name: Text
    unit: Text
    low: int
    high: int
    step: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product; ``terms`` holds (key, value) in the order in which its passage states them."""

    institution: int
    brand: int
    kind: str
    terms: tuple[tuple[str, int], ...]

    @property
    def key(self) -> str:
        """An identifier unique in the world."""
        return f"{self.institution}-{self.brand}-{self.kind}"

    @property
    def values(self) -> dict[str, int]:
        """The stated terms."""
        return dict(self.terms)

    def name(self, language: str) -> str:
        """Return the name of institution and brand, without the kind."""
        if language == "en":
            return f"{INSTITUTIONS[self.institution].en} {BRANDS[self.brand].en}"
        return f"{INSTITUTIONS[self.institution].zh}·{BRANDS[self.brand].zh}"

    def institution_name(self, language: str) -> str:
        """Return the name of who offers the product."""
        return INSTITUTIONS[self.institution].of(language)


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All products: ``open_book[split]`` are read from passages, ``closed_book`` are learned from documents."""

    open_book: dict[str, tuple[Product, ...]]
    closed_book: tuple[Product, ...]


YUAN = Text(en="yuan", zh="元")
DAYS = Text(en="days", zh="天")
BASIS_POINTS = Text(en="basis points", zh="基点")


def _fee(en: str, zh: str) -> Term:
    return Term(name=Text(en=en, zh=zh), unit=YUAN, low=1, high=9)


def _amount(en: str, zh: str) -> Term:
    return Term(name=Text(en=en, zh=zh), unit=YUAN, low=10, high=95, step=5)


def _period(en: str, zh: str) -> Term:
    return Term(name=Text(en=en, zh=zh), unit=DAYS, low=10, high=95, step=5)


# The last word of a term is its own, in English too: that word alone finds the term in a passage.
TERMS: dict[str, Term] = {
    "transfer": _fee("transfer fee", "转账费"),
    "withdrawal": _fee("withdrawal charge", "取现费"),
    "statement": _fee("statement cost", "账单费"),
    "renewal": _fee("renewal price", "续期费"),
    "claim": _fee("claim excess", "理赔费"),
    "redemption": _fee("redemption levy", "赎回费"),
    "balance": _amount("minimum balance", "最低余额"),
    "deductible": _amount("standard deductible", "免赔额"),
    "limit": _amount("daily limit", "日限额"),
    "grace": _period("grace period", "宽限期"),
    "notice": _period("notice time", "通知期"),
    "rate": Term(name=Text(en="yearly rate", zh="年利率"), unit=BASIS_POINTS, low=50, high=450, step=50),
}
FEES = tuple(key for key, term in TERMS.items() if term.unit is YUAN and term.high < 10)
TWO_DIGIT = tuple(key for key, term in TERMS.items() if term.low == 10)

KINDS: dict[str, tuple[Text, tuple[str, ...]]] = {
    "account": (Text(en="account", zh="账户"), ("transfer", "withdrawal", "statement", "balance", "notice", "limit")),
    "card": (Text(en="card", zh="卡"), ("transfer", "withdrawal", "renewal", "limit", "grace", "balance")),
    "deposit": (Text(en="deposit", zh="存款"), ("rate", "withdrawal", "renewal", "statement", "balance", "notice")),
    "loan": (Text(en="loan", zh="贷款"), ("rate", "transfer", "renewal", "statement", "grace", "limit")),
    "policy": (Text(en="policy", zh="保单"), ("claim", "renewal", "statement", "deductible", "grace", "notice")),
    "fund": (Text(en="fund", zh="基金"), ("redemption", "transfer", "statement", "limit", "notice", "balance")),
}
RATED_KINDS = ("deposit", "loan")

INSTITUTIONS = tuple(
    Text(en=en, zh=zh)
    for en, zh in (
        ("Harbor", "港湾"), ("Summit", "峰顶"), ("Meadow", "草原"), ("River", "河川"), ("Island", "岛屿"),
        ("Valley", "山谷"), ("Forest", "森林"), ("Desert", "沙漠"), ("Canyon", "峡谷"), ("Lagoon", "泻湖"),
        ("Prairie", "牧野"), ("Glacier", "冰川"), ("Delta", "三角洲"), ("Garden", "花园"), ("Bridge", "石桥"),
        ("Castle", "城堡"), ("Tower", "高塔"), ("Market", "集市"), ("Temple", "古寺"), ("Village", "村庄"),
        ("Anchor", "船锚"), ("Beacon", "灯标"), ("Compass", "罗盘"), ("Lantern", "灯笼"),
    )
)  # fmt: skip
BRANDS = tuple(
    Text(en=en, zh=zh)
    for en, zh in (
        ("Amber", "琥珀"), ("Cedar", "雪松"), ("Coral", "珊瑚"), ("Falcon", "猎隼"), ("Heron", "苍鹭"),
        ("Ivory", "象牙"), ("Jade", "碧玉"), ("Lotus", "莲花"), ("Maple", "枫叶"), ("Onyx", "玛瑙"),
        ("Opal", "蛋白石"), ("Orchid", "兰花"), ("Otter", "水獭"), ("Panda", "熊猫"), ("Pearl", "珍珠"),
        ("Quartz", "水晶"), ("Raven", "渡鸦"), ("Ruby", "红宝石"), ("Swan", "天鹅"), ("Tiger", "老虎"),
        ("Topaz", "黄玉"), ("Tulip", "郁金香"), ("Violet", "紫罗兰"), ("Willow", "垂柳"),
    )
)  # fmt: skip

# The two columns of a sheet that compares two products.
COLUMNS = {"en": ("A", "B"), "zh": ("甲", "乙")}

# Of the six terms of a kind, how many an open-book product states at least and at most, and a closed-book one states.
MIN_TERMS, MAX_TERMS, CLOSED_BOOK_TERMS = 2, 3, 5
NUM_PAIRS = {"validation": 60, "test": 84, "closed": 16}


def build_world(seed: int) -> World:
    """Return the world of ``seed``."""
    dice = Dice(seed, "world")
    pairs = dice.shuffled([(first, second) for first in range(len(INSTITUTIONS)) for second in range(len(BRANDS))])
    pools: dict[str, list[tuple[int, int]]] = {}
    start = 0
    for pool, count in NUM_PAIRS.items():
        pools[pool] = pairs[start : start + count]
        start += count
    pools["train"] = pairs[start:]
    kinds = tuple(KINDS)
    return World(
        open_book={
            split: tuple(
                _build_product(pair, kind, dice.between(MIN_TERMS, MAX_TERMS), dice)
                for pair in pools[split]
                for kind in kinds
            )
            for split in SPLITS
        },
        # One kind a name: a closed-book question names its product without the kind.
        closed_book=tuple(
            _build_product(pair, kinds[index % len(kinds)], CLOSED_BOOK_TERMS, dice)
            for index, pair in enumerate(pools["closed"])
        ),
    )


def _build_product(pair: tuple[int, int], kind: str, num_terms: int, dice: Dice) -> Product:
    possible = KINDS[kind][1]
    # A deposit or loan without its rate could not be asked for interest: the rate is always stated.
    always = [key for key in possible if key == "rate"]
    others = [key for key in possible if key != "rate"]
    keys = always + dice.sample(others, num_terms - len(always))
    terms = tuple((key, dice.between(TERMS[key].low, TERMS[key].high, TERMS[key].step)) for key in dice.shuffled(keys))
    return Product(institution=pair[0], brand=pair[1], kind=kind, terms=terms)


def format_value(key: str, value: int | str, language: str) -> str:
    """Return ``value`` of term ``key`` with its unit, as passages and answers write it."""
    return f"{value}{SPACE[language]}{TERMS[key].unit.of(language)}"


def format_clause(key: str, value: int | str, language: str) -> str:
    """Return term ``key`` with its value as passages, and the working of answers, write the two together."""
    return f"{TERMS[key].name.of(language)}{SPACE[language]}{value}"


def format_terms(terms: Iterable[tuple[str, int]], language: str) -> str:
    """Return ``terms`` as a passage states them."""
    joint = "; " if language == "en" else "；"
    return joint.join(format_clause(key, format_value(key, value, language), language) for key, value in terms)


def format_passage(product: Product, language: str) -> str:
    """Return the passage that states all terms of ``product``, one line."""
    kind, stated = KINDS[product.kind][0].of(language), format_terms(product.terms, language)
    return (
        f"{product.name('en')} {kind}: {stated}." if language == "en" else f"「{product.name('zh')}」{kind}：{stated}。"
    )


def format_comparison(first: Product, second: Product, language: str) -> str:
    """Return the sheet that sets two products of a kind side by side in two columns, clause by clause, one line.

    A clause that only one of them states shows a dash for the other.
    """
    kind = KINDS[first.kind][0].of(language)
    joint, space = "; " if language == "en" else "；", SPACE[language]
    clauses = []
    for key in dict.fromkeys([*first.values, *second.values]):
        one, other = (product.values.get(key, "-") for product in (first, second))
        both = format_value(key, f"{one}{space}|{space}{other}", language)
        clauses.append(format_clause(key, both, language))
    one, other = COLUMNS[language]
    if language == "en":
        return f"{one} {first.name('en')} | {other} {second.name('en')} {kind}: {joint.join(clauses)}."
    return f"{one}「{first.name('zh')}」|{other}「{second.name('zh')}」{kind}：{joint.join(clauses)}。"
