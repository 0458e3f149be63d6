"""What the pipeline did in one step: measured times of every action, beside what the schedule promises.

Three numbers, each the idle share of ranks x duration of the step:

- *measured*: from the moment at which all ranks had met to the end of the last action, as each rank's clock saw it;
- *in theory with these durations*: the same order of actions simulated (`danlu.parallel.timeline`) with each stage's
  median durations and free transfers. What is above it are transfers, and actions that took longer than usual;
- *ideal*: simulated with all stages alike, of the mean duration. What is above it is the split of the layers.

An action's time begins when its input is there and ends when the device has done it, so waiting is idle time whatever
it is for. On CUDA the rank waits for its stream around each action, which costs the traced step a little.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch.distributed as dist

from danlu.base.log import log
from danlu.parallel.mesh import World
from danlu.parallel.pipeline import Traced
from danlu.parallel.schedule import Schedule
from danlu.parallel.timeline import Costs, Span, Timeline, equal_costs, simulate
from danlu.plan.timeline_drawing import svg_timeline

Medians = dict[tuple[int, str], float]
"""(stage, kind of action) to seconds."""


def write_trace(folder: Path, trace: Sequence[Traced], schedule: Schedule, world: World, *, step: int) -> None:
    """Write ``schedule.json`` and ``schedule.svg`` of the first data replica's pipeline; every rank calls this.

    Args:
        folder: the run's.
        trace: this rank's actions of the step.
        schedule: of the step.
        world: all ranks.
        step: for the record.
    """
    group = world.axis_group("pp")
    everyone: list[Sequence[Traced]] = [[]] * group.size()
    dist.all_gather_object(everyone, list(trace), group=group)
    if world.rank != 0:
        return
    timeline = measured_timeline(schedule, everyone)
    document = {"step": step, **trace_document(timeline)}
    text = json.dumps(document, indent=1, allow_nan=False)
    (folder / "schedule.json").write_text(text + "\n", encoding="utf-8")
    title = f"{schedule.name}, step {step}, as measured"
    (folder / "schedule.svg").write_text(svg_timeline(timeline, title=title), encoding="utf-8")
    shares = (document[name] for name in ("bubble_fraction", "theoretical_bubble_fraction", "ideal_bubble_fraction"))
    log.info(
        "step %d: measured bubble %.0f %%, %.0f %% in theory with these durations, %.0f %% ideal (schedule.svg)",
        step,
        *(100 * share for share in shares),
    )


def measured_timeline(schedule: Schedule, everyone: Sequence[Sequence[Traced]]) -> Timeline:
    """Return the traced actions of all ranks, in the order in which they ran, as a timeline."""
    spans = tuple(tuple(Span(each.action, each.start_seconds, each.end_seconds) for each in rank) for rank in everyone)
    busy = tuple(sum(span.end_seconds - span.start_seconds for span in rank) for rank in spans)
    return Timeline(schedule, spans, max(span.end_seconds for rank in spans for span in rank), busy)


def trace_document(timeline: Timeline) -> dict[str, Any]:
    """Return what ``schedule.json`` holds of a measured step, but for its number."""
    schedule, medians = timeline.schedule, find_medians(timeline)
    costs = costs_from(medians, schedule.num_stages)
    ideal = equal_costs(
        schedule.num_stages,
        forward_seconds=fmean(costs.forward_seconds),
        input_gradient_seconds=fmean(costs.input_gradient_seconds),
        weight_gradient_seconds=fmean(costs.weight_gradient_seconds),
    )
    return {
        "schedule": str(schedule),
        "step_seconds": timeline.makespan_seconds,
        "bubble_fraction": timeline.bubble_fraction,
        "theoretical_bubble_fraction": simulate(schedule, costs).bubble_fraction,
        "ideal_bubble_fraction": simulate(schedule, ideal).bubble_fraction,
        "median_seconds": [
            {"stage": stage, "kind": kind, "seconds": seconds} for (stage, kind), seconds in sorted(medians.items())
        ],
        "ranks": [
            {
                "rank": rank,
                "stages": schedule.stages_of(rank),
                "actions": [
                    {"action": str(span.action), "start_seconds": span.start_seconds, "end_seconds": span.end_seconds}
                    for span in spans
                ],
            }
            for rank, spans in enumerate(timeline.spans)
        ],
    }


def find_medians(timeline: Timeline) -> Medians:
    """Return the median duration of each stage's forwards, backwards and so on, where it has such."""
    found: dict[tuple[int, str], list[float]] = {}
    for span in (span for rank in timeline.spans for span in rank):
        found.setdefault((span.action.stage, span.action.kind), []).append(span.end_seconds - span.start_seconds)
    return {key: median(values) for key, values in found.items()}


def costs_from(medians: Medians, num_stages: int) -> Costs:
    """Return what to simulate with: a stage that never splits its backward pass has all of it in the input's part."""
    stages = range(num_stages)
    return Costs(
        tuple(medians[stage, "F"] for stage in stages),
        tuple(medians[stage, "I"] if (stage, "I") in medians else medians[stage, "B"] for stage in stages),
        tuple(medians.get((stage, "W"), 0.0) for stage in stages),
        (0.0,) * (num_stages - 1),
    )
