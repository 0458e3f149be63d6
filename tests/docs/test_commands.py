"""Every command in the pages is one that danlu accepts."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.main import get_command

from danlu.base.errors import DanluError
from danlu.cli import app
from danlu.config.data_build import DataBuild, TokenizerTrain
from danlu.config.load import build, parse_override
from danlu.config.pipeline import Pipeline
from danlu.config.schema import Config, Section
from docs.pages import PAGES, ROOT, Block, blocks_in

ROOT_COMMAND: Any = get_command(app)
USAGE_ERROR: type[Exception] = typer.BadParameter.__mro__[1]
"""What the parser raises (typer brings its own parser or uses click's, depending on its version)."""
OVERRIDES: dict[str, type[Section]] = {
    "train": Config,
    "config show": Config,
    "data build": DataBuild,
    "data tokenizer": TokenizerTrain,
    "run": Pipeline,
}
"""What the ``key=value`` words of a command are keys of."""


def split_commands(text: str) -> list[list[str]]:
    """Return the words of each command of a shell block: no comments, no redirections, continued lines joined."""
    found: list[list[str]] = []
    for line in text.replace("\\\n", " ").splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        redirected = False
        for word in [*lexer, ";"]:
            if set(word) <= set("|&;"):
                found += [words] if words else []
                words = []
            elif set(word) <= set("<>"):
                redirected = True
            elif redirected:
                redirected = False
            else:
                words.append(word)
    return found


def danlu_words(words: list[str]) -> list[str] | None:
    """Return what follows ``danlu`` (or ``-m danlu``) in a command, or None where it is another program."""
    if Path(words[0]).name == "danlu":
        return words[1:]
    if "-m" in words and words[words.index("-m") + 1 :][:1] == ["danlu"]:
        return words[words.index("-m") + 2 :]
    return None


def check_words(words: list[str]) -> None:
    """Parse a command as danlu would, without running it; overrides must be keys of the right schema."""
    command, names = ROOT_COMMAND, []
    while hasattr(command, "commands"):
        assert words, f"danlu {' '.join(names)}: a command is missing"
        assert words[0] in command.commands, f"danlu {' '.join(names)}: no command {words[0]!r}"
        command, names, words = command.commands[words[0]], [*names, words[0]], words[1:]
    name = " ".join(names)
    values = command.make_context(name, list(words)).params
    given = [*(values.get("overrides") or []), *(values.get("words") or [])]
    schema = OVERRIDES.get(name)
    for word in given if schema else []:
        if "=" in word:
            check_override(schema, word)
    if name == "run":
        file = ROOT / values["pipeline"]
        assert file.is_file() or file.parent == ROOT, f"no such recipe: {values['pipeline']}"


def check_override(schema: type[Section], word: str) -> None:
    """Raise where the key of ``key=value`` does not exist or cannot have this value."""
    path, value = parse_override(word)
    tree: Any = value
    for part in reversed(path):
        tree = {part: tree}
    needed = {name: "x" for name, field in schema.model_fields.items() if field.is_required()}
    if schema is Pipeline:
        needed["stage"] = [{"name": "x", "kind": "data"}]
    build(schema, needed | tree)


SHELL = [(block, words) for block in blocks_in("bash", "console") for words in split_commands(block.text)]
COMMANDS = [(block, found) for block, words in SHELL if (found := danlu_words(words)) is not None]
INLINE = sorted({text for page in PAGES for text in re.findall(r"`(danlu [a-z][^`]*)`", page.sentences)})


@pytest.mark.parametrize(
    ("block", "words"), COMMANDS, ids=lambda value: value.where if isinstance(value, Block) else ""
)
def test_commands_are_accepted(block: Block, words: list[str]) -> None:
    """Command, options and overrides of every shell block exist and take what they are given."""
    check_words(words)


@pytest.mark.parametrize("text", INLINE)
def test_commands_in_sentences_exist(text: str) -> None:
    """A command named in a sentence exists, and so do its options; capitals stand for what the reader puts in."""
    words = [word for word in shlex.split(text)[1:] if word not in ("...",)]
    command = ROOT_COMMAND
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, text
        command, words = command.commands[words[0]], words[1:]
    legal = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    assert {word for word in words if word.startswith("--")} <= legal | {"--help", "--key-with-dashes"}, text


@pytest.mark.parametrize(
    "line",
    [
        "danlu training train.toml",
        "danlu train",
        "danlu train train.toml --nprocs 2",
        "danlu train train.toml --nproc two",
        "danlu train train.toml train.stpes=3",
        "danlu data build input=a output=b tokenizer=c",
        "danlu run recipes/no-such.toml",
        "danlu data",
    ],
)
def test_a_wrong_command_is_noticed(line: str) -> None:
    """The check above can fail."""
    words = danlu_words(split_commands(line)[0])
    assert words is not None
    with pytest.raises((AssertionError, DanluError, USAGE_ERROR)):
        check_words(words)


def test_commands_are_found() -> None:
    """Prompts, pipes, comments, redirections and launchers do not hide a command."""
    text = "danlu train a.toml --nproc 2 # two\ntorchrun --nproc-per-node 2 -m danlu eval x --data y > z\nls \\\n -l\n"
    assert [danlu_words(words) for words in split_commands(text)] == [
        ["train", "a.toml", "--nproc", "2"],
        ["eval", "x", "--data", "y"],
        None,
    ]
    assert len(COMMANDS) > 40


def test_make_targets_exist() -> None:
    """`make X` in a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M))
    named = {words[1] for _, words in SHELL if words[0] == "make"}
    assert named <= targets
    assert "demo" in named
