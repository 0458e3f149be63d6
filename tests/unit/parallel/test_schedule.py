"""Pipeline schedules: complete, without deadlock, equal to torch's where both exist, and found out where wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from danlu.base.errors import UserError
from danlu.parallel.schedule import (
    SCHEDULES,
    Action,
    Schedule,
    build_schedule,
    check_schedule,
    execution_order,
    parse_action,
    parse_schedule,
    peak_in_flight,
    transfers,
)

RANKS = [1, 2, 3, 4, 8]
MICRO_BATCHES = [*range(1, 10), 16, 25]


def legal_virtual(name: str) -> list[int]:
    """Return numbers of stages a rank to test a schedule with."""
    return [v for v in (1, 2, 3, 4) if SCHEDULES[name].takes(v)]


CASES = [(name, p, v) for name in SCHEDULES for p in RANKS for v in legal_virtual(name)]


def edited(schedule: Schedule, rank: int, order: list[Action]) -> Schedule:
    """Return a copy with another order for one rank."""
    orders = list(schedule.orders)
    orders[rank] = tuple(order)
    return Schedule(
        schedule.name,
        schedule.num_ranks,
        schedule.num_stages,
        schedule.num_micro_batches,
        schedule.stage_to_rank,
        tuple(orders),
    )


@pytest.mark.parametrize(("name", "p", "v"), CASES)
def test_every_schedule_is_sound(name: str, p: int, v: int) -> None:
    """Any number of micro-batches: all work once, on the right rank, in a possible order; prints and parses back."""
    for m in MICRO_BATCHES:
        schedule = build_schedule(name, p, v, m)
        check_schedule(schedule)
        assert parse_schedule(str(schedule)) == schedule


@pytest.mark.parametrize("name", SCHEDULES)
def test_br_100_few_micro_batches_never_hang(name: str) -> None:
    """Fewer micro-batches than stages: every rank still reaches the end of its order under blocking receives."""
    for m in range(1, 8):
        schedule = build_schedule(name, 8, SCHEDULES[name].min_virtual, m)
        walked = list(execution_order(schedule))
        assert len(walked) == sum(map(len, schedule.orders))
        for rank, order in enumerate(schedule.orders):
            assert [action for at, action in walked if at == rank] == list(order)


def torch_order(kind: type, rank: int, p: int, v: int, m: int) -> list[str]:
    """Return torch's own order for a rank, without idle slots and gradient reductions; its pairs are taken apart."""
    schedule: Any = kind.__new__(kind)
    rounds = max(1, m // p)
    values = {
        "_num_stages": p * v,
        "num_stages": p * v,
        "_n_microbatches": m,
        "pp_group_size": p,
        "n_local_stages": v,
        "_stages": [None] * v,
        "rank": rank,
        "number_of_rounds": rounds,
        "microbatches_per_round": m // rounds,
    }
    schedule.__dict__.update(values)
    single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
    actions = schedule._get_pipeline_order()[rank] if single else schedule._calculate_single_rank_operations(rank)
    flat = [part for action in actions if action is not None for part in (action.sub_actions or [action])]
    return [str(action) for action in flat if action.is_compute_op]


def divides(p: int, m: int) -> bool:
    """Return whether torch's interleaved schedules take so many micro-batches."""
    return m % max(1, m // p) == 0


TORCH: dict[str, tuple[type, Callable[[int, int], bool]]] = {
    "gpipe": (torch_schedules.ScheduleGPipe, lambda p, m: True),
    "1f1b": (torch_schedules.Schedule1F1B, lambda p, m: m >= p),
    "interleaved": (torch_schedules.ScheduleInterleaved1F1B, divides),
    "looped_bfs": (torch_schedules.ScheduleLoopedBFS, lambda p, m: True),
    "interleaved_zero_bubble": (torch_schedules.ScheduleInterleavedZeroBubble, divides),
    "dualpipev": (torch_schedules.ScheduleDualPipeV, lambda p, m: m >= 2 * p),
}


@pytest.mark.parametrize("name", TORCH)
def test_orders_are_those_of_torch(name: str) -> None:
    """Wherever torch.distributed.pipelining has the schedule for these numbers, the order is the same, rank by rank."""
    kind, defined = TORCH[name]
    compared = 0
    for p in RANKS:
        for v in legal_virtual(name):
            for m in (m for m in MICRO_BATCHES if defined(p, m)):
                schedule = build_schedule(name, p, v, m)
                for rank, order in enumerate(schedule.orders):
                    mine, theirs = list(map(str, order)), torch_order(kind, rank, p, v, m)
                    if name == "1f1b" and rank == p - 1:
                        # torch's listing (not its execution) numbers the last rank's forwards from 1
                        mine, theirs = ([word.rstrip("0123456789") for word in words] for words in (mine, theirs))
                    assert mine == theirs, (p, v, m, rank)
                    compared += 1
    assert compared > 50


def test_zbv_differs_from_torch_only_in_which_weights_are_paid_first() -> None:
    """Forwards and input gradients stand as in torch; W stand at the same places, the oldest first here."""
    for p in RANKS:
        for m in MICRO_BATCHES:
            schedule = build_schedule("zbv", p, 2, m)
            for rank, order in enumerate(schedule.orders):
                theirs = torch_order(torch_schedules.ScheduleZBVZeroBubble, rank, p, 2, m)
                assert [str(a) for a in order if a.kind != "W"] == [word for word in theirs if "W" not in word]
                if m >= 2 * p - 1:
                    assert [a.kind == "W" for a in order] == ["W" in word for word in theirs]


def test_peak_of_gpipe_and_1f1b() -> None:
    """GPipe holds every micro-batch; 1F1B on rank r no more than the ranks from r onwards."""
    for p in RANKS:
        for m in MICRO_BATCHES:
            assert peak_in_flight(build_schedule("gpipe", p, 1, m)) == (m,) * p
            assert peak_in_flight(build_schedule("1f1b", p, 1, m)) == tuple(min(p - rank, m) for rank in range(p))


def test_peak_of_the_split_schedules() -> None:
    """ZB-H1 and ZB-V hold what 1F1B's fullest rank does, on every rank (2401.10241); DualPipeV one chunk more."""
    for p in RANKS[1:]:
        for m in (2 * p, 25):
            assert set(peak_in_flight(build_schedule("zero_bubble", p, 1, m))) == {p}
            assert set(peak_in_flight(build_schedule("zbv", p, 2, m))) == {2 * p}
            assert set(peak_in_flight(build_schedule("dualpipev", p, 2, m))) == {2 * p + 1}


def test_placement() -> None:
    """Loops wrap around; a V turns, so rank 0 holds the first and the last stage."""
    assert build_schedule("interleaved", 3, 2, 1).stage_to_rank == (0, 1, 2, 0, 1, 2)
    zbv = build_schedule("zbv", 3, 2, 1)
    assert zbv.stage_to_rank == (0, 1, 2, 2, 1, 0)
    assert zbv.stages_of(0) == (0, 5)


@pytest.mark.parametrize(("name", "p", "v"), CASES)
def test_transfers_are_all_and_in_the_senders_order(name: str, p: int, v: int) -> None:
    """Each boundary of stages is crossed twice a micro-batch; a channel's order is that of the sender's actions."""
    schedule = build_schedule(name, p, v, 5)
    moved = transfers(schedule)
    everything = [item for group in (moved.sends, moved.local) for items in group.values() for item in items]
    expected = {("activation", s, s + 1, i) for s in range(p * v - 1) for i in range(5)}
    expected |= {("gradient", s + 1, s, i) for s in range(p * v - 1) for i in range(5)}
    assert len(everything) == len(expected)
    assert {(t.what, t.from_stage, t.to_stage, t.micro_batch) for t in everything} == expected
    for (sender, receiver), items in moved.sends.items():
        assert sender != receiver
        made_at = {
            (a.stage, a.kind == "F", a.micro_batch): i for i, a in enumerate(schedule.orders[sender]) if a.kind != "W"
        }
        places = [made_at[item.from_stage, item.what == "activation", item.micro_batch] for item in items]
        assert places == sorted(places)
        assert all(schedule.stage_to_rank[item.to_stage] == receiver for item in items)
    turn = (p - 1, p)
    if SCHEDULES[name].placement == "v":
        assert {(t.from_stage, t.to_stage) for t in moved.local[p - 1]} >= {turn, turn[::-1]}


@pytest.mark.parametrize("name", SCHEDULES)
def test_channels_read_in_order_bring_all_that_is_needed(name: str) -> None:
    """An executor that takes messages only in the order of `transfers` finds each input; none is left over."""
    for m in (1, 3, 9):
        schedule = build_schedule(name, 4, SCHEDULES[name].min_virtual, m)
        moved = transfers(schedule)
        coming = {pair: list(items) for pair, items in moved.sends.items()}
        sent: Counter[tuple[int, int]] = Counter()
        held: set[tuple[int, str, int, int]] = set()
        for rank, (stage, kind, i) in execution_order(schedule):
            source = stage - 1 if kind == "F" else stage + 1
            if kind != "W" and 0 <= source < schedule.num_stages and schedule.stage_to_rank[source] != rank:
                pair = (schedule.stage_to_rank[source], rank)
                need = (rank, "activation" if kind == "F" else "gradient", stage, i)
                while need not in held:
                    assert sent[pair] > 0, "the receiver would wait for ever"
                    sent[pair] -= 1
                    message = coming[pair].pop(0)
                    held.add((rank, message.what, message.to_stage, message.micro_batch))
                held.remove(need)
            target = stage + 1 if kind == "F" else stage - 1
            if kind != "W" and 0 <= target < schedule.num_stages and schedule.stage_to_rank[target] != rank:
                sent[rank, schedule.stage_to_rank[target]] += 1
        assert not held
        assert not any(coming.values())


def test_check_finds_what_is_missing_doubled_or_misplaced() -> None:
    """Each fault has its own message, which names the action."""
    good = build_schedule("zero_bubble", 2, 1, 2)
    order = list(good.orders[0])
    with pytest.raises(UserError, match=r"rank 0, 0W1: work is missing"):
        check_schedule(edited(good, 0, order[:-1]))
    with pytest.raises(UserError, match=r"rank 0, 0F0: the work is there twice"):
        check_schedule(edited(good, 0, [*order, order[0]]))
    with pytest.raises(UserError, match=r"0B1: the work is there twice"):
        check_schedule(edited(good, 0, [*order, Action(0, "B", 1)]))
    with pytest.raises(UserError, match=r"rank 1, 0F0: the stage is on another rank"):
        check_schedule(edited(good, 1, [order[0], *good.orders[1]]))
    with pytest.raises(UserError, match=r"0F2: no such stage or micro-batch"):
        check_schedule(edited(good, 0, [*order, Action(0, "F", 2)]))


def test_check_finds_wrong_order_on_a_rank() -> None:
    """A backward before its forward, and a weight gradient before its input gradient, are refused."""
    good = build_schedule("zero_bubble", 1, 1, 1)
    forward, input_gradient, weight_gradient = good.orders[0]
    with pytest.raises(UserError, match=r"0I0: stands before the F that it needs"):
        check_schedule(edited(good, 0, [input_gradient, forward, weight_gradient]))
    with pytest.raises(UserError, match=r"0W0: stands before the I that it needs"):
        check_schedule(edited(good, 0, [forward, weight_gradient, input_gradient]))


def test_check_finds_deadlock() -> None:
    """Ranks that are each in order but wait for one another are refused, and both waits are named."""
    good = build_schedule("1f1b", 2, 1, 2)
    # rank 0 wants the first gradient before it sends what rank 1 wants to see first
    early = [parse_action(word) for word in ["0F0", "0B0", "0F1", "0B1"]]
    late = [parse_action(word) for word in ["1F0", "1F1", "1B0", "1B1"]]
    with pytest.raises(UserError, match="deadlock") as caught:
        check_schedule(edited(edited(good, 0, early), 1, late))
    assert "rank 0 at 0B0 waits for 1I0; rank 1 at 1F1 waits for 0F1" in str(caught.value)


def test_check_finds_wrong_numbers() -> None:
    """Orders, placement and micro-batches have to fit the numbers of ranks and stages."""
    good = build_schedule("gpipe", 2, 1, 1)
    for wrong, message in (
        (Schedule("x", 3, 2, 1, (0, 1), good.orders), "wrong number of orders"),
        (Schedule("x", 2, 3, 1, (0, 1), good.orders), "wrong number of placed stages"),
        (Schedule("x", 2, 2, 1, (0, 2), good.orders), "not on the ranks there are"),
        (Schedule("x", 2, 2, 0, (0, 1), ((), ())), "without micro-batches"),
    ):
        with pytest.raises(UserError, match=message):
            check_schedule(wrong)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not the head"),
        ("schedule x ranks 1 stages 1", "not the head"),
        ("schedule x ranks one stages 1 micro_batches 1 placement 0", "not a whole number"),
        ("schedule x ranks 1 stages 1 micro_batches 1 placement 0\nrank 1: 0F0", r"s\.txt:2: not the next rank"),
        ("schedule x ranks 1 stages 1 micro_batches 1 placement 0\nrank 0: 0F0 0X0", r"s\.txt:2: not an action"),
    ],
)
def test_bad_text_is_refused_with_its_line(text: str, message: str) -> None:
    """What is no schedule says where and why."""
    with pytest.raises(UserError, match=message):
        parse_schedule(text, where="s.txt")


