"""Lay out line charts, bar charts and histograms, which a template draws as SVG."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from unsloth_ddp.utils.units import counted

Point = tuple[float, float]
WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 70, 14, 12, 38
# More points are not seen at this width, and make the file large.
MOST_POINTS = 500
# Lines with more points than that are noisy where they show one step each, and get a smoothed line beside them.
SMOOTHED_FROM = 60
LOG_FROM = 50


@dataclass(frozen=True)
class Line:
    """A line of a chart: its name, and its points by rising x; a value that is not finite is a gap."""

    name: str
    points: Sequence[Point]
    # Points are few, and each is worth a mark (evaluations).
    marked: bool = False
    # The values are noisy, so that a smoothed line says more.
    noisy: bool = False


@dataclass(frozen=True)
class Tick:
    """A tick: where it stands, in pixels, and its text."""

    at: float
    text: str


@dataclass(frozen=True)
class DrawnLine:
    """A line in pixels: an SVG path, marks with a text each, and a colour from 1 on."""

    name: str
    colour: int
    path: str
    marks: list[tuple[float, float, str]]
    faint: bool = False


@dataclass(frozen=True)
class Bar:
    """A bar in pixels, and its text."""

    x: float
    y: float
    width: float
    height: float
    text: str


@dataclass(frozen=True)
class Chart:
    """A chart in pixels."""

    title: str
    x_name: str
    x_ticks: list[Tick]
    y_ticks: list[Tick]
    lines: list[DrawnLine] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)
    note: str = ""
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM

    @property
    def legend(self) -> list[DrawnLine]:
        """The lines that the legend names; a single line needs none."""
        named = [line for line in self.lines if not line.faint]
        return named if len(named) > 1 else []


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    from_zero: bool = False,
    may_be_log: bool = False,
    shown: Callable[[float], str] | None = None,
    note: str = "",
) -> Chart | None:
    """Return a line chart; None if no line has a point.

    Args:
        from_zero: begin the y axis at 0.
        may_be_log: use a logarithmic y axis where values above 0 reach over a factor of LOG_FROM.
        shown: text of a y value [4 digits].
    """
    lines = [line for line in lines if any(math.isfinite(y) for _, y in line.points)]
    if not lines:
        return None
    text = shown or short_number
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points if math.isfinite(y)]
    low, high = (0.0 if from_zero else min(ys)), max(ys)
    x_axis = axis(min(xs), max(xs), whole=True, ticks=7)
    # The x axis ends where the data does.
    place_x = _scale(min(xs), max(xs), LEFT, WIDTH - RIGHT)
    if may_be_log and low > 0 and high / low >= LOG_FROM:
        y_axis = log_axis(low, high)
        place_log = _scale(math.log10(low), math.log10(high), HEIGHT - BOTTOM, TOP)
        title, place_y = f"{title} (logarithmic)", lambda y: place_log(math.log10(y))
    else:
        y_axis = axis(low, high)
        place_y = _scale(y_axis[0], y_axis[-1], HEIGHT - BOTTOM, TOP)
    drawn: list[DrawnLine] = []
    for colour, line in enumerate(lines, 1):
        smooth = line.noisy and len(line.points) >= SMOOTHED_FROM
        pieces = _pieces(line.points)
        drawn.append(_draw(line, pieces, colour, place_x, place_y, text, faint=smooth))
        if smooth:
            curve = [smoothed(piece, window=max(3, len(line.points) // 20)) for piece in pieces]
            drawn.append(_draw(line, curve, colour, place_x, place_y, text))
    return Chart(
        title,
        "step",
        [Tick(round(place_x(x), 1), short_number(x)) for x in x_axis if min(xs) <= x <= max(xs)],
        [Tick(round(place_y(y), 1), text(y)) for y in y_axis],
        lines=drawn,
        note=note,
    )


def histogram(title: str, edges: Sequence[int], counts: Sequence[int], *, x_name: str, unit: str) -> Chart | None:
    """Return a histogram; None if it counts nothing.

    Args:
        edges: (bars + 1,), rising; a bar holds values from its edge up to the next, that excluded.
        counts: (bars,)
    """
    if not counts or len(edges) != len(counts) + 1 or max(counts) <= 0:
        return None
    y_axis = axis(0, max(counts), whole=True)
    place_x = _scale(edges[0], edges[-1], LEFT, WIDTH - RIGHT)
    place_y = _scale(0, y_axis[-1], HEIGHT - BOTTOM, TOP)
    bars = []
    for first, after, count in zip(edges, edges[1:], counts, strict=False):
        x, y = place_x(first), place_y(count)
        gap = 1.0 if len(counts) > 1 else 0.0
        named = counted(first, "token") if after - first == 1 else f"{first:,} to {after - 1:,} tokens"
        text = f"{named}: {counted(count, unit.removesuffix('s'))}"
        bars.append(
            Bar(round(x, 1), round(y, 1), round(place_x(after) - x - gap, 1), round(HEIGHT - BOTTOM - y, 1), text)
        )
    return Chart(
        title,
        x_name,
        [
            Tick(round(place_x(x), 1), short_number(x))
            for x in axis(edges[0], edges[-1], whole=True, ticks=7)
            if edges[0] <= x <= edges[-1]
        ],
        [Tick(round(place_y(y), 1), short_number(y)) for y in y_axis],
        bars=bars,
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


def log_axis(low: float, high: float) -> list[float]:
    """Return the powers of ten between `low` and `high`, both above 0; with fewer than three also 2 and 5 times these."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    ticks = [10.0**power for power in powers if low <= 10.0**power <= high]
    if len(ticks) >= 3:
        return ticks
    finer = [factor * 10.0**power for power in powers for factor in (1, 2, 5)]
    return [tick for tick in finer if low <= tick <= high]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Return the mean of the middle half of the values in a window, centred, at up to about MOST_POINTS points.

    A single spike does not move it, and stands in the line of the values themselves.
    """
    reach = window // 2
    last = len(points) - 1
    found = []
    for index in sorted({*range(0, len(points), max(1, len(points) // MOST_POINTS)), last} - {-1}):
        # About as far on both sides, so that the ends do not lean towards the middle, and wide enough to be smooth.
        near = max(min(reach, index, last - index), reach // 4)
        values = sorted(y for _, y in points[max(0, index - near) : index + near + 1])
        cut = (len(values) + 1) // 4
        found.append((points[index][0], statistics.fmean(values[cut : len(values) - cut])))
    return found


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """Return at most about `most` points: of each stretch the lowest and the highest, and both ends."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(len(points) / (most // 2))
    kept = {0, len(points) - 1}
    for start in range(0, len(points), stretch):
        indices = range(start, min(start + stretch, len(points)))
        kept |= {min(indices, key=lambda i: points[i][1]), max(indices, key=lambda i: points[i][1])}
    return [points[index] for index in sorted(kept)]


