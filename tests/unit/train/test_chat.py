"""Conversations and text that appears while it is generated."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.data.tokenizer import Tokenizer
from danlu.train import chat
from danlu.train.chat import Conversation, TextStream
from danlu.train.load import TrainedModel, load_model

TEXT = "年费是１２００元，可以提前还款吗？Yes: naïve 🀄 ok"


@pytest.fixture(scope="session")
def chatty(learned_chat_run: Path) -> TrainedModel:
    """The model that has learned the questions as chats."""
    return load_model(learned_chat_run, device="cpu")


def test_characters_are_never_split(qa_tokenizer: Path) -> None:
    """Pieces hold whole characters only, although most Chinese ones are several tokens, and add up to the text."""
    tokenizer = Tokenizer.load(qa_tokenizer)
    ids = tokenizer.encode(TEXT)
    assert len(ids) > 1.5 * len(TEXT)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token) for token in ids]
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) + stream.finish() == TEXT
    assert sum(piece != "" for piece in pieces) > len(TEXT) / 2


def test_bytes_that_are_no_text_do_not_stop_the_stream(qa_tokenizer: Path) -> None:
    """A cut character is held back while it can still be completed and shown as such at the end or once it cannot."""
    tokenizer = Tokenizer.load(qa_tokenizer)
    first_byte, *rest = tokenizer.encode("蛋")
    assert rest
    letter = tokenizer.encode("a")[0]
    stream = TextStream(tokenizer)
    assert [stream.push(first_byte), stream.push(letter)] == ["", "\ufffda"]
    assert [stream.push(first_byte), stream.finish()] == ["", "\ufffd"]


def test_answers_are_those_of_training(chatty: TrainedModel) -> None:
    """A learned question asked as the first turn is answered in Chinese, piece by piece, and kept as a turn."""
    talk = Conversation(chatty, system="Be brief.")
    pieces = list(talk.say("问：可以提前还款吗？\n答："))
    assert "".join(pieces) == "可以"
    assert [turn["content"] for turn in talk.turns] == ["问：可以提前还款吗？\n答：", "可以"]
    talk.reset()
    assert "".join(talk.say("Q: Is it for students?\nA: ")) == "No"
    assert len(talk.turns) == 2


def test_the_oldest_turns_are_dropped(chatty: TrainedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """What no longer fits goes from the front, whole turns at a time; the system message and the new one stay."""
    prompts: list[str] = []

    def answer(model: Any, ids: list[int], **options: Any) -> Iterator[int]:
        prompts.append(chatty.tokenizer.decode(ids))
        assert len(ids) + options["max_new_tokens"] <= chatty.max_tokens == 96
        yield from chatty.tokenizer.encode("No")

    monkeypatch.setattr(chat, "stream", answer)
    talk = Conversation(chatty, system="Be brief.", max_new_tokens=200)
    dropped = []
    for text in ("first question", "second question", "third question"):
        assert "".join(talk.say(text)) == "No"
        dropped.append(talk.num_dropped)
    assert dropped[0] == 0
    assert dropped[-1] > 0
    assert sum(dropped) % 2 == 0
    assert all("Be brief." in prompt for prompt in prompts)
    assert "first question" not in prompts[-1]
    assert "third question" in prompts[-1]
    assert talk.turns[0]["role"] == "user"


def test_a_message_that_is_too_long_is_refused_and_forgotten(chatty: TrainedModel) -> None:
    """The error gives both lengths, and the conversation can go on."""
    talk = Conversation(chatty, system="Be brief.")
    with pytest.raises(UserError, match=r"longer than the model's positions\n  seen:  \d+ tokens\n  legal: < 96"):
        list(talk.say("x" * 200))
    assert talk.turns == []
    assert "".join(talk.say("问：可以提前还款吗？\n答：")) == "可以"


def test_a_stopped_answer_stays_as_far_as_it_got(chatty: TrainedModel) -> None:
    """Closing the stream keeps the shown text as the assistant's turn."""
    talk = Conversation(chatty, system="Be brief.")
    pieces = talk.say("Q: Is it for students?\nA: ")
    shown = next(pieces)
    pieces.close()
    assert talk.turns[-1] == {"role": "assistant", "content": shown}


