"""Write the finance question set: four files and a manifest that hashes them.

What is disjoint between the splits, and asserted here on every build:

- open book: the products (by name and by terms), the wordings, and therefore the pair (facts, question);
- closed book: the products are the same in every split, for they are learned from the documents. What is disjoint is
  the facets, that is the pairs (product, term) that are asked, and the wordings. The answer to a test question occurs
  in `documents.jsonl` and in no training question.

Duplicates are counted three ways (exact prompt, normalised prompt, facts with question); the count across splits must
be zero and, for prompts, also inside a split. Sizes change nothing but the length of a split: streams of draws are
named by split, task and language.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

from danlu.base.errors import RunError, UserError
from danlu.base.folders import make_folder
from danlu.data.answers import normalize_answer
from danlu.data.finance.dice import Dice
from danlu.data.finance.questions import OPEN_BOOK_TASKS, Ask, Question, ask_closed_book, write_document
from danlu.data.finance.templates import QUESTIONS
from danlu.data.finance.world import LANGUAGES, SPLITS, World, build_world

FORMAT_VERSION = 1
# Of a closed-book product's terms, how many the test and the validation questions take; training asks for the others.
NUM_HELD_OUT_FACETS = {"test": 2, "validation": 1}
# Draws per wanted question before the world is called too small.
MAX_DRAWS = 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A question with its labels; ``content`` is kept out of the file."""

    task: str
    language: str
    book: str
    question: Question

    def to_json(self, identifier: str) -> dict[str, str]:
        """Return the line of the file."""
        return {
            "id": identifier,
            "prompt": self.question.prompt,
            "completion": self.question.completion,
            "task": self.task,
            "language": self.language,
            "book": self.book,
        }


def write_finance(
    out: Path,
    *,
    seed: int = 0,
    train: int = 24_000,
    validation: int = 600,
    test: int = 1_200,
    documents: int = 1_200,
) -> dict[str, Any]:
    """Write `train.jsonl`, `validation.jsonl`, `test.jsonl`, `documents.jsonl` and `manifest.json` into ``out``.

    Args:
        out: folder, made if missing; files of an earlier build are replaced.
        seed: names the world and every draw.
        train: open-book questions in train, shared equally by tasks and languages; closed-book ones come on top.
        validation: the same for validation.
        test: the same for test.
        documents: documents about the closed-book products, half in each language.

    Returns:
        The manifest: seed, sizes, counts by task, language and book, duplicates, majority baseline, SHA-256 of files.

    Raises:
        UserError: a size is not a positive multiple of 24 (six tasks, two languages, two sides), or the world has too
            few different questions for it.
        RunError: a duplicate across splits (a fault of the generator).
    """
    sizes = {"train": train, "validation": validation, "test": test}
    check_sizes(sizes, documents)
    world = build_world(seed)
    rows = {split: _build_split(world, seed, split, sizes[split]) for split in SPLITS}
    duplicates = count_duplicates(rows)
    check_duplicates(duplicates)
    files: dict[str, list[dict[str, str]]] = {
        split: [row.to_json(f"{split}-{index:06d}") for index, row in enumerate(rows[split])] for split in SPLITS
    }
    files["documents"] = _build_documents(world, seed, documents)
    make_folder(out)
    manifest: dict[str, Any] = {
        "format_version": FORMAT_VERSION,
        "seed": seed,
        "sizes": {**sizes, "documents": documents},
        "counts": {split: _count(rows[split]) for split in SPLITS},
        "duplicates": duplicates,
        "majority_baseline": majority_baseline(rows["train"], rows["test"]),
        "files": {f"{name}.jsonl": _write_lines(out / f"{name}.jsonl", lines) for name, lines in files.items()},
    }
    text = json.dumps(manifest, ensure_ascii=False, indent=2) + "\n"
    (out / "manifest.json").write_text(text, encoding="utf-8", newline="\n")
    return manifest


def check_sizes(sizes: dict[str, int], num_documents: int) -> None:
    """Raise UserError unless exact balance is possible for every size."""
    unit = len(OPEN_BOOK_TASKS) * len(LANGUAGES) * 2
    for name, size in sizes.items():
        if size <= 0 or size % unit:
            raise UserError(
                f"the number of {name} questions must allow exact balance over tasks, languages and sides",
                where=name,
                seen=size,
                legal=f"a positive multiple of {unit}",
                hint=f"use {max(1, round(size / unit)) * unit}",
            )
    if num_documents < 0 or num_documents % len(LANGUAGES):
        raise UserError(
            "documents are shared equally by two languages", where="documents", seen=num_documents, legal="even, >= 0"
        )


