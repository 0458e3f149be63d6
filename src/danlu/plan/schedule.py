"""What a pipeline schedule costs: its step, its idle share, the activations it holds, the tensors it moves.

Schedules are compared at the same hardware and the same model: p ranks, each with the same layers, whatever number of
stages those are cut into. So times are given for one micro-batch through *all layers of a rank* and a stage takes its
share of them. The simulated idle share holds for any costs, transfers included; the formula is for equal stages and
free transfers, and stands beside it to show how far a real pipeline is from that.

A step here ends with the last backward. Reducing gradients and the optimizer come on top, for every schedule alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from danlu.base.errors import UserError
from danlu.parallel.schedule import (
    SCHEDULES,
    build_schedule,
    check_schedule,
    peak_in_flight,
    schedule_facts,
    theoretical_bubble,
    transfers,
)
from danlu.parallel.timeline import Costs, Timeline, simulate
from danlu.plan.timeline_drawing import draw_timeline, svg_timeline


@dataclass(frozen=True, slots=True)
class RankCosts:
    """Seconds of one micro-batch through all layers of one rank, and between ranks."""

    forward_seconds: float = 1.0
    backward_seconds: float = 2.0
    weight_share: float = 0.5
    """Share of the backward that computes gradients of weights; a matmul spends as much on either gradient."""
    transfer_seconds: float = 0.0
    """One micro-batch's activations, or their gradient, from one rank to the next."""
    stage_weights: tuple[float, ...] = ()
    """Relative work of each stage along the model, 1 being an equal share; empty: all equal."""


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """A schedule, simulated."""

    timeline: Timeline
    costs: RankCosts
    num_virtual: int
    bubble_by_formula: float | None
    """For equal stages and free transfers; None: no closed form is known."""
    peak_in_flight: tuple[int, ...]
    num_sends: int

    @property
    def peak_micro_batches(self) -> float:
        """Activations on the fullest rank, counted in micro-batches through all of its layers."""
        return max(self.peak_in_flight) / self.num_virtual


def plan_schedule(
    name: str, num_ranks: int, num_virtual: int | None, num_micro_batches: int, costs: RankCosts
) -> SchedulePlan:
    """Build, check and simulate a schedule.

    Args:
        name: one of `danlu.parallel.schedule.SCHEDULES`.
        num_ranks: ranks in the pipeline.
        num_virtual: stages a rank; None: the fewest that the schedule takes.
        num_micro_batches: micro-batches in a step.
        costs: what a micro-batch costs.

    Raises:
        UserError: a name or number that no schedule has, or costs that make no sense.
    """
    facts = schedule_facts(name)
    num_virtual = facts.min_virtual if num_virtual is None else num_virtual
    schedule = build_schedule(name, num_ranks, num_virtual, num_micro_batches)
    check_schedule(schedule)
    weight_seconds = costs.backward_seconds * costs.weight_share
    input_seconds = costs.backward_seconds - weight_seconds
    return SchedulePlan(
        timeline=simulate(schedule, _stage_costs(costs, schedule.num_stages, num_virtual)),
        costs=costs,
        num_virtual=num_virtual,
        bubble_by_formula=theoretical_bubble(
            name,
            num_ranks,
            num_virtual,
            num_micro_batches,
            forward_seconds=costs.forward_seconds,
            input_gradient_seconds=input_seconds,
            weight_gradient_seconds=weight_seconds,
        ),
        peak_in_flight=peak_in_flight(schedule),
        num_sends=sum(len(sent) for sent in transfers(schedule).sends.values()),
    )


def compare_schedules(
    num_ranks: int, num_virtual: int | None, num_micro_batches: int, costs: RankCosts
) -> list[SchedulePlan]:
    """Plan every schedule for the same ranks and micro-batches.

    Each has ``num_virtual`` stages a rank if it takes so many, else the fewest that it takes.
    """
    return [
        plan_schedule(
            name,
            num_ranks,
            num_virtual if num_virtual is not None and facts.takes(num_virtual) else None,
            num_micro_batches,
            costs,
        )
        for name, facts in SCHEDULES.items()
    ]


def parse_weights(text: str) -> tuple[float, ...]:
    """Read ``stage_weights`` as a command gives them: numbers with commas between.

    Raises:
        UserError: something is no number.
    """
    try:
        return tuple(float(word) for word in text.split(",")) if text else ()
    except ValueError:
        raise UserError("not numbers with commas between", where="stage_weights", seen=text, legal="1,1,1.5") from None


def write_svg(plan: SchedulePlan, path: Path) -> None:
    """Draw the timeline into a file.

    Raises:
        UserError: the file cannot be written.
    """
    schedule = plan.timeline.schedule
    title = f"{schedule.name}: {schedule.num_ranks} ranks, {schedule.num_micro_batches} micro-batches"
    try:
        path.write_text(svg_timeline(plan.timeline, title=title), encoding="utf-8")
    except OSError as error:
        raise UserError("cannot write the drawing", where=str(path), seen=error.strerror) from None


