"""``danlu export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.options import Json, ModelName


def command(
    model: ModelName,
    output: Annotated[Path, typer.Argument(help="Folder to write.", metavar="OUTPUT", show_default=False)],
    dtype: Annotated[str, typer.Option(help="fp32, bf16 or fp16.")] = "fp32",
    checkpoint: Annotated[int | None, typer.Option(help="Step of a run's checkpoint (default: the newest).")] = None,
    verify: Annotated[bool, typer.Option(help="Open the result with transformers and compare logits.")] = True,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a folder that is not empty.")] = False,
    json: Json = False,
) -> None:
    """Write a trained model as a Hugging Face folder that transformers, vLLM and others load."""
    from danlu.base.log import print_json, print_result
    from danlu.config.load import build
    from danlu.config.stages import ExportOptions
    from danlu.train.export import export

    options = build(ExportOptions, {"model": model, "dtype": dtype, "verify": verify}, source="command line")
    result = export(
        options.model, output, dtype=options.dtype, checkpoint=checkpoint, verify=options.verify, overwrite=overwrite,
        how_to_overwrite="--overwrite",
    )  # fmt: skip
    if json:
        print_json(result)
        return
    rounding = "" if dtype == "fp32" else f", rounding to {dtype} included"
    difference = result["logits_difference"]  # None: not asked for, or transformers has no such architecture
    checked = "" if difference is None else f", logits within {difference:.1e} of transformers{rounding}"
    size = f"{result['bytes'] / 2**20:.1f} MiB"
    print_result(f"{result['folder']}: {result['parameters']:,} parameters, {dtype}, {size}{checked}")
