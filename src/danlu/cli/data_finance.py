"""``danlu data finance``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.options import Json


def command(
    out: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUTPUT", show_default=False)],
    seed: Annotated[int, typer.Option(help="Seed of the world and of every question.")] = 0,
    train: Annotated[int, typer.Option(help="Open-book training questions.")] = 24_000,
    validation: Annotated[int, typer.Option(help="Open-book validation questions.")] = 600,
    test: Annotated[int, typer.Option(help="Open-book test questions.")] = 1_200,
    documents: Annotated[int, typer.Option(help="Documents that state the closed-book facts.")] = 1_200,
    json: Json = False,
) -> None:
    """Write the bilingual finance question set of the demo: questions, documents and a manifest."""
    from danlu.base.log import print_json, print_result
    from danlu.data.finance import write_finance

    manifest = write_finance(
        out, seed=seed, train=train, validation=validation, test=test, documents=documents
    )  # fmt: skip
    if json:
        print_json(manifest)
    else:
        print_result("\n".join(f"{out / name}  {entry['rows']} rows" for name, entry in manifest["files"].items()))
