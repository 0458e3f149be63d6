"""The weights of a run checkpoint, each read when it is asked for.

An export needs one tensor at a time; a whole model in memory, which several machines may have trained, it does not
need. A checkpoint says nothing of layouts, so a tensor is put together here from whatever boxes the ranks of the run
have written. torch.distributed.checkpoint reads the boxes of a tensor one by one: while it does, memory holds the
tensor and one box of it.

Files are compared with their checksums once, before the first tensor.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from danlu.checkpoint.pieces import PieceLoadPlanner, wrap_pieces
from danlu.checkpoint.store import Checkpoint, CheckpointReader, check_files

_PREFIX = "model."


class _OpenReader(CheckpointReader):
    """A reader that reads the list of tensors once and not for every tensor."""

    metadata: Metadata | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.metadata is None:
            self.metadata = super().read_metadata(*args, **kwargs)
        return self.metadata


class SavedWeights(Mapping[str, Tensor]):
    """The model's parameters in a checkpoint, by FQN; every look-up reads the tensor anew, into memory of its own."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        """Open a committed checkpoint.

        Raises:
            UserError: it holds pickled objects, or a file is not what was written.
        """
        self._reader = _OpenReader(checkpoint.folder)
        entries = self._reader.read_metadata().state_dict_metadata
        self._entries = {
            name.removeprefix(_PREFIX): entry
            for name, entry in entries.items()
            if name.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
        }
        check_files(checkpoint, self._reader.read_metadata(), None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, fqn: str) -> Tensor:
        entry = self._entries[fqn]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            # One process reads alone, and DCP warns about just that.
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(
                wrap_pieces({_PREFIX + fqn: tensor}), storage_reader=self._reader, planner=PieceLoadPlanner(),
                no_dist=True,
            )  # fmt: skip
        return tensor
