"""Numbers as people read them.

Invariants (``tests/report/test_numbers.py`` asserts each):

1. Any number has a text: none and NaN a dash, infinities their sign; large ones are shortened by k, M and G.
2. What is counted is one of them, or several.
3. A sign is written only where one was asked for, and 0 has none but in a difference of shares.
"""

from __future__ import annotations

import math


def number(value: float | None, digits: int = 4) -> str:
    """A number as people write it: few digits, k and M for large ones; a dash for none."""
    if value is None or math.isnan(value):
        return "–"
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            scaled = value / (limit if unit != "k" else 1e3)
            return f"{scaled:.{digits - 1}g}{unit}" if abs(scaled) < 1000 else f"{scaled:.0f}{unit}"
    if size and size < 1e-3:
        return f"{value:.{digits - 2}g}"
    return f"{value:.{digits}g}"


def counted(count: int | str, one: str, several: str = "") -> str:
    """``1 step``, ``2 steps``; ``several`` where it is not ``one`` with an s. What is no whole number comes as text."""
    return f"{count} {one if str(count) == '1' else several or f'{one}s'}"


def signed(value: float) -> str:
    """With its sign; exactly 0 has none."""
    return f"+{number(value)}" if value > 0 and math.isfinite(value) else number(value)


def points(share: float, sign: bool = False) -> str:
    """A share in per cent, or a difference of two in points."""
    return f"{100 * share:{'+' if sign else ''}.1f}"
