"""Pipeline schedules as values: who works on what, in which order, printed and checked before anything runs.

A pipeline cuts the model into stages and the batch into micro-batches. Stage s of micro-batch i can start forward when
stage s - 1 is through with it, and backward when stage s + 1 is; a rank that waits is idle, and the idle share of a
step is the *bubble*. With p ranks and m equal micro-batches, GPipe and 1F1B leave (p - 1) / (m + p - 1) of the step
idle: the ramp at both ends, which only more micro-batches can dilute. Other schedules shorten the ramp, and pay
elsewhere:

- several stages a rank (interleaving) divide the ramp by that number and multiply the transfers by rather more than it;
- splitting the backward lets the gradient of the weights (W), for which nobody waits, fill the ramp; activations live
  until W, and the backward runs in two pieces;
- a V (rank 0 holds first and last stage) does both, and evens out memory over the ranks.

A `Schedule` holds, for each rank, the exact sequence of its actions. It is plain data: `str` prints it,
`parse_schedule` reads it back, so an order can be written by hand, kept in a file or compared in a test. Whoever
executes one calls `check_schedule` first: every action exists once, on the rank that holds its stage, and no rank
waits for ever.

How an executor is assumed to move tensors: a send never blocks, a receive blocks. Between two ranks there is one
channel each way; its messages arrive in the order in which the sender's actions stand (`transfers`), and the
receiver takes them in that order and keeps what it does not need yet. What is earlier in a channel was sent earlier, so
taking messages in order adds no deadlock to those that `check_schedule` finds.

Invariants: times play no part here (`danlu.parallel.timeline` adds them), no order depends on a rank's own clock, and
any number of micro-batches from one upwards is legal for every schedule. Not done here: the layout of layers over
stages, and overlapping a forward with a backward inside one action, as DualPipe's kernels do.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from danlu.base.errors import UserError
from danlu.parallel.schedule_facts import SCHEDULES, ScheduleFacts, schedule_facts, theoretical_bubble
from danlu.parallel.schedule_orders import Action, Kind, Order, parse_action

__all__ = [
    "SCHEDULES",
    "Action",
    "Kind",
    "Order",
    "Schedule",
    "ScheduleFacts",
    "Transfer",
    "Transfers",
    "build_schedule",
    "check_schedule",
    "execution_order",
    "find_needs",
    "find_results",
    "parse_action",
    "parse_schedule",
    "peak_in_flight",
    "schedule_facts",
    "theoretical_bubble",
    "transfers",
]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who works on what, in which order. ``str`` gives a text that `parse_schedule` reads back.

    >>> print(build_schedule("1f1b", num_ranks=2, num_virtual=1, num_micro_batches=2))
    schedule 1f1b ranks 2 stages 2 micro_batches 2 placement 0,1
    rank 0: 0F0 0F1 0B0 0B1
    rank 1: 1F0 1B0 1F1 1B1
    """

    name: str
    num_ranks: int
    num_stages: int
    num_micro_batches: int
    stage_to_rank: tuple[int, ...]
    orders: tuple[Order, ...]

    def __str__(self) -> str:
        placement = ",".join(str(rank) for rank in self.stage_to_rank)
        head = (
            f"schedule {self.name} ranks {self.num_ranks} stages {self.num_stages} "
            f"micro_batches {self.num_micro_batches} placement {placement}"
        )
        rows = (f"rank {rank}: {' '.join(map(str, order))}".rstrip() for rank, order in enumerate(self.orders))
        return "\n".join([head, *rows])

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank holds, in the order of the model."""
        return tuple(stage for stage, owner in enumerate(self.stage_to_rank) if owner == rank)


def parse_schedule(text: str, *, where: str = "schedule") -> Schedule:
    """Read what ``str(schedule)`` prints. The result is well-formed, not yet sound: `check_schedule` says that.

    Args:
        text: a head line, then one line a rank in order.
        where: what errors call the text, such as its file.

    Raises:
        UserError: a line is not as described; the error names it.
    """
    head, *rows = text.strip().splitlines() or [""]
    words = head.split()
    if len(words) != 10 or words[::2] != ["schedule", "ranks", "stages", "micro_batches", "placement"]:
        legal = "schedule NAME ranks N stages N micro_batches N placement RANK,RANK,..."
        raise UserError("not the head of a schedule", where=f"{where}:1", seen=head, legal=legal)
    try:
        num_ranks, num_stages, num_micro_batches = (int(words[i]) for i in (3, 5, 7))
        placement = tuple(int(rank) for rank in words[9].split(","))
    except ValueError:
        raise UserError("not a whole number in the head of a schedule", where=f"{where}:1", seen=head) from None
    orders = []
    for number, row in enumerate(rows):
        start, colon, actions = row.partition(":")
        line = f"{where}:{number + 2}"
        if start.split() != ["rank", str(number)] or not colon:
            raise UserError("not the next rank's line", where=line, seen=row, legal=f"rank {number}: ACTION ACTION ...")
        orders.append(tuple(parse_action(word, where=line) for word in actions.split()))
    return Schedule(words[1], num_ranks, num_stages, num_micro_batches, placement, tuple(orders))


def build_schedule(name: str, num_ranks: int, num_virtual: int, num_micro_batches: int) -> Schedule:
    """Build a schedule.

    Args:
        name: one of `SCHEDULES`.
        num_ranks: ranks in the pipeline.
        num_virtual: stages that each rank holds.
        num_micro_batches: micro-batches in a step; any number from 1 upwards.

    Raises:
        UserError: an unknown name, a number below 1, or a number of stages a rank that this schedule has no order for.
    """
    facts = schedule_facts(name)
    for what, count in (("ranks", num_ranks), ("stages a rank", num_virtual), ("micro-batches", num_micro_batches)):
        if count < 1:
            raise UserError(f"a pipeline needs {what}", where=f"schedule {name}", seen=count, legal="1 or more")
    if not facts.takes(num_virtual):
        others = [other for other, its in SCHEDULES.items() if its.takes(num_virtual)]
        raise UserError(
            "this schedule has another number of stages a rank",
            where=f"schedule {name}",
            seen=num_virtual,
            legal=facts.legal_virtual,
            hint=f"with {num_virtual} a rank there are {', '.join(others)}",
        )
    num_stages = num_ranks * num_virtual
    return Schedule(
        name=name,
        num_ranks=num_ranks,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        stage_to_rank=tuple(_rank_of(stage, num_ranks, facts.placement) for stage in range(num_stages)),
        orders=tuple(facts.order(rank, num_ranks, num_virtual, num_micro_batches) for rank in range(num_ranks)),
    )


def _rank_of(stage: int, num_ranks: int, placement: str) -> int:
    way, place = divmod(stage, num_ranks)
    return num_ranks - 1 - place if placement == "v" and way % 2 else place


def find_needs(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return which results an action needs; a whole backward (B) counts as the I and the W that it does."""
    stage, kind, micro_batch = action
    if kind == "F":
        return (Action(stage - 1, "F", micro_batch),) if stage > 0 else ()
    if kind == "W":
        return (Action(stage, "I", micro_batch),)
    own = Action(stage, "F", micro_batch)
    return (own, Action(stage + 1, "I", micro_batch)) if stage < num_stages - 1 else (own,)


