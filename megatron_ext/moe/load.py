"""Routing metrics of one forward: how evenly experts are used, and where two forwards chose different experts. Pure.

Invariants (``tests/moe/test_load.py``): a perfectly even load has CV 0, peak 1 and no cold expert; two routings are the
same when they name the same set of experts, in whatever order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[Any]
COLD_SHARE = 0.1  # an expert below a tenth of the mean load counts as cold, as the metric table says


def expert_counts(experts: Experts, num_experts: int) -> NDArray[np.int64]:
    """How often each expert was chosen, int64 [L, E], from ``experts`` int [n, L, k]. Counts of parts add."""
    layers = experts.shape[1]
    return np.stack([np.bincount(experts[:, i].ravel(), minlength=num_experts) for i in range(layers)])


def load_metrics(counts: NDArray[np.int64]) -> dict[str, float]:
    """``moe/load_cv``, ``load_peak``, ``cold_fraction`` and each layer's, from ``expert_counts`` [L, E]."""
    layers = len(counts)
    mean = counts.mean(axis=1, keepdims=True)
    cv = counts.std(axis=1) / mean[:, 0]
    peak = counts.max(axis=1) / mean[:, 0]
    metrics = {
        "moe/load_cv": float(cv.mean()),
        "moe/load_peak": float(peak.max()),
        "moe/cold_fraction": float((counts < COLD_SHARE * mean).mean()),
    }
    for i in range(layers):
        metrics[f"moe/layer/{i}/load_cv"] = float(cv[i])
        metrics[f"moe/layer/{i}/load_peak"] = float(peak[i])
    return metrics


def routing_flips(a: Experts, b: Experts) -> NDArray[np.bool_]:
    """bool [n]: tokens for which some layer chose other experts in ``a`` than in ``b`` (both int [n, L, k])."""
    if a.shape != b.shape:
        raise ValueError(f"routings of different shapes: {a.shape} and {b.shape}")
    differ = np.sort(a.astype(np.int64), axis=-1) != np.sort(b.astype(np.int64), axis=-1)
    flips: NDArray[np.bool_] = differ.any(axis=(1, 2))
    return flips
