"""The invariants of ``megatron_ext/report/series.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.report.series import Series, band, over_seeds, running_mean, smooth, t975, t_interval, thin


def series(values: list[float], steps: list[int] | None = None) -> Series:
    at = np.arange(len(values)) if steps is None else np.array(steps)
    return Series(at, np.array(values, dtype=np.float64))


@given(st.lists(st.floats(-1e6, 1e6) | st.just(float("nan")), max_size=300), st.integers(1, 50))
def test_thinning_keeps_every_extreme(values: list[float], points: int) -> None:
    curve = thin(series(values), points)
    finite = [v for v in values if np.isfinite(v)]
    assert len(curve.steps) <= max(points, 0) and len(curve.bad) == len(values) - len(finite)
    assert np.all(np.diff(curve.steps) > 0)
    if finite:
        assert curve.low.min() == min(finite) and curve.high.max() == max(finite)
        slack = 1e-9 * max(map(abs, finite)) + 1e-12
        assert np.all(curve.low <= curve.mid + slack) and np.all(curve.mid <= curve.high + slack)


def test_one_spike_in_ten_thousand_steps_stays() -> None:
    values = np.ones(10_000)
    values[6_123] = 500.0
    curve = thin(series(list(values)), 400)
    assert len(curve.steps) == 400 and curve.high.max() == 500.0
    assert abs(curve.steps[int(np.argmax(curve.high))] - 6_123) < 25


def test_t_intervals() -> None:
    # Three values: mean 2, standard deviation 1, so half a width of 4.303 / sqrt(3).
    found = t_interval([1.0, 2.0, 3.0])
    assert (found.mean, found.n) == (2.0, 3) and found.high - 2.0 == pytest.approx(4.303 / 3**0.5)
    assert t975(40) == pytest.approx(2.0211, abs=2e-3) and t975(31) == pytest.approx(2.0395, abs=3e-3)
    with pytest.raises(ValueError, match="at least two"):
        t_interval([1.0])


def test_over_seeds_takes_steps_that_all_have() -> None:
    runs = [series([1, 2, float("nan"), 4]), series([3, 4, 5, 6, 7]), series([2, 3, 4, 5])]
    mean, low, high = over_seeds(runs)
    assert mean.steps.tolist() == [0, 1, 3] and mean.values.tolist() == [2, 3, 5]
    assert np.allclose(high - mean.values, 4.303 / 3**0.5) and np.allclose(mean.values - low, high - mean.values)
    two, low, high = over_seeds(runs[1:])
    assert (
        low.tolist() == [2, 3, 4, 5] and high.tolist() == [3, 4, 5, 6] and two.values.tolist() == [2.5, 3.5, 4.5, 5.5]
    )
    drawn = band(runs, 2)
    assert len(drawn.steps) == 2 and drawn.bad.tolist() == [2]


def test_running_mean_and_smooth() -> None:
    assert running_mean(np.array([1.0, 3.0, 5.0, 7.0]), 2).tolist() == [1.0, 2.0, 4.0, 6.0]
    assert running_mean(np.array([]), 3).tolist() == []
    smoothed = smooth(series([1, float("nan"), 3, 5]), 2).values
    assert np.isnan(smoothed[1]) and smoothed[[0, 2, 3]].tolist() == [1, 2, 4]
