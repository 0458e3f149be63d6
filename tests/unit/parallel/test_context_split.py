"""How rows are cut for context parallelism, what is refused, and which blocks a ring rank computes."""

from __future__ import annotations

import pytest
import torch

from danlu.base.errors import UserError
from danlu.data.batch import IGNORE, MicroBatch
from danlu.parallel.context import METHODS, Method, check_context, row_multiple, slots_of, split_batch
from danlu.parallel.ring_attention import Blocks, zigzag_chunks
from tiny import Document, micro_batch


def parts_of(batch: MicroBatch, size: int, method: Method, multiple_of: int = 1) -> list[MicroBatch]:
    return [split_batch(batch, rank, size, method, multiple_of) for rank in range(size)]


def test_br_249_labels_come_from_the_whole_row() -> None:
    """Tokens 0..7, cp=2, zigzag: [0,1,6,7] -> [1,2,7,-100] and [2,3,4,5] -> [3,4,5,6]; 7 targets in all."""
    parts = parts_of(micro_batch([[list(range(8))]], width=8), 2, "ring")
    assert [part.tokens_BS.tolist() for part in parts] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert [part.labels_BS.tolist() for part in parts] == [[[1, 2, 7, IGNORE]], [[3, 4, 5, 6]]]
    assert [part.positions_BS.tolist() for part in parts] == [[[0, 1, 6, 7]], [[2, 3, 4, 5]]]
    assert sum(int((part.labels_BS != IGNORE).sum()) for part in parts) == 7


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("padded", [False, True])
def test_br_252_packed_documents_keep_the_unpacked_shift(method: Method, padded: bool) -> None:
    """Documents of 5 and 6 tokens, packed as they are or each padded to 8, cp=2: 4 + 5 targets, the next token each."""
    first, second = list(range(10, 15)), list(range(20, 26))
    filled: list[Document] = [
        (x + [0] * (8 - len(x)), [True] * len(x) + [False] * (8 - len(x))) for x in (first, second)
    ]
    batch = micro_batch([filled if padded else [first, second]], width=16 if padded else 11)
    pairs = []
    for part in parts_of(batch, 2, method):
        targets = part.labels_BS != IGNORE
        pairs += zip(part.tokens_BS[targets].tolist(), part.labels_BS[targets].tolist(), strict=True)
    assert sorted(pairs) == [(x, x + 1) for x in (*first[:-1], *second[:-1])]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("multiple_of", [1, 2, 3])
def test_parts_are_the_row_and_padding(method: Method, size: int, multiple_of: int) -> None:
    """Put back into their slots, equal parts give the row, then padding that nobody sees or predicts."""
    batch = micro_batch([[[1, 2, 3], [4, 5, 6, 7]], [list(range(11))]], width=11)
    parts = parts_of(batch, size, method, multiple_of)
    length = sum(part.tokens_BS.shape[1] for part in parts)
    assert length - 11 < row_multiple(size, method, multiple_of)
    assert {part.tokens_BS.shape[1] % multiple_of for part in parts} == {0}
    for field, padding in zip(range(4), (0, IGNORE, 0, -1), strict=True):
        row = torch.full((2, length), 10**6)
        for rank, part in enumerate(parts):
            row[:, slots_of(rank, size, method, length)] = part[field]
        assert torch.equal(row[:, :11], batch[field])
        assert bool((row[:, 11:] == padding).all())


def test_ulysses_parts_are_contiguous_and_ring_parts_zigzag() -> None:
    """Slots of rank 1 of 3."""
    assert slots_of(1, 3, "ulysses", 12).tolist() == [4, 5, 6, 7]
    assert slots_of(1, 3, "ring", 12).tolist() == [2, 3, 8, 9]


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(2, 4, 2), (4, 4, 2), (4, 8, 1), (2, 12, 6), (3, 6, 6)])
def test_br_076_what_ulysses_can_divide(size: int, heads: int, kv_heads: int) -> None:
    """Key heads are divided, or repeated where they are fewer than the ranks."""
    check_context("ulysses", size, heads, kv_heads)


@pytest.mark.parametrize(("size", "heads", "kv_heads"), [(3, 4, 2), (8, 4, 2), (4, 12, 6), (2, 6, 3), (4, 12, 3)])
def test_br_076_what_ulysses_cannot_divide_is_refused(size: int, heads: int, kv_heads: int) -> None:
    """The message has the legal sizes, which are legal, and names the ring, which takes any."""
    with pytest.raises(UserError, match=r"parallel.cp: Ulysses") as caught:
        check_context("ulysses", size, heads, kv_heads)
    assert f"{size} ranks for {heads} query heads and {kv_heads} key heads" in str(caught.value)
    assert 'cp_method="ring"' in str(caught.value)
    legal = str(caught.value).split("legal: ")[1].splitlines()[0].split(", ")
    for other in legal:
        check_context("ulysses", int(other), heads, kv_heads)
    assert str(size) not in legal
    check_context("ring", size, heads, kv_heads)


def test_unknown_methods_and_sizes_are_refused() -> None:
    """A misspelt method gets the nearest name, a size below 1 the rule."""
    with pytest.raises(UserError, match="did you mean 'ulysses'"):
        check_context("ulises", 2, 4, 4)
    with pytest.raises(UserError, match="at least one rank"):
        check_context("ring", 0, 4, 4)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_zigzag_shares_causal_work_equally(size: int) -> None:
    """Every rank has 2 c + 1 blocks under a causal mask, two in each step after the first, and no chunk is lost."""
    for rank in range(size):
        blocks = Blocks(None, 4, rank, size, torch.device("cpu"))
        steps = [len(list(blocks.of_step(step, None))) for step in range(size)]
        assert steps == [3] + [2] * (size - 1)
    assert sorted(chunk for rank in range(size) for chunk in zigzag_chunks(rank, size)) == list(range(2 * size))


@pytest.mark.parametrize("window", [None, 1, 3, 4, 5, 9])
@pytest.mark.parametrize("seed", [None, 0, 1, 2])
def test_blocks_know_what_is_hidden(window: int | None, seed: int | None) -> None:
    """Against the definition: what is skipped is wholly hidden, what needs no mask wholly visible, and all else masked.

    Rows as the loader makes them (ids that rise) are never computed in vain.
    """
    size, chunk = 3, 4
    length = 2 * size * chunk
    ids = None
    if seed is not None:
        jumps = torch.rand(2, length, generator=torch.Generator().manual_seed(seed)) < 0.15
        ids = jumps.long().cumsum(1)
        ids[seed % 2, 20:] = -1
    order = torch.arange(length)
    distance = order[:, None] - order
    seen = ((distance >= 0) & (distance < (window or length)))[None]
    if ids is not None:
        seen = seen & (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, :, None]
    blocks = Blocks(ids, chunk, 0, size, torch.device("cpu"))
    for queries in range(2 * size):
        for keys in range(2 * size):
            part = seen[:, queries * chunk : (queries + 1) * chunk, keys * chunk : (keys + 1) * chunk]
            assert torch.equal(~blocks.hidden(queries, keys, slice(0, chunk), window), part)
            assert torch.equal(~blocks.hidden(queries, keys, slice(1, 3), window), part[:, 1:3])
            if not blocks.is_seen(queries, keys, window):
                assert not part.any()
            elif window is None:
                assert part.any()
            assert not blocks.is_whole(queries, keys, window) or bool(part.all())
            if keys < queries and bool(part.all()):
                assert blocks.is_whole(queries, keys, window)
