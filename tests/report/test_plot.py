"""The invariants of ``megatron_ext/report/plot.py``."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ext.report.plot import (
    HEIGHT,
    WIDTH,
    Line,
    Plot,
    heat_plot,
    line_plot,
    number,
    round_ticks,
    stack_plot,
    tick_labels,
)
from megatron_ext.report.run_data import Resume
from megatron_ext.report.series import Series, thin

VALUES = st.lists(
    st.floats(-1e12, 1e12) | st.sampled_from([0.0, 1.0, float("nan"), float("inf"), 1e-300, 1e300]), max_size=60
)

LEVELS = ((0.0, "none"), (0.2, "some"), (1e4, "much"), (float("nan"), "?"))


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


@given(VALUES, VALUES, st.booleans(), st.booleans(), st.integers(0, 70), st.integers(0, 9))
def test_everything_is_inside(a: list[float], b: list[float], log: bool, share: bool, at: int, undone: int) -> None:
    resumes = (Resume(at, at + undone if undone else None),)
    for plot in (
        line_plot("t", [line(a), line(b, "b", 5)], log=log, share=share, resumes=resumes, levels=LEVELS),
        stack_plot("t", [line([abs(v) for v in a]), line([abs(v) for v in b], "b", 5)], resumes=resumes),
        heat_plot("t", [line([abs(v) for v in a]), line([abs(v) for v in b], "b", 5)]),
        heat_plot("t", [line(a), line(b, "b", 5)], better="higher"),
    ):
        for x, y in coordinates(plot):
            assert -0.11 <= x <= WIDTH + 0.11 and -0.11 <= y <= HEIGHT + 0.11
        json.dumps(plot.data, allow_nan=False)


def test_no_series_and_no_value() -> None:
    assert line_plot("t", []).empty and stack_plot("t", []).empty and heat_plot("t", []).empty
    only_bad = line_plot("t", [line([float("nan")] * 3)])
    assert not only_bad.empty and only_bad.lines[0].bad_count == 3 and "3 not finite" in only_bad.note


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    high = low + span
    assume(span > 1e-6 * abs(low))  # an axis is never narrower than what floats tell apart
    ticks = round_ticks(low, high)
    slack = 1e-6 * span
    assert 1 <= len(ticks) <= 12 and all(low - slack <= t <= high + slack for t in ticks)
    labels = tick_labels(ticks)
    assert len(labels) == len(ticks)


def test_neighbouring_ticks_read_differently() -> None:
    assert tick_labels([0.9995, 1.0, 1.0005]) == ["0.9995", "1.0000", "1.0005"]
    assert tick_labels([0.0, 0.2, 0.4]) == ["0", "0.2", "0.4"]
    assert tick_labels([0.0, 10000.0, 20000.0]) == ["0", "10k", "20k"]


def test_the_axis_turns_logarithmic_only_over_decades() -> None:
    assert "log scale" in line_plot("t", [line([1e-6, 1e-2])], log=True).note
    assert "log" not in line_plot("t", [line([1.0, 20.0])], log=True).note
    assert "log" not in line_plot("t", [line([0.0, 1e-2])], log=True).note


def test_a_stack_adds_up() -> None:
    plot = stack_plot("t", [line([2.0, 2.0]), line([1.0, 1.0], "b")])
    top = [float(y) for y in re.findall(r"\d+\.\d+ (\d+\.\d+)", plot.lines[1].path)]
    base = [float(y) for y in re.findall(r"\d+\.\d+ (\d+\.\d+)", plot.lines[0].path)]
    assert min(top) < min(base) and max(top) == min(base)
    assert plot.data["lines"][1]["values"] == [1.0, 1.0]


def test_a_level_near_the_curve_is_drawn_and_one_far_away_is_not() -> None:
    plot = line_plot("t", [line([0.15, 0.17, 0.12])], levels=((0.0, "from"), (0.2, "to"), (100.0, "never")))
    assert [level.text for level in plot.levels] == ["from", "to"]
    ends = [float(y) for y in re.findall(r"\d+\.\d+ (\d+\.\d+)", plot.lines[0].path)]
    assert plot.levels[1].y < min(ends) <= max(ends) < plot.levels[0].y, "inside the axis, around the curve"
    assert line_plot("t", [line([])], levels=((0.2, "to"),)).levels == ()


@pytest.mark.parametrize(("better", "darkest"), [("lower", 2), ("higher", 0), ("neither", 2)])
def test_a_heat_map_is_darkest_at_its_worst(better: str, darkest: int) -> None:  # invariant 4
    plot = heat_plot("t", [line([0.5, 1.5, 2.5], "0"), line([1.0, 1.0, 1.0], "1")], better=better)
    shades = [shade for *_, shade, _ in plot.cells[:3]]
    assert shades.index(max(shades)) == darkest and max(shades) >= 8
    assert plot.scale is not None and plot.scale.text == f"darker is {'more' if better == 'neither' else 'worse'}"
    ends = (plot.scale.light, plot.scale.dark)
    assert ends == (("2.5", "0") if better == "higher" else ("0", "2.5"))


def test_ticks_of_a_heat_map_stand_below_steps_that_were_logged() -> None:  # invariant 4
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
    assert [tick.label for tick in stack_plot("t", [line([1.0] * 8)]).x_ticks][-1] == "8", "not of a step to come"


def test_a_resume_shades_what_it_undid() -> None:
    plot = line_plot("t", [line([1.0] * 30)], resumes=(Resume(10, 14), Resume(20, None), Resume(400, None)))
    assert [mark.end > mark.x for mark in plot.marks] == [True, False]
    assert "steps 11 to 14" in plot.marks[0].text and "undone" not in plot.marks[1].text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1234"),
        (15_300, "15.3k"),
        (2_500_000, "2.5M"),
        (0.25, "0.25"),
        (None, "–"),
        (float("nan"), "–"),
    ],
)
def test_numbers_as_people_write_them(value: float | None, text: str) -> None:
    assert number(value) == text
