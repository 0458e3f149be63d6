"""Batches of the training stream for one data rank.

`Order` says which row sample k is; the loader cuts the stream into steps and deals a step's rows to micro-batches and
ranks. Micro-batch m of data rank r takes the rows ``first + (m * data_degree + r) * micro_batch_size + i``. A step is
``global_batch_size`` samples, fewer at the end of an epoch (it never mixes two epochs); rows that a short step lacks
are padding rows without labels, and micro-batches that would be empty on every rank are left out. So every rank runs
the same number of micro-batches whatever the numbers are, no sample is seen twice, and none waits for another.

The whole state is `samples_seen`, counted over all ranks: a run resumes with another batch size, world size or number
of workers at exactly the next sample.

Workers are `torch.utils.data.DataLoader` processes that receive the number of a step's first sample and return arrays.
Rows come from memory-mapped files, so zero workers are often as good. A worker outlives a SIGTERM or Ctrl-C that is
meant for the whole job: the step under way and the last checkpoint need it, and its process tells it when to go. Each
worker's Python, numpy and torch generators
are seeded from (seed, data rank, worker, first sample): no two streams are equal, on any rank, after any resume.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator, Sequence
from itertools import islice
from types import FrameType

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from danlu.base.errors import DanluError, RunError, UserError
from danlu.base.log import log
from danlu.data.batch import MicroBatch, StepBatch, stack_rows, to_micro_batch
from danlu.data.dataset import Rows, RowSource
from danlu.data.order import Order


def worker_seed(seed: int, data_rank: int, worker: int, first_sample: int) -> np.ndarray:
    """Return four uint32 words that seed one worker's generators."""
    return np.random.SeedSequence([seed, data_rank, worker, first_sample]).generate_state(4, np.uint32)


