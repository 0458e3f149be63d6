"""Which tokens are targets.

Chat templates rarely mark what the assistant says, so it is derived from prefixes: the text up to an assistant turn is
the template's output for the messages before it with a generation prompt, and the turn ends where the output for the
messages up to it ends. Both must be prefixes of the whole chat's text; a template that rewrites earlier turns (as those
that drop old reasoning do) is followed as far as its turns end in the EOS token, and refused otherwise. The target is
the content and the end-of-turn token, nothing of the header and not the line break behind the turn.

The chat is tokenized as one text, so ids equal those of ``apply_chat_template``; offsets say which ids lie in a target
span. Plain samples are tokenized prompt and completion apart, so the prompt's ids are those seen at inference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import jinja2

from danlu.data.forms import Example
from danlu.data.streams import BadRow
from danlu.data.tokenizer import Message, Tokenizer


@dataclass(slots=True)
class Samples:
    """Tokenized samples: ids and target mask of each (the first token may be masked in; it is dropped later)."""

    ids: list[list[int]] = field(default_factory=list)
    masks: list[list[bool]] = field(default_factory=list)


def encode_plain(examples: Sequence[Example], tokenizer: Tokenizer, *, train_on: str) -> Samples:
    """Tokenize prompt/completion (or text) examples: BOS if the tokenizer uses it, EOS exactly once."""
    prompts = [example.prompt for example in examples]
    encoded = tokenizer.encode_batch([*prompts, *(example.completion for example in examples)])
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    begin = [] if bos is None else [bos]
    samples, whole = Samples(), train_on == "all"
    for prompt, completion in zip(encoded[: len(prompts)], encoded[len(prompts) :], strict=True):
        first = prompt or completion
        before = prompt if first[:1] == begin else begin + prompt
        after = completion if completion[-1:] == [eos] else [*completion, eos]
        samples.ids.append(before + after)
        samples.masks.append([whole] * len(before) + [True] * len(after))
    return samples


def encode_chats(
    examples: Sequence[Example], tokenizer: Tokenizer, *, train_on: str
) -> tuple[Samples, list[BadRow | None]]:
    """Tokenize chats.

    Args:
        examples: chats.
        tokenizer: has the chat template.
        train_on: ``all``, ``completion`` (every assistant turn), ``last`` or ``flags``.

    Returns:
        The samples of the good chats in order, and for each example None or why it is bad.
    """
    turns = [_target_turns(example, train_on) for example in examples]
    texts, faults = _render_all([example.messages or [] for example in examples], tokenizer)
    spans: list[list[tuple[int, int]]] = []
    for number, example in enumerate(examples):
        spans.append([])
        if faults[number] is None and train_on != "all":
            try:
                assert example.messages is not None
                spans[number] = [_span(example.messages, turn, texts[number], tokenizer) for turn in turns[number]]
            except BadRow as fault:
                faults[number] = fault
            except jinja2.TemplateError as error:
                faults[number] = BadRow("chat template refuses the chat", detail=str(error))
    good = [number for number, fault in enumerate(faults) if fault is None]
    samples = Samples()
    encoded = tokenizer.encode_offsets([texts[number] for number in good])
    for number, (ids, offsets) in zip(good, encoded, strict=True):
        mask = [True] * len(ids) if train_on == "all" else _mask(offsets, spans[number])
        if not _ends_turn(texts[number], tokenizer):
            ids, mask = [*ids, tokenizer.eos_id], [*mask, True]
        samples.ids.append(ids)
        samples.masks.append(mask)
    return samples, faults


def _target_turns(example: Example, train_on: str) -> list[int]:
    messages = example.messages or []
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "last":
        return turns[-1:]
    return [turn for turn in turns if example.flags[turn]] if train_on == "flags" else turns


def _render_all(chats: list[list[Message]], tokenizer: Tokenizer) -> tuple[list[str], list[BadRow | None]]:
    """Render in one call; where the template refuses a chat, one by one to find which."""
    try:
        return tokenizer.render(chats), [None] * len(chats)
    except jinja2.TemplateError:
        texts = [""] * len(chats)
        faults: list[BadRow | None] = [None] * len(chats)
        for number, chat in enumerate(chats):
            try:
                texts[number] = tokenizer.render([chat])[0]
            except jinja2.TemplateError as error:
                faults[number] = BadRow("chat template refuses the chat", detail=str(error))
        return texts, faults


def _span(messages: list[Message], turn: int, text: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the characters [start, end) of an assistant turn that are targets."""
    before = tokenizer.render([messages[:turn]], generation_prompt=True)[0] if turn else ""
    if not text.startswith(before):
        raise _unstable("the chat with a generation prompt is not a prefix of the whole chat")
    start = len(before)
    if turn + 1 == len(messages):
        end = len(text)
    elif text.startswith(upto := tokenizer.render([messages[: turn + 1]])[0]):
        end = len(upto)
    elif tokenizer.core.eos and (found := text.find(tokenizer.core.eos, start)) >= 0:
        end = found + len(tokenizer.core.eos)
    else:
        raise _unstable("an earlier turn is rewritten when the chat goes on")
    if not turn or not tokenizer.has_generation_prompt:
        start = _content_start(messages[turn], text, start, end)
    ended = text[start:end].rstrip()
    if any(ended.endswith(token) for token in tokenizer.special_tokens):
        end = start + len(ended)
    return start, end


def _content_start(message: Message, text: str, start: int, end: int) -> int:
    found = text.find(message["content"].strip(), start, end)
    if found < 0:
        raise _unstable("the assistant's words cannot be found in the chat")
    return found


def _unstable(detail: str) -> BadRow:
    hint = 'train_on = "last", or a chat_template that leaves earlier turns as they are'
    return BadRow("assistant turns cannot be told apart in the template's output", detail=detail, hint=hint)


def _mask(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> list[bool]:
    """Return which tokens begin inside a span; whitespace tokens can have an empty range at their end."""
    mask = [False] * len(offsets)
    number = 0
    for start, end in spans:
        while number < len(offsets) and (offsets[number][0] < start or offsets[number][1] <= start):
            number += 1
        while number < len(offsets) and offsets[number][0] < end and offsets[number][1] <= end:
            mask[number] = True
            number += 1
    return mask


def _ends_turn(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether the chat's text ends in a special token, which then is its end; else EOS has to be added."""
    ended = text.rstrip()
    return any(ended.endswith(token) for token in tokenizer.special_tokens)
