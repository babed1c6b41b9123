"""Invariants 1-3 of ``losses/diagnostics.py``."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.losses.diagnostics import MeanMax, lag_stats, ratio_stats, train_rollout_difference
from megatron_ext.tracking.names import check
from megatron_ext.trajectory.version import pack


def test_difference_reads_the_mask_alone_and_parts_add() -> None:
    old = np.array([-1.0, -2.0, np.nan, -4.0], dtype=np.float32)
    new = np.array([-1.5, -2.0, -9.0, -3.0], dtype=np.float32)
    mask = np.array([True, True, False, True])
    whole = train_rollout_difference(old, new, mask)
    assert (whole.mean, whole.maximum, whole.count) == (0.5, 1.0, 3)
    assert (
        train_rollout_difference(old[:2], new[:2], mask[:2]) + train_rollout_difference(old[2:], new[2:], mask[2:])
        == whole
    )
    nothing = train_rollout_difference(old, new, np.zeros(4, dtype=bool))
    assert (nothing.mean, nothing.maximum, nothing.count) == (0.0, 0.0, 0)
    assert np.isnan(train_rollout_difference(old, new, np.ones(4, dtype=bool)).mean), "shown, not hidden"
    with pytest.raises(ValueError, match="all must be"):
        train_rollout_difference(old, new[:2], mask)


def test_lag_counts_optimizer_steps() -> None:
    version = np.array([pack(0, 5), -1, pack(0, 3), pack(0, 5)])
    assert lag_stats(version, version >= 0, pack(0, 6)) == MeanMax(total=5.0, count=3, maximum=3.0)
    # Incarnation 1 resumed from step 4: a token of step 5 was one ahead of it, and two steps have passed since.
    assert lag_stats(np.array([pack(0, 5)]), np.array([True]), pack(1, 6), {1: 4}).maximum == 3
    with pytest.raises(ValueError, match="newer than the current weights"):
        lag_stats(version, version >= 0, pack(0, 4))


def log_probs(n: int = 5000, spread: float = 0.5) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    old = -rng.exponential(1.0, n)
    return old, old + rng.normal(0, spread, n), rng.random(n) < 0.8


@pytest.mark.parametrize("spread", [1e-5, 1e-3, 0.5, 4.0])
def test_ratio_statistics(spread: float) -> None:
    numerator, denominator, mask = log_probs(spread=spread)
    stats = ratio_stats(numerator, denominator, mask)
    x = (numerator - denominator)[mask]
    w = np.exp(x)
    assert stats.ess == pytest.approx(w.sum() ** 2 / (len(w) * (w**2).sum()))
    assert stats.kl == pytest.approx(np.mean(w - 1 - x), rel=1e-6)
    for share in (0.0, 0.01, 0.25, 0.5, 0.99, 1.0):
        exact = float(np.quantile(x, share, method="inverted_cdf"))
        assert np.log(stats.quantile(share)) == pytest.approx(exact, rel=5.1e-3, abs=5.1e-7)
    metrics = stats.metrics()
    check(metrics)
    assert metrics["offpolicy/ratio_p1"] <= metrics["offpolicy/ratio_p50"] <= metrics["offpolicy/ratio_p99"]


def test_ratio_statistics_add() -> None:  # invariant 2
    numerator, denominator, mask = log_probs()
    whole = ratio_stats(numerator, denominator, mask)
    parts = [ratio_stats(numerator[s], denominator[s], mask[s]) for s in (slice(7), slice(7, 900), slice(900, None))]
    nothing = ratio_stats(numerator, denominator, np.zeros_like(mask))
    joined = parts[0] + parts[1] + nothing + parts[2]
    assert joined.count == whole.count and np.array_equal(joined.histogram, whole.histogram)
    assert joined.metrics() == {name: pytest.approx(value) for name, value in whole.metrics().items()}


def test_ratio_statistics_of_odd_inputs() -> None:  # invariants 1 and 3
    old, inf = np.array([-1.0, -2.0, np.nan]), np.inf
    mask = np.array([True, True, False])
    equal = ratio_stats(old, old, mask)
    assert (equal.ess, equal.kl, equal.clamped, equal.quantile(0.5)) == (1.0, 0.0, 0, 1.0)
    nothing = ratio_stats(old, old, np.zeros(3, dtype=bool))
    assert set(nothing.metrics().values()) == {0.0}
    shown = ratio_stats(old, old, np.ones(3, dtype=bool))
    assert np.isnan([shown.ess, shown.kl, shown.quantile(0.5)]).all()
    odd = ratio_stats(np.array([-inf, -1.0, -inf, -1.0]), np.array([-1.0, -inf, -inf, -1.0]), np.ones(4, dtype=bool))
    assert odd.clamped == 3 and odd.quantile(0.5) == 1.0 and all(np.isfinite(list(odd.metrics().values())))
    assert odd.quantile(0.0) == pytest.approx(np.exp(-20), rel=0.11) and odd.ess == pytest.approx(0.25, rel=1e-6)
    with pytest.raises(ValueError, match="all must be"):
        ratio_stats(old, old[:2], mask)
    with pytest.raises(ValueError, match="quantile 1.5"):
        equal.quantile(1.5)
