"""The heat map: many curves of one unit, such as layers, as rows of shaded cells. Pure.

Invariants (``tests/report/test_heat.py`` asserts each):

1. Every cell is finite and inside the plot, whatever the values.
2. Darker is worse where the metric has a better direction, larger where it has none; the scale says which. It begins at
   the metric's own light end and reaches at least to its dark one, so that small differences stay small; values beyond
   stretch it.
3. Ticks stand below steps that were logged.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from megatron_ext.report.axes import BOTTOM, TOP, Axis, Tick, step_axis, step_ticks
from megatron_ext.report.numbers import number
from megatron_ext.report.plot import Line, Plot, Scale, span
from megatron_ext.tracking.names import HIGHER, NEITHER


def heat_plot(
    title: str,
    rows: Sequence[Line],
    *,
    note: str = "",
    better: str = NEITHER,
    ends: tuple[float, float] = (0.0, 0.0),
    columns: int = 80,
    cells: int = 1600,
) -> Plot:
    """A row a line, a column a stretch of steps; for many lines of one unit, such as layers. Darker is worse where
    ``better`` is a direction, else larger; ``ends`` are the lowest and highest value of the scale, which values beyond
    them stretch. Many rows leave fewer columns than ``columns``, so that there are about
    ``cells`` at most."""
    columns = max(1, min(columns, cells // max(len(rows), 1)))
    first, last = span([row.curve for row in rows])
    x_axis = step_axis(first, last + 1)
    count = max(1, min(columns, int(last - first) + 1))
    edges = np.linspace(x_axis.low, x_axis.high, count + 1)
    top = max((float(row.curve.mid.max(initial=ends[1])) for row in rows), default=ends[1])
    low = min((float(row.curve.mid.min(initial=ends[0])) for row in rows), default=ends[0])
    height = (BOTTOM - TOP) / max(len(rows), 1)
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
    said = f"darker is {'more' if better == NEITHER else 'worse'}"
    every = max(1, math.ceil(len(rows) / 12))
    ticks = [Tick(TOP + (i + 0.5) * height, row.label) for i, row in enumerate(rows) if i % every == 0]
    light, dark = (number(top), number(low)) if worst_low else (number(low), number(top))
    values = np.concatenate([row.curve.mid for row in rows] or [np.zeros(0)])
    same = f"{number(float(values[0]))} everywhere" if drawn and values.min() == values.max() else ""
    return Plot(
        title=title,
        note=", ".join(n for n in (note, same) if n),
        lines=(),
        x_ticks=_ticks(x_axis, rows),
        y_ticks=tuple(ticks),
        cells=tuple(drawn),
        scale=None if same or not drawn else Scale(light, dark, said),
    )


def _stretch(edge: float, end: float) -> str:
    """The steps of a column, from its edges."""
    first, last = math.ceil(edge - 1e-9), math.ceil(end - 1e-9) - 1
    return f"steps {first} to {last}" if last > first else f"step {first}"


def _ticks(axis: Axis, rows: Sequence[Line]) -> tuple[Tick, ...]:
    """Below the middle of the column of a step, for round ones of the steps that were logged."""
    logged = sorted({float(step) for row in rows for step in row.curve.steps})
    if not logged:
        return ()
    round_ones = set(step_ticks(logged[0], logged[-1])) if len(logged) > 1 else set()
    shown = [step for step in logged if step in round_ones] or sorted({logged[0], logged[-1]})
    return tuple(Tick(axis.pixel(step + 0.5), number(step)) for step in shown)
