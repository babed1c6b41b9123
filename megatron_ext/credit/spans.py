"""Arrays over spans: one number a span from many a token, and back; sums along the spans of a trajectory.

A span is ``[start, end)`` of a token array. Spans come in order and do not overlap; between them may lie tokens that
belong to none. Long arrays are taken in pieces that fit the processor's cache, so nothing but the result is allocated.

Invariants (``tests/credit/test_spans.py`` asserts each):

1. A masked token has no influence, whatever stands there (NaN and infinities included).
2. An empty span, and one without an unmasked token, gives 0 for every operation.
3. A span's result depends on its own tokens alone.
4. ``prefix_sum`` and ``previous`` never reach over the start of a part.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.scan import linear_scan_reverse

BLOCK = 1 << 17


class Op(StrEnum):
    """How the tokens of a span become one number."""

    SUM = "sum"
    MEAN = "mean"
    COUNT = "count"
    MAX = "max"
    MIN = "min"
    FIRST = "first"
    LAST = "last"


def blocks(start: NDArray[np.int64], end: NDArray[np.int64]) -> Iterator[slice]:
    """Runs of consecutive spans, each of about ``BLOCK`` tokens or of a single longer span."""
    first = 0
    while first < len(start):
        stop = int(np.searchsorted(end, start[first] + BLOCK, side="right"))
        stop = max(stop, first + 1)
        yield slice(first, stop)
        first = stop


def parts(offsets: NDArray[np.int64]) -> Iterator[tuple[slice, NDArray[np.int64], NDArray[np.int64]]]:
    """Blocks of a partition (offsets [P+1]): the tokens of a block, the non-empty parts in it, and where they start."""
    filled = np.flatnonzero(np.diff(offsets) > 0)
    start, end = offsets[filled], offsets[filled + 1]
    for span in blocks(start, end):
        tokens = slice(int(start[span.start]), int(end[span.stop - 1]))
        yield tokens, filled[span], start[span] - tokens.start


def zero_unless(values: NDArray[np.float64], mask: NDArray[np.bool_]) -> None:
    """Writes 0 over ``values`` [n] where ``mask`` [n] is False, whatever stands there; the rest keeps its bits.

    On the bits, without a branch: several times faster than a masked copy when the mask is irregular.
    """
    bits = values.view(np.int64)
    for first in range(0, len(bits), BLOCK):
        block = slice(first, first + BLOCK)
        bits[block] &= -mask[block].astype(np.int64)


def _ufunc(op: Op) -> tuple[np.ufunc, float]:
    """What combines two tokens, and the number that changes nothing."""
    if op in (Op.MAX, Op.LAST):
        return np.maximum, -np.inf
    if op in (Op.MIN, Op.FIRST):
        return np.minimum, np.inf
    return np.add, 0.0


def _combine(
    values: NDArray[Any] | None,
    mask: NDArray[np.bool_] | None,
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    op: Op,
) -> NDArray[np.float64]:
    """``op``'s ufunc over the unmasked tokens of each span; ``values`` None stands for token positions."""
    ufunc, neutral = _ufunc(op)
    out = np.full(len(start), neutral)
    for span in blocks(start, end):
        first, last = int(start[span.start]), int(end[span.stop - 1])
        if last == first:
            continue
        piece = np.empty(last - first + 1)
        piece[:-1] = np.arange(first, last) if values is None else values[first:last]
        piece[-1] = neutral
        if mask is not None and neutral == 0.0:
            zero_unless(piece[:-1], mask[first:last])
        elif mask is not None:
            np.copyto(piece[:-1], neutral, where=~mask[first:last])
        # Every second entry of the result is a gap between two spans. An empty span comes out as the token after it.
        edges = np.stack([start[span], end[span]], axis=1).reshape(-1) - first
        out[span] = ufunc.reduceat(piece, edges)[::2]
    return np.where(end > start, out, neutral)


