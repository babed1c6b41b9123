"""Geometry of a chart: from curves to the paths, ticks and marks of an SVG. Pure; the template writes the markup.

Invariants (``tests/report/test_plot.py`` asserts each):

1. Every coordinate is finite and inside the plot, whatever the values (constant, huge, one point, none, NaN).
2. Ticks are round numbers (1, 2 or 5 times a power of ten) inside the axis.
3. What the pointer shows (``data``) are the values that are drawn, as JSON numbers or null.
4. A heat map's darkest cell is its worst where the metric has a better direction, its largest where it has none; its
   scale says which, and its ticks stand below steps that were logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.report.run_data import Resume
from megatron_ext.report.series import Curve
from megatron_ext.tracking.names import HIGHER, NEITHER

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 10, 26
POINTS = 400
DOTS = 40  # a line of fewer points also shows them
COLOURS = 8


@dataclass(frozen=True, eq=False)
class Line:
    """A curve to draw. ``colour`` counts through the palette; ``thin`` are curves drawn faintly beside it; ``key``
    groups lines that are switched on and off together."""

    label: str
    curve: Curve
    colour: int = 0
    hint: str = ""
    thin: Sequence[Curve] = ()
    key: str = ""


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Drawn:
    """A line as SVG: path data (empty where there is nothing), dots, and crosses at values that were not finite."""

    label: str
    hint: str
    key: str
    colour: int
    path: str
    band: str
    thin: tuple[str, ...]
    dots: tuple[tuple[float, float], ...]
    bad: tuple[float, ...]
    bad_count: int


@dataclass(frozen=True)
class Mark:
    """A resume: a line at ``x``, and a shade up to ``end`` over the steps that were undone."""

    x: float
    end: float
    text: str


@dataclass(frozen=True)
class Level:
    """A dashed line across the plot."""

    y: float
    text: str


@dataclass(frozen=True)
class Scale:
    """What a heat map's shades mean: the value of the ``light`` end and of the ``dark`` one, and how to read them."""

    light: str
    dark: str
    text: str


@dataclass(frozen=True)
class Plot:
    """One chart, ready to be written."""

    title: str
    note: str
    lines: tuple[Drawn, ...]
    x_ticks: tuple[Tick, ...] = ()
    y_ticks: tuple[Tick, ...] = ()
    marks: tuple[Mark, ...] = ()
    cells: tuple[tuple[float, float, float, float, int, str], ...] = ()  # x, y, width, height, shade 0-9, text
    scale: Scale | None = None
    levels: tuple[Level, ...] = ()
    data: dict[str, Any] = field(default_factory=dict)
    stacked: bool = False
    width: int = WIDTH
    height: int = HEIGHT
    left: int = LEFT
    right: int = WIDTH - RIGHT
    top: int = TOP
    bottom: int = HEIGHT - BOTTOM

    @property
    def empty(self) -> bool:
        return not any(line.path or line.dots or line.bad_count for line in self.lines) and not self.cells


# -- numbers --------------------------------------------------------------------------------------------------------
def number(value: float | None, digits: int = 4) -> str:
    """A number as people write it: few digits, k and M for large ones; a dash for none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (limit if unit != "k" else 1e3)
            return f"{scaled:.{digits - 1}g}{unit}" if abs(scaled) < 1000 else f"{scaled:.0f}{unit}"
    if size and size < 1e-3:
        return f"{value:.{digits - 2}g}"
    return f"{value:.{digits}g}"


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float], log: bool = False) -> list[str]:
    """Labels of ticks: as many digits as tell neighbours apart."""
    if log or len(values) < 2 or max(map(abs, values)) >= 1e4:
        return [number(v) for v in values]
    step = min(b - a for a, b in zip(values[:-1], values[1:], strict=True))
    if max(map(abs, values)) < 1e-3:
        return [number(round(v / step) * step) for v in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{v:.{digits}f}" if v else "0" for v in values]


def step_ticks(low: float, high: float) -> list[float]:
    """Ticks of the step axis: whole numbers."""
    found = [t for t in round_ticks(low, high, 6) if t == round(t)] if high > low else []
    return found or [low]


@dataclass(frozen=True)
class Axis:
    """From values to pixels, linear or logarithmic; values outside are drawn at the edge."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, values: NDArray[Any] | float) -> NDArray[np.float64]:
        inside = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        low, high = self.low, self.high
        if self.log:
            inside, low, high = np.log10(inside), math.log10(low), math.log10(high)
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    def drawn_ticks(self) -> tuple[Tick, ...]:
        values = self.ticks()
        labels = tick_labels(values, self.log)
        return tuple(Tick(round(float(self.at(v)), 1), label) for v, label in zip(values, labels, strict=True))

    def ticks(self) -> list[float]:
        if not self.log:
            return round_ticks(self.low, self.high)
        low, high = math.log10(self.low), math.log10(self.high)
        if high - low < 1.5:  # less than two powers of ten apart
            return [t for t in round_ticks(self.low, self.high) if t > 0]
        every = max(1, round((high - low) / 5))
        return [10.0**k for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, every)]