def _build_split(world: World, seed: int, split: str, size: int) -> list[Row]:
    rows: list[Row] = []
    per_stratum = size // (len(OPEN_BOOK_TASKS) * len(LANGUAGES))
    seen: set[str] = set()
    for language in LANGUAGES:
        for task, ask in OPEN_BOOK_TASKS.items():
            rows += _draw(world, seed, split, (task, ask, language), per_stratum, seen)
    rows += _closed_book(world, split)
    return Dice(seed, f"{split}/order").shuffled(rows)


def _draw(world: World, seed: int, split: str, kind: tuple[str, Ask, str], count: int, seen: set[str]) -> Iterable[Row]:
    task, ask, language = kind
    dice = Dice(seed, f"{split}/{task}/{language}")
    rows: list[Row] = []
    for _ in range(count * MAX_DRAWS):
        if len(rows) == count:
            return rows
        question = ask(world.open_book[split], language, split, dice, len(rows))
        if question is None or normalize_answer(question.prompt) in seen:
            continue
        seen.add(normalize_answer(question.prompt))
        rows.append(Row(task=task, language=language, book="open", question=question))
    raise UserError(
        f"the fictional world has too few different {task} questions in {language} for the {split} split",
        where=split,
        seen=f"{count} wanted, {len(rows)} found",
        hint="ask for fewer questions",
    )


def _closed_book(world: World, split: str) -> list[Row]:
    rows = []
    for product in world.closed_book:
        # The order of a product's terms is random, so cutting it assigns facets at random.
        num_test, num_validation = NUM_HELD_OUT_FACETS["test"], NUM_HELD_OUT_FACETS["validation"]
        cuts = {"test": slice(0, num_test), "validation": slice(num_test, num_test + num_validation)}
        cuts["train"] = slice(num_test + num_validation, None)
        for key, _ in product.terms[cuts[split]]:
            for language in LANGUAGES:
                for wording in QUESTIONS["closed_lookup"][language][split]:
                    question = ask_closed_book(product, key, wording, language)
                    rows.append(Row(task="closed_lookup", language=language, book="closed", question=question))
    return rows


def _build_documents(world: World, seed: int, count: int) -> list[dict[str, str]]:
    lines = []
    dice = Dice(seed, "documents")
    for index in range(count):
        language = LANGUAGES[index % len(LANGUAGES)]
        product = world.closed_book[index // len(LANGUAGES) % len(world.closed_book)]
        lines.append(
            {"id": f"document-{index:06d}", "text": write_document(product, language, dice), "language": language}
        )
    return dice.shuffled(lines)


def count_duplicates(rows: dict[str, list[Row]]) -> dict[str, int]:
    """Return how often a prompt, a normalised prompt or (facts, question) of one split occurs in another one.

    Keys ending in ``_within`` count repeated prompts inside a split.
    """
    views = {
        "prompt": {split: [row.question.prompt for row in rows[split]] for split in rows},
        "normalized_prompt": {split: [normalize_answer(row.question.prompt) for row in rows[split]] for split in rows},
        "content": {split: [row.question.content for row in rows[split]] for split in rows},
    }
    found = {
        f"{name}_across": sum(len(set(view[one]) & set(view[other])) for one, other in combinations(view, 2))
        for name, view in views.items()
    }
    found["prompt_within"] = sum(len(prompts) - len(set(prompts)) for prompts in views["prompt"].values())
    return found


def check_duplicates(duplicates: dict[str, int]) -> None:
    """Raise RunError unless every count is zero."""
    wrong = {name: count for name, count in duplicates.items() if count}
    if wrong:
        raise RunError(
            "the question set has duplicates", seen=wrong, hint="this is a fault of the generator: report it"
        )


def majority_baseline(train: Sequence[Row], test: Sequence[Row]) -> dict[str, dict[str, float]]:
    """Return, by task and language, the test accuracy of always giving the most frequent training answer."""
    baseline: dict[str, dict[str, float]] = {}
    for task in dict.fromkeys(row.task for row in sorted(test, key=lambda row: row.task)):
        baseline[task] = {}
        for language in LANGUAGES:
            answers = {
                name: [row.question.answer for row in rows if (row.task, row.language) == (task, language)]
                for name, rows in (("train", train), ("test", test))
            }
            counts = Counter(answers["train"])
            # Ties are broken by the text, never by the order of the file.
            answer = min(counts, key=lambda text: (-counts[text], text))
            baseline[task][language] = round(answers["test"].count(answer) / len(answers["test"]), 6)
    return baseline


def _count(rows: Sequence[Row]) -> dict[str, int]:
    return dict(sorted(Counter(f"{row.task}/{row.language}/{row.book}" for row in rows).items()))


def _write_lines(path: Path, lines: Sequence[dict[str, str]]) -> dict[str, str | int]:
    data = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()
    path.write_bytes(data)
    return {"rows": len(lines), "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
