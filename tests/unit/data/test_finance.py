"""The finance question set: exact answers, exact balance, disjoint splits, the same bytes everywhere."""

import json
import re
from collections import Counter, defaultdict

import pytest

from danlu.base.errors import RunError, UserError
from danlu.data.finance import build
from danlu.data.finance.build import check_duplicates, write_finance
from danlu.data.finance.templates import MORE_LESS, NOT_STATED, QUESTIONS, SIDES
from danlu.data.finance.world import KINDS, LANGUAGES, SPLITS, TERMS, build_world

SIZES = {"train": 960, "validation": 480, "test": 480, "documents": 96}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("finance")
    write_finance(out, seed=0, **SIZES)
    return out


@pytest.fixture(scope="module")
def rows(folder):
    return {
        split: [json.loads(line) for line in (folder / f"{split}.jsonl").read_text("utf-8").splitlines()]
        for split in SPLITS
    }


def every_row(rows):
    return [row for split in SPLITS for row in rows[split]]


def read_passages(prompt, language):
    """Parse the passage back from the text, by a route of its own: {name: {term name: number}}."""
    pattern = r"^([\w |]+) \w+: (.+)\.$" if language == "en" else r"^([^：]+)」[^：]+：(.+)。$"
    heads, stated = re.match(pattern, prompt.splitlines()[0]).groups()
    names = [re.sub("^([AB] |甲|乙)", "", name.strip()).strip("「」") for name in heads.split("|")]
    products = {name: {} for name in names}
    for part in re.split("[;；] ?", stated):
        term, values = re.match(r"([^\d|-]+)([\d |-]+)", part).groups()
        for name, value in zip(names, values.split("|"), strict=True):
            if value.strip() != "-":
                products[name][term.strip()] = int(value)
    return products


def seller(name):
    """The institution in a product's name."""
    return re.split("[ ·]", name)[0]


def asked_terms(row):
    question = row["prompt"].splitlines()[-1]
    return [term.name.of(row["language"]) for term in TERMS.values() if term.name.of(row["language"]) in question]


def answer_of(row):
    """The part of an answer behind its working."""
    return row["completion"].split("=>")[-1]


def with_unit(key_name, number, language):
    """Write a number with the unit of the term of that name."""
    [term] = [term for term in TERMS.values() if term.name.of(language) == key_name]
    return f"{number} {term.unit.en}" if language == "en" else f"{number}{term.unit.zh}"


def solve(row):
    """Answer an open-book question from its text alone, working included."""
    language, question = row["language"], row["prompt"].splitlines()[-1]
    products = read_passages(row["prompt"], language)
    only = next(iter(products.values()))
    terms = sorted(asked_terms(row), key=question.index)
    numbers = [int(number) for number in re.findall(r"\d+", question)]
    space, comma, colon = (" ", ", ", ": ") if language == "en" else ("", "，", "：")
    if row["task"] == "fee_sum":
        clauses = [f"{term}{space}{only[term]}" for term in terms]
        values = [only[term] for term in terms]
        sums = [f"{sum(values[:n])}+{values[n]}={sum(values[: n + 1])}" for n in range(1, len(values))]
        answer = with_unit(terms[0], sum(values), language)
        return comma.join(clauses) + colon + comma.join(sums) + "=>" + answer
    if row["task"] == "interest":
        principal, years = numbers
        rate = only[TERMS["rate"].name.of(language)]
        assert principal * rate % 10_000 == 0
        yearly = principal * rate // 10_000
        return f"{yearly}*{years}={yearly * years}=>" + (
            f"{yearly * years} yuan" if language == "en" else f"{yearly * years}元"
        )
    if row["task"] == "threshold":
        more, less = MORE_LESS[language]
        assert (more in question) != (less in question)
        value, bound = only[terms[0]], numbers[0]
        right = bound > value if more in question else bound < value
        verdict = {("en", True): "yes", ("en", False): "no", ("zh", True): "是", ("zh", False): "否"}[language, right]
        claim = f"{bound}{space}{more if more in question else less}{space}{value}"
        relation = f"{bound}>{value}" if bound > value else f"{bound}<{value}"
        return f"{terms[0]}{space}{value}{comma}{claim}{colon}{relation}=>{verdict}"
    if row["task"] == "clause_comparison":
        asked = {
            word: better for words in SIDES.values() for word, better in zip(words[language], (max, min), strict=True)
        }
        [side] = [word for word in asked if re.search(rf"{word}(?![a-z])", question)]
        best = asked[side](products, key=lambda name: products[name][terms[0]])
        one, other = (product[terms[0]] for product in products.values())
        column = ("AB" if language == "en" else "甲乙")[list(products).index(best)]
        relation = f"{one}>{other}" if one > other else f"{one}<{other}"
        read = f"{terms[0]}{space}{one}{space}|{space}{other}"
        verdict = space.join([side, column, seller(best)])
        return f"{read}{colon}{relation}{comma}{verdict}=>{seller(best)}"
    if terms[0] not in only:
        return f"{terms[0]}=>{NOT_STATED[language]}"
    value = with_unit(terms[0], only[terms[0]], language)
    return f"{terms[0]}{space}{value}=>{value}"


