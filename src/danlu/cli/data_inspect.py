"""``danlu data inspect``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.options import Json


def command(
    folder: Annotated[Path, typer.Argument(help="Data set folder.", metavar="FOLDER", show_default=False)],
    rows: Annotated[int, typer.Option(help="How many rows to show.", min=0)] = 1,
    start: Annotated[int, typer.Option(help="The first row to show.", min=0)] = 0,
    verify: Annotated[bool, typer.Option("--verify", help="Hash every shard first.")] = False,
    json: Json = False,
) -> None:
    """Show decoded rows with their targets and documents, and statistics."""
    from danlu.base.log import print_json, print_result
    from danlu.data.inspect import as_json, as_text, inspect

    statistics, decoded = inspect(folder, rows=range(start, start + rows), verify=verify)
    if json:
        print_json(as_json(statistics, decoded))
    else:
        print_result(as_text(statistics, decoded, color=sys.stdout.isatty()))
