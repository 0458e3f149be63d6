"""Pipelines on a backend that connects two ranks at their first message, and makes each wait there for the other.

That is what NCCL does and gloo does not, so ranks are threads here and a channel's first message is a meeting.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from danlu.parallel.pipeline import Channels, Pipeline

NUM_MICRO_BATCHES = 6
PATIENCE_SECONDS = 5.0


class _Work:
    def __init__(self, finish: Callable[[], None]) -> None:
        self.wait = finish

    def is_completed(self) -> bool:
        return True


class _Wire:
    """What all ranks share: per sender and receiver a place to meet, and the messages under way."""

    def __init__(self, size: int) -> None:
        links = [(source, target) for source in range(size) for target in range(size)]
        self.meetings = {link: threading.Barrier(2) for link in links}
        self.messages = {link: queue.Queue[Tensor]() for link in links}


class _MeetingChannels(Channels):
    """Channels of one thread; the first message on each waits until the peer has posted it too."""

    def __init__(self, wire: _Wire, size: int, place: int) -> None:
        super().__init__(tuple(range(size)), place, cast(Any, None), cast(Any, None))
        object.__setattr__(self, "wire", wire)
        object.__setattr__(self, "met", set())

    def _meet(self, link: tuple[int, int]) -> None:
        if link not in self.met:
            self.wire.meetings[link].wait(PATIENCE_SECONDS)
            self.met.add(link)

    def send(self, tensor: Tensor, to: int) -> Any:
        self._meet((self.place, to))
        self.wire.messages[self.place, to].put(tensor.clone())
        return _Work(lambda: None)

    def receive(self, tensor: Tensor, source: int) -> Any:
        self._meet((source, self.place))
        return _Work(lambda: tensor.copy_(self.wire.messages[source, self.place].get(timeout=PATIENCE_SECONDS)))


def _run_rank(wire: _Wire, size: int, place: int, schedule: str, num_virtual: int) -> float:
    pipeline = Pipeline(_MeetingChannels(wire, size, place), schedule=schedule, num_virtual=num_virtual)
    pipeline.open(torch.device("cpu"), tied=True)
    last = pipeline.num_stages - 1
    losses = []

    def forward(stage: int, index: int, hidden: Tensor | None) -> tuple[Tensor, Tensor | None]:
        hidden = torch.full((1,), float(index), requires_grad=True) if hidden is None else hidden
        out = hidden + 1
        if stage == last:
            losses.append(out.detach())
        return out, out.sum() if stage == last else None

    pipeline.run(lambda _: torch.empty(1), NUM_MICRO_BATCHES, forward, after_backward=lambda *_: None)
    if (peer := pipeline.other_end()) is not None:
        pipeline.channels.sum_with(torch.ones(1), peer)
    return float(sum(losses))


@pytest.mark.parametrize(
    ("schedule", "size", "num_virtual"),
    [("1f1b", 2, 1), ("1f1b", 4, 1), ("gpipe", 3, 1), ("interleaved", 2, 2), ("zero_bubble", 3, 1)],
)
def test_ranks_that_connect_at_their_first_message_do_not_wait_for_each_other(
    schedule: str, size: int, num_virtual: int
) -> None:
    """A whole step and the sum of a tied table's gradients run where a channel's first message needs both ranks."""
    wire = _Wire(size)
    with ThreadPoolExecutor(size) as threads:
        futures = [threads.submit(_run_rank, wire, size, place, schedule, num_virtual) for place in range(size)]
        losses = [future.result() for future in futures]
    assert sum(losses) == sum(index + size * num_virtual for index in range(NUM_MICRO_BATCHES))