def test_samples_depend_on_the_seed(make_run: Callable[..., Path]) -> None:
    """Sampling repeats itself for a seed, and not for another."""
    opened = load_model(make_run(1), device="cpu")
    answers = []
    for seed in (1, 1, 2):
        talk = Conversation(opened, temperature=1.0, top_p=0.9, seed=seed, max_new_tokens=8)
        answers.append("".join(talk.say("hello")))
    assert answers[0] == answers[1] != answers[2]


def test_without_a_template_prompts_are_continued(learned_run: Path, tmp_path: Path) -> None:
    """A tokenizer without a chat template continues each prompt on its own and has no place for a system message."""
    opened = load_model(learned_run, device="cpu")
    core = opened.tokenizer.core
    opened.__dict__["tokenizer"] = Tokenizer(type(core)(core.backend, core.eos, core.bos, core.pad, None))
    talk = Conversation(opened, max_new_tokens=16)
    for _ in range(2):
        assert "".join(talk.say("Q: Is it for students?\nA: ")) == "No"
    assert talk.turns == []
    with pytest.raises(UserError, match="system: a system message needs a chat template"):
        Conversation(opened, system="Be brief.")


def test_command_answers_one_prompt(learned_chat_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a prompt there is one answer on stdout and nothing else."""
    from danlu.cli import chat as command

    command.command(str(learned_chat_run), prompt="问：可以提前还款吗？\n答：", system="Be brief.", device="cpu")
    assert capsys.readouterr().out == "可以\n"


def test_command_reads_lines_until_the_end(
    learned_chat_run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every line is answered, /reset is no question, a message that is too long does not end the conversation."""
    from danlu.cli import chat as command

    lines = ["Q: Is it for students?\u2028A:", "/reset", "", "x" * 200, "hello"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines) + "\n"))
    command.command(str(learned_chat_run), system="Be brief.", max_new_tokens=4, device="cpu")
    captured = capsys.readouterr()
    assert captured.out.count("\n") == 2
    assert "longer than the model's positions" in captured.err


def test_commands_never_reach_the_model(
    chatty: TrainedModel, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """/help and anything like it is answered with the list of commands; a path is a message."""
    from danlu.cli import chat as command

    said: list[str] = []

    def say(self: Conversation, text: str) -> Iterator[str]:
        said.append(text)
        yield "."

    monkeypatch.setattr(Conversation, "say", say)
    monkeypatch.setattr("sys.stdin", io.StringIO("/help\n/quit\n/reset all\n/\n/etc/hosts is what?\nhello\n"))
    with caplog.at_level(logging.INFO, "danlu"):
        command.talk(Conversation(chatty), interactive=False)
    assert said == ["/etc/hosts is what?", "hello"]
    assert [text.startswith("no such command") for text in caplog.messages] == [False, True, True, True]
    assert all("/reset" in text and "Ctrl-D" in text for text in caplog.messages)


def test_ctrl_c_stops_the_answer_only(
    chatty: TrainedModel, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An interrupt in the middle of an answer keeps what was shown and goes on with the next line."""
    from danlu.cli import chat as command

    def answer(model: Any, ids: list[int], **options: Any) -> Iterator[int]:
        yield from chatty.tokenizer.encode("No")
        raise KeyboardInterrupt

    monkeypatch.setattr(chat, "stream", answer)
    monkeypatch.setattr("sys.stdin", io.StringIO("one\ntwo\n"))
    talk = Conversation(chatty)
    command.talk(talk, interactive=False)
    assert capsys.readouterr().out == "No\nNo\n"
    assert [turn["content"] for turn in talk.turns] == ["one", "No", "two", "No"]
