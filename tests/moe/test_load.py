"""Invariants of the routing metrics (``megatron_ext/moe/load.py``)."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.moe.load import expert_counts, load_metrics, routing_flips
from megatron_ext.tracking.names import check


def test_an_even_load_has_cv_0_peak_1_and_no_cold_expert() -> None:
    even = np.arange(16).reshape(8, 1, 2) % 4
    metrics = load_metrics(expert_counts(np.concatenate([even, even[::-1]], axis=1), 4))
    check(metrics)
    assert metrics["moe/load_cv"] == 0.0 and metrics["moe/load_peak"] == 1.0 and metrics["moe/cold_fraction"] == 0.0
    assert {name for name in metrics if name.startswith("moe/layer/")} == {
        f"moe/layer/{layer}/{what}" for layer in range(2) for what in ("load_cv", "load_peak")
    }


def test_numbers_of_an_uneven_load() -> None:
    """Layer 0: counts 6, 2, 0, 0 (mean 2); layer 1: counts 2, 2, 2, 2."""
    experts = np.array([[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[0, 0], [0, 1]], [[0, 0], [2, 3]]])
    parts = expert_counts(experts[:1], 4) + expert_counts(experts[1:1], 4) + expert_counts(experts[1:], 4)
    assert parts.tolist() == expert_counts(experts, 4).tolist() == [[6, 2, 0, 0], [2, 2, 2, 2]]
    metrics = load_metrics(parts)
    cv = np.std([6, 2, 0, 0]) / 2
    assert metrics["moe/layer/0/load_cv"] == pytest.approx(cv) and metrics["moe/layer/1/load_cv"] == 0.0
    assert metrics["moe/layer/0/load_peak"] == 3.0 == metrics["moe/load_peak"]
    assert metrics["moe/load_cv"] == pytest.approx(cv / 2), "mean over layers"
    assert metrics["moe/cold_fraction"] == 2 / 8


def test_routings_are_the_same_as_sets() -> None:
    a = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]]])
    b = np.array([[[1, 0], [3, 2]], [[4, 5], [6, 0]], [[0, 2], [2, 3]]], dtype=np.uint8)
    assert routing_flips(a, b).tolist() == [False, True, True] == routing_flips(b, a).tolist()
    assert not routing_flips(a, a).any() and routing_flips(a[:0], b[:0]).shape == (0,)
    with pytest.raises(ValueError, match="different shapes"):
        routing_flips(a, b[:, :1])
