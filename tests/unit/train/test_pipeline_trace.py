"""What a traced step is compared with: durations as they were, and stages all alike."""

from __future__ import annotations

import pytest

from danlu.parallel.pipeline import Traced
from danlu.parallel.schedule import SCHEDULES, build_schedule, theoretical_bubble
from danlu.parallel.timeline import Costs, equal_costs, simulate
from danlu.train.pipeline_trace import measured_timeline, trace_document

UNEVEN = Costs((1.0, 2.0, 3.0, 1.0), (2.0, 2.0, 3.0, 1.0), (1.0, 1.0, 2.0, 1.0), (0.0,) * 3)


def document_of(name: str, costs: Costs, *, slower: float = 1.0) -> dict[str, object]:
    """Return what a step would leave that ran as simulated, on a clock that is ``slower``."""
    schedule = build_schedule(name, 4 // SCHEDULES[name].min_virtual, SCHEDULES[name].min_virtual, 6)
    traces = [
        [Traced(span.action, slower * span.start_seconds, slower * span.end_seconds) for span in rank]
        for rank in simulate(schedule, costs).spans
    ]
    return trace_document(measured_timeline(schedule, traces))


@pytest.mark.parametrize("name", sorted(SCHEDULES))
def test_a_step_of_equal_stages_is_the_ideal(name: str) -> None:
    """Measured, theoretical and ideal idle share are one number, that of the formula where there is one."""
    found = document_of(name, equal_costs(4), slower=0.001)
    assert found["bubble_fraction"] == pytest.approx(found["theoretical_bubble_fraction"])
    assert found["bubble_fraction"] == pytest.approx(found["ideal_bubble_fraction"])
    virtual = SCHEDULES[name].min_virtual
    formula = theoretical_bubble(name, 4 // virtual, virtual, 6)
    assert formula is not None
    assert found["ideal_bubble_fraction"] == pytest.approx(formula)


@pytest.mark.parametrize("name", sorted(set(SCHEDULES) - {"dualpipev"}))
def test_uneven_stages_cost_what_theory_says(name: str) -> None:
    """With the stages' own durations theory is what was measured; the ideal is below it."""
    found = document_of(name, UNEVEN)
    assert found["bubble_fraction"] == pytest.approx(found["theoretical_bubble_fraction"])
    assert found["ideal_bubble_fraction"] < found["bubble_fraction"]  # type: ignore[operator]


def test_waiting_is_idle_time() -> None:
    """One action that comes late: the measured share rises, what theory expects does not."""
    schedule = build_schedule("1f1b", 2, 1, 2)
    traces = [
        [Traced(s.action, s.start_seconds, s.end_seconds) for s in r] for r in simulate(schedule, equal_costs(2)).spans
    ]
    *rest, last = traces[0]
    late = trace_document(
        measured_timeline(
            schedule, [[*rest, Traced(last.action, last.start_seconds + 6, last.end_seconds + 6)], traces[1]]
        )
    )
    plain = trace_document(measured_timeline(schedule, traces))
    assert late["step_seconds"] == plain["step_seconds"] + 6
    assert late["bubble_fraction"] > plain["bubble_fraction"]
    assert late["theoretical_bubble_fraction"] == plain["theoretical_bubble_fraction"]
