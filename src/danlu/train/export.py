"""A trained model as a Hugging Face folder, checked after writing.

An export is believed by whoever loads it next, often on another machine and without a word from danlu; so the folder
is read back before it takes its place: exactly the tensors of the model's family, each of the right shape and dtype,
and, unless told otherwise, the same logits in ``transformers``. An older export stays where the new one fails.
Weights that become infinite in the wanted dtype (fp16 ends at 65,504) are refused, and then no folder appears.

The weights of a run stream: one parameter at a time is read from the checkpoint, whatever layout wrote it, and one file
at a time is written, so a model that many machines have trained is exported by one process with little memory (other
sources, such as a Hugging Face folder in another dtype, are loaded whole). The comparison of logits does need the whole
model, twice. Where that is more than the memory that is free, it is left out, with a warning.

The end-of-sequence token is that of the training data: the chat template's end of turn for chats, else the
tokenizer's own. `danlu.checkpoint.sidecars` makes config, generation config and tokenizer agree on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from danlu.base.errors import RunError, UserError, unknown_name
from danlu.base.host_memory import free_memory_bytes
from danlu.base.log import log
from danlu.checkpoint.convert import export_hf, load_hf
from danlu.checkpoint.hf_files import open_tensors
from danlu.checkpoint.saved import SavedWeights
from danlu.checkpoint.verify import can_verify, verify_export
from danlu.model.families import hf_names
from danlu.model.spec import ModelSpec
from danlu.train.load import DTYPES, describe_checkpoint, find_checkpoint, is_chat_data, load_model


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
        verify: open the folder with ``transformers`` and compare logits (`danlu.checkpoint.verify`), if the model fits
            into free memory twice.
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
    saved = find_checkpoint(str(model), checkpoint)
    opened = load_model(model, device="cpu") if saved is None else describe_checkpoint(str(model), saved)
    weights = dict(opened.model.named_parameters()) if saved is None else SavedWeights(saved)
    difference: float | None = None

    def check(part: Path) -> None:
        nonlocal difference
        check_export(part, DTYPES[dtype], where=folder)
        if verify and _can_verify(part, opened.spec, dtype):
            whole = opened if saved is None else load_model(model, checkpoint=checkpoint, device="cpu")
            difference = verify_export(part, whole.model, where=folder)

    export_hf(
        opened.spec,
        _InRange(weights, dtype),
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


def _can_verify(folder: Path, spec: ModelSpec, dtype: str) -> bool:
    """Return whether logits can be compared here; where not, a warning says why."""
    if not can_verify(folder):
        log.warning("not verified: transformers has no code for this architecture")
        return False
    narrow = 0 if dtype == "fp32" else DTYPES[dtype].itemsize  # transformers loads it so, and widens it
    needed, free = spec.num_parameters() * (2 * 4 + narrow), free_memory_bytes()
    if needed > free:
        log.warning(
            "not verified: comparing logits with transformers takes the whole model twice, %.1f GiB, and %.1f GiB of "
            "memory are free; names, shapes and dtypes were checked",
            needed / 2**30,
            free / 2**30,
        )
    return needed <= free


class _InRange(Mapping[str, Tensor]):
    """Parameters that are looked at as they pass: finite, and finite in the dtype that is to be written."""

    def __init__(self, weights: Mapping[str, Tensor], dtype: str) -> None:
        self.weights, self.dtype = weights, dtype

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)

    @torch.no_grad()
    def __getitem__(self, fqn: str) -> Tensor:
        tensor = self.weights[fqn]
        largest = torch.stack(tensor.aminmax()).abs().max()  # one number, where a mask would take a tensor's memory
        if not largest.isfinite():
            raise UserError("the model's weights are not finite; it is broken", seen=fqn)
        if not largest.to(DTYPES[self.dtype]).isfinite():
            raise UserError(
                f"a weight is too large for {self.dtype}",
                where="--dtype",
                seen=f"{fqn}: {float(largest):g}",
                hint="export as bf16 or fp32",
            )
        return tensor