def find_results(action: Action) -> tuple[Action, ...]:
    """Return which results an action leaves, in the terms of `find_needs`."""
    stage, kind, micro_batch = action
    return (Action(stage, "I", micro_batch), Action(stage, "W", micro_batch)) if kind == "B" else (action,)


def execution_order(schedule: Schedule) -> Iterator[tuple[int, Action]]:
    """Yield (rank, action) so that each comes after all that it needs and after its rank's earlier actions.

    Raises:
        UserError: no rank can go on; the error says which rank waits where for what.
    """
    position = [0] * schedule.num_ranks
    done: set[Action] = set()
    waiting: dict[Action, list[int]] = defaultdict(list)
    ready = deque(range(schedule.num_ranks))
    while ready:
        rank = ready.popleft()
        order = schedule.orders[rank]
        while position[rank] < len(order):
            action = order[position[rank]]
            missing = next((need for need in find_needs(action, schedule.num_stages) if need not in done), None)
            if missing is not None:
                waiting[missing].append(rank)
                break
            position[rank] += 1
            yield rank, action
            for result in find_results(action):
                done.add(result)
                ready.extend(waiting.pop(result, ()))
    if waiting:
        stuck = sorted((rank, missing) for missing, ranks in waiting.items() for rank in ranks)
        seen = "; ".join(
            f"rank {rank} at {schedule.orders[rank][position[rank]]} waits for {need}" for rank, need in stuck
        )
        raise UserError("deadlock: no rank can go on", where=f"schedule {schedule.name}", seen=seen)


