"""In which order each rank of a pipeline works: the eight schedules, as lists of actions.

Seen from one rank, a schedule without a V is four choices:

- the sequence of its forwards and the sequence of its backwards (which stage, which micro-batch);
- how many forwards it runs before its first backward (the warm-up); after that forwards and backwards alternate until
  the forwards run out;
- whether a backward is whole (B) or split into input gradient (I) and weight gradient (W);
- if split, how many W stay owed before the first is paid. Nobody waits for a W, so owed ones fill the time in which the
  rank would wait for gradients at the end.

GPipe (arXiv 1811.06965) warms up with everything; 1F1B (arXiv 1806.03377, 2104.04473) with one forward for each rank
behind it. Interleaving gives a rank several stages and visits them in rounds of about ``num_ranks`` micro-batches
(depth first, arXiv 2104.04473); breadth first (arXiv 2211.05953) makes one round of all micro-batches. ZB-H1
(arXiv 2401.10241) is 1F1B with the backward split.

The two schedules with a V (stages go down the ranks and come back up, so rank 0 holds both ends of the model) are
phases written out by hand: ZB-V (arXiv 2401.10241, section 6) and DualPipeV, one half of DualPipe (arXiv 2412.19437).
Both are defined from about two micro-batches a rank upwards. With fewer, the order is made for the smallest legal
number and the surplus is struck out: without a micro-batch's whole way through the pipeline all other waits remain
satisfiable, so a shortened order cannot hang. (1F1B with an uncapped warm-up is how a pipeline with few micro-batches
hangs.)
"""

from __future__ import annotations

import re
from collections import Counter, deque
from typing import Literal, NamedTuple

from danlu.base.errors import UserError

Kind = Literal["F", "B", "I", "W"]
_ACTION = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One piece of work of one stage for one micro-batch; printed as stage, kind, micro-batch: ``3F0``.

    >>> Action(3, "F", 0) == parse_action(str(Action(3, "F", 0)))
    True
    """

    stage: int
    """Virtual stage, counted along the model."""
    kind: Kind
    """F forward, B whole backward, I gradient of the input, W gradient of the weights. B does the work of I and W."""
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.micro_batch}"


Order = tuple[Action, ...]


def parse_action(text: str, *, where: str | None = None) -> Action:
    """Read what ``str(action)`` prints.

    Raises:
        UserError: the text is no action.
    """
    found = _ACTION.fullmatch(text)
    if found is None:
        raise UserError(
            "not an action", where=where, seen=text, legal="stage, one of F B I W, micro-batch: 3F0, 0B12, 1I4, 1W4"
        )
    stage, kind, micro_batch = found.groups()
    return Action(int(stage), kind, int(micro_batch))  # type: ignore[arg-type]


class _Writer:
    """Writes one rank's order: counts the micro-batches of each stage and remembers which W are owed, oldest first."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self.forwards: Counter[int] = Counter()
        self.backwards: Counter[int] = Counter()
        self.owed: deque[tuple[int, int]] = deque()

    def forward(self, stage: int) -> None:
        self.actions.append(Action(stage, "F", self.forwards[stage]))
        self.forwards[stage] += 1

    def backward(self, stage: int, *, split: bool = False) -> None:
        micro_batch = self.backwards[stage]
        self.actions.append(Action(stage, "I" if split else "B", micro_batch))
        self.backwards[stage] += 1
        if split:
            self.owed.append((stage, micro_batch))

    def weight(self) -> None:
        if self.owed:
            stage, micro_batch = self.owed.popleft()
            self.actions.append(Action(stage, "W", micro_batch))

    def order(self, num_micro_batches: int) -> Order:
        """Pay what is owed and strike out the micro-batches that there are not."""
        while self.owed:
            self.weight()
        return tuple(action for action in self.actions if action.micro_batch < num_micro_batches)


def _alternate(
    forwards: list[tuple[int, int]], backwards: list[tuple[int, int]], *, warmup: int, owed: int | None = None
) -> Order:
    """Return warm-up forwards, then forward and backward in turn, then the remaining backwards.

    Args:
        forwards: (stage, micro-batch) in the order of the forwards.
        backwards: (stage, micro-batch) in the order of the backwards.
        warmup: how many forwards come before the first pair; capped at all of them.
        owed: split each backward and keep so many W owed; None leaves backwards whole.
    """
    warmup = min(warmup, len(forwards))
    actions = [Action(stage, "F", micro_batch) for stage, micro_batch in forwards[:warmup]]
    debts: deque[Action] = deque()
    for i, (stage, micro_batch) in enumerate(backwards):
        if warmup + i < len(forwards):
            ahead, number = forwards[warmup + i]
            actions.append(Action(ahead, "F", number))
        if owed is None:
            actions.append(Action(stage, "B", micro_batch))
            continue
        actions.append(Action(stage, "I", micro_batch))
        debts.append(Action(stage, "W", micro_batch))
        if len(debts) > owed:
            actions.append(debts.popleft())
    return (*actions, *debts)


