"""GGUF in: read once through transformers, kept as an ordinary HF folder.

Dequantising a GGUF file takes many seconds, so the result is written as fp32 safetensors with the tokenizer and chat
template that the file carries, and every later load is a plain one. The weights stay what they were, rounded to a few
bits: whoever prints a score of such a model should say so.

transformers parses the config, undoes llama.cpp's row permutation and dequantises (its model is only built on meta, to
learn tensor names). What it would lose in silence is refused here: context stretching, which GGUF keeps in a tensor
(``rope_freqs``) or in metadata that transformers does not map.
"""

from __future__ import annotations

import hashlib
import tempfile
from pathlib import Path
from typing import Any

import filelock
import torch
from torch import Tensor

from danlu.base import env
from danlu.base.errors import UserError
from danlu.base.folders import make_folder
from danlu.base.log import log
from danlu.checkpoint.hf_files import write_folder, write_tensors
from danlu.checkpoint.sidecars import write_sidecars
from danlu.model.families import hf_from_spec, hf_names, spec_from_hf


def cached_gguf(path: Path) -> Path:
    """Return the converted folder of a GGUF file, converting it on first use; the cache key is the file's content."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    folder = env.cache_folder() / "gguf" / f"{path.stem}-{digest[:12]}"
    if not folder.is_dir():
        make_folder(folder.parent, where="DANLU_CACHE")
        with filelock.FileLock(folder.with_name(f"{folder.name}.lock")):
            if not folder.is_dir():  # another rank of this job may have made it meanwhile
                log.info("converting %s to %s (once)", path, folder)
                convert_gguf(path, folder)
    return folder


def convert_gguf(gguf_path: Path | str, out_folder: Path | str) -> None:
    """Write the model, tokenizer and chat template of ``gguf_path`` as an HF folder with fp32 safetensors.

    Args:
        gguf_path: the file.
        out_folder: must not exist yet; it appears complete or not at all.

    Raises:
        UserError: the folder exists, transformers cannot read the file, or the model is not a supported one.
    """
    from transformers import AutoConfig, AutoTokenizer

    path = Path(gguf_path)
    source = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    _check_rope(path)
    try:
        config: Any = AutoConfig.from_pretrained(**source)
        tokenizer: Any = AutoTokenizer.from_pretrained(**source)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise UserError("transformers cannot read this GGUF file", where=str(path), seen=error) from error
    spec = spec_from_hf(config.to_dict(), where=str(path))
    tensors = _read_tensors(path, config)
    names = [tensor_map.hf_name for tensor_map in hf_names(spec)]
    missing = [name for name in names if name not in tensors]
    if missing:
        raise UserError("the GGUF file lacks tensors of its model", where=str(path), seen=missing[:20])

    def fill(part: Path) -> None:
        write_tensors(part, {name: tensors[name].nbytes for name in names}, tensors.__getitem__)
        with tempfile.TemporaryDirectory() as tokenizer_folder:
            tokenizer.save_pretrained(tokenizer_folder)
            hf_config = {**hf_from_spec(spec), "dtype": "float32", "torch_dtype": "float32"}
            write_sidecars(part, hf_config, Path(tokenizer_folder), None)

    write_folder(Path(out_folder), fill)


def _check_rope(path: Path) -> None:
    """Raise `UserError` where the file stretches the context in a way that would be lost."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
    except (OSError, ValueError, IndexError) as error:
        raise UserError("not a GGUF file", where=str(path), seen=error) from error
    lost = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    lost += [key for key in reader.fields if ".rope.scaling." in key]
    if lost:
        raise UserError(
            "this GGUF file's context stretching cannot be converted",
            where=str(path),
            seen=", ".join(lost),
            hint="use the model's safetensors folder",
        )


def _read_tensors(path: Path, config: Any) -> dict[str, Tensor]:
    """Return the dequantised fp32 tensors under their HF names."""
    from transformers import AutoModelForCausalLM
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.device("meta"):
        names_only = AutoModelForCausalLM.from_config(config)
    tensors: dict[str, Tensor] = load_gguf_checkpoint(
        str(path), return_tensors=True, model_to_load=names_only, torch_dtype=torch.float32
    )["tensors"]
    return tensors
