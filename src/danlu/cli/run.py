"""``danlu run``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.options import Json


def command(
    pipeline: Annotated[
        Path, typer.Argument(help="TOML file with the stages.", metavar="PIPELINE.toml", show_default=False)
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Such as output=runs/mine.", metavar="key=value", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """Run a pipeline, stage after stage; what is done and unchanged is skipped. Ends with a report."""
    from danlu.base.log import print_json, print_result
    from danlu.config.load import load
    from danlu.config.pipeline import Pipeline
    from danlu.report import read_pipeline, score_table, write_report
    from danlu.train.pipeline_run import run_pipeline

    folder = run_pipeline(load(Pipeline, pipeline, overrides or []).config)
    report = write_report(folder)
    if json:
        print_json({**read_pipeline(folder), "report": str(report)})
        return
    print_result(score_table(folder))
    print_result(f"report: {report}")
