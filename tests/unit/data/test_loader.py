"""The loader's stream depends on seed and sample number only, and every rank gets equal work."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch

from danlu.base.errors import UserError
from danlu.data.batch import IGNORE, StepBatch
from danlu.data.dataset import PackedDataset, Rows
from danlu.data.loader import EvalLoader, Loader, worker_seed
from danlu.data.order import split_rows

Make = Callable[..., PackedDataset]


def ids(batch: StepBatch) -> list[int]:
    """Return the first token of each real row of a step."""
    rows = [micro.tokens_BS[micro.document_ids_BS[:, 0] >= 0, 0] for micro in batch.micro_batches]
    return torch.cat(rows).tolist()


def take(loader: Loader, steps: int) -> list[StepBatch]:
    """Return the next steps."""
    return list(islice(loader, steps))


def test_micro_batch_layout(numbered: Make) -> None:
    """Tokens, shifted labels, restarting positions and document ids have the contract's values and dtype."""
    micro = take(Loader([numbered(1)], shuffle=False), 1)[0].micro_batches[0]
    assert micro.tokens_BS.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert micro.labels_BS.tolist() == [[1, 2, *[IGNORE] * 6]]
    assert micro.positions_BS.tolist() == [[0, 1, 2, 0, 0, 0, 0, 0]]
    assert micro.document_ids_BS.tolist() == [[0, 0, 0, -1, -1, -1, -1, -1]]
    assert {tensor.dtype for tensor in micro} == {torch.int64}


def test_stream_does_not_depend_on_ranks_workers_or_batches(numbered: Make) -> None:
    """Any world size, micro-batch size and number of workers gives the same samples per step."""
    dataset = numbered(13)
    expected = [ids(batch) for batch in take(Loader([dataset], seed=3, global_batch_size=4), 8)]
    for degree, micro, workers in ((1, 4, 0), (2, 1, 0), (3, 2, 0), (2, 2, 2)):
        ranks = [
            take(
                Loader(
                    [dataset], seed=3, global_batch_size=4, micro_batch_size=micro, data_rank=rank,
                    data_degree=degree, num_workers=workers,
                ),
                8,
            )
            for rank in range(degree)
        ]  # fmt: skip
        for step in range(8):
            assert len({len(rank[step].micro_batches) for rank in ranks}) == 1
            assert sorted(token for rank in ranks for token in ids(rank[step])) == sorted(expected[step])


def test_rows_are_dealt_by_the_formula(numbered: Make) -> None:
    """Micro-batch m of rank r holds rows first + (m * degree + r) * micro + i; the rest is padding without labels."""
    rank_1 = Loader([numbered(7)], shuffle=False, global_batch_size=7, micro_batch_size=2, data_rank=1, data_degree=2)
    batch = take(rank_1, 1)[0]
    assert [micro.tokens_BS[:, 0].tolist() for micro in batch.micro_batches] == [[2, 3], [6, 0]]
    assert (batch.micro_batches[1].labels_BS[1] == IGNORE).all()
    assert (batch.micro_batches[1].document_ids_BS[1] == -1).all()


@pytest.mark.parametrize(("rows", "batch", "sizes"), [(10, 4, [4, 4, 2]), (5, 4, [4, 1]), (3, 4, [3])])
def test_br_011_012_013_epoch_ends_in_a_short_step(numbered: Make, rows: int, batch: int, sizes: list[int]) -> None:
    """The last step of an epoch holds the rows that are left; no step mixes two epochs; empty passes are left out."""
    loader = Loader([numbered(rows)], global_batch_size=batch, micro_batch_size=1)
    epochs = 2
    steps = take(loader, epochs * len(sizes))
    assert [step.num_samples for step in steps] == sizes * epochs
    assert [len(step.micro_batches) for step in steps] == sizes * epochs
    assert loader.steps_per_epoch == len(sizes)
    for epoch in range(epochs):
        part = steps[epoch * len(sizes) : (epoch + 1) * len(sizes)]
        assert sorted(token for step in part for token in ids(step)) == list(range(rows))


@pytest.mark.parametrize("workers", [0, 1])
def test_br_044_resume_at_every_step_and_at_the_epochs_edge(numbered: Make, workers: int) -> None:
    """From any step on, including an epoch's end, the resumed stream is the rest of the uninterrupted one."""
    dataset = numbered(8)
    whole = [ids(batch) for batch in take(Loader([dataset], seed=1, global_batch_size=2), 8)]
    for step in (0, 3, 4, 7) if workers else range(9):
        loader = Loader([dataset], seed=1, global_batch_size=2, samples_seen=2 * step, num_workers=workers)
        assert [ids(batch) for batch in take(loader, 8 - step)] == whole[step:]
        assert loader.samples_seen == 16