def short_number(value: float) -> str:
    """Return a number with up to 4 digits: 1,234; 0.125; 12k; 1.2M; 2e-5."""
    size = abs(value)
    if size >= 1e4:
        for unit, one in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if size >= one:
                return f"{value / one:.4g}{unit}"
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


def _pieces(points: Sequence[Point]) -> list[list[Point]]:
    """Return the stretches of points with finite values."""
    grouped = itertools.groupby(points, key=lambda point: math.isfinite(point[1]))
    return [list(piece) for finite, piece in grouped if finite]


def _draw(
    line: Line,
    pieces: Sequence[Sequence[Point]],
    colour: int,
    place_x: Callable[[float], float],
    place_y: Callable[[float], float],
    text: Callable[[float], str],
    *,
    faint: bool = False,
) -> DrawnLine:
    count = sum(map(len, pieces))
    path, marks = "", []
    for piece in pieces:
        points = thinned(piece, max(4, MOST_POINTS * len(piece) // count))
        placed = [(round(place_x(x), 1), round(place_y(y), 1)) for x, y in points]
        path += "M" + "L".join(f"{x:g},{y:g}" for x, y in placed)
        # A line of one point is not seen.
        if line.marked or count <= 12 or len(points) == 1:
            marks += [
                (px, py, f"{line.name}, step {short_number(x)}: {text(y)}")
                for (px, py), (x, y) in zip(placed, points, strict=True)
            ]
    return DrawnLine(line.name, colour, path, marks, faint)