@pytest.mark.parametrize("text", ["F0", "3F", "3f0", "-1F0", "3F0 ", "3F0F1", ""])
def test_bad_actions_are_refused(text: str) -> None:
    """Only stage, kind and micro-batch make an action."""
    with pytest.raises(UserError, match="not an action"):
        parse_action(text)


def test_actions_print_as_they_parse() -> None:
    """Every kind survives the way to text and back."""
    for text in ("3F0", "0B12", "10I4", "1W4"):
        assert str(parse_action(text)) == text


def test_illegal_numbers_are_refused() -> None:
    """Unknown names get a hint, as do numbers of stages a rank that a schedule does not have."""
    with pytest.raises(UserError, match=r"did you mean '1f1b'"):
        build_schedule("1f1", 2, 1, 2)
    with pytest.raises(
        UserError, match=r"seen:  1\n  legal: 2 or more\n  hint:  with 1 a rank there are gpipe, 1f1b, zero_"
    ):
        build_schedule("interleaved", 2, 1, 2)
    with pytest.raises(UserError, match=r"legal: 2\n"):
        build_schedule("zbv", 2, 3, 2)
    for numbers in ((0, 1, 1), (1, 0, 1), (1, 1, 0)):
        with pytest.raises(UserError, match="1 or more"):
            build_schedule("gpipe", *numbers)
