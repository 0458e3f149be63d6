"""``danlu train``."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from danlu.cli.options import ConfigFile, Json, Overrides


def command(
    config: ConfigFile,
    overrides: Overrides = None,
    nproc: Annotated[int, typer.Option(help="Start so many ranks on this machine.", min=1)] = 1,
    resume: Annotated[
        str,
        typer.Option(help="auto, never, or a checkpoint or run folder to continue from.", metavar="auto|never|PATH"),
    ] = "auto",
    json: Json = False,
) -> None:
    """Train: pretrain, continue, fine-tune; one process, local ranks (--nproc), or under torchrun."""
    from danlu.base import env
    from danlu.base.errors import UserError
    from danlu.base.log import print_json
    from danlu.config.load import load
    from danlu.config.rules import check_config
    from danlu.config.schema import Config

    loaded = load(Config, config, overrides or [])
    if env.ranks().launched and nproc > 1:
        raise UserError("this process is a rank of a launched job already", where="--nproc", seen=nproc, legal="1")
    if nproc > 1:
        from danlu.train.local import run_local_ranks

        check_config(loaded.config, nproc)
        words = ["train", str(config), *(overrides or []), "--resume", resume, *(["--json"] if json else [])]
        sys.exit(run_local_ranks(words, nproc=nproc).exit_code)

    def work() -> None:
        from danlu.report import write_report
        from danlu.train.loop import train

        result = train(loaded.config, resume=resume)
        if env.ranks().rank == 0:
            report = write_report(result.folder)
            if json:
                print_json({**result.as_json(), "report": str(report)})

    if env.ranks().launched:
        from danlu.train.local import run_as_rank

        run_as_rank(work)
    else:
        work()
