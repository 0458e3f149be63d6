"""Pieces of tensors in torch.distributed.checkpoint.

DCP knows a tensor's chunks as boxes (offsets and sizes in the whole) and reads any box from the chunks that overlap it.
That is all that resharding needs: a layout writes its boxes, another reads its own. A box that several ranks hold is
written by one of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from danlu.parallel.placement import Block, Piece


class _Chunks:
    """One piece as DCP's planning asks for it."""

    def __init__(self, piece: Piece) -> None:
        self.piece = piece
        self.by_offset = {torch.Size(starts): view for starts, view in piece.boxes}

    def size(self) -> torch.Size:
        return self.piece.shape

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.piece.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.piece.shape),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(offsets, view.shape) for offsets, view in self.by_offset.items()]

    def find(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.by_offset[index.offset]


class PieceSavePlanner(DefaultSavePlanner):
    """DCP's planner, which finds a chunk's data in a piece."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        """Return the box at ``index``."""
        chunks: _Chunks = self.state_dict[index.fqn]
        return chunks.find(index)


class PieceLoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which reads a chunk's data into a piece."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Take the pieces as they are."""
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        """Return the box at ``index``."""
        chunks: _Chunks = self.state_dict[index.fqn]
        return chunks.find(index)


def wrap_pieces(tensors: Mapping[str, Tensor | Piece]) -> dict[str, Any]:
    """Return ``tensors`` for the two planners; a plain tensor is a piece that is whole."""
    return {
        name: _Chunks(held if isinstance(held, Piece) else Piece(Block.of(held.shape), held))
        for name, held in tensors.items()
    }
