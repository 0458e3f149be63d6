"""``danlu data tokenizer``."""

from __future__ import annotations

from danlu.cli.options import Json
from danlu.cli.words import Words, split_words


def command(words: Words, json: Json = False) -> None:
    """Train a byte-level BPE tokenizer: inputs=FILE output=FOLDER vocab_size=8000."""
    from danlu.base.log import print_json, print_result
    from danlu.config.data_build import TokenizerTrain
    from danlu.config.load import load
    from danlu.data.tokenizer_train import build_tokenizer

    result = build_tokenizer(load(TokenizerTrain, *split_words(words)).config)
    if json:
        print_json(result)
    else:
        print_result("\n".join(f"{name.replace('_', ' ')}: {value}" for name, value in result.items()))
