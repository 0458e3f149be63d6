"""Drawings of timelines: true to the times, aligned, within their width, well-formed."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from danlu.parallel.schedule import SCHEDULES, build_schedule
from danlu.parallel.timeline import Costs, Timeline, equal_costs, simulate
from danlu.plan.timeline_drawing import draw_timeline, svg_timeline

SVG = "{http://www.w3.org/2000/svg}"


def timeline_of(name: str, p: int, m: int) -> Timeline:
    """Simulate with costs of one for everything."""
    schedule = build_schedule(name, p, SCHEDULES[name].min_virtual, m)
    return simulate(schedule, equal_costs(schedule.num_stages))


def rows_of(drawing: str) -> list[str]:
    """Return what is drawn for each rank."""
    return re.findall(r"^rank +\d+ (.*)$", drawing, re.M)


def test_a_wide_drawing_names_every_action() -> None:
    """With room for it, each action stands with name and length at its time."""
    assert draw_timeline(timeline_of("1f1b", 2, 2), width=80).splitlines() == [
        "rank 0 F0 F1 ......B0--- ...B1--- ",
        "rank 1 ...F0 B0--- F1 B1--- ......",
        "F forward; B backward; . idle; F3: forward of micro-batch 3; a column is 0.333 s",
    ]


def test_a_narrow_drawing_has_a_letter_a_column() -> None:
    """Without room one column is the shortest action; small letters are a rank's second stage."""
    assert rows_of(draw_timeline(timeline_of("1f1b", 2, 2), width=20)) == ["FF..BB.BB", ".FBBFBB.."]
    drawing = draw_timeline(timeline_of("zbv", 1, 1), width=12)
    assert rows_of(drawing) == ["FfiwIW"]
    assert "small letters" in drawing


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("width", [40, 80, 200])
def test_lines_fit_and_align(name: str, width: int) -> None:
    """No line is longer than asked for, and all ranks are drawn over the same columns."""
    for m in (1, 6, 25):
        drawing = draw_timeline(timeline_of(name, 12, m), width=width)
        assert max(map(len, rows_of(drawing))) == min(map(len, rows_of(drawing)))
        assert max(map(len, drawing.splitlines())) <= max(width, 45)
        assert len(rows_of(drawing)) == 12


@pytest.mark.parametrize("name", SCHEDULES)
def test_dots_are_the_bubble(name: str) -> None:
    """At a column an action of one second the idle share can be counted in the drawing."""
    timeline = timeline_of(name, 4, 9)
    cells = "".join(rows_of(draw_timeline(timeline, width=90)))
    assert cells.count(".") / len(cells) == pytest.approx(timeline.bubble_fraction)
    kinds = {span.action.kind for spans in timeline.spans for span in spans}
    assert set(cells.upper()) == kinds | {"."}


def test_uneven_actions_use_the_whole_width() -> None:
    """Where no column fits all actions, there are as many columns as the line takes."""
    timeline = simulate(build_schedule("gpipe", 1, 1, 9), Costs((1,), (0.7,), (0.6,), ()))
    (row,) = rows_of(draw_timeline(timeline, width=47))
    assert len(row) == 40
    assert row.count("F") == pytest.approx(40 / 2.3, abs=1)


def test_what_takes_no_time_is_not_drawn() -> None:
    """Actions without length leave no mark, and a step without length is said to be one."""
    schedule = build_schedule("zero_bubble", 1, 1, 2)
    assert rows_of(draw_timeline(simulate(schedule, Costs((1,), (1,), (0,), ())), width=80)) == ["F0 I0 F1 I1 "]
    assert draw_timeline(simulate(schedule, Costs((0,), (0,), (0,), ()))) == "nothing takes any time"


@pytest.mark.parametrize("name", SCHEDULES)
def test_svg_is_well_formed_and_true(name: str) -> None:
    """One bar an action, inside the picture, as long as it lasts, its times to read; nothing from outside."""
    timeline = timeline_of(name, 3, 5)
    text = svg_timeline(timeline, title='a < b & "c"')
    root = ElementTree.fromstring(text)
    assert root[0].text == 'a < b & "c"'
    assert re.findall(r"(?:https?|file):[^\"]*", text) == ["http://www.w3.org/2000/svg"]
    assert "<script" not in text
    bars = root.findall(f"{SVG}g")
    spans = [span for row in timeline.spans for span in row]
    assert len(bars) == len(spans)
    seconds_per_pixel = timeline.makespan_seconds / (1200 - 64 - 16)
    for bar, span in zip(bars, spans, strict=True):
        box = bar.find(f"{SVG}rect")
        assert box is not None
        left, wide = float(box.get("x", "")), float(box.get("width", ""))
        assert left >= 64
        assert left + wide <= 1200 - 16 + 0.02
        assert wide * seconds_per_pixel == pytest.approx(span.end_seconds - span.start_seconds, rel=0.01)
        assert f"micro-batch {span.action.micro_batch}: {span.start_seconds:g} to {span.end_seconds:g} s" in bar[0].text


def test_svg_colours_tell_kind_and_micro_batch() -> None:
    """Two actions of one rank share a fill only where kind, micro-batch and stage's turn are the same."""
    timeline = timeline_of("zbv", 2, 6)
    root = ElementTree.fromstring(svg_timeline(timeline, title="t"))
    fills: dict[str, set[tuple[str, int, int]]] = {}
    spans = [span for row in timeline.spans for span in row]
    for bar, span in zip(root.findall(f"{SVG}g"), spans, strict=True):
        box = bar.find(f"{SVG}rect")
        assert box is not None
        what = (span.action.kind, span.action.micro_batch, span.action.stage // 2)
        fills.setdefault(box.get("fill", ""), set()).add(what)
    assert all(len(meanings) == 1 for meanings in fills.values())
    assert len(fills) == 3 * 6 * 2
