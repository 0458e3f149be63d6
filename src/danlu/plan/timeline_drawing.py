"""Timelines of pipeline schedules for the eye: text that fits a terminal, and SVG.

Text has one line a rank and time from left to right. Where the width allows it every action carries its name (``F3``,
or ``5F3`` with several stages a rank) and dashes as long as it lasts; else a column is one letter, the kind of the
action that runs in the middle of the column's time, and its case tells a rank's first, third, ... stage from the
others. Dots are idle time in both. Columns are cut from the true times and never from neighbours, so rows stay
aligned.

The SVG is one file without scripts, fonts or links: hue is the kind of an action, lightness its micro-batch (dark
first, light last), and hovering names the action and its times.
"""

from __future__ import annotations

import colorsys
import math
from xml.sax.saxutils import escape

from danlu.parallel.schedule import Action, Kind, Schedule
from danlu.parallel.timeline import Span, Timeline

KINDS: dict[Kind, str] = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_HUES: dict[Kind, float] = {"F": 0.60, "B": 0.38, "I": 0.08, "W": 0.80}
_SHORTEST_ROW = 10
_NOISE = 1e-6
_LEFT, _RIGHT, _TOP, _ROW, _BAR, _FOOT = 64, 16, 40, 26, 22, 52


def draw_timeline(timeline: Timeline, *, width: int = 100) -> str:
    """Draw a timeline as text: one line a rank, then a legend.

    Args:
        timeline: what to draw.
        width: longest line, in characters; a few more where not even ten columns of time would fit.
    """
    schedule = timeline.schedule
    digits = len(str(schedule.num_ranks - 1))
    space = max(_SHORTEST_ROW, width - len("rank ") - digits - 1)
    durations = {_duration(span) for row in timeline.spans for span in row} - {0.0}
    if not durations:
        return "nothing takes any time"
    shortest = min(durations)
    longest_label = max(len(_label(span.action, schedule)) for row in timeline.spans for span in row)
    columns_per_second = (longest_label + 1) / shortest
    named = round(timeline.makespan_seconds * columns_per_second) <= space
    if not named:
        columns_per_second = space / timeline.makespan_seconds
        # a letter an action is easiest to read, where all are as long as the shortest or a multiple of it
        if all(abs(duration / shortest - round(duration / shortest)) < _NOISE for duration in durations):
            columns_per_second = min(1 / shortest, columns_per_second)
    columns = max(1, round(timeline.makespan_seconds * columns_per_second))
    draw = _named_row if named else _letter_row
    rows = (
        f"rank {rank:>{digits}} {draw(spans, schedule, columns, columns_per_second)}"
        for rank, spans in enumerate(timeline.spans)
    )
    return "\n".join([*rows, *_legend(timeline, named, 1 / columns_per_second, width)])


def _duration(span: Span) -> float:
    return span.end_seconds - span.start_seconds


def _label(action: Action, schedule: Schedule) -> str:
    return str(action) if schedule.num_stages > schedule.num_ranks else f"{action.kind}{action.micro_batch}"


def _named_row(spans: tuple[Span, ...], schedule: Schedule, columns: int, columns_per_second: float) -> str:
    cells = ["."] * columns
    for span in spans:
        start, end = round(span.start_seconds * columns_per_second), round(span.end_seconds * columns_per_second)
        if end > start:
            label = _label(span.action, schedule)[: end - start]
            cells[start:end] = f"{label:-<{end - start - 1}} "[: end - start]
    return "".join(cells)