def _stage_costs(costs: RankCosts, num_stages: int, num_virtual: int) -> Costs:
    if not 0 <= costs.weight_share <= 1:
        raise UserError("not a share", where="weight_share", seen=costs.weight_share, legal="0 to 1")
    weights = costs.stage_weights or (1.0,) * num_stages
    if len(weights) != num_stages:
        raise UserError("not one weight a stage", where="stage_weights", seen=len(weights), legal=str(num_stages))
    weight_seconds = costs.backward_seconds * costs.weight_share
    return Costs(
        forward_seconds=tuple(costs.forward_seconds * weight / num_virtual for weight in weights),
        input_gradient_seconds=tuple(
            (costs.backward_seconds - weight_seconds) * weight / num_virtual for weight in weights
        ),
        weight_gradient_seconds=tuple(weight_seconds * weight / num_virtual for weight in weights),
        transfer_seconds=(costs.transfer_seconds,) * (num_stages - 1),
    )


def as_json(plan: SchedulePlan, *, actions: bool = False) -> dict[str, Any]:
    """Return the plan as a document; with ``actions`` also when each action of each rank runs."""
    timeline, schedule = plan.timeline, plan.timeline.schedule
    facts = SCHEDULES[schedule.name]
    document: dict[str, Any] = {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_virtual": plan.num_virtual,
        "num_micro_batches": schedule.num_micro_batches,
        "stage_to_rank": list(schedule.stage_to_rank),
        "splits_backward": facts.splits_backward,
        "step_seconds": timeline.makespan_seconds,
        "busy_seconds": list(timeline.busy_seconds),
        "bubble_fraction": timeline.bubble_fraction,
        "bubble_fraction_by_formula": plan.bubble_by_formula,
        "bubble_formula": facts.bubble,
        "peak_in_flight": list(plan.peak_in_flight),
        "peak_micro_batches": plan.peak_micro_batches,
        "num_sends": plan.num_sends,
        "source": facts.source,
    }
    if actions:
        document["actions"] = [
            [
                {"action": str(span.action), "start_seconds": span.start_seconds, "end_seconds": span.end_seconds}
                for span in spans
            ]
            for spans in timeline.spans
        ]
    return document


def as_text(plan: SchedulePlan, *, width: int, actions: bool = False) -> str:
    """Return the plan for people: drawing, idle share, memory, transfers; with ``actions`` also each rank's order."""
    timeline, schedule = plan.timeline, plan.timeline.schedule
    facts = SCHEDULES[schedule.name]
    costs = plan.costs
    formula = plan.bubble_by_formula
    by_formula = "not known for these numbers" if formula is None else f"{formula:.1%}, equal stages and free transfers"
    last = schedule.num_ranks - 1
    facts_rows = [
        ["step", f"{timeline.makespan_seconds:.6g} s"],
        ["", f"of a micro-batch a rank has {costs.forward_seconds:g} s forward, {costs.backward_seconds:g} s backward"],
        ["bubble", f"{timeline.bubble_fraction:.1%} idle, {1 - timeline.bubble_fraction:.1%} at work"],
        ["by formula", by_formula],
        ["", f"idle seconds of a rank: {facts.bubble}"],
        ["in flight", " ".join(map(str, plan.peak_in_flight))],
        ["", f"activations that ranks 0 to {last} hold at once, each of one stage and one micro-batch"],
        ["", f"fullest rank: as much as {plan.peak_micro_batches:g} micro-batches through all of its layers"],
        ["sends", f"{plan.num_sends} tensors between ranks"],
    ]
    parts = [
        f"{schedule.name}: {schedule.num_ranks} ranks, stages a rank: {plan.num_virtual}, "
        f"micro-batches: {schedule.num_micro_batches} ({facts.source})",
        draw_timeline(timeline, width=width),
        _table(facts_rows),
    ]
    return "\n\n".join([*parts, str(schedule)] if actions else parts)


def table_text(plans: Sequence[SchedulePlan]) -> str:
    """Return a table of several plans for the same ranks and micro-batches."""
    head = ["schedule", "stages a rank", "step", "bubble", "by formula", "in flight", "sends"]
    rows = [
        [
            plan.timeline.schedule.name,
            str(plan.num_virtual),
            f"{plan.timeline.makespan_seconds:.6g} s",
            f"{plan.timeline.bubble_fraction:.1%}",
            _percent(plan.bubble_by_formula),
            f"{plan.peak_micro_batches:g}",
            str(plan.num_sends),
        ]
        for plan in plans
    ]
    note = "in flight: micro-batches whose activations the fullest rank holds; by formula: equal stages, free transfers"
    return f"{_table([head, *rows])}\n\n{note}"


def _percent(share: float | None) -> str:
    return "unknown" if share is None else f"{share:.1%}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join(
        "  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )
