"""Invariants 1-4 of ``credit/groups.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.groups import compose_keys, group_normalize

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
    values, key, present = (np.array(x) for x in zip(*members, strict=True))
    got = group_normalize(np.where(present, values, np.nan), key, present=present, std=std)
    want = group_normalize(values[present], key[present], std=std)
    assert np.array_equal(got[present], want) and not got[~present].any()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(scores, st.integers(0, 3)), min_size=1, max_size=20), st.integers(0, 99))
def test_order_does_not_matter_and_groups_sum_to_zero(members: list[tuple[float, int]], seed: int) -> None:  # 4
    values, key = (np.array(x) for x in zip(*members, strict=True))
    got = group_normalize(values, key, std=True)
    order = np.random.default_rng(seed).permutation(len(values))
    np.testing.assert_allclose(group_normalize(values[order], key[order], std=True), got[order], atol=1e-9)
    for k in np.unique(key):
        assert abs(got[key == k].sum()) < 1e-6


def test_composite_keys() -> None:
    prompt, role = np.array([0, 0, 1, 1, 0]), np.array(["act", "plan", "act", "act", "act"])
    key = compose_keys(prompt, role)
    assert key[0] == key[4] and key[2] == key[3] and len(set(key.tolist())) == 3


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