def test_every_open_book_answer_follows_from_its_passage(rows):
    """A reader who parses the text and computes in integers gets each stored answer."""
    for row in every_row(rows):
        if row["book"] == "open":
            assert row["completion"] == solve(row)


def test_closed_book_answers_are_in_the_documents(folder, rows):
    """What a closed-book question asks is said in a document, in its language, with the same number."""
    said = defaultdict(set)
    names = {(language, product.name(language)) for product in build_world(0).closed_book for language in LANGUAGES}
    for line in (folder / "documents.jsonl").read_text("utf-8").splitlines():
        document = json.loads(line)
        for sentence in re.findall(r"[^.。]+[.。]", document["text"]):
            for language, name in names:
                if name in sentence and document["language"] == language:
                    said[name].add(sentence)
    for row in every_row(rows):
        if row["book"] == "closed":
            [name] = [name for language, name in names if language == row["language"] and name in row["prompt"]]
            [term] = asked_terms(row)
            assert any(term in sentence and answer_of(row) in sentence for sentence in said[name]), row


def test_yes_and_no_are_balanced_exactly(rows):
    """Threshold answers are half yes and half no in every split and language."""
    for split in SPLITS:
        for language in LANGUAGES:
            answers = Counter(
                answer_of(row) for row in rows[split] if (row["task"], row["language"]) == ("threshold", language)
            )
            assert len(answers) == 2
            assert len(set(answers.values())) == 1


def test_comparison_positions_are_balanced_exactly(rows):
    """The right product stands first in the passage, and first in the question, half of the time."""
    for split in SPLITS:
        chosen = [row for row in rows[split] if row["task"] == "clause_comparison"]
        in_passage = [
            seller(next(iter(read_passages(row["prompt"], row["language"])))) == answer_of(row) for row in chosen
        ]
        assert sum(in_passage) * 2 == len(chosen)


def test_the_form_of_a_question_does_not_tell_whether_it_is_answered(rows):
    """Half of the not_stated rows have no answer, and they are put in the words of questions that have one."""
    for split in SPLITS:
        for language in LANGUAGES:
            wordings = {re.sub(r"\{\w+\}", "_", wording) for wording in QUESTIONS["lookup"][language][split]}
            unanswered = total = 0
            for row in rows[split]:
                if row["language"] != language or row["task"] not in ("not_stated", "lookup"):
                    continue
                question = row["prompt"].splitlines()[-1]
                for text in [*asked_terms(row), *read_passages(row["prompt"], language)]:
                    question = question.replace(text, "_")
                assert question in wordings
                if row["task"] == "not_stated":
                    unanswered, total = unanswered + (answer_of(row) == NOT_STATED[language]), total + 1
            assert unanswered * 2 == total > 0