TINY = 1e-300  # below it the steps between ticks underflow: drawn as 0


def value_axis(values: NDArray[np.float64], *, log: bool, share: bool) -> Axis:
    """The axis of finite ``values``; logarithmic only where they are positive and span two powers of ten."""
    start, end = float(HEIGHT - BOTTOM), float(TOP)
    if share and values.min(initial=0) >= 0 and values.max(initial=1) <= 1:
        return Axis(0.0, 1.0, start, end)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not len(values):
        low, high = 0.0, 1.0
    if log and low > 0 and high / low >= 100:
        return Axis(low / 1.2, high * 1.2, start, end, log=True)
    if 0 <= low < 0.5 * high:
        low = 0.0
    span = high - low
    if max(abs(low), abs(high)) < TINY:
        return Axis(0.0, 1.0, start, end)
    if span <= 1e-9 * max(abs(high), abs(low)):  # constant: the line goes through the middle
        span = 0.2 * max(abs(high), abs(low))
        return Axis(low - span, high + span, start, end)
    return Axis(low if low == 0 else low - 0.05 * span, high + 0.05 * span, start, end)


def step_axis(first: float, last: float) -> Axis:
    return Axis(first, last if last > first else first + 1, float(LEFT), float(WIDTH - RIGHT))


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def path_of(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return f"M{_points(x, y)}" if len(x) > 1 else ""


def area_of(x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> str:
    if len(x) < 2 or np.array_equal(low, high):
        return ""
    return f"M{_points(x, high)}L{_points(x[::-1], low[::-1])}Z"


# -- charts ---------------------------------------------------------------------------------------------------------
def _span(curves: Sequence[Curve]) -> tuple[float, float]:
    steps = np.concatenate([np.concatenate([c.steps, c.bad.astype(np.float64)]) for c in curves] or [np.zeros(0)])
    return (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)


def resume_marks(resumes: Sequence[Resume], axis: Axis) -> tuple[Mark, ...]:
    """Marks of the resumes that lie inside the axis."""
    marks = []
    for resume in resumes:
        if not axis.low <= resume.step <= axis.high:
            continue
        undone = resume.undone_to
        text = f"resumed from step {resume.step}"
        if undone is not None:
            text += f"; step {undone}" if undone == resume.step + 1 else f"; steps {resume.step + 1} to {undone}"
            text += " of the earlier history undone and trained again"
        x, end = (float(axis.at(at)) for at in (resume.step, resume.step if undone is None else undone))
        marks.append(Mark(round(x, 1), round(end, 1), text))
    return tuple(marks)


def line_plot(
    title: str,
    lines: Sequence[Line],
    *,
    note: str = "",
    log: bool = False,
    share: bool = False,
    levels: Sequence[tuple[float, str]] = (),
    resumes: Sequence[Resume] = (),
) -> Plot:
    """Curves over steps. ``levels`` (value, text) are lines across; one so far from the curves that they would be flat
    beside it is left out."""
    curves = [c for line in lines for c in (line.curve, *line.thin)]
    x_axis = step_axis(*_span(curves))
    # Bands may be far wider than what they surround (an interval over three seeds): they do not stretch the axis.
    values = np.concatenate(
        [v for line in lines for c in (line.curve, *line.thin) for v in ((c.mid,) if line.thin else (c.low, c.high))]
        or [np.zeros(0)]
    )
    values = values[np.isfinite(values)]
    near = [(value, text) for value, text in levels if _near(value, values)]
    y_axis = value_axis(np.append(values, [value for value, _ in near]), log=log, share=share)
    drawn = []
    for index, line in enumerate(lines):
        curve = line.curve
        x, y = x_axis.at(curve.steps), y_axis.at(curve.mid)
        dots = tuple(zip(x.round(1).tolist(), y.round(1).tolist(), strict=True)) if len(x) <= DOTS else ()
        drawn.append(
            Drawn(
                label=line.label,
                hint=line.hint,
                key=line.key or str(index),
                colour=line.colour % COLOURS,
                path=path_of(x, y),
                band=area_of(x, y_axis.at(curve.low), y_axis.at(curve.high)),
                thin=tuple(path_of(x_axis.at(c.steps), y_axis.at(c.mid)) for c in line.thin),
                dots=dots,
                bad=tuple(x_axis.at(curve.bad[:200]).round(1).tolist()),
                bad_count=len(curve.bad),
            )
        )
    bad = sum(line.bad_count for line in drawn)
    notes = [note, "log scale" if y_axis.log else "", f"× {bad} not finite" if bad else ""]
    return Plot(
        title=title,
        note=", ".join(n for n in notes if n),
        lines=tuple(drawn),
        x_ticks=_x_ticks(x_axis),
        y_ticks=y_axis.drawn_ticks(),
        marks=resume_marks(resumes, x_axis),
        levels=tuple(Level(round(float(y_axis.at(value)), 1), text) for value, text in near),
        data=_data(x_axis, lines),
    )


def _near(level: float, values: NDArray[np.float64]) -> bool:
    """Whether a level is no farther from the values than they are from each other or from 0."""
    if not len(values) or not math.isfinite(level):
        return False
    low, high = float(values.min()), float(values.max())
    reach = max(high - low, abs(low), abs(high))
    return low - reach <= level <= high + reach


def _x_ticks(axis: Axis, last: float | None = None) -> tuple[Tick, ...]:
    """Round steps, none behind ``last`` (None: the axis's end)."""
    ticks = step_ticks(axis.low, axis.high if last is None else max(last, axis.low))
    return tuple(Tick(round(float(axis.at(t)), 1), number(t)) for t in ticks)


def _data(axis: Axis, lines: Sequence[Line]) -> dict[str, Any]:
    """What the pointer shows: for each line its own steps and values (six digits are enough to read)."""
    return {
        "x": [axis.low, axis.high, axis.start, axis.end],
        "lines": [
            {
                "label": line.label,
                "key": line.key or str(index),
                "colour": line.colour % COLOURS,
                "steps": [round(s, 1) for s in line.curve.steps.tolist()],
                "values": [float(f"{v:.6g}") for v in line.curve.mid.tolist()],
            }
            for index, line in enumerate(lines)
        ],
    }


def stack_plot(title: str, lines: Sequence[Line], *, note: str = "", resumes: Sequence[Resume] = ()) -> Plot:
    """Curves as areas on top of each other, the first at the bottom; a line that lacks a step counts 0 there."""
    steps = np.unique(np.concatenate([line.curve.steps for line in lines] or [np.zeros(0)]))
    x_axis = step_axis(*((float(steps[0]), float(steps[-1])) if len(steps) else (0.0, 1.0)))
    table = np.zeros((len(lines), len(steps)))
    for row, line in zip(table, lines, strict=True):
        row[np.searchsorted(steps, line.curve.steps)] = line.curve.mid
    tops = np.cumsum(table, axis=0)
    highest = float(tops.max(initial=0.0))
    y_axis = Axis(0.0, highest * 1.05 if highest >= TINY else 1.0, float(HEIGHT - BOTTOM), float(TOP))
    # Square shoulders: a step lasts from its number to the next, so that a single slow step is not drawn as a wedge.
    x = np.repeat(np.append(steps, steps[-1:] + 1), 2)[1:-1] if len(steps) else steps
    last = x_axis.high if len(steps) > 1 else x_axis.low
    x_axis = Axis(x_axis.low, x_axis.high + 1, x_axis.start, x_axis.end)
    drawn = []
    for index, line in enumerate(lines):
        low = tops[index - 1] if index else np.zeros(len(steps))
        band = area_of(x_axis.at(x), y_axis.at(np.repeat(low, 2)), y_axis.at(np.repeat(tops[index], 2)))
        drawn.append(
            Drawn(line.label, line.hint, line.key or str(index), line.colour % COLOURS, band, "", (), (), (), 0)
        )
    return Plot(
        title=title,
        note=note,
        lines=tuple(drawn),
        x_ticks=_x_ticks(x_axis, last),
        y_ticks=y_axis.drawn_ticks(),
        marks=resume_marks(resumes, x_axis),
        data=_data(x_axis, lines),
        stacked=True,
    )


def heat_plot(
    title: str,
    rows: Sequence[Line],
    *,
    note: str = "",
    better: str = NEITHER,
    columns: int = 80,
    cells: int = 1600,
) -> Plot:
    """A row a line, a column a stretch of steps; for many lines of one unit, such as layers. Darker is worse where
    ``better`` is a direction, else larger. Many rows leave fewer columns than ``columns``, so that there are about
    ``cells`` at most."""
    columns = max(1, min(columns, cells // max(len(rows), 1)))
    first, last = _span([row.curve for row in rows])
    x_axis = step_axis(first, last + 1)
    count = max(1, min(columns, int(last - first) + 1))
    edges = np.linspace(x_axis.low, x_axis.high, count + 1)
    top = max((float(row.curve.mid.max(initial=0.0)) for row in rows), default=0.0)
    low = min((float(row.curve.mid.min(initial=top)) for row in rows), default=0.0)
    low = low if low > 0.5 * top and low < top else 0.0  # what is never near 0 would be one colour
    height = (HEIGHT - BOTTOM - TOP) / max(len(rows), 1)
    worst_low = better == HIGHER
    drawn = []
    for index, row in enumerate(rows):
        at = np.clip(np.searchsorted(edges, row.curve.steps, side="right") - 1, 0, count - 1)
        sums, sizes = (np.bincount(at, weights=w, minlength=count) for w in (row.curve.mid, np.ones(len(at))))
        for column in np.flatnonzero(sizes):
            value = float(sums[column] / sizes[column])
            x, end = (float(x_axis.at(edges[c])) for c in (column, column + 1))
            place = min(max((value - low) / (top - low), 0.0), 1.0) if top > low else 0.0
            shade = min(9, int(10 * ((1 - place) if worst_low else place)))
            text = f"{row.label}, {_stretch(edges[column], edges[column + 1])}: {number(value)}"
            drawn.append(
                (round(x, 1), round(TOP + index * height, 1), round(end - x, 1), round(height, 1), shade, text)
            )
    every = max(1, math.ceil(len(rows) / 12))
    ticks = [Tick(TOP + (i + 0.5) * height, row.label) for i, row in enumerate(rows) if i % every == 0]
    ends = (number(top), number(low)) if worst_low else (number(low), number(top))
    same = f"{number(top)} everywhere" if drawn and low == top else ""
    return Plot(
        title=title,
        note=", ".join(n for n in (note, same) if n),
        lines=(),
        x_ticks=_cell_ticks(x_axis, rows),
        y_ticks=tuple(ticks),
        cells=tuple(drawn),
        scale=None if same or not drawn else Scale(*ends, f"darker is {'more' if better == NEITHER else 'worse'}"),
    )


def _stretch(edge: float, end: float) -> str:
    """The steps of a column, from its edges."""
    first, last = math.ceil(edge - 1e-9), math.ceil(end - 1e-9) - 1
    return f"steps {first} to {last}" if last > first else f"step {first}"


def _cell_ticks(axis: Axis, rows: Sequence[Line]) -> tuple[Tick, ...]:
    """Below the middle of the column of a step, for round ones of the steps that were logged."""
    logged = sorted({float(step) for row in rows for step in row.curve.steps})
    if not logged:
        return ()
    round_ones = set(step_ticks(logged[0], logged[-1])) if len(logged) > 1 else set()
    shown = [step for step in logged if step in round_ones] or sorted({logged[0], logged[-1]})
    return tuple(Tick(round(float(axis.at(step + 0.5)), 1), number(step)) for step in shown)