class Loader:
    """Iterates over `StepBatch`es without end; the caller counts steps.

    Args:
        sources: the data sets.
        weights: share of each source, or None: every row of all sources once an epoch.
        seed: seed of the order and of the workers' generators.
        global_batch_size: sequences per optimizer step over all ranks.
        micro_batch_size: sequences per forward pass of one rank.
        data_rank: this rank's place among the data ranks.
        data_degree: number of data ranks.
        num_workers: processes; 0 loads in the calling process.
        prefetch: steps that each worker prepares ahead.
        shuffle: visit rows in a seeded random order.
        samples_seen: where to resume.
        sequence_length: slots of a row; None: the longest of the sources. Shorter rows are padded.
        trim_padding: cut each micro-batch to its longest row. Shapes then differ between micro-batches and data ranks,
            which pays for rows of very different lengths; ranks that have the same rows see the same shapes.

    Raises:
        UserError: no rows, weights that do not fit, or rows longer than ``sequence_length``.
    """

    def __init__(
        self,
        sources: Sequence[RowSource],
        *,
        weights: Sequence[float] | None = None,
        seed: int = 0,
        global_batch_size: int = 1,
        micro_batch_size: int = 1,
        data_rank: int = 0,
        data_degree: int = 1,
        num_workers: int = 0,
        prefetch: int = 2,
        shuffle: bool = True,
        samples_seen: int = 0,
        sequence_length: int | None = None,
        trim_padding: bool = False,
    ) -> None:
        if min(global_batch_size, micro_batch_size) < 1:
            sizes = f"global_batch_size={global_batch_size}, micro_batch_size={micro_batch_size}"
            raise UserError("batch sizes must be positive", where="train", seen=sizes)
        if not 0 <= data_rank < data_degree:
            raise UserError("data rank lies outside its axis", seen=data_rank, legal=f"0 to {data_degree - 1}")
        if samples_seen < 0:
            raise UserError("samples_seen must not be negative", seen=samples_seen)
        self.sources = list(sources)
        self.order = Order([len(s) for s in self.sources], weights=weights, seed=seed, shuffle=shuffle)
        self.sequence_length = _width(self.sources, sequence_length)
        self.seed, self.trim_padding = seed, trim_padding
        self.global_batch_size, self.micro_batch_size = global_batch_size, micro_batch_size
        self.data_rank, self.data_degree = data_rank, data_degree
        self.num_workers, self.prefetch = num_workers, prefetch
        self.samples_seen = samples_seen
        if samples_seen:
            log.info("resumed at %s", self.position())

    @property
    def epoch_size(self) -> int | None:
        """Samples in an epoch; None for a weighted mixture."""
        return self.order.epoch_size

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch, the last one possibly short; None for a weighted mixture."""
        return None if self.epoch_size is None else -(-self.epoch_size // self.global_batch_size)

    def position(self) -> str:
        """Return where the stream is, for people: ``sample N of M, epoch E`` (both from 0)."""
        if self.epoch_size is None:
            return f"sample {self.samples_seen} of a weighted mixture"
        epoch, sample = divmod(self.samples_seen, self.epoch_size)
        return f"sample {sample} of {self.epoch_size}, epoch {epoch}"

    def num_samples(self, first: int) -> int:
        """Return the size of the step that starts at sample ``first``."""
        if self.epoch_size is None:
            return self.global_batch_size
        return min(self.global_batch_size, self.epoch_size - first % self.epoch_size)

    def load(self, first: int) -> list[np.ndarray]:
        """Return this rank's micro-batches of the step at ``first``, each [4, B, S] (see `stack_rows`)."""
        samples = np.arange(first, first + self.num_samples(first))
        sources, rows = self.order.locate(samples)
        width = None if self.trim_padding else self.sequence_length
        parts = _deal(len(samples), self.micro_batch_size, self.data_rank, self.data_degree)
        return [
            stack_rows(_gather(self.sources, sources[part], rows[part], self.micro_batch_size, width)) for part in parts
        ]

    def __iter__(self) -> Iterator[StepBatch]:
        start = self.samples_seen
        loader = DataLoader(
            _Steps(self),
            sampler=_Firsts(self, start),
            batch_size=None,
            num_workers=self.num_workers,
            prefetch_factor=self.prefetch if self.num_workers else None,
            collate_fn=_as_is,
            worker_init_fn=_WorkerStart(self.seed, self.data_rank, start),
            # a generator of its own: drawing from torch's global one would change the run's random numbers
            generator=torch.Generator().manual_seed(int(worker_seed(self.seed, self.data_rank, 0, start)[0])),
        )
        batches = iter(loader)
        while True:
            first = self.samples_seen
            try:
                loaded = next(batches)
            except RuntimeError as error:  # a worker that died (memory, a signal), or a fault in our own code
                raise RunError(f"loading the step at sample {first} failed: {error}") from error
            if isinstance(loaded, DanluError):
                raise loaded
            number = self.num_samples(first)
            self.samples_seen = first + number
            yield StepBatch([to_micro_batch(part) for part in loaded], first, number)


