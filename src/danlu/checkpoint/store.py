"""Checkpoints: torch.distributed.checkpoint files, committed by one rename.

A checkpoint is written to ``step-00000100.partial`` and renamed to ``step-00000100`` after every rank's file and the
folder itself are durable. The rename is the commit: a folder without the suffix is complete, always, so the newest one
is simply the one with the highest number; there is no pointer file to go stale. Older checkpoints are deleted only
after a newer commit. Killing the job at any moment therefore loses at most the checkpoint that was being written.

Saving copies the tensors to host memory and returns; a thread writes them. An error in that thread surfaces at the next
save or at the end of the run, never is it lost.

A checkpoint lists its files with their checksums (`danlu.checkpoint.checksums`) and is read only where they hold.

Tensors go through DCP, so any later layout can read them. Everything else (step, samples seen, config) is JSON in the
same folder. Nothing is unpickled freely: DCP's own ``.metadata`` is a pickle, and is read by an unpickler that knows
only DCP's record types; object entries, which DCP would pass to an unrestricted ``torch.load``, are refused.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from danlu.base.errors import RunError, UserError
from danlu.base.log import log
from danlu.checkpoint.checksums import find_cut_files, find_damage, find_damage_together, listed_sums, sum_own_files
from danlu.checkpoint.pieces import PieceLoadPlanner, PieceSavePlanner, wrap_pieces
from danlu.parallel.placement import Piece

FORMAT = 1
_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = ".partial"
_RECORD = "danlu.json"
_AGAIN = "copy it again, or delete it and continue from an earlier one"


@dataclass(frozen=True)
class Checkpoint:
    """A committed checkpoint: its folder and its JSON record."""

    folder: Path
    record: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done when it was saved."""
        return int(self.record["step"])


def find_checkpoints(folder: Path) -> list[Path]:
    """Return the committed checkpoint folders below ``folder``, oldest first."""
    if not folder.is_dir():
        return []
    found = [path for path in folder.iterdir() if _NAME.fullmatch(path.name) and (path / _RECORD).is_file()]
    return sorted(found, key=lambda path: path.name)


def open_checkpoint(folder: Path) -> Checkpoint:
    """Read the record of one checkpoint folder.

    Raises:
        UserError: no such folder, an uncommitted or damaged one, or one written by a newer danlu.
    """
    if folder.name.endswith(_PARTIAL):
        raise UserError("this checkpoint was never completed", where=str(folder), hint="name a folder without .partial")
    path = folder / _RECORD
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"not a checkpoint: {error}", where=str(folder)) from None
    if not isinstance(record, dict):
        raise UserError(
            "not the record of a checkpoint", where=str(path), seen=type(record).__name__, legal="an object"
        )
    if record.get("format") != FORMAT:
        raise UserError("unknown checkpoint format", where=str(folder), seen=record.get("format"), legal=str(FORMAT))
    step = record.get("step")
    if not isinstance(step, int) or step < 0:
        raise UserError("not the record of a checkpoint", where=str(path), seen=f"step = {step!r}", legal="a count")
    return Checkpoint(folder, record)


