"""The invariants of ``megatron_ext/report/plot.py``."""

from __future__ import annotations

import json
import re

from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.report.axes import BOTTOM, TOP
from megatron_ext.report.plot import line_plot, stack_plot
from megatron_ext.report.run_data import Resume
from tests.helpers.plots import VALUES, assert_inside, line

LEVELS = ((0.0, "none"), (0.2, "some"), (1e4, "much"), (float("nan"), "?"))


@given(VALUES, VALUES, st.booleans(), st.booleans(), st.integers(0, 70), st.integers(0, 9))
def test_everything_is_inside(a: list[float], b: list[float], log: bool, share: bool, at: int, undone: int) -> None:
    resumes = (Resume(at, at + undone if undone else None),)
    for plot in (
        line_plot("t", [line(a), line(b, "b", 5)], log=log, share=share, resumes=resumes, levels=LEVELS),
        stack_plot("t", [line([abs(v) for v in a]), line([abs(v) for v in b], "b", 5)], resumes=resumes),
    ):
        assert_inside(plot)
        json.dumps(plot.data, allow_nan=False)


def test_no_series_and_no_value() -> None:
    assert line_plot("t", []).empty and stack_plot("t", []).empty
    only_bad = line_plot("t", [line([float("nan")] * 3)])
    assert line_plot("t", [line([2.0, float("nan")])]).data["lines"][0]["values"] == [2.0]
    assert not only_bad.empty and only_bad.lines[0].bad_count == 3 and "3 not finite" in only_bad.note


def test_a_logarithmic_axis_is_told() -> None:
    assert "log scale" in line_plot("t", [line([1e-6, 1e-2])], log=True).note
    assert "log" not in line_plot("t", [line([1.0, 20.0])], log=True).note


def test_a_stack_adds_up() -> None:
    plot = stack_plot("t", [line([2.0, 2.0]), line([1.0, 1.0], "b")])
    top = [float(y) for y in re.findall(r"\d+\.\d+ (\d+\.\d+)", plot.lines[1].path)]
    base = [float(y) for y in re.findall(r"\d+\.\d+ (\d+\.\d+)", plot.lines[0].path)]
    assert min(top) < min(base) and max(top) == min(base)
    assert plot.data["lines"][1]["values"] == [1.0, 1.0]
    assert [tick.label for tick in stack_plot("t", [line([1.0] * 8)]).x_ticks][-1] == "8", "not of a step to come"


def test_a_level_near_the_curve_is_drawn_and_one_far_away_is_told() -> None:
    plot = line_plot("t", [line([0.15, 0.17, 0.12])], levels=((0.1, "from"), (0.2, "to"), (100.0, "never")))
    assert [level.text for level in plot.levels] == ["from", "to"] and plot.note == "never"
    ends = [float(y) for y in re.findall(r"\d+\.\d+ (\d+\.\d+)", plot.lines[0].path)]
    low, high = plot.levels
    assert high.y < min(ends) <= max(ends) < low.y, "inside the axis, around the curve"
    assert high.text_y > TOP and low.text_y < BOTTOM and low.text_y - high.text_y > 12, "their texts apart"
    assert line_plot("t", [line([])], levels=((0.2, "to"),)).levels == ()


def test_a_level_on_the_axis_is_told() -> None:
    """As the lower end of a band of entropies at 0: drawn it would hide in the axis."""
    plot = line_plot("t", [line([0.15, 0.17])], note="nats", levels=((0.0, "from 0"), (0.2, "to 0.2")))
    assert [level.text for level in plot.levels] == ["to 0.2"] and plot.note == "nats, from 0"
    both = line_plot("t", [line([0.15, 0.17])], note="nats", levels=((0.0, "from 0"), (100.0, "to 100")))
    assert both.levels == () and both.note == "nats, from 0, to 100"


def test_a_resume_shades_what_it_undid() -> None:
    plot = line_plot("t", [line([1.0] * 30)], resumes=(Resume(10, 14), Resume(20, None), Resume(400, None)))
    assert [mark.end > mark.x for mark in plot.marks] == [True, False]
    assert "steps 11 to 14" in plot.marks[0].text and "undone" not in plot.marks[1].text
