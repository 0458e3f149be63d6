"""A trained model as a Hugging Face folder, checked after writing.

An export is believed by whoever loads it next, often on another machine and without a word from danlu; so the folder
is read back before it takes its place: exactly the tensors of the model's family, each of the right shape and dtype,
and, unless told otherwise, the same logits in ``transformers``. An older export stays where the new one fails.
Weights that become infinite in the wanted dtype (fp16 ends at 65,504) are refused before anything is written.

The end-of-sequence token is that of the training data: the chat template's end of turn for chats, else the
tokenizer's own. `danlu.checkpoint.sidecars` makes config, generation config and tokenizer agree on it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from danlu.base.errors import RunError, UserError, unknown_name
from danlu.base.log import log
from danlu.checkpoint.convert import load_hf, save_hf
from danlu.checkpoint.hf_files import open_tensors
from danlu.checkpoint.verify import can_verify, verify_export
from danlu.model.decoder import Decoder
from danlu.model.families import hf_names
from danlu.train.load import DTYPES, is_chat_data, load_model


def export(
    model: str | Path,
    output: str | Path,
    *,
    dtype: str = "fp32",
    checkpoint: int | None = None,
    verify: bool = True,
    overwrite: bool = False,
    how_to_overwrite: str = "overwrite=True",
) -> dict[str, Any]:
    """Write a model as a folder that ``transformers`` loads with equal logits, with tokenizer and generation config.

    Args:
        model: anything that `load_model` opens.
        output: folder to write; appears complete or not at all.
        dtype: of the written weights: ``fp32``, ``bf16`` or ``fp16``.
        checkpoint: step of a run's checkpoint; None takes the newest.
        verify: open the folder with ``transformers`` and compare logits (`danlu.checkpoint.verify`).
        overwrite: replace a folder that is not empty.
        how_to_overwrite: what an error tells the caller to say for that.

    Returns:
        ``folder, step, dtype, parameters, bytes, files, logits_difference`` (None where it was not verified).

    Raises:
        UserError: the folder is not empty, or the weights do not fit the dtype.
        RunError: what was written is not what was meant.
    """
    folder = Path(output)
    if dtype not in DTYPES:
        raise unknown_name("dtype", dtype, DTYPES)
    if not overwrite and folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(
            "the output folder is not empty", where=str(folder), hint=f"choose another one, or {how_to_overwrite}"
        )
    opened = load_model(model, checkpoint=checkpoint, device="cpu")
    _check_range(opened.model, dtype)
    difference: float | None = None

    def check(part: Path) -> None:
        nonlocal difference
        check_export(part, DTYPES[dtype], where=folder)
        if verify and can_verify(part):
            difference = verify_export(part, opened.model, where=folder)
        elif verify:
            log.warning("not verified: transformers has no code for this architecture")

    save_hf(
        opened.model,
        folder,
        tokenizer_from=opened.tokenizer_folder,
        dtype=DTYPES[dtype],
        eos_id=opened.end_of_turn if is_chat_data(opened.data_config) else None,
        overwrite=overwrite,
        check=check,
    )
    files = sorted(path for path in folder.iterdir() if path.is_file())
    num_bytes = sum(path.stat().st_size for path in files)
    result = {
        "folder": str(folder),
        "step": opened.step,
        "dtype": dtype,
        "parameters": load_hf(folder).num_parameters(),
        "bytes": num_bytes,
        "files": [path.name for path in files],
        "logits_difference": difference,
    }
    log.info("exported %s to %s: %s, %.1f MiB", model, folder, dtype, num_bytes / 2**20)
    return result


def check_export(folder: Path, dtype: torch.dtype, *, where: Path | None = None) -> None:
    """Read an exported folder back and compare names, shapes and dtype of its tensors with its config.

    Args:
        folder: the files.
        dtype: what the tensors should be.
        where: what errors call the folder (while it has another name); None is its own.

    Raises:
        RunError: a tensor is missing, unexpected, or of another shape or dtype; the first one is named.
    """
    spec = load_hf(folder)
    shapes = spec.parameter_shapes()
    files = open_tensors(folder)
    maps = {tensor_map.hf_name: tensor_map for tensor_map in hf_names(spec)}
    if different := sorted(set(maps) ^ set(files.names)):
        raise RunError(
            "the exported tensors are not those of the model", where=str(where or folder), seen=different[:8]
        )
    for name, tensor_map in maps.items():
        tensor = files.read(name)
        expected, shape = tensor_map.hf_shape(shapes), tuple(tensor.shape)
        if shape != expected or tensor.dtype != dtype:
            raise RunError(
                f"the exported tensor {name} is wrong",
                where=str(where or folder),
                seen=f"{shape} {tensor.dtype}",
                legal=f"{expected} {dtype}",
            )


@torch.no_grad()
def _check_range(model: Decoder, dtype: str) -> None:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            raise UserError("the model's weights are not finite; it is broken", seen=name)
        if not parameter.to(DTYPES[dtype]).isfinite().all():
            raise UserError(
                f"a weight is too large for {dtype}",
                where="--dtype",
                seen=f"{name}: {float(parameter.abs().max()):g}",
                hint="export as bf16 or fp32",
            )
