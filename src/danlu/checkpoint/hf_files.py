"""The files of a Hugging Face folder: tensors by name, in one file or in shards, and how a folder is committed.

Reading is lazy: safetensors files are mapped and a tensor is materialised when it is asked for. An index that names
tensors which its shards do not hold is refused. Pickled ``.bin`` files load through torch's weights-only unpickler,
which runs no code; a file that needs more is refused by name.

Writing keeps one shard in memory, each tensor contiguous and in storage of its own. A folder is filled under a hidden
name beside its target and renamed when complete.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from danlu.base.errors import RunError, UserError
from danlu.base.folders import make_folder

MAX_SHARD_BYTES = 5 * 2**30
"""Default size limit of one safetensors file."""

_SAFE, _PICKLE = "model.safetensors", "pytorch_model.bin"


@dataclass(frozen=True, slots=True)
class TensorFiles:
    """The tensors of a folder, by exact name."""

    readers: Mapping[str, Callable[[str], Tensor]]

    @property
    def names(self) -> Set[str]:
        """Every tensor's exact name."""
        return self.readers.keys()

    def read(self, name: str) -> Tensor:
        """Return one tensor, on the CPU."""
        return self.readers[name](name)


def open_tensors(folder: Path) -> TensorFiles:
    """Return the tensors of an HF folder, safetensors before pickled files.

    Raises:
        UserError: no weights, a damaged file or index, or a pickle that is more than weights.
    """
    for stem, opener in ((_SAFE, _open_safetensors), (_PICKLE, _load_pickle)):
        index = folder / f"{stem}.index.json"
        if index.is_file():
            listed: dict[str, str] = read_json(index).get("weight_map", {})
            outside = sorted({file for file in listed.values() if Path(file).name != file})
            if outside:
                raise UserError("the index names files outside its folder", where=str(index), seen=outside)
            files = sorted(set(listed.values()))
        elif (folder / stem).is_file():
            listed, files = {}, [stem]
        else:
            continue
        readers: dict[str, Callable[[str], Tensor]] = {}
        for file in files:
            readers |= opener(folder / file)
        ghosts = sorted(set(listed) - set(readers))
        if ghosts:
            raise UserError(
                "the index names tensors that its files do not hold", where=str(index), seen=shorten(ghosts)
            )
        return TensorFiles(readers)
    raise UserError(
        "no weights in this folder", where=str(folder), legal=f"{_SAFE} or {_PICKLE}, each also with an index"
    )


def write_tensors(
    folder: Path, sizes: Mapping[str, int], make: Callable[[str], Tensor], max_shard_bytes: int = MAX_SHARD_BYTES
) -> None:
    """Write tensors as safetensors, in shards with an index where they exceed ``max_shard_bytes`` together.

    Args:
        folder: existing folder.
        sizes: name -> bytes, in the order of writing.
        make: returns a tensor by name; called once each, one shard at a time.
        max_shard_bytes: limit of a file; a larger single tensor gets its own.
    """
    shards: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if shards[-1] and filled + size > max_shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    weight_map: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = _SAFE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        save_file({name: make(name).contiguous() for name in names}, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, file)
    if len(shards) > 1:
        write_json(
            folder / f"{_SAFE}.index.json",
            {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map},
        )


def write_folder(folder: Path, fill: Callable[[Path], None], *, overwrite: bool = False) -> None:
    """Let ``fill`` write into a hidden sibling of ``folder``, then rename it into place.

    Whatever fails, nothing half-written is left and the folder that was there before is there again.

    Raises:
        UserError: ``folder`` exists, is not empty, and ``overwrite`` is false.
        RunError: the files could not be written (a full disk); the system's reason is named.
    """
    if folder.exists() and not overwrite and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError("the output folder exists", where=str(folder), hint="choose another one or allow overwriting")
    folder = folder.absolute()
    part = folder.with_name(f".{folder.name}.{os.getpid()}.part")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    make_folder(folder.parent)
    try:
        part.mkdir()
        fill(part)
        for file in part.iterdir():  # safetensors writes files only their owner can read; the folder knows the umask
            file.chmod(part.stat().st_mode & 0o666)
        if folder.exists():
            folder.rename(old)
        part.rename(folder)
    except Exception as error:
        if not isinstance(error, OSError) and "(os error " not in str(error):  # how the Rust libraries put it
            raise
        raise RunError(
            f"the folder could not be written: {error}",
            where=str(folder),
            hint="free some disk space or check the permissions; what was there before is untouched",
        ) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
        if old.exists() and not folder.exists():
            old.rename(folder)
        shutil.rmtree(old, ignore_errors=True)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in ``path``; `UserError` naming the file where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("file not found", where=str(path), hint="is this a Hugging Face model folder?") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError("not a JSON file", where=str(path), seen=error) from error
    if not isinstance(value, dict):
        raise UserError("not a JSON object", where=str(path), seen=type(value).__name__)
    return value


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write one JSON object, indented, UTF-8."""
    path.write_text(json.dumps(value, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")


def shorten(names: list[str], limit: int = 20) -> str:
    """Return the names as one line, the tail as a count."""
    tail = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + tail


def _open_safetensors(path: Path) -> dict[str, Callable[[str], Tensor]]:
    try:
        file = safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise UserError("a shard is missing", where=str(path), hint="the download or copy is incomplete") from None
    except SafetensorError as error:
        raise UserError("not a safetensors file", where=str(path), seen=error) from error
    return dict.fromkeys(file.keys(), file.get_tensor)


def _load_pickle(path: Path) -> dict[str, Callable[[str], Tensor]]:
    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise UserError("a shard is missing", where=str(path), hint="the download or copy is incomplete") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError) as error:
        raise UserError(
            "refusing to unpickle this file: it is more than weights, or damaged",
            where=str(path),
            seen=str(error).splitlines()[0] if str(error) else type(error).__name__,
            hint="use the model's safetensors files",
        ) from error
    if not isinstance(tensors, dict) or not all(isinstance(value, Tensor) for value in tensors.values()):
        raise UserError("not a dictionary of tensors", where=str(path), seen=type(tensors).__name__)
    return dict.fromkeys(tensors, tensors.__getitem__)
