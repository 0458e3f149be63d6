"""Hugging Face folders in and out: the door between danlu's parameters and everybody else's files.

In: config.json gives the spec, `families.hf_names` the exact name of every tensor that must be there, and the weights
stream one tensor at a time into the parameters (cast, transposed or split on the way), so memory peaks at the model
plus one tensor. Names are compared as sets before anything is read: whatever is missing or unexpected is an error that
lists both. Only buffers which old checkpoints carry and every model recomputes (rotary frequencies, causal masks) are
passed over, by exact name.

Out: the same table read backwards. ``tie_word_embeddings`` is written from the tensors (tied iff embedding and head
are equal), not from a flag that training may have outdated. The folder appears complete or not at all.

No q/k permutation happens in either direction: the decoder turns the same pairs of dimensions as transformers.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from danlu.base.errors import UserError
from danlu.base.log import log
from danlu.checkpoint.hf_files import MAX_SHARD_BYTES, open_tensors, read_json, shorten, write_folder, write_tensors
from danlu.checkpoint.sidecars import write_sidecars
from danlu.model.decoder import Decoder
from danlu.model.families import FAMILIES, TensorMap, hf_extras, hf_from_spec, hf_names, spec_from_hf
from danlu.model.spec import ModelSpec
from danlu.parallel.placement import Piece

_HEAD = "lm_head.weight"


def load_hf(folder: Path | str) -> ModelSpec:
    """Return the spec of an HF folder.

    Raises:
        UserError: no config.json, not JSON, or a model danlu does not support.
    """
    path = Path(folder) / "config.json"
    return spec_from_hf(read_json(path), where=str(path))


def load_decoder(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    compute_dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
) -> Decoder:
    """Build the decoder of an HF folder and load its weights; it is in eval mode.

    Args:
        folder: config.json and weights.
        dtype: dtype of the parameters.
        compute_dtype: dtype of the activations; None is ``dtype``.
        device: where the parameters live.
    """
    with torch.device("meta"):
        model = Decoder(load_hf(folder), compute_dtype=compute_dtype or dtype)
    load_hf_weights(model, folder, dtype=dtype, device=device)
    return model.eval()


@torch.no_grad()
def load_hf_weights(
    model: Decoder, folder: Path | str, *, dtype: torch.dtype | None = None, device: torch.device | str = "cpu"
) -> None:
    """Fill ``model`` with the weights of an HF folder, one tensor at a time.

    Args:
        model: its spec must be the folder's; parameters on meta are materialised first.
        folder: safetensors or weights-only .bin files, single or with an index.
        dtype: convert the parameters to it first; None keeps theirs.
        device: where meta parameters are materialised.

    Raises:
        UserError: tensors missing, unexpected (both lists, exact names) or of the wrong shape, or an unsafe file.
    """
    if dtype is not None:
        model.to(dtype)
    if any(parameter.is_meta for parameter in model.parameters()):
        model.to_empty(device=device)
    fill_from_hf(model.spec, dict(model.named_parameters()), folder)


@torch.no_grad()
def fill_from_hf(spec: ModelSpec, targets: Mapping[str, Tensor | Piece], folder: Path | str) -> None:
    """Fill ``targets`` (FQN -> parameter, or this rank's piece of it) from an HF folder; see `load_hf_weights`.

    Parameters that are not among the targets (another pipeline stage's) are checked by name only.
    """
    folder = Path(folder)
    files = open_tensors(folder)
    shapes = spec.parameter_shapes()
    maps = _match_names(spec, files.names, folder)
    for name, tensor_map in maps.items():
        wanted = [_part(targets[fqn], tensor_map) for fqn in tensor_map.fqns if fqn in targets]
        if not any(isinstance(part, Tensor) or part.boxes for part in wanted):
            continue  # another rank's
        tensor = files.read(name)
        shape = tensor_map.hf_shape(shapes)
        if tensor.shape != shape:
            raise UserError(
                "a tensor's shape contradicts config.json", where=str(folder), seen=f"{name}: {tuple(tensor.shape)}",
                legal=str(shape),
            )  # fmt: skip
        stacked = tensor.t() if tensor_map.transpose else tensor
        pieces = stacked.split(tensor_map.rows, dim=max(0, stacked.dim() - 2))
        for fqn, piece in zip(tensor_map.fqns, pieces, strict=True):
            if fqn in targets:
                _part(targets[fqn], tensor_map).copy_(piece)
    if spec.tied_embeddings and _HEAD in files.names:
        table = next(name for name, tensor_map in maps.items() if tensor_map.fqns == ("embedding.weight",))
        if not torch.equal(files.read(_HEAD), files.read(table)):
            raise UserError(
                "config.json ties the embeddings but the file holds another head",
                where=str(folder),
                seen=f"{_HEAD} differs from the embedding",
                hint='set "tie_word_embeddings": false in config.json to keep this head',
            )


def save_hf(
    model: Decoder,
    folder: Path | str,
    *,
    tokenizer_from: Path | str | None = None,
    dtype: torch.dtype | None = None,
    eos_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write ``model`` as an HF folder that transformers loads with equal logits.

    Args:
        model: the decoder, without adapters.
        folder: target; appears complete or not at all.
        tokenizer_from: folder whose tokenizer files, token ids and generation settings go along; None warns.
        dtype: dtype of the written weights; None keeps the parameters'.
        eos_id: end-of-sequence id of the template the model was trained with; None takes the tokenizer's.
        max_shard_bytes: limit of one file (a larger single tensor gets its own).
        overwrite: replace an existing folder.
        check: looks at the finished files before they take their place; where it raises, they never do.

    Raises:
        UserError: the folder exists, or the model's parameters are not exactly those of its family.
    """
    export_hf(
        model.spec, dict(model.named_parameters()), folder, tokenizer_from=tokenizer_from, dtype=dtype, eos_id=eos_id,
        max_shard_bytes=max_shard_bytes, overwrite=overwrite, check=check,
    )  # fmt: skip


@torch.no_grad()
def export_hf(
    spec: ModelSpec,
    parameters: Mapping[str, Tensor],
    folder: Path | str,
    *,
    tokenizer_from: Path | str | None = None,
    dtype: torch.dtype | None = None,
    eos_id: int | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    overwrite: bool = False,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write ``parameters`` (FQN -> tensor, from a model or a run checkpoint) as an HF folder; see `save_hf`.

    A parameter is looked up once and let go of before the next, so that a mapping which reads on look-up
    (`danlu.checkpoint.saved`) needs memory for its largest tensor and one file.
    """
    expected = spec.parameter_shapes()
    _check_sets(set(expected), set(parameters), "the model to export does not have its family's parameters")
    if not spec.tied_embeddings and _digest(parameters["embedding.weight"]) == _digest(parameters["head.weight"]):
        spec = replace(spec, tied_embeddings=True)
    config, maps = hf_from_spec(spec), {tensor_map.hf_name: tensor_map for tensor_map in hf_names(spec)}
    out_dtype = dtype or parameters["embedding.weight"].dtype
    held: dict[str, Tensor] = {}

    def look_up(fqn: str) -> Tensor:
        if fqn not in held:
            held.clear()
            held[fqn] = parameters[fqn].detach()
            if held[fqn].shape != expected[fqn]:
                raise UserError("parameters contradict the model's spec", seen=f"{fqn}: {tuple(held[fqn].shape)}")
        return held[fqn]

    def make(name: str) -> Tensor:
        stacked = torch.cat([_part(look_up(fqn), maps[name]).to("cpu", out_dtype) for fqn in maps[name].fqns])
        return stacked.t() if maps[name].transpose else stacked

    def fill(part: Path) -> None:
        sizes = {name: math.prod(maps[name].hf_shape(expected)) * out_dtype.itemsize for name in _by_parameter(maps)}
        write_tensors(part, sizes, make, max_shard_bytes)
        text = str(out_dtype).removeprefix("torch.")
        source = None if tokenizer_from is None else Path(tokenizer_from)
        write_sidecars(part, {**config, "dtype": text, "torch_dtype": text}, source, eos_id)
        if check is not None:
            check(part)

    write_folder(Path(folder), fill, overwrite=overwrite)


def _by_parameter(maps: Mapping[str, TensorMap]) -> list[str]:
    """Return the names so that tensors of the same parameter (its experts' matrices) follow one another."""
    firsts = [tensor_map.fqns[0] for tensor_map in maps.values()]
    place = {fqn: number for number, fqn in reversed(list(enumerate(firsts)))}
    return sorted(maps, key=lambda name: place[maps[name].fqns[0]])


def _digest(tensor: Tensor) -> bytes:
    """Return a hash of a tensor's bytes: two large tables are compared without both in memory."""
    plain = tensor.detach().cpu().contiguous().view(torch.uint8).numpy()
    return hashlib.blake2b(plain.data, digest_size=16).digest()


@overload
def _part(parameter: Tensor, tensor_map: TensorMap) -> Tensor: ...
@overload
def _part(parameter: Tensor | Piece, tensor_map: TensorMap) -> Tensor | Piece: ...
def _part(parameter: Tensor | Piece, tensor_map: TensorMap) -> Tensor | Piece:
    """Return what of a parameter a tensor of the checkpoint holds: all of it, or one expert's matrix."""
    return parameter if tensor_map.expert is None else parameter[tensor_map.expert]


def _match_names(spec: ModelSpec, found: Set[str], folder: Path) -> dict[str, TensorMap]:
    """Return name in the files -> map, after comparing the names as sets; bare-model files lack the prefix."""
    prefix = FAMILIES[spec.family].prefix + "."
    bare = not any(name.startswith(prefix) for name in found)
    strip = prefix if bare else ""
    maps = {tensor_map.hf_name.removeprefix(strip): tensor_map for tensor_map in hf_names(spec)}
    if spec.num_experts is not None:  # transformers >= 5 can also write a layer's experts as it holds them
        stacked = {each.hf_name.removeprefix(strip): each for each in hf_names(spec, stacked_experts=True)}
        maps = stacked if len(found & set(stacked)) > len(found & set(maps)) else maps
    extras = {name.removeprefix(strip) for name in hf_extras(spec)} | ({_HEAD} if spec.tied_embeddings else set())
    _check_sets(set(maps), found - extras, "the checkpoint's tensors are not those of its config.json", str(folder))
    skipped = sorted((found & extras) - {_HEAD})
    if skipped:
        log.info("%s: left out buffers that the model computes itself: %s", folder, shorten(skipped, 3))
    return maps


def _check_sets(expected: Set[str], found: Set[str], what: str, where: str | None = None) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        seen = f"missing: {shorten(missing) or 'none'}; unexpected: {shorten(unexpected) or 'none'}"
        raise UserError(what, where=where, seen=seen)
