"""Invariants of ``trajectory/routed_rows.py``."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.trajectory.record import RecordError
from megatron_ext.trajectory.routed_rows import RoutedRows


def of(*experts: tuple[int, int], dtype: type = np.uint8) -> NDArray[np.uint8]:
    """One layer, two experts a token."""
    return np.array(experts, dtype=dtype)[:, None]


def stands(rows: RoutedRows, size: int) -> list[tuple[int, int] | None]:
    placed = rows.placed(size)
    if placed is None:
        return []
    return [tuple(row[0].tolist()) if known else None for row, known in zip(*placed, strict=True)]


def test_the_first_rows_stand_and_the_last_are_kept_while_they_differ() -> None:  # invariants 1 and 3
    rows, elsewhere = RoutedRows(), RoutedRows()
    assert rows.placed(3) is None and rows.shape is None
    assert rows.add("here", 1, of((0, 1), (2, 3))) == 0 and not rows.moved
    assert rows.add("here", 0, of((4, 5), (0, 1), (2, 4), (6, 7))) == 1 and rows.moved
    assert stands(rows, 4) == [(4, 5), (0, 1), (2, 3), (6, 7)]
    elsewhere.inherit(rows, 9)
    assert stands(elsewhere, 4) == [(4, 5), (0, 1), (2, 4), (6, 7)] and not elsewhere.moved
    assert rows.add("here", 4, of((1, 2))) == 0 and rows.moved  # nothing ran again
    assert rows.add("here", 2, of((2, 3))) == 0 and not rows.moved  # the old choice is back


def test_the_order_of_a_tokens_experts_says_nothing() -> None:  # invariant 2
    rows = RoutedRows()
    rows.add("here", 0, of((0, 1), (2, 3)))
    assert rows.differing(0, of((1, 0), (3, 2))) == 0 and rows.differing(0, of((1, 0), (3, 1))) == 1
    assert rows.add("here", 0, of((1, 0), (3, 2))) == 0 and not rows.moved
    assert stands(rows, 2) == [(0, 1), (2, 3)]


def test_rows_that_nothing_stands_on_give_way() -> None:
    rows = RoutedRows()
    rows.add("here", 0, of((0, 1), (2, 3), (4, 5)))
    assert rows.add("here", 1, of((6, 7)), replace=True) == 0 and not rows.moved
    assert stands(rows, 3) == [(0, 1), (6, 7), (4, 5)]


def test_what_is_inherited_fills_gaps_alone_and_ends_where_it_is_told() -> None:
    rows, other = RoutedRows(), RoutedRows()
    other.add("there", 0, of((8, 9), (8, 9), (8, 9), (8, 9)))
    rows.add("here", 1, of((0, 1)))
    rows.inherit(other, 3)
    rows.inherit(RoutedRows(), 3)
    assert stands(rows, 4)[:3] == [(8, 9), (0, 1), (8, 9)] and stands(rows, 4)[3:] in ([], [None])


def test_types_widen_and_rows_of_another_model_are_refused() -> None:
    rows = RoutedRows()
    given = of((0, 1))
    rows.add("here", 0, given)
    given[:] = 9  # invariant 4
    rows.add("here", 1, of((300, 301), dtype=np.uint16))
    assert stands(rows, 2) == [(0, 1), (300, 301)]
    with pytest.raises(RecordError, match=r"here: routed rows of shape \(2, 2\).*after \(1, 2\)"):
        rows.add("here", 2, np.zeros((1, 2, 2), np.uint8))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 6), st.integers(0, 2)), max_size=8))
def test_against_a_plain_list(given: list[tuple[int, int, int]]) -> None:
    """Each call gives ``count`` equal rows from ``start`` on."""
    rows, first, last = RoutedRows(), dict[int, int](), dict[int, int]()
    for start, count, expert in given:
        span = range(start, start + count)
        differing = sum(first.get(position, expert) != expert for position in span)
        assert rows.add("here", start, of(*[(expert, 9)] * count)) == differing
        for position in span:
            first.setdefault(position, expert)
            last[position] = expert
        assert rows.moved == (first != last)
    want = [(first[position], 9) if position in first else None for position in range(16)]
    got = stands(rows, 16)
    assert got == want[: len(got)] and not any(want[len(got) :])


def test_cost_is_linear_in_the_rows_given() -> None:  # invariant 5
    def seconds(turns: int) -> float:
        """Of the processor: other processes do not lengthen them."""
        row, best = np.zeros((4, 8, 8), np.uint8), np.inf
        for _ in range(3):
            rows, begin = RoutedRows(), time.process_time()
            for turn in range(turns):
                rows.add("here", 4 * turn, row)
            best = min(best, time.process_time() - begin)
        return best

    assert seconds(8000) < 4 * seconds(4000)
