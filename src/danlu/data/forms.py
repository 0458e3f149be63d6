"""What the fields of a record mean.

Five forms cover what people have: ``text``, ``alpaca`` (instruction, input, output), ``sharegpt`` (conversations of
from/value), ``messages`` (role/content) and ``prompt_completion`` (two fields or two templates). Each record becomes
an `Example`: either a prompt and a completion as plain text, or a chat. Nothing is tokenized here.

Required fields must hold text (numbers are written out; lists of strings are joined by line breaks); null or empty
optional fields count as absent. A record that does not fit raises `BadRow`; fields that no form asks for are
reported by name, not refused.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from danlu.base.errors import UserError
from danlu.config.data_build import DataBuild, Form
from danlu.data.streams import BadRow

Record = dict[str, Any]

_PAIRS = (
    ("prompt", "completion"), ("prompt", "response"), ("question", "answer"), ("query", "response"),
    ("query", "answer"), ("input", "output"),
)  # fmt: skip
_ROLES = {
    "human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "bot": "assistant",
    "model": "assistant", "system": "system", "tool": "tool", "observation": "tool", "function": "tool",
}  # fmt: skip
_ALPACA = "### Instruction:\n{instruction}\n\n{input}### Response:\n"


@dataclass(frozen=True, slots=True)
class Example:
    """One sample before tokenization.

    Attributes:
        prompt: text before the completion; "" where there is none.
        completion: the text (form text) or the answer.
        messages: a chat instead of the two above, or None.
        flags: per message, whether it is trained on (policy ``flags``).
    """

    prompt: str = ""
    completion: str = ""
    messages: list[Record] | None = None
    flags: tuple[bool, ...] = ()


def detect_form(records: Sequence[Record], config: DataBuild) -> Form:
    """Return the form that the first records have, from their keys and the templates that are set.

    Raises:
        UserError: no form fits.
    """
    if config.prompt_template or config.prompt_field or config.completion_template or config.completion_field:
        return "prompt_completion"
    if config.text_template:
        return "text"
    keys = set().union(*records) if records else set()
    if "messages" in keys:
        return "messages"
    if "conversations" in keys:
        return "sharegpt"
    if {"instruction", "output"} <= keys:
        return "alpaca"
    if any(set(pair) <= keys for pair in _PAIRS):
        return "prompt_completion"
    if config.text_field in keys:
        return "text"
    raise UserError(
        "cannot tell what the fields mean",
        where="form",
        seen=sorted(keys),
        hint='name the fields: text_field, or prompt_template = "...{field}..." and completion_template',
    )


class Template:
    """Text with ``{field}`` places; ``{{`` and ``}}`` are braces. No attribute or index access."""

    def __init__(self, text: str, where: str) -> None:
        legal = '"... {field} ..."'
        try:
            parsed = list(string.Formatter().parse(text))
        except ValueError as error:
            raise UserError(f"malformed template: {error}", where=where, seen=repr(text), legal=legal) from None
        self.pieces: list[tuple[str, bool]] = []
        for literal, field, spec, conversion in parsed:
            if field == "" or spec or conversion:
                raise UserError("a template's braces hold a field name only", where=where, seen=repr(text), legal=legal)
            self.pieces += [(literal, False)] + ([(field, True)] if field else [])
        self.fields = [piece for piece, is_field in self.pieces if is_field]
        if not self.fields:
            raise UserError("template names no field", where=where, seen=repr(text), legal=legal)

    def fill(self, record: Record) -> str:
        """Return the text for one record."""
        return "".join(text_of(record, piece) if is_field else piece for piece, is_field in self.pieces)


def text_of(record: Record, field: str, *, default: str | None = None) -> str:
    """Return a field as text; ``default`` stands for one that is absent or null.

    Raises:
        BadRow: the field is absent or null without a default, or holds something that is not text.
    """
    value = record.get(field)
    if value is None:
        if default is not None:
            return default
        raise BadRow(f"field {field!r} is {'null' if field in record else 'missing'}", detail=f"fields: {list(record)}")
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value):
        return "\n".join(value)
    raise BadRow(f"field {field!r} is not text", detail=type(value).__name__)


@dataclass(frozen=True, slots=True)
class Reader:
    """A form made ready: the fields it uses and the function from record to example."""

    form: Form
    chat: bool
    fields: frozenset[str]
    read: Callable[[Record], Example]


def make_reader(config: DataBuild, form: Form, first: Sequence[Record], has_chat_template: bool) -> Reader:
    """Return the reader for a form; ``first`` are some records, to find which of the usual field names are used.

    Raises:
        UserError: options that the form cannot use.
    """
    _check_options(config, form)
    if form == "text":
        template = Template(config.text_template or "{" + config.text_field + "}", "text_template")
        return Reader(form, False, frozenset(template.fields), lambda record: _text(template.fill(record)))
    if form in ("messages", "sharegpt"):
        turns = _messages if form == "messages" else _sharegpt
        field = "messages" if form == "messages" else "conversations"
        used = frozenset([field, "system"] if form == "sharegpt" else [field])
        return Reader(form, True, used, lambda record: _chat(turns(record), config.system, record))
    chat = config.layout == "chat" or (config.layout == "auto" and form == "alpaca" and has_chat_template)
    if form == "alpaca":
        used = frozenset(["instruction", "input", "output", *(["system", "history"] if chat else [])])
        return Reader(form, chat, used, lambda record: _alpaca(record, chat, config.system))
    prompt, completion = _pair(config, first)
    used = frozenset([*prompt.fields, *completion.fields])
    return Reader(form, chat, used, lambda record: _prompt(prompt.fill(record), completion.fill(record), chat, config))


def _check_options(config: DataBuild, form: Form) -> None:
    """Every option that is set has an effect in this form."""
    wrong: list[str] = []
    if form != "text":
        wrong += ["text_template"] if config.text_template else []
        wrong += [name for name in ("text_field", "text_unit") if name in config.model_fields_set]
        wrong += ["packing"] if config.packing == "chunk" else []
        wrong += ["overlong"] if config.overlong == "split" else []
    if form == "text":
        wrong += ["train_on"] if config.train_on not in ("auto", "all") else []
    if form in ("text", "messages", "sharegpt"):
        names = ("prompt_field", "completion_field", "prompt_template", "completion_template")
        wrong += [name for name in names if getattr(config, name)]
        wrong += ["layout"] if config.layout == ("chat" if form == "text" else "plain") else []
    if form in ("text", "prompt_completion", "alpaca") and config.layout != "chat":
        wrong += ["system"] if config.system and (form != "alpaca" or config.layout == "plain") else []
    if form not in ("messages",) and config.train_on == "flags":
        wrong += ["train_on"]
    for side in ("prompt", "completion"):
        if getattr(config, f"{side}_field") and getattr(config, f"{side}_template"):
            raise UserError(f"give {side}_field or {side}_template, not both", where=f"{side}_field")
    if wrong:
        raise UserError(f"has no effect on form {form!r}", where=wrong[0], seen=getattr(config, wrong[0]))


def _pair(config: DataBuild, first: Sequence[Record]) -> tuple[Template, Template]:
    keys = set().union(*first) if first else set()
    usual = next((pair for pair in _PAIRS if set(pair) <= keys), None)
    sides: list[Template] = []
    for number, side in enumerate(("prompt", "completion")):
        text = getattr(config, f"{side}_template")
        field = getattr(config, f"{side}_field") or (usual[number] if usual else None)
        if text is None and field is None:
            raise UserError(f"which field is the {side}?", where=f"{side}_field", seen=sorted(keys))
        sides.append(Template(text or "{" + str(field) + "}", f"{side}_template"))
    return sides[0], sides[1]


def _text(text: str) -> Example:
    if not text.strip():
        raise BadRow("text is empty")
    return Example(completion=text)


def _prompt(prompt: str, completion: str, chat: bool, config: DataBuild) -> Example:
    if not completion.strip():
        raise BadRow("completion is empty")
    if not chat:
        return Example(prompt, completion)
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    return _chat(turns, config.system, {})


def _alpaca(record: Record, chat: bool, system: str | None) -> Example:
    instruction, extra = text_of(record, "instruction"), text_of(record, "input", default="")
    output = text_of(record, "output")
    if not output.strip():
        raise BadRow("output is empty")
    if not chat:
        more = f"### Input:\n{extra}\n\n" if extra else ""
        return Example(_ALPACA.replace("{instruction}", instruction).replace("{input}", more), output)
    turns: list[Record] = []
    for turn in record.get("history") or []:
        if not (isinstance(turn, (list, tuple)) and len(turn) == 2):
            raise BadRow("history is not a list of [question, answer]")
        turns += [{"role": "user", "content": str(turn[0])}, {"role": "assistant", "content": str(turn[1])}]
    turns += [
        {"role": "user", "content": f"{instruction}\n{extra}" if extra else instruction},
        {"role": "assistant", "content": output},
    ]
    return _chat(turns, text_of(record, "system", default="") or system, {})


def _messages(record: Record) -> list[Record]:
    messages = record.get("messages")
    if not isinstance(messages, list) or not messages:
        raise BadRow("messages is not a list of turns")
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise BadRow("a message has no role")
    return messages


def _sharegpt(record: Record) -> list[Record]:
    turns = record.get("conversations")
    if not isinstance(turns, list) or not turns:
        raise BadRow("conversations is not a list of turns")
    messages: list[Record] = []
    if system := text_of(record, "system", default=""):
        messages.append({"role": "system", "content": system})
    for turn in turns:
        if not isinstance(turn, dict) or not isinstance(turn.get("from"), str) or turn["from"] not in _ROLES:
            seen = turn.get("from") if isinstance(turn, dict) else turn
            raise BadRow("a turn's 'from' is unknown", detail=f"{seen!r}; legal: {', '.join(_ROLES)}")
        messages.append({"role": _ROLES[turn["from"]], "content": text_of(turn, "value")})
    return messages


def _chat(messages: list[Record], system: str | None, record: Record) -> Example:
    if system and messages[0].get("role") != "system":
        messages = [{"role": "system", "content": system}, *messages]
    flags = tuple(_flag(message) for message in messages)
    chat = [_content(message) for message in messages]
    if not any(message["role"] == "assistant" for message in chat):
        raise BadRow("chat has no assistant turn")
    return Example(messages=chat, flags=flags)


def _content(message: Record) -> Record:
    """Return the message without flags; content in parts (OpenAI style) is joined, null content becomes ""."""
    content = message.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise BadRow("a message has content that is not text")
        content = "".join(part["text"] for part in content)
    elif content is None and message.get("tool_calls"):
        content = ""
    elif not isinstance(content, str):
        raise BadRow("a message has content that is not text", detail=type(content).__name__)
    return {name: value for name, value in message.items() if name not in ("train", "weight")} | {"content": content}


def _flag(message: Record) -> bool:
    """Return whether a message is flagged for training; unflagged assistant turns are, others are not."""
    assistant = message.get("role") == "assistant"
    flag = message.get("train", message.get("weight"))
    if flag is None:
        return assistant
    if flag not in (0, 1):
        raise BadRow("a message's train/weight is not 0 or 1", detail=repr(flag))
    if flag and not assistant:
        raise BadRow("only assistant turns can be trained on", detail=str(message.get("role")))
    return bool(flag)
