"""Sums that come out bit for bit the same in every order, and however ranks share the terms out.

A number is cut into whole multiples of fixed powers of two (limbs). Sums of a limb are whole numbers below 2^53, which
float64 adds without rounding, so limbs add over members and over ranks (``Stat(Reduce.SUM, ...)``) in any order.

Invariants (``tests/credit/test_exact.py`` asserts each):

1. Permuting the terms, or adding the partial sums of any split of them, gives identical bits.
2. A sum is off its true value by less than the terms' number times 2^-121 (and the rounding of the result).
3. ``Moments`` loses nothing to cancellation: variances are those of exact arithmetic, rounded once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.protocol import Reduce, Stat

LIMB_BITS = 30
EXPONENTS = (60, 30, 0, -30, -60, -90, -120)
LIMBS = len(EXPONENTS)
LARGEST = 2.0**89
MOST_TERMS = 2**23


def exact_parts(values: NDArray[Any], index: NDArray[Any] | None = None, size: int = 1) -> NDArray[np.float64]:
    """Partial sums, float64 [size, LIMBS]: those of ``values`` [n] whose ``index`` (int [n], 0..size-1) is the row's.

    ``index`` None puts all values into one sum. Values must be finite and below 2^89 in size, at most 2^23 of them.
    """
    if len(values) > MOST_TERMS:
        raise ValueError(f"exact sum: {len(values)} values, more than 2^23; sum parts of them first")
    rest = np.array(values, dtype=np.float64)
    where = np.zeros(len(rest), dtype=np.int64) if index is None else index
    out = np.zeros((size, LIMBS))
    if not len(rest):
        return out
    largest = float(np.max(np.abs(rest)))
    if not largest < LARGEST:
        raise ValueError(f"exact sum: a value of size {largest} is not below 2^89")
    for limb, exponent in enumerate(EXPONENTS):
        if largest < 2.0 ** (exponent - 1):
            continue
        whole = np.rint(rest * 2.0**-exponent)
        out[:, limb] = np.bincount(where, weights=whole, minlength=size)
        rest -= whole * 2.0**exponent
        largest = float(np.max(np.abs(rest)))
        if largest == 0.0:
            break
    return out


def exact_value(parts: NDArray[np.float64]) -> NDArray[np.float64]:
    """The sums that limbs [..., LIMBS] stand for, float64 [...], each the same for the same limbs."""
    total: NDArray[np.float64] = np.zeros(parts.shape[:-1])
    for limb in reversed(range(LIMBS)):
        total = total + parts[..., limb] * 2.0 ** EXPONENTS[limb]
    return total


def exact_sum(values: NDArray[Any], index: NDArray[Any] | None = None, size: int = 1) -> NDArray[np.float64]:
    """Sums of ``values`` by ``index``, float64 [size]; see ``exact_parts``."""
    return exact_value(exact_parts(values, index, size))


def _whole(parts: NDArray[np.float64]) -> int:
    """Limbs [LIMBS] as one integer, in units of 2^-120."""
    return sum(int(value) << (exponent - EXPONENTS[-1]) for value, exponent in zip(parts, EXPONENTS, strict=True))


def _squares(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Three numbers each, exactly summing to the squares: a value is split into two halves of at most 26 bits."""
    mantissa, exponent = np.frexp(values)
    high = np.ldexp(np.rint(np.ldexp(mantissa, 26)), exponent - 26)
    low = values - high
    return high * high, 2.0 * high * low, low * low


@dataclass(frozen=True)
class Moments:
    """Moments of K keys, in a form that adds over ranks: ``count`` [K], limbs of sum and of sum of squares [K, LIMBS],
    lowest and highest value [K] (+inf and -inf where a key has no value)."""

    count: NDArray[np.int64]
    total: NDArray[np.float64]
    squares: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]

    @classmethod
    def of(cls, values: NDArray[Any], index: NDArray[Any] | None = None, size: int = 1) -> Moments:
        """Of ``values`` [n] by ``index`` (int [n], 0..size-1, a numbering that all ranks share)."""
        numbers = np.asarray(values, dtype=np.float64)
        where = np.zeros(len(numbers), dtype=np.int64) if index is None else np.asarray(index, dtype=np.int64)
        low, high = np.full(size, np.inf), np.full(size, -np.inf)
        np.minimum.at(low, where, numbers)
        np.maximum.at(high, where, numbers)
        squares = sum((exact_parts(part, where, size) for part in _squares(numbers)), np.zeros((size, LIMBS)))
        return cls(np.bincount(where, minlength=size), exact_parts(numbers, where, size), squares, low, high)

    def stats(self, name: str) -> dict[str, Stat]:
        """The two statistics to reduce over ranks."""
        sums = np.concatenate([self.count[:, None].astype(np.float64), self.total, self.squares], axis=1)
        ends = np.stack([-self.low, self.high], axis=1)
        return {f"{name}/sums": Stat(Reduce.SUM, sums), f"{name}/ends": Stat(Reduce.MAX, ends)}

    @classmethod
    def reduced(cls, reduced: Mapping[str, NDArray[Any]], name: str) -> Moments:
        """Of all ranks, from the reduced ``stats(name)``."""
        sums, ends = reduced[f"{name}/sums"], reduced[f"{name}/ends"]
        count = sums[:, 0].astype(np.int64)
        return cls(count, sums[:, 1 : 1 + LIMBS], sums[:, 1 + LIMBS :], -ends[:, 0], ends[:, 1])

    @property
    def sum(self) -> NDArray[np.float64]:
        return exact_value(self.total)

    @property
    def mean(self) -> NDArray[np.float64]:
        """0 where there is no value."""
        return self.sum / np.maximum(self.count, 1)

    @property
    def mean_square(self) -> NDArray[np.float64]:
        return exact_value(self.squares) / np.maximum(self.count, 1)

    def variance(self, ddof: int = 0) -> NDArray[np.float64]:
        """``(n sum x^2 - (sum x)^2) / (n (n - ddof))``; 0 for a key with ``ddof`` values or fewer."""
        out = np.zeros(len(self.count))
        for k, count in enumerate(self.count.tolist()):
            if count > max(ddof, 1):
                spread = (count * _whole(self.squares[k]) << -EXPONENTS[-1]) - _whole(self.total[k]) ** 2
                # Python divides whole numbers of any size with one rounding.
                out[k] = max(spread, 0) / (count * (count - ddof) << -2 * EXPONENTS[-1])
        return out

    def std(self, ddof: int = 0) -> NDArray[np.float64]:
        return np.sqrt(self.variance(ddof))

    def constant(self, tolerance: float = 0.0) -> NDArray[np.bool_]:
        """Keys whose highest and lowest value differ by no more than ``tolerance``, and keys without a value."""
        result: NDArray[np.bool_] = (self.count == 0) | (self.high - self.low <= tolerance)
        return result
