"""Talk with a model: a conversation that fits its positions, and text that appears as it is generated.

A token is not a character. In Chinese one character is often spread over two or three tokens, whose bytes mean nothing
alone, so text is held back until the bytes at its end are complete; what was shown is never taken back, and all pieces
together are exactly the decoded answer.

A conversation lives in the chat template of the tokenizer. When it no longer fits (a quarter of the model's positions
is kept for the answer, or all that was asked for where that is less) its oldest turns are dropped, the system message
never, and how many were dropped is told. Without a chat template there are no turns: each prompt is continued on its
own.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import jinja2

from danlu.base.errors import UserError
from danlu.data.tokenizer import Tokenizer
from danlu.model.generate import stream
from danlu.train.load import TrainedModel

_INCOMPLETE = "\ufffd"


class TextStream:
    """Turns ids into pieces of text, never splitting a character."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.ids: list[int] = []
        self.shown = ""

    @property
    def text(self) -> str:
        """All text so far, with replacement characters for bytes that are no text (yet)."""
        return self.tokenizer.decode(self.ids, skip_special=True)

    def push(self, token: int) -> str:
        """Add one id and return the text that is complete now and was not shown before."""
        self.ids.append(token)
        return self._show(self.text.rstrip(_INCOMPLETE))

    def finish(self) -> str:
        """Return what is still held back."""
        return self._show(self.text)

    def _show(self, text: str) -> str:
        piece = text[len(self.shown) :]
        self.shown += piece
        return piece


class Conversation:
    """A chat with a model.

    Args:
        opened: the model.
        system: system message.
        max_new_tokens: longest answer.
        temperature: 0 takes the likeliest token, above 0 samples.
        top_p: sample among the likeliest tokens that together reach this probability.
        seed: with the number of the answer it determines what is sampled.

    Raises:
        UserError: a system message and no chat template to put it in.
    """

    def __init__(
        self,
        opened: TrainedModel,
        *,
        system: str | None = None,
        max_new_tokens: int = 512,
        temperature: float = 0.0,
        top_p: float | None = None,
        seed: int = 0,
    ) -> None:
        self.opened, self.max_new_tokens, self.seed = opened, max_new_tokens, seed
        self.temperature, self.top_p = temperature, top_p
        self.has_turns = opened.tokenizer.core.chat_template is not None
        if system is not None and not self.has_turns:
            raise UserError("a system message needs a chat template, and this tokenizer has none", where="system")
        self._system = [] if system is None else [{"role": "system", "content": system}]
        self.num_answers = self.num_dropped = 0
        self.turns: list[dict[str, Any]] = []

    def reset(self) -> None:
        """Forget all turns but the system message."""
        self.turns = []

    def say(self, text: str) -> Generator[str]:
        """Yield the answer piece by piece; one that is stopped half-way stays in the conversation as far as it got.

        ``num_dropped`` then says how many old messages no longer fit.

        Raises:
            UserError: the text alone is longer than the model's positions, or the template refuses the chat.
        """
        ids, room = self._prepare(text)
        pieces = TextStream(self.opened.tokenizer)
        self.num_answers += 1
        try:
            for token in stream(
                self.opened.model, ids, max_new_tokens=room, stop_ids=self.opened.stop_ids,
                temperature=self.temperature, top_p=self.top_p, seed=self.seed + self.num_answers - 1,
            ):  # fmt: skip
                if piece := pieces.push(token):
                    yield piece
            if piece := pieces.finish():
                yield piece
        finally:
            if self.has_turns:
                self.turns.append({"role": "assistant", "content": pieces.shown})

    def _prepare(self, text: str) -> tuple[list[int], int]:
        """Return the prompt's ids and how many tokens the answer may have; old turns go where that is needed."""
        self.num_dropped = 0
        turns = [*self.turns, {"role": "user", "content": text}]
        limit = self.opened.max_tokens
        reserve = min(self.max_new_tokens, max(1, limit // 4))
        while len(ids := self._encode(turns)) + reserve > limit and len(turns) > 1:
            gone = next((n for n, turn in enumerate(turns[1:], 1) if turn["role"] == "user"), len(turns) - 1)
            turns, self.num_dropped = turns[gone:], self.num_dropped + gone
        room = min(self.max_new_tokens, limit - len(ids))
        if room < 1:
            raise UserError(
                "the message is longer than the model's positions", seen=f"{len(ids)} tokens", legal=f"< {limit}"
            )
        if self.has_turns:
            self.turns = turns
        return ids, room

    def _encode(self, turns: list[dict[str, Any]]) -> list[int]:
        tokenizer = self.opened.tokenizer
        if not self.has_turns:
            return tokenizer.encode(str(turns[-1]["content"]), bos=True)
        try:
            return tokenizer.encode(tokenizer.render([[*self._system, *turns]], generation_prompt=True)[0])
        except jinja2.TemplateError as error:
            raise UserError(f"the chat template refuses this chat: {error}") from None
