"""Chains of numbers for the tests of scans and advantages, and the scan as a loop."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def offsets_of(lengths: Array | list[int]) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def scan_by_hand(x: Array, share: Array, offsets: Array, factor: Array, carry: Array) -> Array:
    y = np.zeros(len(x))
    for c in range(len(offsets) - 1):
        last = carry[c]
        for i in range(offsets[c + 1] - 1, offsets[c] - 1, -1):
            last = y[i] = x[i] + share[c] * factor[i] * last
    return y


def bits(*arrays: Array) -> bytes:
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)
