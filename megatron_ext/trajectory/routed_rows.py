"""Routing rows of a growing segment: of each token, the experts of its first forward and those of its last.

An engine that lost its cache (it was full, or the weights changed) runs a prefix again, and may choose other experts.
Tokens sampled before stand on the first forward, tokens sampled after on the last: one sequence cannot replay both.

Invariants (``tests/trajectory/test_routed_rows.py`` asserts each):

1. Of several rows for one position the first given stands (``placed``); the last is kept beside it only while some
   position has other experts in it (``moved``).
2. Rows agree when they name the same experts in every layer, in whatever order.
3. ``add`` counts the positions whose experts are others than those that stand.
4. Rows are copies: what the giver does to its buffer later changes nothing.
5. Cost is linear in the rows given.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.fields import Array, RecordError


class Rerun(StrEnum):
    """What a record does with a prompt that ran again on other experts than those it holds."""

    FIRST = "first"  # keeps the first rows: tokens sampled after replay experts of another forward
    SEGMENT = "segment"  # goes on in a segment of its own: every token replays the forward that sampled it


@dataclass(frozen=True)
class RerunCounts:
    """``positions`` whose experts were recorded again, and were others; ``displaced``: sampled tokens that the record
    puts behind experts of another forward than the one that sampled them."""

    positions: int = 0
    displaced: int = 0

    def __add__(self, other: RerunCounts) -> RerunCounts:
        return RerunCounts(self.positions + other.positions, self.displaced + other.displaced)


class RoutedRows:
    """Rows [L, k] by position; layers, k and the integer type are those of the rows given."""

    def __init__(self) -> None:
        self._known: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._first: Array | None = None
        self._last: Array | None = None  # None: as the first
        self._end = 0

    @property
    def moved(self) -> bool:
        """Whether the last forward of some position chose other experts than the one that stands."""
        return self._last is not None

    @property
    def shape(self) -> tuple[int, ...] | None:
        """(L, k) of the rows, None before any was given."""
        return None if self._first is None else self._first.shape[1:]

    def differing(self, start: int, rows: Array) -> int:
        """How many of the positions ``start .. start + len(rows)`` stand with other experts than ``rows`` has."""
        if self._first is None or start >= self._end or self.shape != rows.shape[1:]:
            return 0
        span = slice(start, min(start + len(rows), self._end))
        other = ~_agree(self._first[span], rows[: span.stop - start])
        return int(np.count_nonzero(other & self._known[span]))

    def add(self, where: str, start: int, rows: Array, *, replace: bool = False) -> int:
        """Takes rows [m, L, k] of the positions from ``start`` on; returns ``differing``. With ``replace`` nothing
        stands on earlier rows: these take their place, and none differs. Raises ``RecordError``."""
        if self.shape not in (None, rows.shape[1:]):
            raise RecordError(f"{where}: routed rows of shape {rows.shape[1:]} (layers, experts) after {self.shape}")
        again = 0 if replace else self.differing(start, rows)
        overlaps = start < self._end
        first, span = self._room(start + len(rows), rows), slice(start, start + len(rows))
        if again and self._last is None:
            self._last = first.copy()
        fresh = slice(None) if replace else ~self._known[span]
        first[span][fresh] = rows[fresh]
        self._known[span] = True
        if self._last is not None:
            self._last[span] = rows
            if overlaps and not again and np.all(_agree(first[: self._end], self._last[: self._end])):
                self._last = None
        return again

    def inherit(self, other: RoutedRows, end: int) -> None:
        """Rows of the positions before ``end`` that have none, from the last forward of the same tokens elsewhere."""
        given = other._first if other._last is None else other._last
        end = min(end, other._end)
        if given is None or end <= 0:
            return
        first = self._room(end, given[:end])
        fresh = other._known[:end] & ~self._known[:end]
        for kept in (first,) if self._last is None else (first, self._last):
            kept[:end][fresh] = given[:end][fresh]
        self._known[:end] |= fresh

    def placed(self, size: int) -> tuple[Array, NDArray[np.bool_]] | None:
        """The rows that stand at the ``size`` first positions, and which of them are known; None without any."""
        if self._first is None:
            return None
        return self._first[:size], self._known[:size]

    def _room(self, end: int, like: Array) -> Array:
        """Makes room for ``end`` positions of the type and shape of ``like``; returns the first rows."""
        if self._first is None:
            self._first = np.zeros((0, *like.shape[1:]), dtype=like.dtype)
        dtype = np.result_type(self._first.dtype, like.dtype)
        if end > len(self._first) or dtype != self._first.dtype:
            size = max(end, 2 * len(self._first)) if end > len(self._first) else len(self._first)
            self._first = _grown(self._first, size, dtype)
            self._last = None if self._last is None else _grown(self._last, size, dtype)
            self._known = _grown(self._known, size, self._known.dtype)
        self._end = max(self._end, end)
        return self._first


def _grown(array: Array, size: int, dtype: np.dtype[Any]) -> Array:
    grown = np.zeros((size, *array.shape[1:]), dtype=dtype)
    grown[: len(array)] = array
    return grown


def _agree(a: Array, b: Array) -> NDArray[np.bool_]:
    """bool [m]: rows that name the same experts in each layer."""
    if np.array_equal(a, b):  # nearly always, and much faster than row by row
        return np.ones(len(a), dtype=np.bool_)
    same: NDArray[np.bool_] = np.all(a == b, axis=(1, 2))
    apart = np.flatnonzero(~same)
    if len(apart):  # the order of a token's experts, likeliest first, says nothing of which they are
        same[apart] = np.all(np.sort(a[apart], axis=-1) == np.sort(b[apart], axis=-1), axis=(1, 2))
    return same
