"""How much of the returns' variance a critic explains, from moments that add over ranks.

Invariants (``tests/credit/test_explained_variance.py`` asserts each):

1. Moments of parts of a batch add up to those of the whole.
2. 1 is a perfect critic, 0 one no better than the mean; where there is nothing to explain it is 0, never NaN.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def value_moments(returns: NDArray[Any], values: NDArray[Any], mask: NDArray[np.bool_]) -> Floats:
    """Count, then sum and sum of squares of returns and of errors, where ``mask``; float64 [5] that adds over ranks."""
    target = np.asarray(returns, dtype=np.float64)[mask]
    error = target - np.asarray(values, dtype=np.float64)[mask]
    return np.array([len(target), target.sum(), np.square(target).sum(), error.sum(), np.square(error).sum()])


def explained_variance(moments: NDArray[Any]) -> float:
    """``1 - Var(returns - values) / Var(returns)``, from ``value_moments`` summed over ranks. 1 is a perfect critic, 0
    one no better than the mean; 0 also when there is nothing to explain (no tokens, constant returns)."""
    count, total, squares, error, error_squares = (float(x) for x in moments)
    if count == 0:
        return 0.0
    spread = squares / count - (total / count) ** 2
    if spread <= 1e-12 * squares / count:  # equal returns, up to rounding
        return 0.0
    return 1.0 - max(error_squares / count - (error / count) ** 2, 0.0) / spread
