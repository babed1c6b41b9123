"""Lines to draw, and where a chart put them."""

from __future__ import annotations

import re

import numpy as np
from hypothesis import strategies as st

from megatron_ext.report.axes import HEIGHT, WIDTH
from megatron_ext.report.plot import Line, Plot
from megatron_ext.report.series import Series, thin

VALUES = st.lists(
    st.floats(-1e12, 1e12) | st.sampled_from([0.0, 1.0, float("nan"), float("inf"), 1e-300, 1e300]), max_size=60
)


def line(values: list[float], label: str = "a", first: int = 1) -> Line:
    return Line(label, thin(Series(np.arange(first, first + len(values)), np.array(values, dtype=np.float64)), 20))


def coordinates(plot: Plot) -> list[tuple[float, float]]:
    found = []
    for drawn in plot.lines:
        for path in (drawn.path, drawn.band, *drawn.thin):
            numbers = [float(x) for x in re.findall(r"-?\d+\.\d+", path)]
            assert len(numbers) % 2 == 0 and "nan" not in path and "inf" not in path
            found += list(zip(numbers[::2], numbers[1::2], strict=True))
        found += list(drawn.dots) + [(x, 20.0) for x in drawn.bad]
    found += [(x, 20.0) for mark in plot.marks for x in (mark.x, mark.end)]
    found += [(tick.at, 20.0) for tick in plot.x_ticks] + [(60.0, tick.at) for tick in plot.y_ticks]
    found += [(60.0, level.y) for level in plot.levels]
    found += [(x + w, y + h) for x, y, w, h, _, _ in plot.cells] + [(x, y) for x, y, *_ in plot.cells]
    return found


def assert_inside(plot: Plot) -> None:
    """Every coordinate of the chart is finite and inside it."""
    for x, y in coordinates(plot):
        assert -0.11 <= x <= WIDTH + 0.11 and -0.11 <= y <= HEIGHT + 0.11