class CheckpointStore:
    """Saves and loads the checkpoints of one run folder; every rank holds one and calls it at the same steps."""

    def __init__(
        self, folder: Path, *, group: dist.ProcessGroup, keep_last: int = 2, asynchronous: bool = True
    ) -> None:
        self.folder = folder
        self.group = group
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self._writer = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None

    def __enter__(self) -> CheckpointStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        elif not isinstance(error, Exception):  # a second Ctrl-C: at once
            self._writer.shutdown(wait=False, cancel_futures=True)
        else:  # finish what is under way: the peers' threads are at it too, also where their main thread waits for us
            try:
                self.close()
            except RunError as second:
                log.warning("%s", second)

    def latest(self) -> Checkpoint | None:
        """Return the newest committed checkpoint, or None."""
        found = find_checkpoints(self.folder)
        return open_checkpoint(found[-1]) if found else None

    def save(self, step: int, tensors: Mapping[str, Tensor | Piece], record: Mapping[str, Any]) -> None:
        """Save under ``step``. Returns once the tensors are copied (asynchronous) or committed.

        Args:
            step: optimizer steps done.
            tensors: names to tensors, or to this rank's pieces of them; what several ranks hold is written once.
            record: JSON values, equal on every rank.

        Raises:
            RunError: this save (synchronous) or the one before it (asynchronous) could not be written.
        """
        self.wait()
        staged = {name: _to_host(tensor) for name, tensor in tensors.items()}
        full_record = {"format": FORMAT, "step": step, "torch": torch.__version__, **record}
        self._pending = self._writer.submit(self._write, step, staged, full_record)
        if not self.asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait until the save under way is committed on every rank.

        Raises:
            RunError: it could not be written; the message names the folder and the cause.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except (Exception, CheckpointException) as error:  # DCP's own derives from BaseException
            raise RunError(
                f"the checkpoint could not be written: {_first_cause(error)}",
                where=str(self.folder),
                hint="free some disk space or check the permissions; the last complete checkpoint is untouched",
            ) from error

    def close(self) -> None:
        """Wait for the save under way and end the writing thread."""
        try:
            self.wait()
        finally:
            self._writer.shutdown(wait=True)

    def _write(self, step: int, tensors: dict[str, Tensor | Piece], record: dict[str, Any]) -> None:
        final = self.folder / f"step-{step:08d}"
        partial = final.with_name(final.name + _PARTIAL)
        if self.group.rank() == 0:
            self._sweep()  # what a run that was killed has left
        dist.barrier(self.group)
        dcp.save(
            wrap_pieces(tensors),
            storage_writer=_Writer(partial, sync_files=True),
            planner=PieceSavePlanner(),
            process_group=self.group,
        )
        files = sum_own_files(partial, self.group)
        self._check_shared(partial, files)
        if self.group.rank() == 0:
            record = {**record, "files": files}
            _write_durably(partial / _RECORD, json.dumps(record, indent=2))
            _sync_folder(partial)
            if final.exists():
                _give_up(final)  # the same step of another attempt
            partial.rename(final)
            _sync_folder(self.folder)
            log.info("saved %s", final)
            for old in find_checkpoints(self.folder)[: -self.keep_last]:
                if old != final:
                    _give_up(old)
            self._sweep()
        dist.barrier(self.group)

    def _check_shared(self, partial: Path, files: Iterable[str]) -> None:
        """Raise on every rank where rank 0, which commits, cannot see what another has written."""
        absent = [[name for name in files if not (partial / name).is_file()]]
        dist.broadcast_object_list(absent, group_src=0, group=self.group)
        if absent[0]:
            raise RunError(f"rank 0 does not see {_some(absent[0])}: all machines must share the run folder")

    def _sweep(self) -> None:
        for folder in self.folder.glob(f"step-*{_PARTIAL}"):
            shutil.rmtree(folder, ignore_errors=True)


