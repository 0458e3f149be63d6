"""Simulated steps: equal to the formulas, never better than what is possible."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from danlu.base.errors import UserError
from danlu.parallel.schedule import SCHEDULES, Schedule, build_schedule, parse_schedule, theoretical_bubble
from danlu.parallel.timeline import Costs, Timeline, equal_costs, simulate

SPLIT = [name for name, facts in SCHEDULES.items() if facts.splits_backward]


def simulated(name: str, p: int, v: int, m: int, forward: float = 1, back: float = 1, weight: float = 1) -> Timeline:
    """Simulate with so many seconds for all layers of a rank, in equal stages."""
    costs = equal_costs(
        p * v,
        forward_seconds=forward / v,
        input_gradient_seconds=back / v,
        weight_gradient_seconds=weight / v,
    )
    return simulate(build_schedule(name, p, v, m), costs)


def fewest(name: str) -> int:
    """Return the fewest stages a rank that a schedule takes."""
    return SCHEDULES[name].min_virtual


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(SCHEDULES)),
    p=st.integers(1, 8),
    v=st.integers(1, 4),
    m=st.integers(1, 30),
    times=st.tuples(*[st.integers(1, 30)] * 3),
    equal=st.booleans(),
)
def test_simulated_bubble_is_the_formula(
    name: str, p: int, v: int, m: int, times: tuple[int, int, int], equal: bool
) -> None:
    """Whatever forward, input and weight gradient cost: equal stages idle as long as the closed form says."""
    v = v if SCHEDULES[name].takes(v) else fewest(name)
    forward, back, weight = (times[0],) * 3 if equal else times
    seconds = {"forward_seconds": forward, "input_gradient_seconds": back, "weight_gradient_seconds": weight}
    expected = theoretical_bubble(name, p, v, m, **seconds)
    if expected is not None:
        assert simulated(name, p, v, m, forward, back, weight).bubble_fraction == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_formula_is_known_for_equal_costs_and_enough_micro_batches(name: str) -> None:
    """The test above compares something for every schedule."""
    assert theoretical_bubble(name, 4, fewest(name), 8) is not None
    assert theoretical_bubble(name, 1, fewest(name), 1) == 0


def test_published_values() -> None:
    """Eight ranks of GPipe work 46 % of the time with 6 micro-batches and 78 % with 25: m / (m + p - 1)."""
    for m, percent in ((6, 46), (25, 78)):
        for name in ("gpipe", "1f1b"):
            work = 1 - simulated(name, 8, 1, m).bubble_fraction
            assert work == pytest.approx(m / (m + 7))
            assert round(100 * work) == percent


def test_interleaving_divides_the_bubble() -> None:
    """The published form: (p - 1) / (v m + p - 1)."""
    for v in (2, 4):
        for name in ("interleaved", "looped_bfs"):
            assert simulated(name, 4, v, 8, 1, 1.3, 0.9).bubble_fraction == pytest.approx(3 / (8 * v + 3))


@pytest.mark.parametrize("name", SPLIT)
def test_splitting_the_backward_shortens_the_step(name: str) -> None:
    """F = I = W: a smaller bubble than 1F1B for any number of micro-batches, down to one."""
    for p in (2, 3, 4, 8):
        for m in (1, 2, 3, 4, 5, 8, 9, 16, 25):
            mine, usual = simulated(name, p, fewest(name), m), simulated("1f1b", p, 1, m)
            assert mine.bubble_fraction < usual.bubble_fraction - 1e-9, (p, m)


def longest_way(costs: Costs, schedule: Schedule) -> float:
    """Return how long one micro-batch takes to the last stage and back with nobody in its way."""
    crossings = [
        seconds
        for stage, seconds in enumerate(costs.transfer_seconds)
        if schedule.stage_to_rank[stage] != schedule.stage_to_rank[stage + 1]
    ]
    back = costs.input_gradient_seconds
    return sum(costs.forward_seconds) + sum(back) + costs.weight_gradient_seconds[0] + 2 * sum(crossings)


@settings(max_examples=150, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(SCHEDULES)), p=st.integers(1, 5), m=st.integers(1, 9))
def test_no_step_beats_its_busiest_rank_or_its_longest_way(data: st.DataObject, name: str, p: int, m: int) -> None:
    """Random costs for each stage: two lower bounds hold, and no rank does two things at once."""
    v = data.draw(st.integers(fewest(name), SCHEDULES[name].max_virtual or 3))
    seconds = st.floats(0, 10)
    rows = [tuple(data.draw(st.lists(seconds, min_size=n, max_size=n))) for n in (p * v, p * v, p * v, p * v - 1)]
    costs = Costs(*rows)
    schedule = build_schedule(name, p, v, m)
    timeline = simulate(schedule, costs)
    slack = 1e-9 * (1 + timeline.makespan_seconds)
    assert timeline.makespan_seconds >= max(timeline.busy_seconds) - slack
    assert timeline.makespan_seconds >= longest_way(costs, schedule) - slack
    for spans in timeline.spans:
        assert all(one.end_seconds <= other.start_seconds for one, other in itertools.pairwise(spans))
    work = m * sum(sum(row) for row in rows[:3])
    assert sum(timeline.busy_seconds) == pytest.approx(work)


def test_a_step_by_hand() -> None:
    """Two uneven stages, one micro-batch, a slow link: each action starts when its input has arrived."""
    schedule = build_schedule("zero_bubble", 2, 1, 1)
    timeline = simulate(schedule, Costs((1, 2), (3, 4), (5, 6), (10,)))
    first, second = timeline.spans
    assert [(s.start_seconds, s.end_seconds) for s in first] == [(0, 1), (27, 30), (30, 35)]
    assert [(s.start_seconds, s.end_seconds) for s in second] == [(11, 13), (13, 17), (17, 23)]
    assert timeline.busy_seconds == (9, 12)
    assert timeline.bubble_fraction == pytest.approx(1 - 21 / 70)


def test_stages_on_one_rank_pay_no_transfer() -> None:
    """At the turn of a V nothing is sent."""
    costs = Costs((1, 1), (1, 1), (1, 1), (100,))
    assert simulate(build_schedule("zbv", 1, 2, 3), costs).makespan_seconds == 18


def test_bad_costs_are_refused() -> None:
    """Another number of stages, and costs below zero or without end, name the list."""
    schedule = build_schedule("gpipe", 2, 1, 1)
    with pytest.raises(UserError, match="transfer_seconds: costs for another number of stages"):
        simulate(schedule, Costs((1, 1), (1, 1), (1, 1), (1, 1)))
    for wrong in (-1.0, float("inf"), float("nan")):
        with pytest.raises(UserError, match="forward_seconds: a cost is negative or not finite"):
            simulate(schedule, equal_costs(2, forward_seconds=wrong))


def test_nothing_costs_nothing() -> None:
    """Costs of zero give no bubble, not a division by zero."""
    zero = equal_costs(2, forward_seconds=0, input_gradient_seconds=0, weight_gradient_seconds=0)
    assert simulate(build_schedule("1f1b", 2, 1, 3), zero).bubble_fraction == 0
    free = {"forward_seconds": 0, "input_gradient_seconds": 0, "weight_gradient_seconds": 0}
    assert theoretical_bubble("1f1b", 2, 1, 3, **free) == 0


def test_a_deadlock_is_an_error_not_a_hang() -> None:
    """Simulating what waits for ever says so."""
    text = "schedule x ranks 2 stages 2 micro_batches 1 placement 0,1\nrank 0: 0B0 0F0\nrank 1: 1F0 1B0"
    with pytest.raises(UserError, match="deadlock"):
        simulate(parse_schedule(text), equal_costs(2))
