"""Pieces of tensors: any flat range of any block is few boxes that cover it exactly, without padding."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from danlu.parallel.placement import Block, Piece, boxes


def random_blocks(num: int, seed: int) -> Iterator[tuple[Block, int, int]]:
    """Yield blocks of 1 to 4 dimensions, half of them padded, each with a flat range (first, length)."""
    draw = random.Random(seed)
    for _ in range(num):
        whole = tuple(draw.randint(1, 6) for _ in range(draw.randint(1, 4)))
        starts = tuple(draw.randrange(size) for size in whole)
        extent = tuple(draw.randint(1, size - start) for size, start in zip(whole, starts, strict=True))
        local = list(extent)
        if draw.random() < 0.5:
            local[0] += draw.randint(0, 3)
        numel = math.prod(local)
        first = draw.randrange(numel)
        yield Block(whole, starts, extent, tuple(local)), first, draw.randint(0, numel - first)


def slots(block: Block) -> Tensor:
    """Return where each element of the local tensor lies in the flattened whole; -1 for padding."""
    whole = torch.arange(math.prod(block.whole)).view(block.whole)
    inside = whole[tuple(slice(start, start + size) for start, size in zip(block.starts, block.extent, strict=True))]
    local = torch.full(block.local, -1)
    local[tuple(slice(0, size) for size in block.extent)] = inside
    return local.view(-1)


def test_boxes_cover_a_range_exactly_once_and_no_padding() -> None:
    """400 random ranges: every element is in one box, at its place in the whole; at most 2 n - 1 boxes."""
    for block, first, length in random_blocks(400, seed=0):
        places = slots(block)[first : first + length]
        found = list(boxes(block, places, first))
        assert len(found) <= 2 * len(block.whole) - 1
        whole = torch.arange(math.prod(block.whole)).view(block.whole)
        covered: list[int] = []
        for starts, view in found:
            region = tuple(slice(start, start + size) for start, size in zip(starts, view.shape, strict=True))
            torch.testing.assert_close(view, whole[region])
            covered += view.flatten().tolist()
        assert sorted(covered) == sorted(place for place in places.tolist() if place >= 0)


def test_copy_is_slicing() -> None:
    """A piece takes from the whole what its range of the block says, and leaves padding as it is."""
    for block, first, length in random_blocks(200, seed=1):
        whole = torch.randn(block.whole)
        mine = torch.full((length,), 7.0)
        piece = Piece(block, mine, first)
        piece.copy_(whole)
        places = slots(block)[first : first + length]
        expected = torch.where(places >= 0, whole.view(-1)[places.clamp_min(0)], torch.tensor(7.0))
        assert torch.equal(mine, expected)
        assert piece.shape == torch.Size(block.whole)


def test_boxes_are_views_and_host_copies_are_not() -> None:
    """What is written into a box is in the rank's memory; a copy for the writer's thread is not touched any more."""
    mine = torch.arange(6.0)
    piece = Piece(Block.of((3, 4)), mine, 2)
    copy = piece.to_host()
    mine += 10
    assert sum(float(view.sum()) for _, view in piece.boxes) == float(mine.sum())
    assert sum(float(view.sum()) for _, view in copy.boxes) == 15.0
    assert [starts for starts, _ in copy.boxes] == [(0, 2), (1, 0)]


@pytest.mark.parametrize("shape", [(), (0, 3)])
def test_what_has_nothing_to_cover_is_still_known(shape: tuple[int, ...]) -> None:
    """A number without dimensions, and a tensor without elements, have one box: a checkpoint must hold their names."""
    piece = Piece(Block.of(shape), torch.zeros(shape))
    assert len(piece.boxes) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
def test_br_057_ranks_of_a_flat_partition_cover_each_tensor(ranks: int) -> None:
    """Tensors of 7, 5 and 3 numbers in one flat memory cut into equal parts: put together they are the tensors."""
    sizes = (7, 5, 3)
    part = -(-sum(sizes) // ranks)
    for size, offset in zip(sizes, (0, 7, 12), strict=True):
        whole = torch.randn(size)
        rebuilt = torch.full((size,), math.nan)
        for rank in range(ranks):
            low, high = max(offset, rank * part), min(offset + size, (rank + 1) * part)
            mine = torch.zeros(max(0, high - low))
            piece = Piece(Block.of((size,)), mine, max(0, low - offset))
            if high > low:
                piece.copy_(whole)
            for (start,), view in [(starts, view) for starts, view in piece.boxes if view.numel()]:
                assert torch.isnan(rebuilt[start : start + len(view)]).all()
                rebuilt[start : start + len(view)] = view
        assert torch.equal(rebuilt, whole)
