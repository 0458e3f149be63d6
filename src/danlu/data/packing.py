"""From samples of all lengths to rows of one length.

Everything works on one flat array of tokens and one of target flags; a document is a (start, length) pair. First the
overlong documents are dealt with, then documents are placed:

- ``documents``: best-fit decreasing (Johnson 1974; arXiv 2404.10830 for language models): the longest document first,
  each into the fullest row that still holds it. No document is ever cut here.
- ``chunk``: documents end to end, cut every S tokens. For pretraining text only; pieces are documents of their own
  (attention and positions do not cross the cut), and only the last row can be partly empty.
- ``none``: one document a row.

The first token of a document (or piece) is never a target: nothing of its own comes before it. A document without any
target is dropped and counted. Truncation keeps the final EOS: cutting on the right puts it on the last slot, cutting
on the left keeps BOS in front.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from danlu.base.errors import UserError
from danlu.data.shards import PackedRow


@dataclass(slots=True)
class Documents:
    """Documents in one flat buffer.

    Attributes:
        tokens: ids [T].
        mask: bool [T], True where the token is a target.
        starts: int64 [N], first slot of each document.
        lengths: int64 [N].
        counts: what happened to samples, by name (``truncated``, ``split``, ``dropped: ...``).
    """

    tokens: np.ndarray
    mask: np.ndarray
    starts: np.ndarray
    lengths: np.ndarray
    counts: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_lists(cls, ids: Sequence[list[int]], masks: Sequence[list[int]], dtype: np.dtype) -> Documents:
        """Flatten lists; the first token of each document stops being a target.

        Args:
            ids: token ids of each document.
            masks: for each document, run lengths of tokens that are no targets, are targets, are no targets, ...
            dtype: of the tokens.
        """
        lengths = np.fromiter(map(len, ids), np.int64, len(ids))
        tokens = np.fromiter(chain.from_iterable(ids), dtype, int(lengths.sum()))
        num_runs = np.fromiter(map(len, masks), np.int64, len(masks))
        runs = np.fromiter(chain.from_iterable(masks), np.int64, int(num_runs.sum()))
        place = np.arange(len(runs)) - np.repeat(np.cumsum(num_runs) - num_runs, num_runs)
        mask = np.repeat(place % 2 == 1, runs)
        documents = cls(tokens, mask, np.cumsum(lengths) - lengths, lengths)
        documents.mask[documents.starts[lengths > 0]] = False
        return documents

    def select(self, keep: np.ndarray) -> None:
        """Keep only the documents where ``keep`` is True."""
        self.starts, self.lengths = self.starts[keep], self.lengths[keep]

    def target_counts(self) -> np.ndarray:
        """Return the number of targets of each document, int64 [N]."""
        before = np.concatenate([[0], np.cumsum(self.mask, dtype=np.int64)])
        counts: np.ndarray = before[self.starts + self.lengths] - before[self.starts]
        return counts


def fit(
    documents: Documents, limit: int, overlong: str, *, eos_id: int, bos_id: int | None, where: Sequence[str] = ()
) -> None:
    """Make every document at most ``limit`` tokens long, in place, and drop those without targets.

    Args:
        documents: what to cut.
        limit: slots of a row.
        overlong: ``truncate_right``, ``truncate_left``, ``drop``, ``error`` or ``split``.
        eos_id: kept on the last slot when the right end is cut off.
        bos_id: kept on the first slot when the left end is cut off, if the document began with it.
        where: file and line of each document, for the error.

    Raises:
        UserError: a document is too long and ``overlong`` is ``error``.
    """
    long = documents.lengths > limit
    if long.any():
        if overlong == "error":
            number = int(np.argmax(long))
            raise UserError(
                "sample is longer than a row",
                where=where[number] if where else f"sample {number}",
                seen=f"{int(documents.lengths[number])} tokens",
                legal=f"at most {limit}",
                hint="raise sequence_length, or set overlong to truncate_right, truncate_left or drop",
            )
        if overlong == "drop":
            documents.counts["dropped: longer than a row"] += int(long.sum())
            documents.select(~long)
        elif overlong == "split":
            documents.counts["split"] += int(long.sum())
            _split(documents, limit)
        else:
            _truncate(documents, long, limit, overlong, eos_id, bos_id)
            documents.counts["truncated"] += int((documents.target_counts()[long] > 0).sum())
    targets = documents.target_counts() > 0
    if not targets.all():
        documents.counts["dropped: no target token"] += int((~targets).sum())
        documents.select(targets)


def _truncate(
    documents: Documents, long: np.ndarray, limit: int, overlong: str, eos_id: int, bos_id: int | None
) -> None:
    starts, ends = documents.starts[long], documents.starts[long] + documents.lengths[long]
    tokens, mask = documents.tokens, documents.mask
    if overlong == "truncate_right":
        # EOS moves to the last slot, but is a target only behind another one: a prompt whose whole answer was cut off
        # must not teach that the answer is empty. Such a sample has no target left and is dropped.
        last, final = starts + limit - 1, ends - 1
        targets = Documents(tokens, mask, starts, np.full_like(starts, limit - 1)).target_counts() > 0
        has_eos = tokens[final] == eos_id
        mask[last[has_eos]] = (mask[final] & targets)[has_eos]
        tokens[last[has_eos]] = eos_id
    else:
        cut = ends - limit
        if bos_id is not None:
            tokens[cut[tokens[starts] == bos_id]] = bos_id
        mask[cut] = False
        documents.starts[long] = cut
    documents.lengths[long] = limit


def _split(documents: Documents, limit: int) -> None:
    pieces = -(-documents.lengths // limit)
    owner = np.repeat(np.arange(len(pieces)), pieces)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    offsets = place * limit
    # A last piece of one token (the EOS) could not be a target: let the piece before it give it one more.
    offsets[(place > 0) & (documents.lengths[owner] - offsets == 1)] -= 1
    ends = np.where(place + 1 == pieces[owner], documents.lengths[owner], np.append(offsets[1:], 0))
    starts = documents.starts[owner] + offsets
    documents.starts, documents.lengths = starts, ends - offsets
    documents.mask[starts] = False


def best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Place items into bins by best-fit decreasing.

    Args:
        lengths: int64 [N], each at most ``capacity``.
        capacity: size of a bin.

    Returns:
        Items of each bin in input order; bins in the order of their first item.
    """
    bins: list[list[int]] = []
    by_room: dict[int, list[int]] = {}  # free room -> bins with just that room
    rooms: list[int] = []  # the keys of by_room, sorted
    order = np.argsort(-lengths, kind="stable")
    for item, length in zip(order.tolist(), lengths[order].tolist(), strict=True):
        at = bisect_left(rooms, length)
        if at < len(rooms):
            room = rooms[at]
            number = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[at]
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(item)
        if left := room - length:
            if left not in by_room:
                by_room[left] = []
                insort(rooms, left)
            by_room[left].append(number)
    return sorted(sorted(members) for members in bins)


