"""``danlu config schema``."""

from __future__ import annotations

from typing import Annotated

import typer


def command(
    kind: Annotated[
        str, typer.Argument(help="train, data, tokenizer, eval, export, finance or pipeline.", metavar="KIND")
    ] = "train",
) -> None:
    """Print the JSON Schema of a config file, for editors that complete TOML."""
    from danlu.base.errors import unknown_name
    from danlu.base.log import print_json
    from danlu.config.data_build import DataBuild, TokenizerTrain
    from danlu.config.pipeline import Pipeline
    from danlu.config.schema import Config, Section
    from danlu.config.stages import EvalOptions, ExportOptions, FinanceOptions

    schemas: dict[str, type[Section]] = {
        "train": Config,
        "data": DataBuild,
        "tokenizer": TokenizerTrain,
        "eval": EvalOptions,
        "export": ExportOptions,
        "finance": FinanceOptions,
        "pipeline": Pipeline,
    }
    if kind not in schemas:
        raise unknown_name("config", kind, schemas)
    print_json(schemas[kind].model_json_schema())
