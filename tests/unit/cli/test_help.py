"""What `--help` shows: one style for every command."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import typer.main

from danlu.cli import app


def arguments(command: Any, name: str = "danlu") -> Iterator[tuple[str, Any]]:
    for word, below in getattr(command, "commands", {}).items():
        yield from arguments(below, f"{name} {word}")
    yield from ((name, each) for each in command.params if each.param_type_name == "argument")


def test_arguments_are_named_in_one_style() -> None:
    """Capitals, or a file or override as it is typed; the help page adds brackets and dots."""
    found = list(arguments(typer.main.get_command(app)))
    assert len(found) >= 12
    for command, argument in found:
        shown = argument.metavar or argument.name
        assert re.fullmatch(r"[A-Z]+(\.toml)?|(section\.)?key=value|CONFIG\.toml\|key=value", shown), (command, shown)
