"""Invariants 1-5 of ``credit/groups.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.groups import (
    centred_rank,
    compose_keys,
    gathered,
    group_normalize,
    group_quantile,
    group_rank,
    group_size,
    group_stats,
    numbered,
    weighted_z_sum,
)
from megatron_ext.credit.pipeline import combine

scores = st.floats(-1e3, 1e3, allow_nan=False, width=32)


def test_numbers_by_hand() -> None:
    got = group_normalize(np.array([0.0, 1.0, 5.0, 1.0]), np.array([0, 0, 7, 0]), std=True, eps=0.0)
    np.testing.assert_allclose(got, [-np.sqrt(2), np.sqrt(0.5), 0.0, np.sqrt(0.5)])
    got = group_normalize(np.array([0.0, 2.0]), np.array([0, 0]), std=True, ddof=1, eps=0.0)
    np.testing.assert_allclose(got, [-np.sqrt(0.5), np.sqrt(0.5)])
    np.testing.assert_allclose(group_normalize(np.array([0.0, 3.0]), np.array([1, 1]), std=False), [-1.5, 1.5])


@settings(max_examples=60, deadline=None)
@given(scores, st.integers(1, 9), st.booleans())
def test_a_constant_group_is_exactly_zero(value: float, size: int, std: bool) -> None:  # invariant 1
    """NeMo-RL 4158: float noise makes the spread of equal rewards non-zero."""
    noisy = np.full(size, value) + np.resize([0.0, 1e-9], size)
    assert not group_normalize(noisy, np.zeros(size), std=std).any()


def test_float_noise_is_not_a_signal() -> None:  # invariant 1: the mean of seven 0.1 is not 0.1
    values = np.full(7, 0.1, dtype=np.float32)
    assert not group_normalize(values, np.zeros(7), std=True, eps=0.0, tolerance=0.0).any()


def test_a_group_of_one() -> None:  # invariant 2
    values, key, present = np.array([3.0, 4.0, 5.0]), np.array([0, 1, 1]), np.array([True, True, False])
    assert not group_normalize(values, key, present=present, std=True).any()
    assert not group_normalize(values, key, present=present, std=True, ddof=1).any()
    raw = group_normalize(values, key, present=present, std=True, singleton="raw")
    assert raw.tolist() == [3.0, 4.0, 0.0]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(scores, st.integers(0, 3), st.booleans()), min_size=1, max_size=20), st.booleans())
def test_absent_members_do_not_vote(members: list[tuple[float, int, bool]], std: bool) -> None:  # invariant 3
    """NeMo-RL 4160: masked rows that still vote in the baseline."""
    values, key, present = (np.array(x) for x in zip(*members, strict=True))
    got = group_normalize(np.where(present, values, np.nan), key, present=present, std=std)
    want = group_normalize(values[present], key[present], std=std)
    assert np.array_equal(got[present], want) and not got[~present].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(scores, st.integers(0, 3)), min_size=1, max_size=20), st.integers(0, 99))
def test_order_does_not_matter_and_groups_sum_to_zero(members: list[tuple[float, int]], seed: int) -> None:  # 4
    """slime 1414: groups of unequal size, each on its own."""
    values, key = (np.array(x) for x in zip(*members, strict=True))
    got = group_normalize(values, key, std=True)
    order = np.random.default_rng(seed).permutation(len(values))
    assert np.array_equal(group_normalize(values[order], key[order], std=True), got[order])
    for k in np.unique(key):
        assert abs(got[key == k].sum()) < 1e-6


def test_composite_keys() -> None:
    prompt, role = np.array([0, 0, 1, 1, 0]), np.array(["act", "plan", "act", "act", "act"])
    key = compose_keys(prompt, role)
    assert key[0] == key[4] and key[2] == key[3] and len(set(key.tolist())) == 3
    values = np.array([1.0, 5.0, 2.0, 4.0, 3.0])
    np.testing.assert_allclose(group_normalize(values, (prompt, role), std=False), [-1, 0, -1, 1, 1])


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(-(2**62), 2**62) | st.integers(0, 5), max_size=20))
def test_numbering_of_keys(keys: list[int]) -> None:
    key = np.array(keys, dtype=np.int64)
    distinct, member = numbered(key)
    assert distinct.tolist() == sorted(set(keys)) and np.array_equal(distinct[member], key)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(scores, st.integers(0, 3), st.booleans()), min_size=1, max_size=20))
def test_statistics_by_hand(members: list[tuple[float, int, bool]]) -> None:
    values, key, present = (np.array(x) for x in zip(*members, strict=True))
    stats = group_stats(values, key, present)
    for k, name in enumerate(stats.keys):
        own = values[present & (key == name)].astype(np.float64)
        assert (stats.count[k], stats.low[k], stats.high[k]) == (len(own), own.min(), own.max())
        np.testing.assert_allclose([stats.mean[k], stats.std()[k]], [own.mean(), own.std()], atol=1e-9)
        np.testing.assert_allclose(stats.sumsq[k], (own**2).sum(), rtol=1e-9, atol=1e-9)
        if len(own) > 1:
            np.testing.assert_allclose(stats.variance(1)[k], own.var(ddof=1), atol=1e-6)
    assert np.array_equal(stats.index(np.array([99])), [-1])


def test_rows_and_rollouts_as_voters() -> None:  # invariant 5
    """EnvACE: a rollout with three caller rows and one with a single one, by role."""
    score, rollout = np.array([1.0, 1, 1, 0, 1, 0, 0]), np.array([1, 1, 1, 2, 1, 2, 2])
    role = np.array(["act"] * 4 + ["rehearse"] * 3)
    np.testing.assert_allclose(
        group_normalize(score, (np.zeros(7, dtype=int), role), std=False),
        [0.25, 0.25, 0.25, -0.75, 2 / 3, -1 / 3, -1 / 3],
    )
    by_rollout = group_normalize(score, role, rollout=rollout, std=False)
    np.testing.assert_allclose(by_rollout, [0.5, 0.5, 0.5, -0.5, 0.5, -0.5, -0.5])
    with pytest.raises(ValueError, match=r"rollout 1: rows 0 and 2 score 1.0 and 3.0"):
        group_normalize(np.array([1.0, 1, 3, 0]), role[:4], rollout=rollout[:4])


def test_rollouts_are_one_vote_in_however_many_rows() -> None:  # invariant 5
    """Agent Lightning: A=1 in two rows, B=0 in one; votes of rows would give 1/3, 1/3, -2/3."""
    score, rollout = np.array([1.0, 1.0, 0.0]), np.array([0, 0, 1])
    got = group_normalize(score, np.zeros(3), rollout=rollout, std=False)
    np.testing.assert_allclose(got, [0.5, 0.5, -0.5])
    got = group_normalize(score, np.zeros(3), rollout=rollout, ddof=1, eps=0.0)
    np.testing.assert_allclose(got, [0.7071068, 0.7071068, -0.7071068])


def test_other_baselines() -> None:
    values, key = np.array([1.0, 2.0, 6.0, 5.0]), np.array([0, 0, 0, 1])
    loo = group_normalize(values, key, std=False, baseline="leave_one_out")
    np.testing.assert_allclose(loo, [1 - 4, 2 - 3.5, 6 - 1.5, 0.0])
    given_values = group_normalize(values, key, std=False, baseline=np.array([0.0, 1.0, 2.0, 3.0]))
    np.testing.assert_allclose(given_values, [1, 1, 4, 2])
    # Skill0.5: gains against the mean of a window, over the spread of this batch's.
    gains = group_normalize(np.array([0.5, 0.125]), np.zeros(2), ddof=1, baseline=np.full(2, 0.2))
    np.testing.assert_allclose(gains, [1.131367, -0.282842], atol=1e-5)
    with pytest.raises(ValueError, match="baseline 'median'"):
        group_normalize(values, key, baseline="median")


def test_a_floor_under_the_spread() -> None:
    """CARE, eq. 9: without the floor a fully successful group is scaled to 1 whatever its reward differences."""
    anchor = np.sqrt(0.75 * 0.25)
    reward = 1.0 - 0.1 * np.array([0.0, 0.2, 0.4, 1.0])
    got = group_normalize(reward, np.zeros(4), std_floor=anchor)
    np.testing.assert_allclose(got, [0.092376, 0.046188, 0, -0.138564], atol=1e-6)
    bare = group_normalize(reward, np.zeros(4), std_floor=np.array([0.0] * 4))
    np.testing.assert_allclose(bare, [1.069016, 0.534508, 0, -1.603525], atol=5e-5)
    three = reward - np.array([0, 0, 0, 1.0])
    np.testing.assert_allclose(
        group_normalize(three, np.zeros(4), std_floor=anchor), [0.619832, 0.577085, 0.534338, -1.731256], atol=1e-6
    )


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_groups_that_no_rank_holds_whole(ranks: int) -> None:  # invariant 4
    rng = np.random.default_rng(0)
    values, key, present = rng.normal(size=40), rng.integers(0, 6, 40), rng.random(40) < 0.8
    rank = rng.integers(0, ranks, 40)
    shares = [rank == r for r in range(ranks)]
    reduced = combine([gathered("skill", values[s], key[s], present[s]) for s in shares])
    stats = group_stats(reduced["skill/score"], reduced["skill/key"])
    want = group_normalize(values, key, present=present)
    for s in shares:
        assert np.array_equal(group_normalize(values[s], key[s], present=present[s], stats=stats), want[s])
    with pytest.raises(ValueError, match="key 9: the given statistics have no such group"):
        group_normalize(np.ones(1), np.array([9]), stats=stats)
    with pytest.raises(ValueError, match="not a composite"):
        group_normalize(values, (key, key), stats=stats)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 3), st.booleans()), max_size=20))
def test_ranks_and_quantiles_by_hand(members: list[tuple[int, int, bool]]) -> None:  # invariant 3
    values, key = (np.array([m[i] for m in members], dtype=np.float64) for i in (0, 1))
    present = np.array([m[2] for m in members], dtype=bool)
    rank, centred = group_rank(values, key, present), centred_rank(values, key, present)
    median, size = group_quantile(values, key, 0.3, present, empty=-7.0), group_size(key, present)
    for j, name in enumerate(key):
        own = values[present & (key == name)]
        assert size[j] == len(own)
        assert median[j] == (pytest.approx(np.quantile(own, 0.3)) if len(own) else -7.0)
        if present[j]:
            assert rank[j] == (own < values[j]).sum() + ((own == values[j]).sum() - 1) / 2
            assert centred[j] == (pytest.approx(rank[j] / (len(own) - 1) - 0.5) if len(own) > 1 else 0.0)
        else:
            assert rank[j] == centred[j] == 0.0
    for name in np.unique(key):
        assert abs(centred[key == name].sum()) < 1e-12


def test_ranks_in_numbers() -> None:
    """MOSAIC: sessions ranked within each outcome; the multiplicative form keeps the sum of the group."""
    sessions, reward = np.array([2, 4, 3, 1, 5]), np.array([1.0, 1, 1, 0, 0])
    rank = centred_rank(sessions, (np.zeros(5, dtype=int), reward))
    np.testing.assert_allclose(rank, [-0.5, 0.5, 0, -0.5, 0.5])
    edited = group_normalize(reward, np.zeros(5), eps=0.0) * (1 - 0.5 * rank)
    np.testing.assert_allclose(edited, [1.020621, 0.612372, 0.816497, -1.530931, -0.918559], atol=1e-6)
    np.testing.assert_allclose(centred_rank(np.array([2, 2, 4]), np.zeros(3)), [-0.25, -0.25, 0.5])
    with pytest.raises(ValueError, match="quantile 2"):
        group_quantile(sessions, np.zeros(5), 2)


def test_a_weighted_sum_of_standardised_rewards() -> None:
    """GDPO: each reward standardised in its group, summed, then whitened over the batch."""
    parts = {"acc": np.array([1.0, 1, 0, 0]), "eff": np.array([1.0, 0.5, 1, 0])}
    total = weighted_z_sum(parts, {"acc": 1.0, "eff": 1.0}, np.zeros(4))
    np.testing.assert_allclose(total, [1.904534, 0.698489, -0.095466, -2.507557], atol=1e-5)
    white = group_normalize(total, np.zeros(4), eps=1e-8)
    np.testing.assert_allclose(white, [1.180456, 0.432933, -0.059171, -1.554217], atol=1e-5)
    two = {"acc": np.array([0.0, 1, 0, 1]), "eff": np.array([0.0, 0, 0, 1])}
    total = weighted_z_sum(two, {"acc": 1.0, "eff": 1.0}, np.array([0, 0, 1, 1]), eps=0.0)
    np.testing.assert_allclose(total, [-1, 1, -2, 2])  # a constant column says nothing
    absent = weighted_z_sum(two, {"acc": 1.0, "eff": 2.0}, np.zeros(4), present={"eff": np.zeros(4, dtype=bool)})
    np.testing.assert_allclose(absent, group_normalize(two["acc"], np.zeros(4)))
    with pytest.raises(ValueError, match="must have the same names"):
        weighted_z_sum(two, {"acc": 1.0}, np.zeros(4))


def test_bad_input_is_named() -> None:
    values, key = np.array([1.0, np.inf]), np.array([0, 0])
    with pytest.raises(ValueError, match="score 1 is inf"):
        group_normalize(values, key, std=True)
    with pytest.raises(ValueError, match="singleton 'one'"):
        group_normalize(values, key, std=True, singleton="one")
    with pytest.raises(ValueError, match="ddof 2"):
        group_normalize(values, key, std=True, ddof=2)
    with pytest.raises(ValueError, match="all must be"):
        group_normalize(values, key[:1], std=True)
