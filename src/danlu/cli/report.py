"""``danlu report``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.options import Json


def command(
    folder: Annotated[
        Path, typer.Argument(help="Run folder or pipeline folder.", metavar="FOLDER", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Write report.html: loss curves, scores, throughput, config; opens without a network."""
    from danlu.base.log import print_json, print_result
    from danlu.report import write_report

    path = write_report(folder)
    if json:
        print_json({"report": str(path)})
    else:
        print_result(str(path))
