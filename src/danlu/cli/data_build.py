"""``danlu data build``."""

from __future__ import annotations

from danlu.cli.options import Json
from danlu.cli.words import Words, split_words


def command(words: Words, json: Json = False) -> None:
    """Turn files into packed, tokenized WebDataset shards (keys: `danlu config schema data`)."""
    from danlu.base.log import print_json
    from danlu.config.data_build import DataBuild
    from danlu.config.load import load
    from danlu.data.build import build

    manifest = build(load(DataBuild, *split_words(words)).config)
    if json:
        print_json(manifest)
