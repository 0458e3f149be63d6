"""Train a byte-level BPE tokenizer on the user's own text.

Byte-level means that any text in any language has a spelling, so there is no unknown token; the merges are learned by
the `tokenizers` library. Digits stay apart: numbers of equal length get equally many tokens, which helps arithmetic
with large numbers. A closed world of few numbers may keep them whole instead: a number is then one token, which a
small model copies and compares in one step. The result is a folder that ``transformers.AutoTokenizer`` opens with EOS,
BOS and PAD set and, on request, a chat template.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from danlu.base.errors import UserError
from danlu.base.folders import make_folder
from danlu.base.log import log
from danlu.config.data_build import TokenizerTrain
from danlu.data.sources import Chunk, find_files, parse_chunk, read_chunks
from danlu.data.streams import BadRow
from danlu.data.tokenizer import CHATML, Tokenizer, copy_tokenizer


def build_tokenizer(config: TokenizerTrain, *, progress: bool = True) -> dict[str, Any]:
    """Train the tokenizer of ``config`` and save it.

    Returns:
        What was made: folder, vocabulary size, characters and bytes read, characters per token on a sample.

    Raises:
        UserError: wrong input, or no text.
    """
    sample: list[str] = []
    texts = _Counted(_texts(config), sample)
    tokenizer = train_tokenizer(
        texts,
        Path(config.output),
        vocab_size=config.vocab_size,
        special_tokens=config.special_tokens,
        chat=config.chat,
        whole_numbers=config.digits == "whole",
        progress=progress,
    )
    num_tokens = sum(map(len, tokenizer.encode_batch(sample)))
    result = {
        "folder": config.output,
        "vocab_size": tokenizer.vocab_size,
        "characters_read": texts.characters,
        "characters_per_token": round(sum(map(len, sample)) / max(1, num_tokens), 3),
    }
    if tokenizer.vocab_size < config.vocab_size:
        log.warning("the text has only %d entries to learn, not %d", tokenizer.vocab_size, config.vocab_size)
    return result


def _texts(config: TokenizerTrain) -> Iterator[str]:
    """Yield the text of the chosen fields, or all text, of every row."""
    for file in find_files(config.inputs, config.format):
        for chunk in read_chunks(file, encoding=config.encoding, text_unit="line"):
            rows = parse_chunk(chunk, config.encoding) if isinstance(chunk, Chunk) else iter([(chunk.where, chunk)])
            for where, row in rows:
                if isinstance(row, BadRow):
                    row.where = row.where or where
                    raise row.error()
                yield from _strings([row.get(name) for name in config.fields] if config.fields else row)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        if value:
            yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)


def train_tokenizer(
    texts: Iterable[str],
    folder: Path,
    *,
    vocab_size: int,
    special_tokens: Sequence[str] = (),
    chat: bool = True,
    whole_numbers: bool = False,
    progress: bool = False,
) -> Tokenizer:
    """Train a byte-level BPE tokenizer and save it so that ``AutoTokenizer`` opens it.

    Args:
        texts: the training text, as many strings as there are.
        folder: where it is saved.
        vocab_size: entries, the 256 bytes and the special tokens included.
        special_tokens: further special tokens.
        chat: add ``<|im_start|>`` and ``<|im_end|>`` and the ChatML template; ``<|im_end|>`` is then EOS.
        whole_numbers: let merges join digits (never a digit with anything else).
        progress: show the library's progress bar.

    Raises:
        UserError: the vocabulary is smaller than its fixed part, or there is no text.
    """
    from tokenizers import decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    turn = ["<|im_start|>", "<|im_end|>"] if chat else []
    specials = list(dict.fromkeys(["<|endoftext|>", *turn, *special_tokens]))
    if vocab_size < 256 + len(specials):
        raise UserError(
            "vocabulary is too small", where="vocab_size", seen=vocab_size, legal=f"at least {256 + len(specials)}"
        )
    make_folder(folder)
    if (folder / "config.json").exists():
        raise UserError("the folder holds a model", where="output", seen=folder, hint="choose another folder")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=not whole_numbers), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    counted = _Counted(texts)
    backend.train_from_iterator(counted, trainer)
    if not counted.characters:
        raise UserError("no text to train a tokenizer on", where="inputs")
    eos = "<|im_end|>" if chat else "<|endoftext|>"
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token=eos, bos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    if chat:
        wrapped.chat_template = CHATML
    with tempfile.TemporaryDirectory() as fresh:  # an earlier tokenizer there may have had files that this one lacks
        wrapped.save_pretrained(fresh)
        copy_tokenizer(Path(fresh), folder)
    return Tokenizer.load(folder)


class _Counted:
    """Passes texts on, counts their characters and keeps the first of them."""

    def __init__(self, texts: Iterable[str], sample: list[str] | None = None) -> None:
        self.texts, self.sample, self.characters = texts, sample, 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.characters += len(text)
            if self.sample is not None and len(self.sample) < 1000:
                self.sample.append(text)
            yield text