class EvalLoader:
    """Every row of a data set once, over all data ranks, in order; an iteration starts anew each time.

    Every rank gets the same number of micro-batches of the same shape; the rows that are missing at the end are padding
    without labels, so sums over labelled tokens count each row once.

    Args:
        source: the data set.
        micro_batch_size: sequences per forward pass.
        data_rank: this rank's place among the data ranks.
        data_degree: number of data ranks.
        max_rows: only the first rows, or None for all.
        sequence_length: slots of a row, as in `Loader`.
        trim_padding: cut each micro-batch to its longest row, as in `Loader`.
    """

    def __init__(
        self,
        source: RowSource,
        *,
        micro_batch_size: int,
        data_rank: int = 0,
        data_degree: int = 1,
        max_rows: int | None = None,
        sequence_length: int | None = None,
        trim_padding: bool = False,
    ) -> None:
        self.source = source
        self.num_rows = min(len(source), max_rows or len(source))
        self.micro_batch_size = micro_batch_size
        self.data_rank, self.data_degree = data_rank, data_degree
        self.width = None if trim_padding else _width([source], sequence_length)

    def __len__(self) -> int:
        return -(-self.num_rows // (self.data_degree * self.micro_batch_size))

    def __iter__(self) -> Iterator[MicroBatch]:
        for part in _deal(self.num_rows, self.micro_batch_size, self.data_rank, self.data_degree):
            rows = np.arange(part.start, part.stop)
            gathered = _gather([self.source], np.zeros_like(rows), rows, self.micro_batch_size, self.width)
            yield to_micro_batch(stack_rows(gathered))


def _width(sources: Sequence[RowSource], sequence_length: int | None) -> int:
    longest = max((source.sequence_length for source in sources), default=0)
    if sequence_length is not None and sequence_length < longest:
        raise UserError(
            "data set has longer rows than asked for",
            seen=f"rows of {longest}",
            legal=f"at most {sequence_length}",
            hint=f"build the data with sequence_length = {sequence_length}",
        )
    return sequence_length or longest


def _deal(num_rows: int, micro_batch_size: int, data_rank: int, data_degree: int) -> Iterator[slice]:
    """Yield the slices of a step's rows that are this rank's micro-batches; slices may be short or empty."""
    for first in range(0, num_rows, micro_batch_size * data_degree):
        start = min(first + data_rank * micro_batch_size, num_rows)
        yield slice(start, min(start + micro_batch_size, num_rows))


def _gather(
    sources: Sequence[RowSource], which: np.ndarray, indices: np.ndarray, num_rows: int, width: int | None
) -> Rows:
    """Return ``num_rows`` rows, the given ones first; ``width`` None takes that of the longest row."""
    spans: list[tuple[RowSource, np.ndarray, np.ndarray]] = []
    for number in np.unique(which):
        slots = np.flatnonzero(which == number)
        spans.append((sources[number], slots, indices[slots]))
    if width is None:
        width = max([1, *(int(source.widths(chosen).max()) for source, _, chosen in spans)])
    rows = Rows.padding(num_rows, width)
    for source, slots, chosen in spans:
        if len(spans) == 1:
            source.fill(rows, 0, chosen)
        else:
            for slot, row in zip(slots.tolist(), chosen.tolist(), strict=True):
                source.fill(rows, slot, [row])
    return rows


class _Steps(Dataset):
    """The step that starts at a given sample; errors meant for people travel as values, with their text intact."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getitem__(self, first: int) -> list[np.ndarray] | DanluError:
        try:
            return self.loader.load(first)
        except DanluError as error:
            return error


class _Firsts(Sampler):
    """The first sample of every step from ``start`` on, without end."""

    def __init__(self, loader: Loader, start: int) -> None:
        self.loader, self.start = loader, start

    def __iter__(self) -> Iterator[int]:
        first = self.start
        while True:
            yield first
            first += self.loader.num_samples(first)


class _WorkerStart:
    """Readies a worker process: its signals and its three generators; picklable, so any start method works."""

    def __init__(self, seed: int, data_rank: int, first_sample: int) -> None:
        self.seed, self.data_rank, self.first_sample = seed, data_rank, first_sample

    def __call__(self, worker: int) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, _leave_the_next)
        words = worker_seed(self.seed, self.data_rank, worker, self.first_sample).tolist()
        random.seed(words[0])
        np.random.seed(words[1])
        torch.manual_seed(words[2] << 32 | words[3])


def _leave_the_next(number: int, frame: FrameType | None) -> None:
    """Outlive one SIGTERM; a worker that hangs must still end by the ones that torch sends it."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _as_is(value: object) -> object:
    return value


def take_steps(loader: Loader, num_steps: int) -> list[StepBatch]:
    """Return the next steps as a list (for tests and benchmarks)."""
    return list(islice(loader, num_steps))