def plan_rounds(num_ranks: int, num_micro_batches: int) -> list[range]:
    """Split the micro-batches into rounds of at least ``num_ranks`` (where there are so many), the longer ones first.

    >>> plan_rounds(4, 10)
    [range(0, 5), range(5, 10)]
    """
    num_rounds = max(1, num_micro_batches // num_ranks)
    size, longer = divmod(num_micro_batches, num_rounds)
    starts = [i * size + min(i, longer) for i in range(num_rounds + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(num_rounds)]


def gpipe(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """All forwards, then all backwards."""
    passes = [(rank, i) for i in range(num_micro_batches)]
    return _alternate(passes, passes, warmup=num_micro_batches)


def one_forward_one_backward(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """1F1B: a rank starts with one forward for each rank behind it."""
    passes = [(rank, i) for i in range(num_micro_batches)]
    return _alternate(passes, passes, warmup=num_ranks - 1 - rank)


def zero_bubble(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """ZB-H1: 1F1B that owes one W for each rank before it, as many as that rank has forwards less in flight."""
    passes = [(rank, i) for i in range(num_micro_batches)]
    return _alternate(passes, passes, warmup=num_ranks - 1 - rank, owed=rank)


def looped_bfs(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """Breadth first: all micro-batches through one stage before the next; back the same way, last in first out."""
    stages = range(rank, num_ranks * num_virtual, num_ranks)
    forwards = [(stage, i) for stage in stages for i in range(num_micro_batches)]
    return _alternate(forwards, forwards[::-1], warmup=len(forwards))


def _rounds(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> tuple[list, list, int]:
    """Return forwards and backwards, round by round, and how many forwards the last rank runs before a backward."""
    stages = range(rank, num_ranks * num_virtual, num_ranks)
    rounds = plan_rounds(num_ranks, num_micro_batches)
    forwards = [(stage, i) for numbers in rounds for stage in stages for i in numbers]
    backwards = [(stage, i) for numbers in rounds for stage in reversed(stages) for i in numbers]
    return forwards, backwards, (num_virtual - 1) * len(rounds[0])


def interleaved(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """Interleaved 1F1B: a rank needs two forwards ahead for each rank behind it, one each way."""
    forwards, backwards, warmup = _rounds(rank, num_ranks, num_virtual, num_micro_batches)
    return _alternate(forwards, backwards, warmup=warmup + 2 * (num_ranks - 1 - rank))


def interleaved_zero_bubble(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """Interleaved 1F1B with split backwards: an I is half as long as a B, so one forward ahead for each rank behind."""
    forwards, backwards, warmup = _rounds(rank, num_ranks, num_virtual, num_micro_batches)
    return _alternate(forwards, backwards, warmup=warmup + num_ranks - 1 - rank, owed=rank)


def zbv(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """ZB-V: down and up the V, every backward split."""
    down, up = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - rank
    total = max(num_micro_batches, 2 * num_ranks - 1)
    writer = _Writer()
    for _ in range(2 * behind - 1):
        writer.forward(down)
    for _ in range(rank):
        writer.forward(up)
        writer.forward(down)
    for _ in range(behind):
        writer.forward(up)
        writer.backward(up, split=True)
        writer.weight()
    while writer.forwards[up] < total:
        if writer.forwards[down] < total:
            writer.forward(down)
        writer.backward(down, split=True)
        writer.weight()
        writer.forward(up)
        writer.backward(up, split=True)
        writer.weight()
    for _ in range(rank):
        writer.backward(down, split=True)
        writer.backward(up, split=True)
    for _ in range(behind):
        writer.backward(down, split=True)
        writer.weight()
    return writer.order(num_micro_batches)


def dualpipev(rank: int, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Order:
    """DualPipeV: forwards of one arm of the V beside backwards of the other; W is split off only near the ends."""
    down, up = rank, 2 * num_ranks - 1 - rank
    behind = num_ranks - 1 - rank
    total = max(num_micro_batches, 2 * num_ranks)
    writer = _Writer()
    for _ in range(2 * behind):
        writer.forward(down)
    for _ in range(rank + 1):
        writer.forward(down)
        writer.forward(up)
    for _ in range(behind):
        writer.backward(up, split=True)
        writer.weight()
        writer.forward(up)
    for _ in range(total - 2 * num_ranks + rank + 1):
        writer.forward(down)
        writer.backward(up)
        writer.forward(up)
        writer.backward(down)
    for _ in range(behind):
        writer.backward(up)
        writer.forward(up)
        writer.backward(down)
    for i in range(2 * (rank + 1)):
        # the second half, an odd rest included, owes its W to the phase below
        writer.backward((up, down)[i % 2], split=i > rank)
    for _ in range(behind):
        writer.weight()
        writer.backward(down, split=True)
    return writer.order(num_micro_batches)