def test_br_046_progress_is_counted_in_samples(numbered: Make) -> None:
    """After 12 samples in batches of 4, a resume with batch 2 or with two ranks goes on at sample 12."""
    dataset = numbered(40)
    before = Loader([dataset], seed=2, global_batch_size=4)
    seen = [token for batch in take(before, 3) for token in ids(batch)]
    assert before.samples_seen == 12
    rest = [ids(b) for b in take(Loader([dataset], seed=2, global_batch_size=4, samples_seen=12), 7)]
    by_2 = take(Loader([dataset], seed=2, global_batch_size=2, samples_seen=12), 14)
    by_rank = [
        take(Loader([dataset], seed=2, global_batch_size=4, data_rank=r, data_degree=2, samples_seen=12), 7)
        for r in range(2)
    ]
    assert by_2[0].first_sample == by_rank[0][0].first_sample == 12
    assert [token for batch in by_2 for token in ids(batch)] == [token for batch in rest for token in batch]
    assert sorted(t for rank in by_rank for b in rank for t in ids(b)) == sorted(set(range(40)) - set(seen))


def test_br_047_mixture_resumes_without_repeats(numbered: Make) -> None:
    """A 70/30 mixture stopped at step 5 of 20 and resumed gives the ids and source counts of the whole run."""
    sources = [numbered(100), numbered(100, first=500)]
    options: dict[str, Any] = {"weights": [0.7, 0.3], "seed": 4, "global_batch_size": 4}
    whole = [t for b in take(Loader(sources, **options), 20) for t in ids(b)]
    head = [t for b in take(Loader(sources, **options), 5) for t in ids(b)]
    tail = [t for b in take(Loader(sources, samples_seen=20, **options), 15) for t in ids(b)]
    assert head + tail == whole
    assert len(set(whole)) == 80
    assert sum(token < 500 for token in whole) == 56


def test_br_049_every_rank_resumes_its_own_share(numbered: Make) -> None:
    """Four ranks stopped in mid-epoch and resumed as two give each id exactly once."""
    dataset = numbered(12)
    options: dict[str, Any] = {"seed": 9, "global_batch_size": 4}
    first = [t for r in range(4) for b in take(Loader([dataset], data_rank=r, data_degree=4, **options), 2)
             for t in ids(b)]  # fmt: skip
    rest = [t for r in range(2)
            for b in take(Loader([dataset], data_rank=r, data_degree=2, samples_seen=8, **options), 1)
            for t in ids(b)]  # fmt: skip
    assert sorted(first + rest) == list(range(12))


def test_br_070_resume_says_where(numbered: Make, caplog: pytest.LogCaptureFixture) -> None:
    """A resumed loader logs sample, epoch size and epoch; a fresh one does not."""
    dataset = numbered(10)
    with caplog.at_level(logging.INFO, logger="danlu"):
        Loader([dataset])
        assert "resumed" not in caplog.text
        loader = Loader([dataset], samples_seen=23)
    assert "resumed at sample 3 of 10, epoch 2" in caplog.text
    assert loader.position() == "sample 3 of 10, epoch 2"


