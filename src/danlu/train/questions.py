r"""Questions with known answers, asked in the very tokens of training.

A question file is read by the code that reads training data (formats, forms, templates), and its prompts are tokenized
by the code that tokenizes training samples: a prompt and its completion apart, or a chat up to the assistant's last
turn with the template's generation prompt. A model that was trained on "Query: ...\nIntent:" and is asked without that
template scores zero for no fault of its own; so where the options do not say how to read the file, it is read as the
training data was, if its fields allow that.

The prompt never depends on the answer, not even through a token that would straddle the two.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jinja2

from danlu.base.errors import UserError
from danlu.config.data_build import DataBuild, Form
from danlu.config.load import build
from danlu.data.forms import Example, Template, detect_form, make_reader
from danlu.data.masking import encode_plain
from danlu.data.sources import Chunk, find_files, parse_chunk, read_chunks
from danlu.data.streams import BadRow
from danlu.data.tokenizer import Tokenizer
from danlu.train.load import is_chat_data
from danlu.train.scores import Stratum

Record = dict[str, Any]
_NUM_FIRST = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionForm:
    """How rows become prompts and answers; the fields are those of the data build (`danlu.config.data_build`)."""

    form: str = "auto"
    prompt_field: str | None = None
    completion_field: str | None = None
    prompt_template: str | None = None
    completion_template: str | None = None
    layout: str = "auto"
    system: str | None = None

    @property
    def names_fields(self) -> bool:
        """Whether it says which fields are used, so that nothing has to be found out."""
        fields = (self.prompt_field, self.completion_field, self.prompt_template, self.completion_template)
        return self.form != "auto" or any(field is not None for field in fields)


@dataclass(frozen=True, slots=True)
class Asked:
    """A row before tokenization: the prompt as text or as a chat, and the answer."""

    where: str
    prompt: str | list[Record]
    answer: str
    stratum: Stratum

    @property
    def prompt_text(self) -> str:
        """The prompt for people."""
        if isinstance(self.prompt, str):
            return self.prompt
        return "\n".join(f"{message['role']}: {message['content']}" for message in self.prompt)


def settle_form(given: QuestionForm, training: Mapping[str, Any], first: Record) -> QuestionForm:
    """Return how to read the questions: as the options say, else as the training data was read.

    Args:
        given: the user's options.
        training: config of the data build behind the training data; empty if unknown.
        first: a row of the question file, to see whether it has the fields of the training data.
    """
    form = given
    if not given.names_fields and training.get("form") not in (None, "text"):
        like_training = replace(
            given,
            form=training["form"],
            prompt_field=training.get("prompt_field"),
            completion_field=training.get("completion_field"),
            prompt_template=training.get("prompt_template"),
            completion_template=training.get("completion_template"),
        )
        if _has_fields(like_training, first):
            form = like_training
    chats = is_chat_data(training)
    if form.layout == "auto" and not {"messages", "conversations"} & first.keys():
        form = replace(form, layout="chat" if chats else training.get("layout", "auto"))
    if form.system is None and chats and form.layout != "plain":
        form = replace(form, system=training.get("system"))
    return form


def _has_fields(form: QuestionForm, row: Record) -> bool:
    needed = {"messages": {"messages"}, "sharegpt": {"conversations"}, "alpaca": {"instruction", "output"}}
    if form.form != "prompt_completion":
        return needed[form.form] <= row.keys()
    fields = {name for name in (form.prompt_field, form.completion_field) if name}
    for template in (form.prompt_template, form.completion_template):
        fields |= set(Template(template, "template").fields) if template else set()
    return bool(fields) and fields <= row.keys()  # without names the usual ones are looked for, in any file


def read_asked(path: Path, form: QuestionForm, training: Mapping[str, Any], *, has_chat_template: bool) -> list[Asked]:
    """Read a question file.

    Args:
        path: jsonl, json, csv, tsv or parquet, also compressed.
        form: how to read it; what it leaves open is taken from ``training``.
        training: config of the training data's build, empty if unknown.
        has_chat_template: whether the model's tokenizer has one.

    Raises:
        UserError: no such file, no rows, no answer field, or a malformed row (named by its line).
    """
    if not path.is_file():
        raise UserError("no such question file", where=str(path))
    rows = list(_read_rows(path))
    if not rows:
        raise UserError("the file holds no questions", where=str(path))
    first = [record for _, record in rows[:_NUM_FIRST]]
    form = settle_form(form, training, first[0])
    # Only the fields about forms matter here: nothing is built.
    config = build(DataBuild, {"inputs": str(path), "output": "-", "tokenizer": "-", **asdict(form)}, source=str(path))
    kind = _kind(config, first, path)
    reader = make_reader(config, kind, first, has_chat_template)
    asked = []
    for where, record in rows:
        try:
            asked.append(_ask(where, reader.read(record), record))
        except BadRow as fault:
            raise _as_error(fault, where) from None
    return asked


def _read_rows(path: Path) -> Iterator[tuple[str, Record]]:
    for file in find_files((str(path),)):
        for chunk in read_chunks(file, encoding="utf-8", text_unit="line"):
            for where, row in parse_chunk(chunk, "utf-8") if isinstance(chunk, Chunk) else [(chunk.where, chunk)]:
                if isinstance(row, BadRow):
                    raise _as_error(row, where)
                yield where, row


def _as_error(fault: BadRow, where: str) -> UserError:
    return UserError(fault.reason, where=fault.where or where, seen=fault.detail or None)


def _kind(config: DataBuild, first: Sequence[Record], path: Path) -> Form:
    try:
        kind = detect_form(first, config) if config.form == "auto" else config.form
    except UserError:
        kind = "text"
    if kind == "text":
        raise UserError(
            "no answer field: cannot tell questions from answers",
            where=str(path),
            seen=f"fields {', '.join(sorted(first[0]))}",
            legal="prompt and completion, question and answer, instruction and output, or messages",
            hint="name the fields: --prompt-template '{question}' --completion-template '{answer}'",
        )
    return kind


def _ask(where: str, example: Example, record: Record) -> Asked:
    stratum = (_label(record, "task"), _label(record, "language"))
    if example.messages is None:
        return Asked(where, example.prompt, example.completion, stratum)
    turn = max(number for number, message in enumerate(example.messages) if message["role"] == "assistant")
    if turn == 0:
        raise BadRow("the assistant speaks first, so there is no question")
    return Asked(where, example.messages[:turn], example.messages[turn]["content"], stratum)


def _label(record: Record, field: str) -> str | None:
    value = record.get(field)
    return None if value is None or value == "" else str(value)


def sample_asked(asked: Sequence[Asked], limit: int | None, seed: int) -> list[Asked]:
    """Return a random sample without replacement, in the order of the file; all rows where ``limit`` allows it."""
    if limit is None or limit >= len(asked):
        return list(asked)
    return [asked[number] for number in sorted(random.Random(seed).sample(range(len(asked)), limit))]


def encode_prompts(asked: Sequence[Asked], tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of each prompt, as training would have them before the first target.

    Raises:
        UserError: a prompt without any token, a chat and no chat template, or a chat that the template refuses.
    """
    plain = [Example(one.prompt, one.answer) for one in asked if isinstance(one.prompt, str)]
    chats = [one.prompt for one in asked if not isinstance(one.prompt, str)]
    samples = encode_plain(plain, tokenizer, train_on="completion")
    prompts = iter([ids[: runs[0]] for ids, runs in zip(samples.ids, samples.masks, strict=True)])
    try:
        texts = tokenizer.render(chats, generation_prompt=True) if chats else []
    except jinja2.TemplateError as error:
        raise UserError(f"the chat template refuses a chat: {error}", where=asked[0].where) from None
    chat_ids = iter(tokenizer.encode_batch(texts))
    encoded = [next(prompts) if isinstance(one.prompt, str) else next(chat_ids) for one in asked]
    for one, ids in zip(asked, encoded, strict=True):
        if not ids:
            raise UserError("empty prompt: there is nothing to ask", where=one.where)
    return encoded
