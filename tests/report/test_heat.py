"""The invariants of ``megatron_ext/report/heat.py``."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given

from megatron_ext.report.heat import heat_plot
from megatron_ext.report.plot import Line
from megatron_ext.report.series import Series, thin
from tests.helpers.plots import VALUES, assert_inside, line


@given(VALUES, VALUES)
def test_everything_is_inside(a: list[float], b: list[float]) -> None:
    assert_inside(heat_plot("t", [line([abs(v) for v in a]), line([abs(v) for v in b], "b", 5)]))
    assert_inside(heat_plot("t", [line(a), line(b, "b", 5)], better="higher"))


def test_no_rows_and_no_value() -> None:
    assert heat_plot("t", []).empty and heat_plot("t", [line([float("nan")] * 3)]).empty


@pytest.mark.parametrize(("better", "darkest"), [("lower", 2), ("higher", 0), ("neither", 2)])
def test_a_heat_map_is_darkest_at_its_worst(better: str, darkest: int) -> None:
    plot = heat_plot("t", [line([0.5, 1.5, 2.5], "0"), line([1.0, 1.0, 1.0], "1")], better=better)
    shades = [shade for *_, shade, _ in plot.cells[:3]]
    assert shades.index(max(shades)) == darkest and max(shades) >= 8
    assert plot.scale is not None and plot.scale.text == f"darker is {'more' if better == 'neither' else 'worse'}"
    ends = (plot.scale.light, plot.scale.dark)
    assert ends == (("2.5", "0") if better == "higher" else ("0", "2.5"))


def test_small_differences_stay_small_on_the_scale_of_the_metric() -> None:
    """1.27 and 1.43 of a load that may be 3 times the mean; and what is beyond the scale stretches it."""
    rows = [line([1.27, 1.3], "0"), line([1.43, 1.4], "1")]
    plot = heat_plot("t", rows, better="lower", ends=(1.0, 3.0))
    assert {shade for *_, shade, _ in plot.cells} <= {1, 2}
    assert plot.scale is not None and (plot.scale.light, plot.scale.dark) == ("1", "3")
    beyond = heat_plot("t", [*rows, line([4.0, 0.5], "2")], better="lower", ends=(1.0, 3.0))
    assert beyond.scale is not None and (beyond.scale.light, beyond.scale.dark) == ("0.5", "4")
    assert [shade for *_, shade, _ in beyond.cells[-2:]] == [9, 0]
    same = heat_plot("t", [line([0.0, 0.0], "0")], better="lower", ends=(0.0, 0.5))
    assert same.scale is None and same.note == "0 everywhere" and {shade for *_, shade, _ in same.cells} == {0}


def test_ticks_of_a_heat_map_stand_below_steps_that_were_logged() -> None:
    plot = heat_plot("t", [line([1.0, 2.0, 3.0, 4.0], "0"), line([1.0] * 4, "1")])
    assert [tick.label for tick in plot.x_ticks] == ["1", "2", "3", "4"]
    middles = [round(x + w / 2, 1) for x, _, w, *_ in plot.cells[:4]]
    assert [tick.at for tick in plot.x_ticks] == pytest.approx(middles, abs=0.11)
    assert [text for *_, text in plot.cells[:2]] == ["0, step 1: 1", "0, step 2: 2"]
    every = Line("0", thin(Series(np.array([10, 20, 31]), np.array([1.0, 2.0, 3.0])), 20))
    assert [tick.label for tick in heat_plot("t", [every]).x_ticks] == ["10", "20"]
    many = heat_plot("t", [line([float(v) for v in range(200)], "0")], columns=50)
    assert re.match(r"0, steps \d+ to \d+: ", many.cells[0][-1])
    same = heat_plot("t", [line([0.0, 0.0], "0")])
    assert same.scale is None and same.note == "0 everywhere"
