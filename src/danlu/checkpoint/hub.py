"""Where a model comes from: one name, five kinds of place, no guessing.

`resolve_model` only looks (no network, no torch) and returns a value; `local_folder` then makes sure that a folder
with config.json and weights lies on this disk. The kinds are told apart by rules a user can predict, in this order:
the preset names; ``modelscope:ID``; anything that exists on disk (a .gguf file, or a folder with config.json); a hub
id of the form ``owner/name`` (``hf:owner/name`` says so explicitly). Everything else is an error that names the
nearest preset.

Downloads take weights as safetensors, JSON and tokenizer files and nothing else: no Python file ever lands on disk, so
none can be executed, and pickled weights are not fetched at all.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from danlu.base.errors import UserError, nearest
from danlu.base.log import log
from danlu.model.presets import PRESETS

ModelKind = Literal["preset", "folder", "gguf", "hub", "modelscope"]

DOWNLOAD_PATTERNS = (
    "*.safetensors",
    "config.json",
    "generation_config.json",
    "*.safetensors.index.json",
    "tokenizer*.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "*.tiktoken",
)
"""The only files that are ever fetched."""

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """What a model name stands for.

    Attributes:
        kind: which kind of place.
        name: the preset's name, the path, or the id without its prefix.
    """

    kind: ModelKind
    name: str


def resolve_model(name: str) -> ModelSource:
    """Return what ``name`` stands for, without touching the network.

    Raises:
        UserError: it is neither a preset, nor on disk, nor shaped like a hub or ModelScope id.
    """
    if name in PRESETS:
        return ModelSource("preset", name)
    for prefix, kind in (("modelscope:", "modelscope"), ("hf:", "hub")):
        if name.startswith(prefix):
            if not _HUB_ID.fullmatch(name.removeprefix(prefix)):
                raise UserError(f"not a {kind} id", seen=name, legal=f"{prefix}owner/name")
            return ModelSource("modelscope" if kind == "modelscope" else "hub", name.removeprefix(prefix))
    path = Path(name).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return ModelSource("gguf", str(path))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError("this folder holds no model", where=name, legal="a folder with config.json and weights")
        return ModelSource("folder", str(path))
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        return ModelSource("hub", name)
    close = nearest(name, PRESETS)
    raise UserError(
        "no such model",
        seen=name,
        legal="a preset, a folder with config.json, a .gguf file, owner/name on the hub, modelscope:owner/name",
        hint=f"did you mean the preset {close!r}?" if close else f"presets: {', '.join(PRESETS)}",
    )


def local_folder(source: ModelSource | str, *, revision: str | None = None) -> Path:
    """Return a folder on this disk with the model's config.json and weights, downloading or converting it once.

    Args:
        source: a name or what `resolve_model` made of it.
        revision: branch, tag or commit of a hub or ModelScope id; None is the default branch.

    Raises:
        UserError: a preset (it has no weights), or the download failed.
    """
    source = resolve_model(source) if isinstance(source, str) else source
    if source.kind == "preset":
        raise UserError(
            "a preset is only a shape and has no weights",
            seen=source.name,
            hint="name an HF folder, a GGUF file or a hub id",
        )
    if source.kind == "folder":
        return Path(source.name)
    if source.kind == "gguf":
        from danlu.checkpoint.gguf import cached_gguf

        return cached_gguf(Path(source.name))
    return (
        _fetch_modelscope(source.name, revision) if source.kind == "modelscope" else _fetch_hub(source.name, revision)
    )


def _fetch_hub(model_id: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    log.info("fetching %s from the hub", model_id)
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=list(DOWNLOAD_PATTERNS)))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(
            "the model could not be fetched from the hub",
            seen=f"{model_id}: {error}",
            hint="check the id, the network and HF_TOKEN, or name a local folder",
        ) from error


def _fetch_modelscope(model_id: str, revision: str | None) -> Path:
    try:
        from modelscope import snapshot_download
    except ImportError as error:
        raise UserError(
            "ModelScope ids need the modelscope package",
            seen=f"modelscope:{model_id}",
            hint="pip install 'danlu[modelscope]'",
        ) from error
    log.info("fetching %s from ModelScope", model_id)
    options = {"revision": revision} if revision else {}
    try:
        return Path(snapshot_download(model_id, allow_patterns=list(DOWNLOAD_PATTERNS), **options))
    except Exception as error:  # the library raises many kinds, none of them public
        raise UserError(
            "the model could not be fetched from ModelScope", seen=f"{model_id}: {error}", hint="check id and network"
        ) from error
