"""Invariants of ``credit/scan.py``, against the recurrence as a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.scan import linear_scan_reverse
from tests.helpers.chains import bits, offsets_of, scan_by_hand

shares = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 90)), max_size=12),
    st.lists(shares, min_size=12, max_size=12),
    st.sampled_from([1, 2, 3, 7, 16, 256]),
    st.booleans(),
)
def test_it_is_the_recurrence(seed: int, lengths: list[int], share: list[float], block: int, scaled: bool) -> None:
    rng, offsets = np.random.default_rng(seed), offsets_of(lengths)
    size, coefficient = int(offsets[-1]), np.array(share)[: len(lengths)]
    x, carry = rng.normal(size=size), rng.normal(size=len(lengths))
    factor = rng.uniform(-1, 1, size) * (rng.random(size) < 0.9) if scaled else np.ones(size)
    got = linear_scan_reverse(x, coefficient, offsets, factor=factor if scaled else None, carry=carry, block=block)
    expected = scan_by_hand(x, coefficient, offsets, factor, carry)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_a_chain_is_its_own_bit_for_bit() -> None:  # invariant 2
    rng = np.random.default_rng(0)
    lengths = [1, 700, 0, 3, 64, 65, 1000, 256, 257, 5]
    offsets, share = offsets_of(lengths), rng.random(len(lengths))
    x = rng.normal(size=int(offsets[-1]))
    together = linear_scan_reverse(x, share, offsets)
    for c, length in enumerate(lengths):
        span = slice(offsets[c], offsets[c + 1])
        alone = linear_scan_reverse(x[span], share[c], np.array([0, length]))
        assert bits(alone) == bits(together[span])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99999, 1.0])
def test_a_very_long_chain(share: float) -> None:  # invariant 3
    size = 1_000_003
    got = linear_scan_reverse(np.ones(size), share, np.array([0, size]))
    left = np.arange(size, 0, -1, dtype=np.float64)
    expected = left if share == 1 else -np.expm1(left * np.log(share)) / (1 - share) if share else np.ones(size)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_chunks_change_the_last_digits_alone() -> None:  # invariant 4
    rng = np.random.default_rng(2)
    lengths, share = [5000, 17, 900], np.array([1.0, 0.9, 0.999])
    x, offsets = rng.normal(size=sum(lengths)), offsets_of(lengths)
    expected = scan_by_hand(x, share, offsets, np.ones(len(x)), np.zeros(3))
    for block in (1, 2, 37, 128, 256, 10_000):
        np.testing.assert_allclose(linear_scan_reverse(x, share, offsets, block=block), expected, rtol=1e-9, atol=1e-11)


def test_numbers_of_appo() -> None:
    future = linear_scan_reverse(np.array([0.1, -0.2, 0.3, 0.0]), 0.5, np.array([0, 4]))
    np.testing.assert_allclose(future, [0.075, -0.05, 0.3, 0.0], atol=1e-12)


def test_no_elements() -> None:
    assert linear_scan_reverse(np.zeros(0), 1.0, np.array([0])).shape == (0,)
    assert linear_scan_reverse(np.zeros(0), 1.0, np.array([0, 0, 0]), carry=np.ones(2)).shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coefficient": 1.1}, "coefficient spans 1.1..1.1: must lie within -1..1"),
        ({"coefficient": np.array([np.nan, 0.0])}, "coefficient spans nan"),
        ({"coefficient": np.zeros(3)}, r"coefficient \(3,\)"),
        ({"factor": np.full(5, 2.0)}, "factor spans 2.0"),
        ({"factor": np.zeros(4)}, r"factor \(4,\)"),
        ({"carry": np.zeros(3)}, r"carry \(3,\)"),
        ({"offsets": np.array([0, 3, 4])}, "offsets .* end at 5"),
        ({"offsets": np.array([0, 6, 5])}, "never fall"),
        ({"block": 0}, "block 0"),
    ],
)
def test_a_scan_that_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"coefficient": 1.0, "offsets": np.array([0, 3, 5]), **values}
    with pytest.raises(ValueError, match=message):
        linear_scan_reverse(np.zeros(5), **arguments)
