"""The invariants of ``megatron_ext/report/axes.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from megatron_ext.report.axes import BOTTOM, LEFT, RIGHT, TOP, round_ticks, step_axis, tick_labels, value_axis


@given(
    st.lists(st.floats(-1e12, 1e12) | st.sampled_from([1e-300, 1e300, -1e300]), max_size=20),
    st.booleans(),
    st.booleans(),
    st.floats(-1e300, 1e300),
)
def test_every_pixel_is_inside(values: list[float], log: bool, share: bool, other: float) -> None:
    axis = value_axis(np.array(values), log=log, share=share)
    assert axis.low < axis.high
    for pixel in (*axis.at(np.array([*values, other])), *(tick.at for tick in axis.drawn_ticks())):
        assert TOP - 0.06 <= pixel <= BOTTOM + 0.06


@given(st.integers(0, 10**7), st.integers(0, 10**7), st.integers(0, 10**7))
def test_ticks_of_steps_are_whole_and_none_stands_behind_the_last(first: int, more: int, back: int) -> None:
    axis = step_axis(float(first), float(first + more))
    for last in (None, float(first + more - back)):
        ticks = axis.drawn_steps(last)
        assert ticks and all(LEFT <= tick.at <= RIGHT for tick in ticks)
        assert last is None or ticks[-1].at <= axis.pixel(max(last, first)) + 0.11


@pytest.mark.parametrize(("first", "last", "labels"), [(1, 1, ["1"]), (1, 4, ["1", "2", "3", "4"]), (0, 60, 7)])
def test_steps_of_an_axis(first: float, last: float, labels: list[str] | int) -> None:
    shown = [tick.label for tick in step_axis(first, last).drawn_steps(last)]
    assert shown == labels or len(shown) == labels


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_inside(low: float, span: float) -> None:
    high = low + span
    assume(span > 1e-6 * abs(low))  # an axis is never narrower than what floats tell apart
    ticks = round_ticks(low, high)
    slack = 1e-6 * span
    assert 1 <= len(ticks) <= 12 and all(low - slack <= t <= high + slack for t in ticks)
    labels = tick_labels(ticks)
    assert len(labels) == len(ticks)


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_multiples_of_one_two_or_five(low: float, span: float) -> None:
    assume(span > 1e-6 * abs(low))
    ticks = round_ticks(low, low + span)
    if len(ticks) > 1:
        step = float(np.diff(ticks).mean())
        power = 10.0 ** np.floor(np.log10(step) + 1e-6)
        first = round(step / power, 3)
        multiples = np.array(ticks) / (first * power)
        assert first in (1, 2, 5) and np.allclose(multiples, np.round(multiples), rtol=0, atol=1e-6)


def test_neighbouring_ticks_read_differently() -> None:
    assert tick_labels([0.9995, 1.0, 1.0005]) == ["0.9995", "1.0000", "1.0005"]
    assert tick_labels([0.0, 0.2, 0.4]) == ["0", "0.2", "0.4"]
    assert tick_labels([0.0, 10000.0, 20000.0]) == ["0", "10k", "20k"]


def test_an_axis_is_logarithmic_only_over_decades() -> None:
    assert value_axis(np.array([1e-6, 1e-2]), log=True, share=False).log
    for values, log in (([1e-6, 1e-2], False), ([1.0, 20.0], True), ([0.0, 1e-2], True), ([-1.0, 1e3], True)):
        assert not value_axis(np.array(values), log=log, share=False).log
