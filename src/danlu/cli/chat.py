"""``danlu chat``."""

from __future__ import annotations

import contextlib
import re
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from danlu.cli.options import ModelName

if TYPE_CHECKING:
    from danlu.train.chat import Conversation

_COMMANDS = "/reset forgets the conversation, /help says this, Ctrl-C stops an answer, Ctrl-D ends"


def command(
    model: ModelName,
    prompt: Annotated[str | None, typer.Option(help="Answer this one prompt and end.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_new_tokens: Annotated[int, typer.Option(help="Longest answer in tokens.", min=1)] = 512,
    temperature: Annotated[float, typer.Option(help="0: the likeliest token; above: sample.", min=0)] = 0.0,
    top_p: Annotated[
        float | None, typer.Option(help="Sample among the likeliest tokens that reach this probability.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Talk with a model. Ctrl-C stops an answer, Ctrl-D ends, /reset forgets the conversation, /help lists commands."""
    from danlu.model.generate import check_sampling
    from danlu.train.chat import Conversation
    from danlu.train.load import load_model

    check_sampling(temperature, None, top_p)
    opened = load_model(model, dtype=dtype, device=device)
    conversation = Conversation(
        opened, system=system, max_new_tokens=max_new_tokens, temperature=temperature, top_p=top_p, seed=seed
    )
    if prompt is not None:
        _answer(conversation, prompt)
        return
    talk(conversation, interactive=sys.stdin.isatty())


def talk(conversation: Conversation, *, interactive: bool) -> None:
    """Answer line after line of stdin until it ends."""
    from danlu.base.errors import UserError
    from danlu.base.log import log, print_error

    if interactive:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (line editing and history for input())
        kind = "chat" if conversation.has_turns else "no chat template: each prompt is continued on its own"
        log.info("%s; %s", kind, _COMMANDS)
    while True:
        try:
            text = input("> " if interactive else "").strip()
        except EOFError:
            return
        except KeyboardInterrupt:
            log.info("Ctrl-D ends")
            continue
        if text == "/reset":
            conversation.reset()
            log.info("the conversation is forgotten")
        elif re.fullmatch(r"/[A-Za-z]*", text.partition(" ")[0]):  # no path, and nothing for the model
            log.info("%s%s", "" if text == "/help" else f"no such command: {text}; ", _COMMANDS)
        elif text:
            try:
                _answer(conversation, text)
            except UserError as error:  # a message that is too long is no reason to leave
                print_error(str(error))


def _answer(conversation: Conversation, text: str) -> None:
    from danlu.base.log import log

    with contextlib.closing(conversation.say(text)) as pieces:
        try:
            for piece in pieces:
                sys.stdout.write(piece)
                sys.stdout.flush()
        except KeyboardInterrupt:
            log.info("stopped")
    sys.stdout.write("\n")
    sys.stdout.flush()
    if conversation.num_dropped:
        log.info("the oldest %d messages no longer fit and were dropped", conversation.num_dropped)
