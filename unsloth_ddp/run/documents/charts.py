"""Lay out line charts, which a template draws as SVG."""

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

Point = tuple[float, float]
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 38
# A line with more points is drawn through the means of stretches of them.
MOST_POINTS = 200
# A line with at most so many points has a mark on each.
MARKED_POINTS = 12


class Line(NamedTuple):
    """A line of a chart: its name, and its points by rising x; a value that is not finite is a gap."""

    name: str
    points: Sequence[Point]


class DrawnLine(NamedTuple):
    """A line in pixels: an SVG path, marks with a text each, and a colour from 1 on."""

    name: str
    colour: int
    path: str
    marks: list[tuple[float, float, str]]


class Chart(NamedTuple):
    """A chart in pixels; a tick is its place and its text."""

    title: str
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    lines: list[DrawnLine]
    note: str


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    from_zero: bool = False,
    shown: Callable[[float], str] | None = None,
    note: str = "",
) -> Chart | None:
    """Return a line chart; None if no line has a point."""
    lines = [line for line in lines if any(math.isfinite(y) for _, y in line.points)]
    if not lines:
        return None
    text = shown or short_number
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if math.isfinite(y)]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    # The x axis ends where the data does.
    x_axis = [x for x in axis(min(xs), max(xs), whole=True, ticks=7) if min(xs) <= x <= max(xs)]
    y_axis = axis(low, high)
    place_x = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    place_y = _scale(y_axis[0], y_axis[-1], HEIGHT - BOTTOM, TOP)
    return Chart(
        title,
        [(round(place_x(x), 1), short_number(x)) for x in x_axis],
        [(round(place_y(y), 1), text(y)) for y in y_axis],
        [_draw(line, colour, place_x, place_y, text) for colour, line in enumerate(lines, 1)],
        note,
    )


def axis(low: float, high: float, *, whole: bool = False, ticks: int = 5) -> list[float]:
    """Return evenly spaced round numbers, about `ticks` of them, that reach from below `low` to above `high`."""
    span = high - low
    if span <= 0:
        # One value: an axis around it.
        span = abs(high) or 1.0
        low, high = (low, high + span) if low >= 0 else (low - span, high)
    rough = span / ticks
    size = 10 ** math.floor(math.log10(rough))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= rough * 0.999)
    if whole:
        step = max(1.0, math.ceil(step) if step > 1 else 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(number * step, 12) for number in range(first, last + 1)]


def averaged(points: Sequence[Point], limit: int = MOST_POINTS) -> list[Point]:
    """Return at most `most` points: those given, or the means of stretches of as many of them each."""
    length = math.ceil(len(points) / limit)
    stretches = [points[start : start + length] for start in range(0, len(points), max(1, length))]
    return [(statistics.fmean(x for x, _ in each), statistics.fmean(y for _, y in each)) for each in stretches]


def short_number(value: float) -> str:
    """Return a number with up to 4 digits: 1,234; 0.125; 12k; 1.2M; 2e-5."""
    size = abs(value)
    if size >= 1e4:
        for unit, factor in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= factor:
                return f"{value / factor:.4g}{unit}"
    if value == 0:
        return "0"
    if size < 1e-3:
        return f"{value:.2e}".replace("e-0", "e-").replace(".00e", "e").replace("0e-", "e-")
    return f"{value:,.4g}"


def _scale(low: float, high: float, first: float, last: float) -> Callable[[float], float]:
    span = high - low
    if not span:
        return lambda _: (first + last) / 2
    return lambda value: first + (value - low) / span * (last - first)


def _draw(
    line: Line,
    colour: int,
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    text: Callable[[float], str],
) -> DrawnLine:
    grouped = itertools.groupby(line.points, key=lambda point: math.isfinite(point[1]))
    pieces = [list(piece) for finite, piece in grouped if finite]
    count = sum(map(len, pieces))
    path, marks = "", []
    for piece in pieces:
        points = averaged(piece, max(1, MOST_POINTS * len(piece) // count))
        placed = [(round(place_x(x), 1), round(place_y(y), 1)) for x, y in points]
        path += "M" + "L".join(f"{x:g},{y:g}" for x, y in placed)
        # A line of one point is not seen.
        if count <= MARKED_POINTS or len(points) == 1:
            marks += [
                (px, py, f"{line.name}, step {short_number(x)}: {text(y)}")
                for (px, py), (x, y) in zip(placed, points, strict=True)
            ]
    return DrawnLine(line.name, colour, path, marks)
