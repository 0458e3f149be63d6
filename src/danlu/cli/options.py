"""Arguments that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigFile = Annotated[Path, typer.Argument(help="TOML file.", metavar="CONFIG.toml", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(help="Values that replace those of the file.", metavar="section.key=value", show_default=False),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout and nothing else there.")]
ModelName = Annotated[
    str,
    typer.Argument(
        help="Run folder, checkpoint folder, HF folder, GGUF file, hub id or modelscope:id.",
        metavar="MODEL",
        show_default=False,
    ),
]
