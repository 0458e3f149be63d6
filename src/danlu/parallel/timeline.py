"""When each action of a schedule runs, given what it costs: start, end, idle share.

The model is small on purpose. A rank does one action at a time, in the order of its schedule, as soon as its inputs are
there. An input from another rank arrives ``transfer_seconds`` after the action that made it; transfers cost the
ranks no time and do not queue behind one another (they run beside the computation, on links that are not full). A whole
backward takes as long as input gradient and weight gradient together.

So two bounds hold whatever the costs: a step is never shorter than the work of its busiest rank, nor than the way of
one micro-batch to the last stage and back. Everything above them is the schedule's doing. `bubble_fraction` is the
idle share of ranks times makespan: 1 - work / (ranks x makespan); with equal stages and no transfer time it is what
the formulas of `danlu.parallel.schedule_facts` say, and a test holds the two together.

Not modelled: contention of links, the reduction of gradients over data ranks, the optimizer step (which can start early
on ranks that finish early, as the zero-bubble paper, arXiv 2401.10241, uses), and slower pieces by splitting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from danlu.base.errors import UserError
from danlu.parallel.schedule import Action, Schedule, execution_order, find_needs, find_results


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds (or any other unit of time) that each stage takes for one micro-batch."""

    forward_seconds: tuple[float, ...]
    """For each stage."""
    input_gradient_seconds: tuple[float, ...]
    weight_gradient_seconds: tuple[float, ...]
    transfer_seconds: tuple[float, ...]
    """For each boundary: between stage s and s + 1, either way; counts only where the two are on different ranks."""


def equal_costs(
    num_stages: int,
    *,
    forward_seconds: float = 1.0,
    input_gradient_seconds: float = 1.0,
    weight_gradient_seconds: float = 1.0,
    transfer_seconds: float = 0.0,
) -> Costs:
    """Return the costs of stages that are all alike; the defaults are those of the papers' drawings."""
    return Costs(
        (forward_seconds,) * num_stages,
        (input_gradient_seconds,) * num_stages,
        (weight_gradient_seconds,) * num_stages,
        (transfer_seconds,) * (num_stages - 1),
    )


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it runs."""

    action: Action
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated step."""

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    """For each rank, in the order of its actions."""
    makespan_seconds: float
    busy_seconds: tuple[float, ...]
    """For each rank, the time that it works."""

    @property
    def bubble_fraction(self) -> float:
        """Idle share of the step over all ranks; 0 where nothing costs anything."""
        total = self.makespan_seconds * self.schedule.num_ranks
        return max(0.0, 1.0 - sum(self.busy_seconds) / total) if total else 0.0


def simulate(schedule: Schedule, costs: Costs) -> Timeline:
    """Find when each action runs.

    Raises:
        UserError: costs for another number of stages, a negative cost, or a schedule that deadlocks.
    """
    _check_costs(costs, schedule.num_stages)
    seconds = {"F": costs.forward_seconds, "I": costs.input_gradient_seconds, "W": costs.weight_gradient_seconds}
    free_at = [0.0] * schedule.num_ranks
    busy = [0.0] * schedule.num_ranks
    done_at: dict[Action, float] = {}
    spans: list[list[Span]] = [[] for _ in range(schedule.num_ranks)]
    for rank, action in execution_order(schedule):
        start = free_at[rank]
        for need in find_needs(action, schedule.num_stages):
            local = schedule.stage_to_rank[need.stage] == rank
            boundary = min(need.stage, action.stage)
            start = max(start, done_at[need] + (0.0 if local else costs.transfer_seconds[boundary]))
        results = find_results(action)
        duration = sum(seconds[result.kind][action.stage] for result in results)
        free_at[rank] = start + duration
        busy[rank] += duration
        done_at.update(dict.fromkeys(results, free_at[rank]))
        spans[rank].append(Span(action, start, free_at[rank]))
    return Timeline(schedule, tuple(tuple(row) for row in spans), max(free_at, default=0.0), tuple(busy))


def _check_costs(costs: Costs, num_stages: int) -> None:
    rows: tuple[tuple[str, Sequence[float], int], ...] = (
        ("forward_seconds", costs.forward_seconds, num_stages),
        ("input_gradient_seconds", costs.input_gradient_seconds, num_stages),
        ("weight_gradient_seconds", costs.weight_gradient_seconds, num_stages),
        ("transfer_seconds", costs.transfer_seconds, num_stages - 1),
    )
    for name, values, count in rows:
        if len(values) != count:
            raise UserError("costs for another number of stages", where=name, seen=len(values), legal=str(count))
        if not all(0 <= value < float("inf") for value in values):
            raise UserError("a cost is negative or not finite", where=name, seen=values)
