"""The invariants of ``megatron_ext/report/numbers.py``."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.report.numbers import counted, number, points, signed


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1234.5, "1234"),
        (15_300, "15.3k"),
        (2_500_000, "2.5M"),
        (0.25, "0.25"),
        (None, "–"),
        (float("nan"), "–"),
        (float("inf"), "∞"),
        (float("-inf"), "−∞"),
        (-3.2e9, "-3.2G"),
        (1.23e-5, "1.2e-05"),
    ],
)
def test_numbers_as_people_write_them(value: float | None, text: str) -> None:
    assert number(value) == text


def test_one_is_one() -> None:
    assert [counted(n, "step") for n in (0, 1, 2)] == ["0 steps", "1 step", "2 steps"]
    assert [counted(n, "pass", "passes") for n in ("1", "1.2")] == ["1 pass", "1.2 passes"]


@given(st.floats())
def test_any_number_has_a_short_text(value: float) -> None:
    assert 1 <= len(number(value)) <= 10 or abs(value) >= 1e12
    assert signed(value).removeprefix("+") == number(value)
    assert signed(value).startswith("+") == (value > 0 and math.isfinite(value))


def test_shares_are_per_cent_and_differences_points() -> None:
    assert (points(0.9), points(1 / 3), points(0.0)) == ("90.0", "33.3", "0.0")
    assert (points(0.7, True), points(-0.05, True), points(0.0, True)) == ("+70.0", "-5.0", "+0.0")