def _letter_row(spans: tuple[Span, ...], schedule: Schedule, columns: int, columns_per_second: float) -> str:
    cells = ["."] * columns
    for span in spans:
        # the columns whose middle lies in the span
        start = math.ceil(span.start_seconds * columns_per_second - 0.5)
        end = min(columns, math.ceil(span.end_seconds * columns_per_second - 0.5))
        upper = (span.action.stage // schedule.num_ranks) % 2 == 0
        cells[start:end] = (span.action.kind if upper else span.action.kind.lower()) * (end - start)
    return "".join(cells)


def _legend(timeline: Timeline, named: bool, seconds_per_column: float, width: int) -> list[str]:
    schedule = timeline.schedule
    used = {span.action.kind for row in timeline.spans for span in row}
    parts = [f"{kind} {word}" for kind, word in KINDS.items() if kind in used] + [". idle"]
    several = schedule.num_stages > schedule.num_ranks
    if named:
        parts.append("5F3: stage 5, forward, micro-batch 3" if several else "F3: forward of micro-batch 3")
    elif several:
        parts.append("small letters: every second stage of a rank")
    parts.append(f"a column is {seconds_per_column:.3g} s")
    lines = [""]
    for part in parts:
        joined = f"{lines[-1]}; {part}" if lines[-1] else part
        if len(joined) <= width or not lines[-1]:
            lines[-1] = joined
        else:
            lines.append(part)
    return lines


def svg_timeline(timeline: Timeline, *, title: str, width: int = 1200) -> str:
    """Draw a timeline as a self-contained SVG document.

    Args:
        timeline: what to draw.
        title: the heading.
        width: of the picture, in pixels.
    """
    schedule = timeline.schedule
    scale = (width - _LEFT - _RIGHT) / timeline.makespan_seconds if timeline.makespan_seconds else 0.0
    height = _TOP + _ROW * schedule.num_ranks + _FOOT
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{_LEFT}" y="24" font-size="15">{escape(title)}</text>',
    ]
    for rank, spans in enumerate(timeline.spans):
        top = _TOP + _ROW * rank
        parts.append(f'<text x="{_LEFT - 8}" y="{top + 15}" text-anchor="end">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{width - _LEFT - _RIGHT}" height="{_BAR}" fill="#eeeeee"/>')
        parts += [_bar(span, schedule, top, scale) for span in spans if _duration(span) > 0]
    parts += _foot(timeline, _TOP + _ROW * schedule.num_ranks, width)
    return "\n".join([*parts, "</svg>\n"])


def _bar(span: Span, schedule: Schedule, top: int, scale: float) -> str:
    action = span.action
    left, wide = _LEFT + span.start_seconds * scale, _duration(span) * scale
    fill, ink = _colors(action, schedule)
    label = _label(action, schedule)
    # about seven pixels a character at this font size
    text = next((words for words in (label, str(action.micro_batch)) if 7 * len(words) + 4 <= wide), "")
    drawn = (
        f'<text x="{left + wide / 2:.2f}" y="{top + 15}" text-anchor="middle" fill="{ink}">{text}</text>'
        if text
        else ""
    )
    hover = (
        f"stage {action.stage}, {KINDS[action.kind]}, micro-batch {action.micro_batch}: "
        f"{span.start_seconds:.6g} to {span.end_seconds:.6g} s"
    )
    return (
        f'<g><title>{hover}</title><rect x="{left:.2f}" y="{top}" width="{wide:.2f}" height="{_BAR}" '
        f'fill="{fill}" stroke="#ffffff" stroke-width="0.5"/>{drawn}</g>'
    )


def _colors(action: Action, schedule: Schedule) -> tuple[str, str]:
    """Return fill and ink: hue by kind, lightness by micro-batch, less saturated for every second stage of a rank."""
    share = action.micro_batch / max(1, schedule.num_micro_batches - 1)
    saturation = 0.75 if (action.stage // schedule.num_ranks) % 2 == 0 else 0.4
    lightness = 0.38 + 0.40 * share
    return _hex(_HUES[action.kind], lightness, saturation), "#ffffff" if lightness < 0.55 else "#000000"


def _hex(hue: float, lightness: float, saturation: float) -> str:
    return "#" + "".join(f"{round(255 * part):02x}" for part in colorsys.hls_to_rgb(hue, lightness, saturation))


def _foot(timeline: Timeline, top: int, width: int) -> list[str]:
    right = width - _RIGHT
    parts = [
        f'<text x="{_LEFT}" y="{top + 12}">0 s</text>',
        f'<text x="{right}" y="{top + 12}" text-anchor="end">{timeline.makespan_seconds:.6g} s</text>',
        f'<text x="{right}" y="{top + 36}" text-anchor="end">idle {timeline.bubble_fraction:.1%}</text>',
    ]
    used = {span.action.kind for row in timeline.spans for span in row}
    left = _LEFT
    for kind, word in KINDS.items():
        if kind in used:
            parts.append(
                f'<rect x="{left}" y="{top + 26}" width="12" height="12" fill="{_hex(_HUES[kind], 0.5, 0.75)}"/>'
            )
            parts.append(f'<text x="{left + 18}" y="{top + 36}">{kind} {word}</text>')
            left += 150
    return parts