def load_tensors(
    checkpoint: Checkpoint,
    tensors: Mapping[str, Tensor | Piece],
    *,
    unread: tuple[str, ...] = (),
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fill ``tensors`` in place from a checkpoint, whatever layout wrote it.

    Args:
        checkpoint: a committed checkpoint.
        tensors: names to the live tensors, or pieces of them, that are to be overwritten.
        unread: prefixes of names that the checkpoint may hold without being asked for (``("optimizer.", "rng.")`` to
            read the model alone).
        group: ranks that together ask for everything in the checkpoint; None where this one does.

    Raises:
        UserError: names or shapes differ (both directions are listed), the checkpoint holds pickled objects, or a file
            is not what was written.
    """
    reader = CheckpointReader(checkpoint.folder)
    metadata = reader.read_metadata()
    entries = metadata.state_dict_metadata
    asked = set(tensors)
    if group is not None and group.size() > 1:
        everyone: list[set[str]] = [asked] * group.size()
        dist.all_gather_object(everyone, asked, group=group)
        asked = set().union(*everyone)
    missing = sorted(asked - set(entries))
    extra = sorted(name for name in set(entries) - asked if not name.startswith(unread))
    if missing or extra:
        raise UserError(
            "the checkpoint and this run do not hold the same tensors",
            where=str(checkpoint.folder),
            seen=f"missing in the checkpoint: {_some(missing)}; not known to this run: {_some(extra)}",
        )
    for name, tensor in tensors.items():
        entry = entries[name]
        assert isinstance(entry, TensorStorageMetadata)
        if entry.size != tensor.shape:
            raise UserError(
                f"the shape of {name} differs",
                where=str(checkpoint.folder),
                seen=f"{tuple(entry.size)} in the checkpoint",
                legal=f"{tuple(tensor.shape)}",
            )
    check_files(checkpoint, metadata, group)
    try:
        dcp.load(wrap_pieces(tensors), storage_reader=reader, planner=PieceLoadPlanner(), process_group=group)
    except CheckpointException as error:
        raise UserError(
            f"the checkpoint cannot be read: {_first_cause(error)}", where=str(checkpoint.folder), hint=_AGAIN
        ) from error


def check_files(checkpoint: Checkpoint, metadata: Metadata, group: dist.ProcessGroup | None) -> None:
    """Raise `UserError`, on every rank, where a file is not what was written; older checkpoints know lengths only."""
    folder = checkpoint.folder
    sums = listed_sums(checkpoint.record, folder / _RECORD)
    damage = find_cut_files(folder, metadata) if sums is None else find_damage_together(folder, sums, group)
    if not damage:
        return
    name, seen, legal = damage[0]
    hint = _AGAIN
    for earlier in reversed(find_checkpoints(folder.parent)):
        if earlier.name < folder.name and _is_sound(earlier):
            hint = f"copy it again, or delete it and continue from {earlier.name}, which is sound"
            break
    more = f" (and {len(damage) - 1} more files)" if len(damage) > 1 else ""
    raise UserError(
        f"a file of the checkpoint is damaged{more}", where=str(folder / name), seen=seen, legal=legal, hint=hint
    )


def _is_sound(folder: Path) -> bool:
    try:
        sums = listed_sums(open_checkpoint(folder).record, folder)
        return sums is not None and not find_damage(folder, sums)
    except (UserError, OSError):
        return False


def tensor_names(checkpoint: Checkpoint) -> list[str]:
    """Return the names of all tensors in a checkpoint."""
    return sorted(CheckpointReader(checkpoint.folder).read_metadata().state_dict_metadata)


class _Unpickler(pickle.Unpickler):
    """Knows the record types that DCP's metadata consists of and nothing else."""

    # Exact names: a module as a whole would let a pickle reach what that module imports.
    _ALLOWED = frozenset(
        {("torch.distributed.checkpoint.metadata", name) for name in (
            "Metadata", "MetadataIndex", "StorageMeta", "TensorProperties", "TensorStorageMetadata",
            "BytesStorageMetadata", "ChunkStorageMetadata", "_MEM_FORMAT_ENCODING",
        )}
        | {
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("pathlib", "PosixPath"),
            ("pathlib", "WindowsPath"),
        }
    )  # fmt: skip

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._ALLOWED and not (
            module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        ):
            raise pickle.UnpicklingError(f"{module}.{name} has no place in a checkpoint")
        return super().find_class(module, name)


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, whose errors name the system's reason (a full disk) and not what torch made of it."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().write_data(*args, **kwargs)
        except Exception as error:
            cause: BaseException | None = error
            while cause is not None and not isinstance(cause, OSError):
                cause = cause.__cause__ or cause.__context__
            raise cause or error from None


class CheckpointReader(dcp.FileSystemReader):
    """DCP's reader without its unrestricted unpickling."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds; `UserError` where that is more than tensors."""
        path = Path(self.path) / ".metadata"
        try:
            with path.open("rb") as file:
                metadata = _Unpickler(file).load()
        except Exception as error:  # a damaged pickle can raise anything
            raise UserError(f"refused to read this checkpoint file: {error}", where=str(path)) from None
        if not isinstance(metadata, Metadata):
            raise UserError("this is no checkpoint metadata", where=str(path), seen=type(metadata).__name__)
        objects = [
            name for name, entry in metadata.state_dict_metadata.items() if not isinstance(entry, TensorStorageMetadata)
        ]
        if objects:
            raise UserError("refused: the checkpoint holds pickled objects", where=str(path), seen=_some(objects))
        return metadata


def _to_host(tensor: Tensor | Piece) -> Tensor | Piece:
    if isinstance(tensor, Piece):
        return tensor.to_host()
    tensor = tensor.detach()
    return tensor.clone() if tensor.device.type == "cpu" else tensor.to("cpu")


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _give_up(folder: Path) -> None:
    """Mark a checkpoint as incomplete before it is deleted, so that a kill in between leaves none that looks whole."""
    folder.rename(folder.with_name(f"{folder.name}.old{_PARTIAL}"))


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:8])}{f' and {len(names) - 8} more' if len(names) > 8 else ''}" if names else "none"


def _first_cause(error: BaseException) -> str:
    failures = getattr(error, "failures", None)  # DCP's CheckpointException maps ranks to (exception, traceback)
    if failures:
        rank, (cause, _) = min(failures.items())
        return f"rank {rank}: {type(cause).__name__}: {cause}"
    return f"{type(error).__name__}: {error}"
