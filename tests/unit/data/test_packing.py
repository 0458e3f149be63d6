"""Packing keeps documents whole, loses no token and never makes a first token a target."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from danlu.base.errors import UserError
from danlu.data.packing import Documents, best_fit, fit, pack

EOS, BOS = 1, 2
BYTES = np.ones(1000, np.int64)
lists = st.lists(st.lists(st.integers(10, 999), min_size=2, max_size=20), max_size=30)


def make(ids: list[list[int]], masks: list[list[int]] | None = None) -> Documents:
    """Return documents, every token a target unless masks (run lengths) are given."""
    return Documents.from_lists(ids, masks or [[0, len(one)] for one in ids], np.dtype("<u2"))


def unpack(rows: list) -> list[list[list[int]]]:
    """Return the documents of each row as lists."""
    return [
        [part.tolist() for part in np.split(row.tokens, np.cumsum(row.lengths)[:-1])] for row in rows
    ]  # fmt: skip


@given(ids=lists, capacity=st.integers(20, 40))
def test_documents_stay_whole(ids: list[list[int]], capacity: int) -> None:
    """Every document appears once, uncut; rows fit; no row could take in another whole row's smallest document."""
    rows = pack(make(ids), capacity, "documents", BYTES)
    assert sorted(document for row in unpack(rows) for document in row) == sorted(ids)
    assert all(len(row.tokens) <= capacity for row in rows)
    assert all(not row.mask[np.cumsum(row.lengths) - row.lengths].any() for row in rows)
    assert sum(int(row.mask.sum()) for row in rows) == sum(len(one) - 1 for one in ids)


@given(ids=lists, capacity=st.integers(2, 40))
def test_chunking_loses_no_token(ids: list[list[int]], capacity: int) -> None:
    """Chunks joined are the documents joined; all rows but the last are full; pieces respect documents and rows."""
    rows = pack(make(ids), capacity, "chunk", BYTES)
    joined = [token for row in rows for token in row.tokens.tolist()]
    assert joined == [token for one in ids for token in one]
    assert all(len(row.tokens) == capacity for row in rows[:-1])
    assert all(int(row.lengths.sum()) == len(row.tokens) for row in rows)
    ends = set(np.cumsum([len(one) for one in ids]).tolist())
    seen = set(np.cumsum([int(n) for row in rows for n in row.lengths]).tolist())
    assert ends <= seen
    assert all(not row.mask[np.cumsum(row.lengths) - row.lengths].any() for row in rows)


@given(lengths=st.lists(st.integers(1, 16), max_size=60))
def test_best_fit_places_all_and_leaves_few_rows_half_empty(lengths: list[int]) -> None:
    """Each item is in one bin, none is overfull, and at most one bin is no more than half full."""
    bins = best_fit(np.array(lengths, np.int64), 16)
    assert sorted(item for members in bins for item in members) == list(range(len(lengths)))
    loads = [sum(lengths[item] for item in members) for members in bins]
    assert all(load <= 16 for load in loads)
    assert sum(load <= 8 for load in loads) <= 1


def test_br_144_samples_are_never_cut_for_packing() -> None:
    """Three samples of 5 in rows of 8 are three rows; chunking cuts them and is for text."""
    ids = [[n] * 5 for n in (10, 20, 30)]
    assert unpack(pack(make(ids), 8, "documents", BYTES)) == [[one] for one in ids]
    assert unpack(pack(make(ids), 8, "chunk", BYTES)) == [[[10] * 5, [20] * 3], [[20] * 2, [30] * 5]]


def test_none_is_one_sample_a_row() -> None:
    """Without packing each row is one sample."""
    assert unpack(pack(make([[5, 6], [7, 8]]), 8, "none", BYTES)) == [[[5, 6]], [[7, 8]]]


def prompt_and_answer() -> Documents:
    """Return one sample: BOS, a prompt of 5, an answer of 5, EOS."""
    ids = [BOS, 10, 11, 12, 13, 14, 20, 21, 22, 23, 24, EOS]
    return make([ids], [[6, 6]])


def fitted(documents: Documents, overlong: str, limit: int = 8) -> list[list[int]]:
    """Apply `fit` and return the documents' ids."""
    fit(documents, limit, overlong, eos_id=EOS, bos_id=BOS, where=["a.jsonl:3"])
    return [
        documents.tokens[start : start + length].tolist()
        for start, length in zip(documents.starts, documents.lengths, strict=True)
    ]


def test_br_147_overlong_policies() -> None:
    """Prompt 6, answer 6, limit 8: each policy does what it says, counts it, and EOS is never cut off."""
    right = prompt_and_answer()
    assert fitted(right, "truncate_right") == [[BOS, 10, 11, 12, 13, 14, 20, EOS]]
    assert right.counts == {"truncated": 1}
    assert right.target_counts().tolist() == [2]
    left = prompt_and_answer()
    assert fitted(left, "truncate_left") == [[BOS, 14, 20, 21, 22, 23, 24, EOS]]
    assert left.counts == {"truncated": 1}
    assert left.target_counts().tolist() == [6]
    drop = prompt_and_answer()
    assert fitted(drop, "drop") == []
    assert drop.counts == {"dropped: longer than a row": 1}
    with pytest.raises(UserError, match=r"a\.jsonl:3: sample is longer than a row\n.*12 tokens"):
        fitted(prompt_and_answer(), "error")


def test_br_031_answer_cut_off_leaves_no_label() -> None:
    """Prompt 20, completion 5, limit 16: the sample has no target left, so it is dropped and counted."""
    documents = make([[*range(100, 120), *range(200, 204), EOS]], [[20, 5]])
    assert fitted(documents, "truncate_right", 16) == []
    assert documents.counts == {"truncated": 0, "dropped: no target token": 1}


@given(length=st.integers(2, 100), limit=st.integers(3, 30))
def test_split_loses_no_token(length: int, limit: int) -> None:
    """Pieces joined are the document; none is longer than the limit or a lone token."""
    ids = list(range(100, 100 + length))
    pieces = fitted(make([ids]), "split", limit)
    assert [token for piece in pieces for token in piece] == ids
    assert all(2 <= len(piece) <= limit for piece in pieces)


def test_rows_count_the_bytes_of_their_targets() -> None:
    """A row's bytes are those of its target tokens only."""
    table = np.arange(1000)
    rows = pack(make([[5, 6, 7]], [[0, 2, 1]]), 8, "documents", table)
    assert [row.target_bytes for row in rows] == [6]
