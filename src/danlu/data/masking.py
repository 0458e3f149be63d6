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

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field

import jinja2

from danlu.data.forms import Example
from danlu.data.streams import BadRow
from danlu.data.tokenizer import Message, Tokenizer

Runs = list[int]
"""A mask as run lengths: tokens that are no targets, then targets, and so on in turn."""


@dataclass(slots=True)
class Samples:
    """Tokenized samples: ids and mask of each (the first token may be a target here; packing takes that back)."""

    ids: list[list[int]] = field(default_factory=list)
    masks: list[Runs] = field(default_factory=list)


def encode_plain(examples: Sequence[Example], tokenizer: Tokenizer, *, train_on: str) -> Samples:
    """Tokenize prompt/completion (or text) examples: BOS if the tokenizer uses it, EOS exactly once."""
    completions = tokenizer.encode_batch([example.completion for example in examples])
    prompts = iter(tokenizer.encode_batch([example.prompt for example in examples if example.prompt]))
    bos, eos = tokenizer.bos_id, tokenizer.eos_id
    samples, whole = Samples(), train_on == "all"
    for example, completion in zip(examples, completions, strict=True):
        prompt = next(prompts) if example.prompt else []
        ids = prompt + completion if prompt else completion
        begun = bos is not None and ids[:1] != [bos]
        if begun:
            ids.insert(0, bos)  # type: ignore[arg-type]
        if ids[-1:] != [eos]:
            ids.append(eos)
        masked = 0 if whole else len(prompt) + begun
        samples.ids.append(ids)
        samples.masks.append([masked, len(ids) - masked])
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
    chats = [example.messages or [] for example in examples]
    texts = _render(chats, tokenizer)
    faults = [text if isinstance(text, BadRow) else None for text in texts]
    spans: list[list[tuple[int, int]]] = [[] for _ in chats]
    if train_on != "all":
        places = [(n, turn) for n, example in enumerate(examples) for turn in _target_turns(example, train_on)]
        befores = _render([chats[n][:turn] for n, turn in places], tokenizer, generation_prompt=True)
        for (n, turn), before in zip(places, befores, strict=True):
            text = texts[n]
            try:
                if isinstance(before, BadRow):
                    raise before
                if isinstance(text, str):
                    spans[n].append(_span(chats[n], turn, text, before, tokenizer))
            except BadRow as fault:
                faults[n] = faults[n] or fault
    samples = Samples()
    good = [n for n, fault in enumerate(faults) if fault is None]
    kept = [str(texts[n]) for n in good]
    for n, text, (ids, offsets) in zip(good, kept, tokenizer.encode_offsets(kept), strict=True):
        runs = [0, len(ids)] if train_on == "all" else _runs(offsets, spans[n])
        if not _ends_turn(text, tokenizer):
            ids.append(tokenizer.eos_id)
            target = train_on == "all" or (bool(spans[n]) and spans[n][-1][1] == len(text))
            if target == (len(runs) % 2 == 0):  # the last run is of the same kind
                runs[-1] += 1
            else:
                runs.append(1)
        samples.ids.append(ids)
        samples.masks.append(runs)
    return samples, faults


def _target_turns(example: Example, train_on: str) -> list[int]:
    messages = example.messages or []
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    if train_on == "last":
        return turns[-1:]
    return [turn for turn in turns if example.flags[turn]] if train_on == "flags" else turns


def _render(chats: list[list[Message]], tokenizer: Tokenizer, *, generation_prompt: bool = False) -> list[str | BadRow]:
    """Render in one call; where the template refuses a chat, one by one to find which. No messages are no text."""
    try:
        texts = iter(tokenizer.render([chat for chat in chats if chat], generation_prompt=generation_prompt))
        return [next(texts) if chat else "" for chat in chats]
    except (jinja2.TemplateError, TypeError, ValueError) as error:  # templates also trip over values of a wrong type
        if len(chats) == 1:
            return [BadRow("chat template refuses the chat", detail=str(error))]
        return [_render([chat], tokenizer, generation_prompt=generation_prompt)[0] for chat in chats]


def _span(messages: list[Message], turn: int, text: str, before: str, tokenizer: Tokenizer) -> tuple[int, int]:
    """Return the characters [start, end) of an assistant turn that are targets; ``before`` is the text up to it."""
    if not text.startswith(before):
        raise _unstable("the chat with a generation prompt is not a prefix of the whole chat")
    start, end = len(before), len(text)
    if turn + 1 < len(messages):
        upto = _render([messages[: turn + 1]], tokenizer)[0]
        if isinstance(upto, str) and text.startswith(upto):
            end = len(upto)
        elif tokenizer.core.eos and (found := text.find(tokenizer.core.eos, start)) >= 0:
            end = found + len(tokenizer.core.eos)
        else:
            raise _unstable("an earlier turn is rewritten when the chat goes on")
    if not turn or not tokenizer.has_generation_prompt:
        start = _content_start(messages[turn], text, start, end)
    ended = text[start:end].rstrip()
    if ended.endswith(tokenizer.special_texts):
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


def _runs(offsets: list[tuple[int, int]], spans: list[tuple[int, int]]) -> Runs:
    """Return the mask of the tokens that begin inside a span; whitespace tokens can have an empty range at their end.

    Offsets do not decrease, so the edges of a span are found by bisection.
    """
    runs: Runs = []
    done = 0
    for start, end in spans:
        first = bisect_left(offsets, start, done, key=lambda offset: offset[0])
        while first < len(offsets) and offsets[first][1] <= start:
            first += 1
        if first > done and offsets[first - 1][1] > start:  # " answer": the word's token begins at the space before it
            first -= 1
        last = bisect_left(offsets, end, first, key=lambda offset: offset[0])
        runs += [first - done, last - first]
        done = last
    return [*runs, len(offsets) - done]


def _ends_turn(text: str, tokenizer: Tokenizer) -> bool:
    """Return whether the chat's text ends in a special token, which then is its end; else EOS has to be added."""
    return text.rstrip().endswith(tokenizer.special_texts)
