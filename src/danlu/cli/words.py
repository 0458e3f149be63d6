"""Commands whose config file is optional: ``{CONFIG.toml|key=value}...``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Words = Annotated[
    list[str],
    typer.Argument(
        help="A TOML file, values that replace its own, or both.",
        metavar="CONFIG.toml|key=value",
        show_default=False,
    ),
]


def split_words(words: list[str]) -> tuple[Path | None, list[str]]:
    """Return the config file, if the first word is one, and the overrides."""
    return (None, words) if "=" in words[0] else (Path(words[0]), words[1:])