def test_products_and_wordings_are_disjoint_between_splits(rows):
    """No name of a product and no wording of a task occurs in two splits (open book)."""
    names = {
        split: {
            (row["language"], name)
            for row in rows[split]
            if row["book"] == "open"
            for name in read_passages(row["prompt"], row["language"])
        }
        for split in SPLITS
    }
    for one, other in (("train", "validation"), ("train", "test"), ("validation", "test")):
        assert not names[one] & names[other]
        for languages in QUESTIONS.values():
            for wordings in languages.values():
                assert not set(wordings[one]) & set(wordings[other])


def test_closed_book_facets_are_disjoint_between_splits(rows):
    """A (product, term) pair asked in test is never asked in train or validation, in either language."""
    products = build_world(0).closed_book
    facets = {split: set() for split in SPLITS}
    for split in SPLITS:
        for row in rows[split]:
            if row["book"] == "closed":
                language = row["language"]
                [product] = [product for product in products if product.name(language) in row["prompt"]]
                [key] = [key for key, term in TERMS.items() if term.name.of(language) in row["prompt"]]
                facets[split].add((product.key, key))
    assert all(facets.values())
    assert not facets["train"] & facets["test"]
    assert not facets["train"] & facets["validation"]
    assert not facets["validation"] & facets["test"]


def test_the_majority_baseline_is_low(folder):
    """Always giving the most frequent answer scores at most one half anywhere, far less where answers are open."""
    baseline = json.loads((folder / "manifest.json").read_text("utf-8"))["majority_baseline"]
    for task, by_language in baseline.items():
        for accuracy in by_language.values():
            assert accuracy <= (0.5 if task in ("threshold", "not_stated") else 0.2)


def test_the_same_seed_gives_the_same_bytes_as_ever(folder):
    """The files of seed 0 hash to the recorded values: no machine, Python version or dictionary order shows in them."""
    files = json.loads((folder / "manifest.json").read_text("utf-8"))["files"]
    assert {name: entry["sha256"][:16] for name, entry in files.items()} == GOLDEN


def test_seeds_differ_and_sizes_do_not_shift_other_splits(tmp_path, folder):
    """Another seed gives another world; a larger train split leaves test as it was."""
    write_finance(tmp_path / "seed", seed=1, **SIZES)
    write_finance(tmp_path / "size", seed=0, **{**SIZES, "train": 1008})
    original = (folder / "test.jsonl").read_bytes()
    assert (tmp_path / "seed" / "test.jsonl").read_bytes() != original
    assert (tmp_path / "size" / "test.jsonl").read_bytes() == original


def test_duplicates_stop_the_build(monkeypatch, tmp_path):
    """One test question put into train raises before any file is written."""
    with pytest.raises(RunError, match="prompt_across"):
        check_duplicates({"prompt_across": 1, "content_across": 0})
    whole = build._build_split
    monkeypatch.setattr(build, "_build_split", lambda world, seed, split, size: whole(world, seed, "train", size))
    with pytest.raises(RunError, match="duplicates"):
        write_finance(tmp_path / "none", **SIZES)
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"test": 100}, r"(?s)test: .*multiple of 24.*hint:  use 96"),
        ({"train": 0}, "train"),
        ({"documents": 3}, "documents"),
        ({"validation": 9_600}, "too few different"),
    ],
)
def test_impossible_sizes_are_refused(monkeypatch, tmp_path, change, message):
    """Sizes that break exact balance or exceed the world are the user's error and say what to ask for."""
    monkeypatch.setattr(build, "MAX_DRAWS", 2)
    with pytest.raises(UserError, match=message):
        write_finance(tmp_path, **{**SIZES, **change})


def test_every_kind_has_terms_to_leave_out_and_fees_to_add():
    """Each kind of product can be asked by every task that draws from all kinds."""
    for _, possible in KINDS.values():
        assert len(possible) == 6
        assert set(possible) <= set(TERMS)


GOLDEN = {
    "train.jsonl": "5163018511b9073c",
    "validation.jsonl": "ae03230e048f538f",
    "test.jsonl": "5f88c4ea0d3aa617",
    "documents.jsonl": "26811a5ec4370480",
}