@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_br_170_fewer_shards_than_readers(numbered: Make, shards: int) -> None:
    """Two ranks with two workers each take equal steps and see each id once, however few shards there are."""
    dataset = numbered(4 * shards, per_shard=4)
    loaders = [
        Loader([dataset], global_batch_size=4, micro_batch_size=2, data_rank=r, data_degree=2, num_workers=2)
        for r in range(2)
    ]
    taken = [take(loader, loader.steps_per_epoch or 0) for loader in loaders]
    assert [len(steps) for steps in taken] == [shards, shards]
    assert sorted(t for steps in taken for b in steps for t in ids(b)) == list(range(4 * shards))


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_br_171_183_evaluation_counts_each_row_once(numbered: Make, degree: int) -> None:
    """21 rows in micro-batches of 2 are each seen once on 1, 2 and 4 ranks, in as many micro-batches on each."""
    dataset = numbered(21)
    ranks = [
        list(EvalLoader(dataset, micro_batch_size=2, data_rank=rank, data_degree=degree)) for rank in range(degree)
    ]
    assert {len(rank) for rank in ranks} == {-(-21 // (2 * degree))}
    assert len({micro.tokens_BS.shape for rank in ranks for micro in rank}) == 1
    real = [micro.tokens_BS[micro.document_ids_BS[:, 0] >= 0, 0] for rank in ranks for micro in rank]
    assert sorted(torch.cat(real).tolist()) == list(range(21))
    assert sum(int((micro.labels_BS != IGNORE).sum()) for rank in ranks for micro in rank) == 42


def test_eval_loader_takes_the_first_rows_and_starts_anew(numbered: Make) -> None:
    """`max_rows` limits the rows; a second iteration gives the same batches."""
    loader = EvalLoader(numbered(9), micro_batch_size=4, max_rows=5)
    once, twice = list(loader), list(loader)
    assert len(loader) == len(once) == 2
    assert all(torch.equal(a.tokens_BS, b.tokens_BS) for a, b in zip(once, twice, strict=True))
    assert int((once[1].document_ids_BS[:, 0] >= 0).sum()) == 1


class Draws:
    """A source whose row is a draw from each of the three generators, and the row's number."""

    sequence_length = 4
    fingerprint = "draws"

    def __len__(self) -> int:
        return 8

    def widths(self, indices: Any) -> np.ndarray:
        """Return the number of tokens of each row."""
        return np.full(len(indices), 4)

    def fill(self, rows: Rows, start: int, indices: Any) -> None:
        """Fill in the draws."""
        for slot, index in enumerate(indices, start):
            rows.tokens_BS[slot] = [
                int(index), random.getrandbits(40), np.random.randint(1 << 40), int(torch.randint(1 << 40, ())),
            ]  # fmt: skip
            rows.document_ids_BS[slot] = 0


def draws(rank: int, seed: int = 0) -> list[int]:
    """Return all draws of two epochs on one of two ranks with two workers."""
    loader = Loader(
        [Draws()], seed=seed, global_batch_size=4, micro_batch_size=2, data_rank=rank, data_degree=2, num_workers=2
    )
    return [n for b in take(loader, 4) for m in b.micro_batches for n in m.tokens_BS[:, 1:].flatten().tolist()]


def test_br_225_226_worker_randomness_is_distinct_and_reproducible() -> None:
    """Python, numpy and torch draws differ between workers, ranks and epochs, and repeat with the seed."""
    both = draws(0) + draws(1)
    assert len(set(both)) == len(both) == 2 * 4 * 2 * 3
    assert draws(0) == both[: len(both) // 2]
    assert not set(draws(0, seed=1)) & set(both)


def test_br_226_seeds_name_rank_worker_and_position() -> None:
    """Seeds differ by rank, by worker and by the sample where a run resumes."""
    seeds = {tuple(worker_seed(0, r, w, k).tolist()) for r in range(3) for w in range(3) for k in (0, 100)}
    assert len(seeds) == 18


def test_loader_leaves_the_global_generator_alone(numbered: Make) -> None:
    """Making and reading a loader draws nothing from torch's generator, so a resumed run keeps its random numbers."""
    torch.manual_seed(0)
    state = torch.get_rng_state()
    take(Loader([numbered(4)], num_workers=1), 3)
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("workers", [0, 1])
def test_error_of_a_worker_surfaces_with_its_cause(numbered: Make, workers: int) -> None:
    """A damaged row met in a worker raises the same `UserError`, naming shard and byte, in the training process."""
    dataset = numbered(3)
    shard = dataset.folder / "shard-000000.tar"
    content = bytearray(shard.read_bytes())
    content[int(dataset.index["tokens_at"][1])] ^= 1
    shard.write_bytes(content)
    with pytest.raises(UserError, match=r"shard-000000\.tar: row at byte \d+"):
        take(Loader([PackedDataset(dataset.folder)], num_workers=workers), 3)


def test_skipping_damage_keeps_ranks_in_step(numbered: Make) -> None:
    """With ``on_corrupt="skip"`` a damaged row is a row of padding: same step count, no label, counted."""
    dataset = numbered(4)
    shard = dataset.folder / "shard-000000.tar"
    content = bytearray(shard.read_bytes())
    content[int(dataset.index["tokens_at"][1])] ^= 1
    shard.write_bytes(content)
    tolerant = PackedDataset(dataset.folder, on_corrupt="skip")
    steps = take(Loader([tolerant], global_batch_size=2, micro_batch_size=2), 2)
    assert sorted(t for b in steps for t in ids(b)) == [0, 2, 3]
    assert [b.num_samples for b in steps] == [2, 2]
    assert tolerant.num_corrupt == 1


def test_padding_can_be_trimmed_or_widened(numbered: Make) -> None:
    """`trim_padding` cuts to the longest row; a longer `sequence_length` pads; a shorter one is refused."""
    dataset = numbered(2)
    assert take(Loader([dataset], trim_padding=True), 1)[0].micro_batches[0].tokens_BS.shape == (1, 3)
    assert take(Loader([dataset], sequence_length=12), 1)[0].micro_batches[0].tokens_BS.shape == (1, 12)
    with pytest.raises(UserError, match="longer rows"):
        Loader([dataset], sequence_length=4)


def test_br_148_held_out_rows(numbered: Make) -> None:
    """One of ten rows is held out by the seed alone; the other nine train, whatever the number of workers."""
    dataset = numbered(10)
    train, held_out = split_rows(dataset, 1, seed=7)
    assert len(held_out) == 1
    seen = [
        sorted(t for b in take(Loader([train], num_workers=w, global_batch_size=3), 3) for t in ids(b)) for w in (0, 2)
    ]
    assert seen[0] == seen[1] == sorted(set(range(10)) - set(held_out.indices.tolist()))
    assert split_rows(dataset, 1, seed=7)[0].fingerprint == train.fingerprint != dataset.fingerprint
    with pytest.raises(UserError, match="held-out"):
        split_rows(dataset, 10, seed=0)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_batch_size": 0}, "batch sizes"),
        ({"data_rank": 2, "data_degree": 2}, "data rank"),
        ({"samples_seen": -1}, "samples_seen"),
        ({"seed": -1}, "seed"),
        ({"weights": [1.0, 2.0]}, "one weight per source"),
    ],
)
def test_wrong_arguments_are_named(numbered: Make, options: dict[str, Any], text: str) -> None:
    """Each argument that makes no sense is refused by name."""
    with pytest.raises(UserError, match=text):
        Loader([numbered(2)], **options)
