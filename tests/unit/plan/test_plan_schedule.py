"""`danlu plan schedule`: the numbers, the words and the refusals."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from danlu.base.errors import UserError
from danlu.cli import plan_schedule as cli
from danlu.parallel.schedule import SCHEDULES, parse_schedule
from danlu.plan.schedule import RankCosts, as_json, as_text, compare_schedules, plan_schedule


def printed(capsys: pytest.CaptureFixture[str], **options: Any) -> str:
    """Run the command and return what it prints."""
    cli.command(**options)
    return capsys.readouterr().out


def test_the_case_of_eight_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    """8 ranks, 25 micro-batches: 78 % at work, simulated and by formula, 1F1B holding 8 micro-batches at most."""
    document = json.loads(printed(capsys, stages=8, micro_batches=25, json=True))
    assert document["schedule"] == "1f1b"
    assert document["bubble_fraction"] == pytest.approx(7 / 32)
    assert document["bubble_fraction_by_formula"] == pytest.approx(7 / 32)
    assert document["peak_in_flight"] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert document["num_sends"] == 2 * 7 * 25
    assert "78.1% at work" in printed(capsys, stages=8, micro_batches=25)


def test_actions_print_a_schedule_that_parses(capsys: pytest.CaptureFixture[str]) -> None:
    """What --actions adds is the schedule itself; in JSON each action has its times."""
    options = {"stages": 2, "micro_batches": 3, "schedule": "zbv", "actions": True}
    text = printed(capsys, **options)
    schedule = parse_schedule(text[text.index("schedule zbv ranks") :])
    assert schedule == plan_schedule("zbv", 2, None, 3, RankCosts()).timeline.schedule
    document = json.loads(printed(capsys, **options, json=True))
    assert [[row["action"] for row in rows] for rows in document["actions"]] == [
        [str(action) for action in order] for order in schedule.orders
    ]
    assert max(row["end_seconds"] for rows in document["actions"] for row in rows) == document["step_seconds"]


def test_compare_has_a_line_for_every_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    """All schedules at the same work; the number of stages a rank is used by those that take it."""
    text = printed(capsys, stages=4, micro_batches=8, virtual=3, compare=True)
    assert [line.split()[0] for line in text.splitlines()[1 : 1 + len(SCHEDULES)]] == list(SCHEDULES)
    rows = json.loads(printed(capsys, stages=4, micro_batches=8, virtual=3, compare=True, json=True))["schedules"]
    assert [row["num_virtual"] for row in rows] == [1, 1, 3, 3, 1, 3, 2, 2]
    for row in rows:
        assert sum(row["busy_seconds"]) == pytest.approx(4 * 8 * 3)


def test_a_stage_takes_its_share_of_the_rank() -> None:
    """However many stages, a rank without company takes as long for a micro-batch."""
    for plan in compare_schedules(1, 4, 3, RankCosts(1, 3)):
        assert plan.timeline.makespan_seconds == pytest.approx(12)
        assert plan.bubble_by_formula == 0


def test_costs_reach_the_simulation() -> None:
    """A slower last stage, slower transfers and a smaller share of W each lengthen the step as they must."""
    base = plan_schedule("1f1b", 2, None, 4, RankCosts()).timeline.makespan_seconds
    assert base == 15
    slow_link = plan_schedule("1f1b", 2, None, 1, RankCosts(transfer_seconds=5)).timeline.makespan_seconds
    assert slow_link == 6 + 2 * 5
    heavy_head = plan_schedule("1f1b", 2, None, 4, RankCosts(stage_weights=(1, 2))).timeline
    assert heavy_head.busy_seconds == (12, 24)
    whole = plan_schedule("zero_bubble", 4, None, 8, RankCosts(weight_share=0)).timeline.makespan_seconds
    assert whole == plan_schedule("1f1b", 4, None, 8, RankCosts()).timeline.makespan_seconds


def test_svg_is_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The drawing lands in the file, and JSON names it."""
    path = tmp_path / "timeline.svg"
    document = json.loads(printed(capsys, stages=2, micro_batches=2, svg=path, json=True))
    assert document["svg"] == str(path)
    assert path.read_text(encoding="utf-8").startswith("<svg ")
    with pytest.raises(UserError, match="cannot write the drawing"):
        cli.command(stages=2, micro_batches=2, svg=tmp_path / "no" / "t.svg")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "2f2b"}, r"unknown pipeline schedule\n  seen:  2f2b"),
        ({"schedule": "zbv", "virtual": 3}, "another number of stages a rank"),
        ({"weight_share": 1.5}, "weight_share: not a share"),
        ({"stage_weights": "1,x"}, "stage_weights: not numbers"),
        ({"stage_weights": "1,2,3"}, "stage_weights: not one weight a stage"),
        ({"forward_seconds": -1.0}, "forward_seconds: a cost is negative"),
        ({"compare": True, "schedule": "gpipe"}, "--schedule: is for one schedule"),
        ({"compare": True, "actions": True}, "--actions: is for one schedule"),
        ({"compare": True, "stage_weights": "1,1"}, "--stage-weights: is for one schedule"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], message: str) -> None:
    """Nothing is ignored: each wrong or useless option is named."""
    with pytest.raises(UserError, match=message):
        cli.command(stages=2, micro_batches=2, **options)


def test_the_text_is_true_where_no_formula_is_known() -> None:
    """Few micro-batches in a V: simulated only, and said so."""
    plan = plan_schedule("zbv", 4, None, 2, RankCosts())
    assert plan.bubble_by_formula is None
    assert as_json(plan)["bubble_fraction_by_formula"] is None
    assert "by formula  not known for these numbers" in as_text(plan, width=80)


def test_exit_codes_of_the_command() -> None:
    """0 with a result on stdout; 2 for a wrong name, with nothing on stdout and a hint on stderr."""
    words = [sys.executable, "-m", "danlu", "plan", "schedule", "--stages", "2", "--micro-batches", "3", "--json"]
    good = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert good.returncode == 0
    assert json.loads(good.stdout)["num_ranks"] == 2
    bad = subprocess.run([*words, "--schedule", "zvb"], capture_output=True, text=True, timeout=60, check=False)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "hint:  did you mean 'zbv'?" in bad.stderr
