"""Invariants 1-4 of ``credit/variance.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.variance import contrast_counts, shrink, variance_shares

returns = st.floats(-10, 10, allow_nan=False, width=32)


def explained(by_action: list[list[float]], fallback: float = 1.0) -> float:
    """AdaStep's weight of one state, from the returns of each action."""
    scores = np.array([x for action in by_action for x in action])
    part = np.repeat(np.arange(len(by_action)), [len(action) for action in by_action])
    return float(variance_shares(scores, np.zeros(len(scores)), part).explained(fallback)[0])


@pytest.mark.parametrize(
    ("by_action", "share"),
    [
        ([[1, 1], [0, 0]], 1.0),
        ([[1, 0], [1, 0]], 0.0),
        ([[1, 0.8], [0.2, 0]], 0.9411765),
        ([[1, 1, 0], [0, 0]], 0.4444444),
        ([[1], [0, 0]], 1.0),
        ([[1, 0, 1]], 1.0),
        ([[1, 1], [1, 1]], 1.0),
    ],
)
def test_the_share_that_actions_explain(by_action: list[list[float]], share: float) -> None:
    assert explained(by_action) == pytest.approx(share, abs=1e-7)


def test_the_bias_of_small_samples_stays() -> None:
    """AdaStep: pure noise gives (actions - 1) / (returns - 1) on average; nothing corrects it."""
    rng = np.random.default_rng(0)
    draws = rng.normal(size=(4000, 4))
    shares = variance_shares(draws.reshape(-1), np.repeat(np.arange(4000), 4), np.tile([0, 0, 1, 1], 4000))
    assert shares.explained(1.0).mean() == pytest.approx(1 / 3, abs=0.02)


@settings(max_examples=80, deadline=None)
@given(
    st.lists(st.tuples(returns, st.integers(0, 2), st.integers(0, 2), st.booleans()), min_size=1, max_size=25),
    st.floats(-100, 100, width=32),
    st.floats(0.125, 8, width=32),
)
def test_total_variance(members: list[tuple[float, int, int, bool]], shift: float, scale: float) -> None:  # 1, 2
    score, key, part = (np.array([m[i] for m in members], dtype=np.float64) for i in (0, 1, 2))
    present = np.array([m[3] for m in members])
    got = variance_shares(score, key, part, present)
    np.testing.assert_allclose(got.within + got.between, got.total, rtol=1e-12, atol=1e-14)
    share = got.explained(0.5)
    assert np.all((share >= 0) & (share <= 1)) and np.all(share[~present] == 0.5)
    for j in np.flatnonzero(present):
        own = present & (key == key[j])
        assert got.total[got.index[j]] == pytest.approx(score[own].var(), rel=1e-9, abs=1e-12)
        counts = np.unique(part[own], return_counts=True)[1]
        assert (got.parts[got.index[j]], got.smallest[got.index[j]]) == (len(counts), counts.min())
    moved = variance_shares(score * scale + shift, key, part, present)
    clear = got.total > 1e-3  # below this the shift's own rounding is the spread
    np.testing.assert_allclose(moved.within[clear] / scale**2, got.within[clear], rtol=1e-6, atol=1e-8)


def test_shrinkage_in_numbers() -> None:
    """RSIPO: four tasks of one type, four replays with the skill and four without."""
    gain = np.array([0.5, 0.75, -0.25, 0.25])
    noise = np.array([0.125, 0.0625, 7 / 48, 0.0625])
    got = shrink(gain, noise, np.zeros(4))
    np.testing.assert_allclose([got.mean[0], got.prior[0]], [0.3125, 1 / 12])
    np.testing.assert_allclose(got.factor, [0.4, 0.571429, 0.363636, 0.571429], atol=1e-6)
    np.testing.assert_allclose(got.value, [0.3875, 0.5625, 0.107955, 0.276786], atol=1e-6)
    np.testing.assert_allclose(gain - got.mean, [0.1875, 0.4375, -0.5625, -0.0625])


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(returns, st.floats(0, 4), st.integers(0, 2), st.booleans()), max_size=15))
def test_shrunk_values_lie_between(members: list[tuple[float, float, int, bool]]) -> None:  # invariant 3
    estimate, noise, key = (np.array([m[i] for m in members], dtype=np.float64) for i in (0, 1, 2))
    present = np.array([m[3] for m in members], dtype=bool)
    got = shrink(estimate, noise, key, present)
    assert np.all((got.factor >= 0) & (got.factor <= 1))
    low, high = np.minimum(estimate, got.mean) - 1e-9, np.maximum(estimate, got.mean) + 1e-9
    assert np.all((got.value >= low) & (got.value <= high) | ~present)
    assert not got.value[~present].any() and not got.factor[~present].any()


def test_a_type_of_one_and_no_noise_at_all() -> None:
    got = shrink(np.array([1.0, 0.0, 5.0]), np.full(3, 0.1), np.array([0, 0, 1]))
    assert got.mean[2] == got.value[2] == pytest.approx(2.0) and got.factor[2] == 0.0
    still = shrink(np.array([1.0, 1.0]), np.zeros(2), np.zeros(2))
    assert still.factor.tolist() == [0.0, 0.0] and still.value.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="not negative"):
        shrink(np.ones(2), np.array([1.0, -1.0]), np.zeros(2))


def test_contrasts_in_numbers() -> None:
    """Self-Credit: cited turns of two successes and two failures, matched by the documents they retrieved."""
    turns = [(0, 1), (0, 2), (1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]
    success = np.array([rollout < 2 for rollout, _ in turns])
    pairs = np.array([[0, 2], [1, 4], [5, 6]])
    won, lost = contrast_counts(pairs, np.array([rollout for rollout, _ in turns]), success)
    assert won.tolist() == [2, 1, 2, 1, 1, 0, 0, 0]
    assert lost.tolist() == [0, 1, 0, 0, 1, 2, 2, 1]


def test_a_rollout_counts_once_and_matches_are_not_passed_on() -> None:  # invariant 4
    rollout, success = np.array([0, 0, 1, 2]), np.array([True, True, True, False])
    won, lost = contrast_counts(np.array([[0, 1], [1, 0], [0, 2], [2, 3]]), rollout, success)
    assert won.tolist() == [2, 1, 2, 1] and lost.tolist() == [0, 0, 1, 1]
    won, lost = contrast_counts(np.empty((0, 2)), rollout, success)
    assert won.tolist() == [1, 1, 1, 0] and lost.tolist() == [0, 0, 0, 1]
    with pytest.raises(ValueError, match="items 0..3"):
        contrast_counts(np.array([[0, 4]]), rollout, success)
