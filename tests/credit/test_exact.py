"""Invariants 1-3 of ``credit/exact.py``."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.exact import MOST_TERMS, Moments, exact_parts, exact_sum, exact_value
from megatron_ext.credit.pipeline import combine, local

numbers = st.lists(st.floats(-1e12, 1e12, allow_nan=False), min_size=1, max_size=40)


@settings(max_examples=80, deadline=None)
@given(numbers, st.integers(0, 99))
def test_order_and_split_change_no_bit(values: list[float], seed: int) -> None:  # invariants 1, 2
    terms, rng = np.array(values), np.random.default_rng(seed)
    whole = exact_parts(terms)
    assert np.array_equal(exact_parts(rng.permutation(terms)), whole)
    cut = rng.integers(0, 3, len(terms))
    assert np.array_equal(sum(exact_parts(terms[cut == p]) for p in range(3)), whole)
    true = sum(map(Fraction, values), Fraction(0))
    assert float(abs(Fraction(float(exact_value(whole)[0])) - true)) <= len(values) * 2.0**-121 + 1e-15 * abs(true)


def test_sums_go_by_index() -> None:
    got = exact_sum(np.array([1.0, 2.0, 4.0, 1e-30]), np.array([2, 0, 2, 1]), 4)
    np.testing.assert_allclose(got, [2.0, 1e-30, 5.0, 0.0])
    assert exact_sum(np.array([]), np.array([], dtype=int), 2).tolist() == [0.0, 0.0]


def test_what_cannot_be_summed_is_named() -> None:
    with pytest.raises(ValueError, match="not below 2"):
        exact_parts(np.array([1.0, np.inf]))
    with pytest.raises(ValueError, match="not below 2"):
        exact_parts(np.array([np.nan]))
    with pytest.raises(ValueError, match="sum parts of them first"):
        exact_parts(np.broadcast_to(1.0, MOST_TERMS + 1))


@settings(max_examples=60, deadline=None)
@given(numbers, st.integers(0, 99))
def test_moments_over_ranks_are_those_of_exact_arithmetic(values: list[float], seed: int) -> None:  # invariant 3
    terms = np.array(values)
    key = np.random.default_rng(seed).integers(0, 2, len(terms))
    rank = np.random.default_rng(seed + 1).integers(0, 3, len(terms))
    shares = [Moments.of(terms[rank == r], key[rank == r], 3) for r in range(3)]
    got = Moments.reduced(combine([share.stats("x") for share in shares]), "x")
    alone = Moments.reduced(local(Moments.of(terms, key, 3).stats("x")), "x")
    for k in range(3):
        own = [Fraction(float(x)) for x in terms[key == k]]
        assert got.count[k] == len(own)
        if not own:
            assert got.mean[k] == got.variance()[k] == 0.0 and got.constant()[k]
            continue
        mean = sum(own, Fraction(0)) / len(own)
        variance = sum(((x - mean) ** 2 for x in own), Fraction(0)) / len(own)
        assert got.mean[k] == pytest.approx(float(mean), rel=1e-15, abs=1e-30)
        assert got.variance()[k] == pytest.approx(float(variance), rel=1e-14, abs=1e-20)
        assert (got.low[k], got.high[k]) == (float(min(own)), float(max(own)))
    assert np.array_equal(got.variance(1), alone.variance(1)) and np.array_equal(got.sum, alone.sum)
    assert np.array_equal(got.mean_square, alone.mean_square) and np.array_equal(got.std(), alone.std())


def test_a_large_offset_costs_no_precision() -> None:  # invariant 3
    values = np.array([0.1, 0.4, 0.7], dtype=np.float32).astype(np.float64)
    offset = Moments.of(values + 2.0**24)
    assert offset.variance()[0] == pytest.approx(np.var(values + 2.0**24), rel=1e-12)
    assert Moments.of(np.full(7, 0.1)).variance()[0] == 0.0 and Moments.of(np.full(7, 0.1)).constant()[0]