def count_spans(mask: NDArray[np.bool_], start: NDArray[np.int64], end: NDArray[np.int64]) -> NDArray[np.int64]:
    """Unmasked tokens of each span, int64."""
    out = np.zeros(len(start), dtype=np.int64)
    for span in blocks(start, end):
        first, last = int(start[span.start]), int(end[span.stop - 1])
        if last > first:
            piece = np.append(mask[first:last], False)
            edges = np.stack([start[span], end[span]], axis=1).reshape(-1) - first
            out[span] = np.add.reduceat(piece, edges, dtype=np.int64)[::2]
    return np.where(end > start, out, 0)


def reduce_spans(
    values: NDArray[Any],
    start: NDArray[np.int64],
    end: NDArray[np.int64],
    op: Op = Op.SUM,
    mask: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """One number a span, float64 [K], from ``values`` [T] (any real dtype) where ``mask`` (bool [T], None = all)."""
    if mask is not None and mask.shape != np.shape(values):
        raise ValueError(f"values {np.shape(values)} and mask {mask.shape}: both must be [T]")
    if mask is None and op in (Op.COUNT, Op.MEAN):
        mask = np.ones(len(values), dtype=np.bool_)
    if op == Op.COUNT:
        assert mask is not None
        return count_spans(mask, start, end).astype(np.float64)
    if op in (Op.FIRST, Op.LAST):
        position = _combine(None, mask, start, end, op)
        there = np.isfinite(position)
        out = np.zeros(len(start))
        out[there] = np.asarray(values)[position[there].astype(np.int64)]
        return out
    result = _combine(values, mask, start, end, op)
    if op == Op.MEAN:
        assert mask is not None
        return result / np.maximum(count_spans(mask, start, end), 1)
    if op == Op.SUM:
        return result
    return np.where(np.isneginf(result) if op == Op.MAX else np.isposinf(result), 0.0, result)


def sums_and_squares(
    values: NDArray[np.float64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sum and sum of squares of ``values`` [T] in each part (offsets [P+1]), float64 [P] each, in one pass."""
    total, squares = np.zeros(len(offsets) - 1), np.zeros(len(offsets) - 1)
    for tokens, part, edges in parts(offsets):
        piece = values[tokens]
        total[part] = np.add.reduceat(piece, edges)
        squares[part] = np.add.reduceat(piece * piece, edges)
    return total, squares


def spread_spans(
    values: NDArray[Any], start: NDArray[np.int64], end: NDArray[np.int64], size: int, fill: float = 0.0
) -> NDArray[np.float64]:
    """Each span's value on its tokens, float64 [size]; ``fill`` on the tokens of no span."""
    count = len(start)
    lengths = np.empty(2 * count + 1, dtype=np.int64)
    lengths[0:-1:2] = start - np.concatenate([[0], end[:-1]]) if count else 0
    lengths[1::2] = end - start
    lengths[-1] = size - (end[-1] if count else 0)
    padded = np.full(2 * count + 1, fill)
    padded[1::2] = values
    return np.repeat(padded, lengths)


def prefix_sum(values: NDArray[Any], offsets: NDArray[np.int64], discount: float = 1.0) -> NDArray[np.float64]:
    """``s_k = x_k + discount * s_{k-1}`` within each part of ``values`` [M]; float64 [M]. For sums from behind, such as
    returns to go, see ``scan.linear_scan_reverse``."""
    ends = int(offsets[-1]) - np.asarray(offsets)[::-1]
    return linear_scan_reverse(np.asarray(values)[::-1], discount, ends)[::-1]


def previous(values: NDArray[Any], offsets: NDArray[np.int64], first: float | NDArray[Any] = 0.0) -> NDArray[Any]:
    """``values`` [M] one place later within each part; ``first`` (a number, or one a part [P]) stands at its start."""
    out = np.empty(len(values), dtype=np.result_type(values, np.asarray(first)))
    out[1:] = values[:-1]
    filled = np.flatnonzero(np.diff(offsets) > 0)
    out[np.asarray(offsets)[filled]] = np.broadcast_to(first, len(offsets) - 1)[filled]
    return out