def check_schedule(schedule: Schedule) -> None:
    """Raise unless the schedule can be executed and does all the work exactly once.

    Raises:
        UserError: the placement does not fit the numbers; an action is missing, there twice, on a rank that does not
            hold its stage, or before what it needs on the same rank; or the ranks wait for one another for ever.
    """
    _check_numbers(schedule)
    where = f"schedule {schedule.name}"
    stages, micro_batches = range(schedule.num_stages), range(schedule.num_micro_batches)
    seen: set[Action] = set()
    for rank, order in enumerate(schedule.orders):
        for action in order:
            place = f"{where}, rank {rank}, {action}"
            if action.stage not in range(schedule.num_stages) or action.micro_batch not in range(
                schedule.num_micro_batches
            ):
                raise UserError("no such stage or micro-batch", where=place)
            if schedule.stage_to_rank[action.stage] != rank:
                owner = schedule.stage_to_rank[action.stage]
                raise UserError("the stage is on another rank", where=place, legal=f"rank {owner}")
            for need in find_needs(action, schedule.num_stages):
                if need.stage == action.stage and need not in seen:
                    raise UserError(f"stands before the {need.kind} that it needs", where=place)
            if any(result in seen for result in find_results(action)):
                raise UserError("the work is there twice", where=place)
            seen.update(find_results(action))
    for stage in stages:
        for micro_batch in micro_batches:
            for kind in ("F", "I", "W"):
                if Action(stage, kind, micro_batch) not in seen:
                    rank = schedule.stage_to_rank[stage]
                    raise UserError("work is missing", where=f"{where}, rank {rank}, {stage}{kind}{micro_batch}")
    for _ in execution_order(schedule):
        pass


def _check_numbers(schedule: Schedule) -> None:
    where = f"schedule {schedule.name}"
    if schedule.num_micro_batches < 1:
        raise UserError("a step without micro-batches", where=where, seen=schedule.num_micro_batches, legal="1 or more")
    if len(schedule.orders) != schedule.num_ranks:
        legal = f"{schedule.num_ranks}, one a rank"
        raise UserError("wrong number of orders", where=where, seen=len(schedule.orders), legal=legal)
    if len(schedule.stage_to_rank) != schedule.num_stages:
        seen = schedule.stage_to_rank
        raise UserError("wrong number of placed stages", where=where, seen=seen, legal=f"{schedule.num_stages} ranks")
    if set(schedule.stage_to_rank) != set(range(schedule.num_ranks)):
        legal = f"each of 0 to {schedule.num_ranks - 1}, and no other"
        raise UserError("stages are not on the ranks there are", where=where, seen=schedule.stage_to_rank, legal=legal)


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Return, for each rank, for how many (stage, micro-batch) pairs it holds activations at once, at most.

    They live from F to the end of B, or of W where the backward is split (an I may free a part of them already). Divide
    by the stages a rank to compare schedules with different numbers of stages.
    """
    peaks = []
    for order in schedule.orders:
        alive = peak = 0
        for action in order:
            alive += {"F": 1, "B": -1, "I": 0, "W": -1}[action.kind]
            peak = max(peak, alive)
        peaks.append(peak)
    return tuple(peaks)


@dataclass(frozen=True, slots=True)
class Transfer:
    """A tensor that one stage makes for its neighbour: activations forward, the gradient of the same backward."""

    what: Literal["activation", "gradient"]
    from_stage: int
    to_stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class Transfers:
    """All that moves in a step."""

    sends: dict[tuple[int, int], tuple[Transfer, ...]]
    """(sending rank, receiving rank) to what goes that way, in the order of the sender's actions. Pairs between which
    nothing moves are left out."""
    local: dict[int, tuple[Transfer, ...]]
    """Rank to what it hands to itself, because it holds both stages, in the order of its actions."""


def transfers(schedule: Schedule) -> Transfers:
    """Return what each rank sends to which other rank, in which order, and what stays on a rank."""
    sends: dict[tuple[int, int], list[Transfer]] = defaultdict(list)
    local: dict[int, list[Transfer]] = defaultdict(list)
    for rank, order in enumerate(schedule.orders):
        for stage, kind, micro_batch in order:
            to_stage = stage + 1 if kind == "F" else stage - 1
            if kind == "W" or not 0 <= to_stage < schedule.num_stages:
                continue
            transfer = Transfer("activation" if kind == "F" else "gradient", stage, to_stage, micro_batch)
            receiver = schedule.stage_to_rank[to_stage]
            (local[rank] if receiver == rank else sends[rank, receiver]).append(transfer)
    return Transfers(
        sends={pair: tuple(moved) for pair, moved in sorted(sends.items())},
        local={rank: tuple(moved) for rank, moved in sorted(local.items())},
    )
