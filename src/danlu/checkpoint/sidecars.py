"""The small files around exported weights: config.json, generation_config.json and the tokenizer's.

Three files carry an end-of-sequence id of their own (config, generation config, tokenizer), and base models shipped
with a chat template are notorious for three different ones; a server then stops at the wrong token or never. The
export settles it: the id of the template the model was trained with wins (else the tokenizer's, else what the source
says), a disagreement is a warning that lists all three, and the exported files agree. Further stop ids which the
source lists beside the chosen one are kept.

Tokenizer files are copied from a fixed list of names; code is never among them.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from danlu.base.log import log
from danlu.checkpoint.hf_files import read_json, write_json

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "qwen.tiktoken",
)
"""The files that make a tokenizer, whichever kind it is."""

_TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def write_sidecars(folder: Path, config: Mapping[str, Any], source: Path | None, eos_id: int | None) -> None:
    """Write config.json, generation_config.json and the tokenizer files of an export.

    Args:
        folder: the export.
        config: the model's own keys (no token ids).
        source: folder with tokenizer files and, for a model that began as an HF one, config and generation config.
        eos_id: end-of-sequence id to settle on; None decides from the source.
    """
    old_config, generation, tokens = _read_source(source)
    names = [] if source is None else [name for name in TOKENIZER_FILES if (source / name).is_file()]
    if source is not None:
        for name in names:
            shutil.copyfile(source / name, folder / name)
    if not names:
        log.warning("exported without tokenizer files: none were given")
    ids = {key: old_config.get(key, tokens.get(key)) for key in _TOKEN_IDS}
    seen = {
        "config.json": old_config.get("eos_token_id"),
        "generation_config.json": generation.get("eos_token_id"),
        "tokenizer": tokens.get("eos_token_id"),
    }
    given = [value for value in (eos_id, seen["tokenizer"], *seen.values()) if value is not None]
    if given:
        chosen = _as_list(given[0])
        if any(value is not None and not set(chosen) <= set(_as_list(value)) for value in seen.values()):
            listed = ", ".join(f"{name}: {value}" for name, value in seen.items())
            log.warning("end-of-sequence ids differ (%s); the export uses %s everywhere", listed, given[0])
        ids["eos_token_id"] = _settle(old_config.get("eos_token_id"), chosen)
        generation["eos_token_id"] = _settle(generation.get("eos_token_id", ids["eos_token_id"]), chosen)
        if seen["tokenizer"] is not None and seen["tokenizer"] not in chosen:
            _set_tokenizer_eos(folder, chosen[0])
    generation = {key: value for key, value in ids.items() if value is not None} | generation
    write_json(folder / "config.json", {**config, **ids})  # null where unknown: readers have defaults of their own
    write_json(folder / "generation_config.json", generation)


def _read_source(source: Path | None) -> tuple[dict[str, Any], dict[str, Any], dict[str, int]]:
    """Return config.json, generation_config.json and the tokenizer's special ids of ``source``, empty where absent."""
    if source is None:
        return {}, {}, {}
    files = [source / "config.json", source / "generation_config.json"]
    config, generation = (read_json(path) if path.is_file() else {} for path in files)
    return config, generation, special_token_ids(source)


def special_token_ids(folder: Path) -> dict[str, int]:
    """Return bos, eos and pad ids of a tokenizer folder, read from its JSON files; absent ones are left out."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    config, vocabulary = read_json(path), _vocabulary(folder)
    ids = {}
    for key in _TOKEN_IDS:
        token = config.get(key.removesuffix("_id"))
        text = token.get("content") if isinstance(token, Mapping) else token
        if text in vocabulary:
            ids[key] = vocabulary[text]
    return ids


def _vocabulary(folder: Path) -> dict[Any, int]:
    """Return token text -> id from whichever of the tokenizer's files say it."""
    found: dict[Any, int] = {}
    for name in ("vocab.json", "added_tokens.json"):
        if (folder / name).is_file():
            found |= read_json(folder / name)
    if (folder / "tokenizer.json").is_file():
        tokenizer = read_json(folder / "tokenizer.json")
        vocab = tokenizer.get("model", {}).get("vocab", {})
        pairs = vocab.items() if isinstance(vocab, Mapping) else ((piece[0], i) for i, piece in enumerate(vocab))
        found |= dict(pairs)
        found |= {token["content"]: token["id"] for token in tokenizer.get("added_tokens", [])}
    decoder = read_json(folder / "tokenizer_config.json").get("added_tokens_decoder", {})
    return found | {token["content"]: int(number) for number, token in decoder.items()}


def _set_tokenizer_eos(folder: Path, eos_id: int) -> None:
    """Make ``eos_id``'s token the end of sequence in the copied tokenizer files."""
    texts = [text for text, number in _vocabulary(folder).items() if number == eos_id]
    if not texts:
        log.warning("the tokenizer has no token with id %s; its eos_token is left as it was", eos_id)
        return
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        if (folder / name).is_file():
            write_json(folder / name, {**read_json(folder / name), "eos_token": texts[0]})


def _as_list(value: int | list[int]) -> list[int]:
    return value if isinstance(value, list) else [value]


def _settle(old: int | list[int] | None, chosen: list[int]) -> int | list[int]:
    """Return ``old`` where it already contains the choice, else the choice."""
    if isinstance(old, list) and set(chosen) <= set(old):
        return old
    return chosen[0] if len(chosen) == 1 else chosen
