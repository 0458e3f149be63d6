"""``danlu doctor parity``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.options import Json


def command(
    config_a: Annotated[Path, typer.Argument(help="TOML file.", metavar="CONFIG.toml", show_default=False)],
    config_b: Annotated[
        Path, typer.Argument(help="The one that A is measured by.", metavar="CONFIG.toml", show_default=False)
    ],
    steps: Annotated[int, typer.Option(help="Optimizer steps of each training.", min=1)] = 10,
    nproc_a: Annotated[
        int | None, typer.Option(help="Ranks of A; else the product of its degrees.", min=1, show_default=False)
    ] = None,
    nproc_b: Annotated[
        int | None, typer.Option(help="Ranks of B; else the product of its degrees.", min=1, show_default=False)
    ] = None,
    tolerance: Annotated[float, typer.Option(help="Largest relative distance of losses and weights.")] = 1e-5,
    json: Json = False,
) -> None:
    """Train two configs for a few steps and compare losses, gradient norms and weights."""
    from danlu.base.log import print_json, print_result
    from danlu.doctor.parity import as_json, as_text, check_parity

    parity = check_parity(
        config_a, config_b, steps=steps, nproc_first=nproc_a, nproc_second=nproc_b, tolerance=tolerance
    )
    if json:
        print_json(as_json(parity))
    else:
        print_result(as_text(parity))
    if not parity.same:
        raise typer.Exit(1)