def pack(documents: Documents, capacity: int, packing: str, token_bytes: np.ndarray) -> list[PackedRow]:
    """Place documents into rows.

    Args:
        documents: each at most ``capacity`` long, unless ``packing`` is ``chunk``.
        capacity: slots of a row.
        packing: ``documents``, ``chunk`` or ``none``.
        token_bytes: bytes of text of each id [V].
    """
    if packing == "documents":
        members = best_fit(documents.lengths, capacity)
        order = np.fromiter(chain.from_iterable(members), np.int64, len(documents.lengths))
        per_row = np.fromiter(map(len, members), np.int64, len(members))
    else:
        order = np.arange(len(documents.lengths))
        per_row = np.ones(len(order), np.int64)
    starts, lengths = documents.starts[order], documents.lengths[order]
    ends = np.cumsum(lengths)
    slots = np.arange(int(lengths.sum())) + np.repeat(starts - (ends - lengths), lengths)
    tokens, mask = documents.tokens[slots], documents.mask[slots]
    if packing == "chunk":
        cuts = np.arange(0, len(tokens), capacity)
        pieces = np.union1d(cuts, ends - lengths)
        mask[pieces] = False
        lengths = np.diff(np.append(pieces, len(tokens)))
        per_row = np.diff(np.append(np.searchsorted(pieces, cuts), len(pieces)))
    return _rows(tokens, mask, lengths, per_row, token_bytes)


def _rows(
    tokens: np.ndarray, mask: np.ndarray, lengths: np.ndarray, per_row: np.ndarray, token_bytes: np.ndarray
) -> list[PackedRow]:
    if not len(per_row):
        return []
    first = np.cumsum(per_row) - per_row
    sizes = np.add.reduceat(lengths, first)
    ends = np.cumsum(sizes)
    row_bytes = np.add.reduceat(np.where(mask, token_bytes[tokens], 0), ends - sizes)
    lengths = lengths.astype("<i4")
    return [
        PackedRow(tokens[end - size : end], mask[end - size : end], lengths[at : at + count], count_bytes)
        for end, size, at, count, count_bytes in zip(
            ends.tolist(), sizes.tolist(), first.tolist(), per_row.tolist(), row_bytes.tolist(), strict=True
        )
    ]
