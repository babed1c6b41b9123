"""Invariants of ``credit/explained_variance.py``, and the specifications' numbers."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.credit.explained_variance import explained_variance, value_moments


def test_numbers_of_explained_variance() -> None:
    returns, values = np.array([1, 1, 1, 0, 0, 0.0]), np.array([0.8, 0.7, 0.9, 0.2, 0.1, 0.3])
    on = np.ones(6, dtype=bool)
    assert explained_variance(value_moments(returns, values, on)) == pytest.approx(0.813333, abs=5e-7)
    parts = value_moments(returns, values, np.arange(6) < 2) + value_moments(returns, values, np.arange(6) >= 2)
    assert explained_variance(parts) == pytest.approx(0.813333, abs=5e-7)  # adds over ranks
    assert explained_variance(value_moments(returns, returns, on)) == 1.0
    assert explained_variance(value_moments(returns, values, ~on)) == 0.0
    assert explained_variance(value_moments(np.full(7, 0.1), np.zeros(7), np.ones(7, dtype=bool))) == 0.0
