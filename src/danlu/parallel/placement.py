"""Where a rank's numbers lie in the whole tensor: the one description that every layout shares.

Tensor parallelism gives a rank a block of a parameter: some rows, or some columns. ZeRO then gives it a flat range of
that block: what a bucket's boundary leaves. Both are rare shapes for a tensor and common ones for a layout, so a rank's
share of a parameter, its gradient or an optimizer moment is described here as

    Block   what tensor parallelism leaves: start and extent in every dimension of the whole, and the local shape
            (larger than the extent where the vocabulary was padded)
    Piece   a flat range of the block, as the few boxes (offset, view) that cover it

A flat range of a row-major block with n dimensions is at most 2 n - 1 boxes: the end of a first row, whole rows, the
beginning of a last one. Boxes have offsets in the whole tensor and are views of the rank's own memory, so filling
initial weights, reading a model and saving or loading a checkpoint are all one loop over boxes, whatever the layout;
and a checkpoint knows nothing of layouts, so that any of them can read it. Padding is in no box: it is never saved.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Size, Tensor

Box = tuple[tuple[int, ...], Tensor]
"""Offsets in the whole tensor, and a view of this rank's memory."""


@dataclass(frozen=True)
class Block:
    """A rank's block of a parameter, and how its gradient relates to the tensor parallel peers'.

    Attributes:
        whole: shape of the parameter in the model's spec.
        starts: first index of the block in each dimension of the whole.
        extent: sizes of the block inside the whole.
        local: shape of the tensor that holds it; larger than ``extent`` only where rows are padding.
        copies: tensor parallel ranks that hold this same block.
        gradient: ``full``: the local gradient is that of the block; ``partial``: the sum over all tensor parallel ranks
            is; ``partial_copies``: the sum over the ranks that hold this block is.
    """

    whole: tuple[int, ...]
    starts: tuple[int, ...]
    extent: tuple[int, ...]
    local: tuple[int, ...]
    copies: int = 1
    gradient: Literal["full", "partial", "partial_copies"] = "full"

    @classmethod
    def of(cls, shape: Sequence[int], *, copies: int = 1, partial: bool = False) -> Block:
        """Return the block that is the whole tensor."""
        size = tuple(shape)
        return cls(size, (0,) * len(size), size, size, copies, "partial" if partial else "full")


def boxes(block: Block, flat: Tensor, first: int) -> Iterator[Box]:
    """Yield the boxes of ``flat``, the elements ``first`` to ``first + len(flat)`` of the block's local tensor."""
    for starts, view in _cover(block.local, flat, first, ()):
        inside = tuple(
            slice(0, max(0, min(size, extent - start)))
            for start, size, extent in zip(starts, view.shape, block.extent, strict=True)
        )
        clipped = view[inside] if inside else view
        if clipped.numel():
            yield tuple(start + offset for start, offset in zip(starts, block.starts, strict=True)), clipped


def _cover(shape: Sequence[int], flat: Tensor, first: int, prefix: tuple[int, ...]) -> Iterator[Box]:
    """Yield (start, view) boxes of a flat range of a row-major tensor of ``shape`` below the indices ``prefix``."""
    if not flat.numel():
        return
    if not shape:
        yield prefix, flat.view((1,) * len(prefix))
        return
    row = math.prod(shape[1:])
    index, inner = divmod(first, row)
    head = min(flat.numel(), row - inner) if inner else 0
    if head:
        yield from _cover(shape[1:], flat[:head], inner, (*prefix, index))
        index += 1
    rows = (flat.numel() - head) // row
    if rows:
        body = flat[head : head + rows * row]
        yield (*prefix, index, *(0,) * (len(shape) - 1)), body.view(*(1,) * len(prefix), rows, *shape[1:])
    tail = flat[head + rows * row :]
    yield from _cover(shape[1:], tail, 0, (*prefix, index + rows))


class Piece:
    """This rank's share of one whole tensor; ``shape`` and `copy_` make it a target for whoever has the whole."""

    def __init__(self, block: Block, tensor: Tensor, first: int = 0) -> None:
        """Describe ``tensor`` (contiguous, any shape) as the flat range of ``block`` that begins at ``first``."""
        self.block, self.shape, self.dtype = block, Size(block.whole), tensor.dtype
        self.boxes = list(boxes(block, tensor.detach().view(-1), first))
        if not math.prod(block.whole) or not block.whole:  # nothing to cover, and still to be known
            self.boxes = [(block.starts, tensor.detach())]

    def copy_(self, whole: Tensor) -> None:
        """Take this rank's share of ``whole``."""
        for starts, view in self.boxes:
            view.copy_(whole[tuple(slice(start, start + size) for start, size in zip(starts, view.shape, strict=True))])

    def __getitem__(self, index: int) -> Piece:
        """Return this rank's share of ``whole[index]``, such as one expert's matrix; it may be nothing."""
        share = Piece.__new__(Piece)
        share.block, share.shape, share.dtype = self.block, self.shape[1:], self.dtype
        share.boxes = [
            (starts[1:], view[index - starts[0]])
            for starts, view in self.boxes
            if 0 <= index - starts[0] < view.shape[0]
        ]
        return share

    @property
    def indices(self) -> list[int]:
        """Indices of the whole's first dimension of which something is here."""
        return sorted({first + index for (first, *_), view in self.boxes for index in range(view.shape[0])})

    def to_host(self) -> Piece:
        """Return a copy in host memory, for a writer in the background."""
        copy = Piece.__new__(Piece)
        copy.block, copy.shape, copy.dtype = self.block, self.shape, self.dtype
        copy.boxes = [
            (starts, view.clone() if view.device.type == "cpu" else view.to("cpu")) for starts, view in self.boxes
        ]
        return copy
