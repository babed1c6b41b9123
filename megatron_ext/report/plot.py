"""Geometry of a chart: from curves to the paths and marks of an SVG. Pure; the template writes the markup.

Invariants (``tests/report/test_plot.py`` asserts each):

1. Every coordinate is finite and inside the plot, whatever the values (constant, huge, one point, none, NaN).
2. What the pointer shows (``data``) are the values that are drawn, as JSON numbers or null.
3. A stack adds up: each area begins where the one below it ends.
4. A level far from the curves, or on the axis, is told in the note and not drawn; a resume shades the steps that it
   undid.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.report.axes import BOTTOM, HEIGHT, LEFT, RIGHT, TINY, TOP, WIDTH, Axis, Tick, step_axis, value_axis
from megatron_ext.report.run_data import Resume
from megatron_ext.report.series import Curve

POINTS = 400
DOTS = 40  # a line of fewer points also shows them
COLOURS = 8
ON_AXIS = 5  # pixels: a level closer to the step axis would hide in it


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
class Drawn:
    """A line as SVG: path data (empty where there is nothing), dots, and crosses at values that were not finite."""

    label: str
    hint: str
    key: str
    colour: int
    path: str
    band: str = ""
    thin: tuple[str, ...] = ()
    dots: tuple[tuple[float, float], ...] = ()
    bad: tuple[float, ...] = ()
    bad_count: int = 0


@dataclass(frozen=True)
class Mark:
    """A resume: a line at ``x``, and a shade up to ``end`` over the steps that were undone."""

    x: float
    end: float
    text: str


@dataclass(frozen=True)
class Level:
    """A dashed line across the plot at ``y``, its text at ``text_y``."""

    y: float
    text: str
    text_y: float


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
    right: int = RIGHT
    top: int = TOP
    bottom: int = BOTTOM

    @property
    def empty(self) -> bool:
        """Whether there is nothing to draw, not even a value that was not finite."""
        return not any(line.path or line.dots or line.bad_count for line in self.lines) and not self.cells


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
    """Curves over steps. ``levels`` (value, text) are lines across, from low to high; one so far from the curves that
    they would be flat beside it, or on the axis, stands in the note."""
    curves = [c for line in lines for c in (line.curve, *line.thin)]
    x_axis = step_axis(*span(curves))
    # Bands may be far wider than what they surround (an interval over three seeds): they do not stretch the axis.
    values = np.concatenate(
        [v for line in lines for c in (line.curve, *line.thin) for v in ((c.mid,) if line.thin else (c.low, c.high))]
        or [np.zeros(0)]
    )
    values = values[np.isfinite(values)]
    near = [(value, text) for value, text in levels if _near(value, values)]
    y_axis = value_axis(np.append(values, [value for value, _ in near]), log=log, share=share)
    across = _levels(y_axis, near)
    told = {level.text for level in across}
    untold = [text for value, text in levels if math.isfinite(value) and text not in told]
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
                path=_path(x, y),
                band=_area(x, y_axis.at(curve.low), y_axis.at(curve.high)),
                thin=tuple(_path(x_axis.at(c.steps), y_axis.at(c.mid)) for c in line.thin),
                dots=dots,
                bad=tuple(x_axis.at(curve.bad[:200]).round(1).tolist()),
                bad_count=len(curve.bad),
            )
        )
    bad = sum(line.bad_count for line in drawn)
    notes = [note, *untold, "log scale" if y_axis.log else "", f"× {bad} not finite" if bad else ""]
    return Plot(
        title=title,
        note=", ".join(n for n in notes if n),
        lines=tuple(drawn),
        x_ticks=x_axis.drawn_steps(),
        y_ticks=y_axis.drawn_ticks(),
        marks=_marks(resumes, x_axis),
        levels=across,
        data=_data(x_axis, drawn, lines),
    )


def stack_plot(title: str, lines: Sequence[Line], *, note: str = "", resumes: Sequence[Resume] = ()) -> Plot:
    """Curves as areas on top of each other, the first at the bottom; a line that lacks a step counts 0 there."""
    steps = np.unique(np.concatenate([line.curve.steps for line in lines] or [np.zeros(0)]))
    x_axis = step_axis(*((float(steps[0]), float(steps[-1])) if len(steps) else (0.0, 1.0)))
    table = np.zeros((len(lines), len(steps)))
    for row, line in zip(table, lines, strict=True):
        row[np.searchsorted(steps, line.curve.steps)] = line.curve.mid
    tops = np.cumsum(table, axis=0)
    highest = float(tops.max(initial=0.0))
    y_axis = Axis(0.0, highest * 1.05 if highest >= TINY else 1.0, float(BOTTOM), float(TOP))
    # Square shoulders: a step lasts from its number to the next, so that a single slow step is not drawn as a wedge.
    x = np.repeat(np.append(steps, steps[-1:] + 1), 2)[1:-1] if len(steps) else steps
    last = x_axis.high if len(steps) > 1 else x_axis.low
    x_axis = Axis(x_axis.low, x_axis.high + 1, x_axis.start, x_axis.end)
    drawn = []
    for index, line in enumerate(lines):
        low = tops[index - 1] if index else np.zeros(len(steps))
        band = _area(x_axis.at(x), y_axis.at(np.repeat(low, 2)), y_axis.at(np.repeat(tops[index], 2)))
        drawn.append(Drawn(line.label, line.hint, line.key or str(index), line.colour % COLOURS, band))
    return Plot(
        title=title,
        note=note,
        lines=tuple(drawn),
        x_ticks=x_axis.drawn_steps(last),
        y_ticks=y_axis.drawn_ticks(),
        marks=_marks(resumes, x_axis),
        data=_data(x_axis, drawn, lines),
        stacked=True,
    )


def span(curves: Sequence[Curve]) -> tuple[float, float]:
    """First and last step of some curves, those of values that were not finite included; 0 and 1 for none."""
    steps = np.concatenate([np.concatenate([c.steps, c.bad.astype(np.float64)]) for c in curves] or [np.zeros(0)])
    return (float(steps.min()), float(steps.max())) if len(steps) else (0.0, 1.0)


def _near(level: float, values: NDArray[np.float64]) -> bool:
    """Whether a level is no farther from the values than they are from each other or from 0."""
    if not len(values) or not math.isfinite(level):
        return False
    low, high = float(values.min()), float(values.max())
    reach = max(high - low, abs(low), abs(high))
    return low - reach <= level <= high + reach


def _levels(axis: Axis, levels: Sequence[tuple[float, str]]) -> tuple[Level, ...]:
    """Those that do not lie on the step axis; of several the lowest has its text below its line, the others above."""
    found: list[Level] = []
    for value, text in levels:
        y = axis.pixel(value)
        if BOTTOM - y < ON_AXIS:
            continue
        below = bool(len(levels) > 1 and not found and y < BOTTOM - 16) or y < TOP + 14
        found.append(Level(y, text, y + 12 if below else y - 4))
    return tuple(found)


def _marks(resumes: Sequence[Resume], axis: Axis) -> tuple[Mark, ...]:
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
        marks.append(Mark(axis.pixel(resume.step), axis.pixel(resume.step if undone is None else undone), text))
    return tuple(marks)


def _data(axis: Axis, drawn: Sequence[Drawn], lines: Sequence[Line]) -> dict[str, Any]:
    """What the pointer shows: for each line its own steps and values (six digits are enough to read)."""
    return {
        "x": [axis.low, axis.high, axis.start, axis.end],
        "lines": [
            {
                "label": shown.label,
                "key": shown.key,
                "colour": shown.colour,
                "steps": [round(s, 1) for s in line.curve.steps.tolist()],
                "values": [float(f"{v:.6g}") for v in line.curve.mid.tolist()],
            }
            for shown, line in zip(drawn, lines, strict=True)
        ],
    }


def _points(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return "L".join(f"{a:.1f} {b:.1f}" for a, b in zip(x, y, strict=True))


def _path(x: NDArray[np.float64], y: NDArray[np.float64]) -> str:
    return f"M{_points(x, y)}" if len(x) > 1 else ""


def _area(x: NDArray[np.float64], low: NDArray[np.float64], high: NDArray[np.float64]) -> str:
    if len(x) < 2 or np.array_equal(low, high):
        return ""
    return f"M{_points(x, high)}L{_points(x[::-1], low[::-1])}Z"
