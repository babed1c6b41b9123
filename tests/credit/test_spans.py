"""Invariants 1-4 of ``credit/spans.py``."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit import spans
from megatron_ext.credit.spans import Op, prefix_sum, previous, reduce_spans, spread_spans, sums_and_squares

PLAIN: dict[Op, Callable[[np.ndarray], float]] = {
    Op.SUM: np.sum,
    Op.MEAN: np.mean,
    Op.COUNT: len,
    Op.MAX: np.max,
    Op.MIN: np.min,
    Op.FIRST: lambda x: x[0],
    Op.LAST: lambda x: x[-1],
}


def layout(seed: int, count: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Spans of 0-4 tokens with gaps of 0-2 between them, and how many tokens there are."""
    rng = np.random.default_rng(seed)
    steps = np.cumsum(rng.integers([[0, 0]] * count, [[3, 5]] * count).reshape(-1)) if count else np.zeros(0, int)
    size = int(steps[-1]) + int(rng.integers(0, 3)) if count else 3
    return steps[0::2], steps[1::2], size


@pytest.mark.parametrize("block", [1, 5, 1 << 17])
@pytest.mark.parametrize("op", list(Op))
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 10**6), count=st.integers(0, 12), masked=st.booleans())
def test_reduction_by_hand(op: Op, block: int, seed: int, count: int, masked: bool) -> None:  # invariants 1-3
    start, end, size = layout(seed, count)
    rng = np.random.default_rng(seed + 1)
    values = rng.normal(size=size).astype(np.float32)
    mask = rng.random(size) < 0.6 if masked else None
    if mask is not None:
        values[~mask] = rng.choice([np.nan, np.inf, -np.inf], int((~mask).sum()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK", block)
        got = reduce_spans(values, start, end, op, mask)
    for k, (a, b) in enumerate(zip(start, end, strict=True)):
        own = values[a:b] if mask is None else values[a:b][mask[a:b]]
        assert got[k] == (pytest.approx(float(PLAIN[op](own.astype(np.float64))), abs=1e-12) if len(own) else 0.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(0, 12))
def test_spreading(seed: int, count: int) -> None:
    start, end, size = layout(seed, count)
    values = np.arange(1.0, count + 1)
    got = spread_spans(values, start, end, size, fill=-1.0)
    want = np.full(size, -1.0)
    for value, a, b in zip(values, start, end, strict=True):
        want[a:b] = value
    assert np.array_equal(got, want)


def test_a_mask_of_another_size_is_named() -> None:
    with pytest.raises(ValueError, match=r"values \(3,\) and mask \(2,\)"):
        reduce_spans(np.zeros(3), np.array([0]), np.array([2]), Op.SUM, np.ones(2, dtype=bool))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 5), max_size=6), st.floats(-1, 1), st.integers(0, 99))
def test_sums_along_a_part_stay_in_it(sizes: list[int], discount: float, seed: int) -> None:  # invariant 4
    offsets = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
    values = np.random.default_rng(seed).normal(size=offsets[-1])
    sums, before = prefix_sum(values, offsets, discount), previous(values, offsets, np.arange(len(sizes)) + 0.5)
    total, squares = sums_and_squares(values, offsets)
    for p, (a, b) in enumerate(zip(offsets, offsets[1:], strict=False)):
        run = 0.0
        for k in range(a, b):
            run = values[k] + discount * run
            assert sums[k] == pytest.approx(run, abs=1e-12)
            assert before[k] == (p + 0.5 if k == a else values[k - 1])
        np.testing.assert_allclose([total[p], squares[p]], [values[a:b].sum(), (values[a:b] ** 2).sum()], atol=1e-12)


@pytest.mark.parametrize("block", [1, 7, 1 << 17])
def test_zeroing_keeps_the_bits_of_the_rest(block: int) -> None:  # invariant 1
    values = np.array([np.nan, -0.0, 1.5, -np.inf, 5e-324, -2.0])
    mask = np.array([False, True, True, False, True, False])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spans, "BLOCK", block)
        spans.zero_unless(values, mask)
    want = np.array([0.0, -0.0, 1.5, 0.0, 5e-324, 0.0])
    assert np.array_equal(values.view(np.int64), want.view(np.int64))
