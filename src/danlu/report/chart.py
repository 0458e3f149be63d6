"""The geometry of charts, as values: the page only draws what is planned here.

No plotting library: a report must be one small file that opens without a network, and a line, an axis and an interval
are a few numbers each. Hovering shows exact values through SVG's own ``<title>``, so the page needs no script.

Long runs are thinned to a few hundred points, each the mean of the steps it stands for; the chart says so. Values that
are null (not finite, or not known) are left out and break the line.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float | None]

WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 12, 40
MAX_POINTS = 300


@dataclass(frozen=True, slots=True)
class Tick:
    """A mark on an axis: position in pixels and label."""

    at: float
    label: str


@dataclass(frozen=True, slots=True)
class Line:
    """A drawn series: its name, SVG path, and dots where it has few points."""

    name: str
    path: str
    dots: tuple[tuple[float, float], ...]


@dataclass(frozen=True, slots=True)
class Hover:
    """A strip of the plot that shows ``text``."""

    x: float
    width: float
    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Chart:
    """A line chart ready to draw."""

    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    x_ticks: tuple[Tick, ...]
    y_ticks: tuple[Tick, ...]
    hovers: tuple[Hover, ...]
    note: str


def format_number(value: float) -> str:
    """Return a number for people: four significant digits, thousands separated, no trailing zeros."""
    if value == 0:
        return "0"
    if abs(value) < 1e-3 or abs(value) >= 1e7:
        mantissa, exponent = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(exponent)}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def plan_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return round numbers inside ``[low, high]``: multiples of 1, 2 or 5 times a power of ten."""
    if not high > low:
        return [low]
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def thin(points: Sequence[Point], limit: int = MAX_POINTS) -> tuple[list[Point], int]:
    """Return at most ``limit`` points, each the mean of a group of neighbours, and the size of a group."""
    size = max(1, -(-len(points) // limit))
    if size == 1:
        return list(points), 1
    thinned: list[Point] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        values = [y for _, y in group if y is not None]
        thinned.append((group[-1][0], sum(values) / len(values) if values else None))
    return thinned, size


def plan_chart(
    title: str, series: Sequence[tuple[str, Sequence[Point]]], *, x_label: str, y_label: str, zero: bool = False
) -> Chart | None:
    """Plan a line chart.

    Args:
        title: heading.
        series: (name, points) each; points in order of x.
        x_label: name of the x axis.
        y_label: name of the y axis, with its unit.
        zero: start the y axis at zero.

    Returns:
        The chart, or None where no series has a value.
    """
    thinned = [(name, *thin(points)) for name, points in series]
    values = [y for _, points, _ in thinned for _, y in points if y is not None]
    if not values:
        return None
    columns = [x for _, points, _ in thinned for x, _ in points]
    x_low, x_high = min(columns), max(columns)
    y_low, y_high = 0.0 if zero else min(values), max(values)
    pad = (y_high - y_low) * 0.05 or abs(y_high) * 0.05 or 1.0
    y_low, y_high = (y_low if zero else y_low - pad), y_high + pad
    to_x = _Scale(x_low, x_high, LEFT, WIDTH - RIGHT)
    to_y = _Scale(y_low, y_high, HEIGHT - BOTTOM, TOP)
    grouped = [f"{name}: each point is the mean of {size} records" for name, _, size in thinned if size > 1]
    return Chart(
        title=title,
        x_label=x_label,
        y_label=y_label,
        lines=tuple(_line(name, points, to_x, to_y) for name, points, _ in thinned),
        x_ticks=tuple(Tick(to_x(x), format_number(x)) for x in plan_ticks(x_low, x_high, 6)),
        y_ticks=tuple(Tick(to_y(y), format_number(y)) for y in plan_ticks(y_low, y_high)),
        hovers=_hovers([(name, points) for name, points, _ in thinned], to_x, x_label),
        note="; ".join(grouped),
    )


class _Scale:
    """A linear map from values to pixels; a single value lands in the middle."""

    def __init__(self, low: float, high: float, start: float, stop: float) -> None:
        self.low, self.span, self.start, self.stop = low, high - low, start, stop

    def __call__(self, value: float) -> float:
        share = (value - self.low) / self.span if self.span > 0 else 0.5
        return round(self.start + share * (self.stop - self.start), 2)


def _line(name: str, points: Sequence[Point], to_x: _Scale, to_y: _Scale) -> Line:
    path, pen_down, dots = [], False, []
    for x, y in points:
        if y is not None:
            at = (to_x(x), to_y(y))
            path.append(f"{'L' if pen_down else 'M'}{at[0]} {at[1]}")
            dots.append(at)
        pen_down = y is not None
    return Line(name, " ".join(path), tuple(dots) if len(dots) <= 12 else ())


def _hovers(series: Sequence[tuple[str, Sequence[Point]]], to_x: _Scale, x_label: str) -> tuple[Hover, ...]:
    texts: dict[float, list[str]] = {}
    for name, points in series:
        for x, y in points:
            if y is not None:
                texts.setdefault(x, [f"{x_label} {format_number(x)}"]).append(f"{name}: {y:.6g}")
    at = [to_x(x) for x in sorted(texts)]
    edges = [LEFT, *((one + other) / 2 for one, other in itertools.pairwise(at)), WIDTH - RIGHT]
    return tuple(
        Hover(round(edges[i], 2), round(edges[i + 1] - edges[i], 2), at[i], "\n".join(texts[x]))
        for i, x in enumerate(sorted(texts))
    )
