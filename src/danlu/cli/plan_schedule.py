"""``danlu plan schedule``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from danlu.cli.options import Json


def command(
    stages: Annotated[int, typer.Option(help="Ranks in the pipeline.", min=1, show_default=False)],
    micro_batches: Annotated[int, typer.Option(help="Micro-batches in a step.", min=1, show_default=False)],
    schedule: Annotated[
        str | None,
        typer.Option(
            help="gpipe, 1f1b, interleaved, looped_bfs, zero_bubble, interleaved_zero_bubble, zbv or dualpipev; "
            "1f1b where none is named.",
            show_default=False,
        ),
    ] = None,
    virtual: Annotated[
        int | None, typer.Option(help="Stages a rank; else the fewest it takes.", min=1, show_default=False)
    ] = None,
    forward_seconds: Annotated[float, typer.Option(help="One micro-batch forward through a rank's layers.")] = 1.0,
    backward_seconds: Annotated[float, typer.Option(help="The same, backward.")] = 2.0,
    weight_share: Annotated[float, typer.Option(help="Share of the backward for gradients of weights.")] = 0.5,
    transfer_seconds: Annotated[float, typer.Option(help="One tensor from one rank to the next.")] = 0.0,
    stage_weights: Annotated[
        str, typer.Option(help="Relative work of each stage: 1,1,1,1.5.", metavar="N,N,...", show_default=False)
    ] = "",
    compare: Annotated[bool, typer.Option("--compare", help="One line for each schedule instead.")] = False,
    actions: Annotated[bool, typer.Option("--actions", help="Also print each rank's order.")] = False,
    svg: Annotated[Path | None, typer.Option(help="Write the drawing to this file.", show_default=False)] = None,
    json: Json = False,
) -> None:
    """Draw a pipeline schedule: its order, its idle share, the activations it holds."""
    from danlu.base import env
    from danlu.base.errors import UserError
    from danlu.base.log import print_json, print_result
    from danlu.plan.schedule import (
        RankCosts,
        as_json,
        as_text,
        compare_schedules,
        parse_weights,
        plan_schedule,
        table_text,
        write_svg,
    )

    costs = RankCosts(forward_seconds, backward_seconds, weight_share, transfer_seconds, parse_weights(stage_weights))
    if compare:
        given = {"--schedule": schedule, "--actions": actions, "--svg": svg, "--stage-weights": stage_weights}
        for option, value in given.items():
            if value:
                raise UserError("is for one schedule; --compare shows them all", where=option, seen=value)
        plans = compare_schedules(stages, virtual, micro_batches, costs)
        if json:
            print_json({"schedules": [as_json(plan) for plan in plans]})
        else:
            print_result(table_text(plans))
        return
    plan = plan_schedule(schedule or "1f1b", stages, virtual, micro_batches, costs)
    if svg is not None:
        write_svg(plan, svg)
    if json:
        print_json(as_json(plan, actions=actions) | ({"svg": str(svg)} if svg is not None else {}))
    else:
        print_result(as_text(plan, width=env.terminal_width(), actions=actions))
