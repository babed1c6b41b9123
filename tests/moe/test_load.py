"""Invariants of the routing metrics (``megatron_ext/moe/load.py``)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.moe.load import (
    expert_counts,
    layer_loads,
    load_metrics,
    operation_information,
    operation_sums,
    routing_flips,
    token_jaccard,
)
from megatron_ext.moe.routing_losses import mutual_information
from megatron_ext.tracking.names import check

LOADS = ("load_cv", "load_peak", "cold_fraction", "load_entropy")


def test_an_even_load_has_cv_0_peak_1_entropy_1_and_no_cold_expert() -> None:
    even = np.arange(16).reshape(8, 1, 2) % 4
    metrics = load_metrics(expert_counts(np.concatenate([even, even[::-1]], axis=1), 4))
    check(metrics)
    assert metrics["moe/load_cv"] == 0.0 and metrics["moe/load_peak"] == 1.0 and metrics["moe/cold_fraction"] == 0.0
    assert metrics["moe/load_entropy"] == pytest.approx(1.0)
    assert {name for name in metrics if name.startswith("moe/layer/")} == {
        f"moe/layer/{layer}/{what}" for layer in range(2) for what in LOADS
    }


@pytest.mark.parametrize(
    ("load", "cv", "peak", "cold"),
    [((29, 15, 12, 2), 0.665973, 2.0, 0.0), ((50, 4, 3, 1), 1.415474, 3.448276, 0.25)],
)
def test_worked_numbers_of_the_load(load: tuple[int, ...], cv: float, peak: float, cold: float) -> None:
    found = {name: float(values[0]) for name, values in layer_loads(np.array([load])).items()}
    assert found["load_cv"] == pytest.approx(cv, abs=5e-7) and found["load_peak"] == pytest.approx(peak, abs=5e-7)
    assert found["cold_fraction"] == cold
    share = np.array(load) / sum(load)
    assert found["load_entropy"] == pytest.approx(-(share * np.log(share)).sum() / math.log(4))


def test_numbers_of_an_uneven_load() -> None:
    """Layer 0: counts 6, 2, 0, 0 (mean 2); layer 1: counts 2, 2, 2, 2."""
    experts = np.array([[[0, 1], [0, 1]], [[0, 1], [2, 3]], [[0, 0], [0, 1]], [[0, 0], [2, 3]]])
    parts = expert_counts(experts[:1], 4) + expert_counts(experts[1:1], 4) + expert_counts(experts[1:], 4)
    assert parts.tolist() == expert_counts(experts, 4).tolist() == [[6, 2, 0, 0], [2, 2, 2, 2]]
    metrics = load_metrics(parts, layers=(1, 5))
    cv = np.std([6, 2, 0, 0]) / 2
    assert metrics["moe/layer/1/load_cv"] == pytest.approx(cv) and metrics["moe/layer/5/load_cv"] == 0.0
    assert metrics["moe/layer/1/load_peak"] == 3.0 == metrics["moe/load_peak"]
    assert metrics["moe/load_cv"] == pytest.approx(cv / 2), "mean over layers"
    assert metrics["moe/cold_fraction"] == 2 / 8 and metrics["moe/layer/1/cold_fraction"] == 0.5


def test_nothing_routed_and_a_single_expert_are_finite() -> None:
    assert load_metrics(np.zeros((2, 4), dtype=np.int64)) == {}
    assert load_metrics(np.array([[5]])) == {f"moe/{at}{n}": v for at in ("", "layer/0/") for n, v in _one().items()}


def _one() -> dict[str, float]:
    return dict(zip(LOADS, (0.0, 1.0, 0.0, 1.0), strict=True))


def test_routings_are_the_same_as_sets() -> None:
    a = np.array([[[0, 1], [2, 3]], [[4, 5], [6, 7]], [[0, 1], [2, 3]]])
    b = np.array([[[1, 0], [3, 2]], [[4, 5], [6, 0]], [[0, 2], [2, 3]]], dtype=np.uint8)
    assert routing_flips(a, b).tolist() == [False, True, True] == routing_flips(b, a).tolist()
    assert not routing_flips(a, a).any() and routing_flips(a[:0], b[:0]).shape == (0,)
    with pytest.raises(ValueError, match="different shapes"):
        routing_flips(a, b[:, :1])


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([3, 64, 65, 200]))
def test_jaccard_is_that_of_python_sets(seed: int, num_experts: int) -> None:
    rng = np.random.default_rng(seed)
    experts = np.stack([rng.permuted(np.arange(num_experts))[:3] for _ in range(16)]).reshape(8, 2, 3)
    found = np.array([2, 3, 7])
    want = [
        sum(
            len(set(a) & set(b)) / len(set(a) | set(b))
            for a, b in ((experts[t, layer].tolist(), experts[t - 1, layer].tolist()) for t in found)
        )
        for layer in range(2)
    ]
    assert token_jaccard(experts, found, num_experts) == pytest.approx(want)
    assert token_jaccard(experts, found[:0], num_experts).tolist() == [0, 0]


def test_operation_information_is_that_of_the_loss() -> None:
    rng = np.random.default_rng(0)
    experts = np.stack([rng.permuted(np.arange(5))[:2] for _ in range(12)]).reshape(12, 1, 2)
    cell = np.array([0, 0, 1, 1, 1, -1, 2, 2, 3, 0, 0, 0])  # two fields of two operations
    share = np.array([1 / 2, 1 / 2, 1 / 3, 1 / 3, 1 / 3, 0, 1 / 2, 1 / 2, 1, 1 / 3, 1 / 3, 1 / 3])
    sums = operation_sums(experts, 5, cell, share, 4)
    assert sums.sum(axis=2).tolist() == [pytest.approx([2, 1, 1, 1])]
    units = np.array([[2.0, 1.0], [1.0, 1.0]])
    shaped = sums.reshape(1, 2, 2, 5)
    want = mutual_information(torch.from_numpy(shaped), torch.from_numpy(units)).mean(-1)
    assert operation_information(shaped, units) == pytest.approx(want.numpy()) and want[0] > 0
    assert len(operation_information(shaped * 0, units * 0)) == 0
