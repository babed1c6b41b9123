"""Axes of a chart: from values to pixels, and the ticks on them. Pure.

Invariants (``tests/report/test_axes.py`` asserts each):

1. Every pixel is finite and inside the plot, whatever the values (constant, huge, one, none).
2. Ticks are round numbers (1, 2 or 5 times a power of ten) inside the axis, and neighbours read differently.
3. An axis is logarithmic only where that was allowed and its values are positive and span two powers of ten.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.report.numbers import number

WIDTH, HEIGHT = 480, 230
LEFT, RIGHT, TOP, BOTTOM = 52, WIDTH - 10, 10, HEIGHT - 26  # edges of the plot, in pixels from the chart's corner
TINY = 1e-300  # below it the steps between ticks underflow: drawn as 0


@dataclass(frozen=True)
class Tick:
    at: float
    label: str


@dataclass(frozen=True)
class Axis:
    """From values (``low`` to ``high``) to pixels (``start`` to ``end``), linear or logarithmic; the edge for a value
    outside."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def at(self, values: NDArray[Any] | float) -> NDArray[np.float64]:
        """Pixels of values of any shape."""
        inside = np.clip(np.asarray(values, dtype=np.float64), self.low, self.high)
        low, high = self.low, self.high
        if self.log:
            inside, low, high = np.log10(inside), math.log10(low), math.log10(high)
        return self.start + (inside - low) / (high - low) * (self.end - self.start)

    def pixel(self, value: float) -> float:
        """Where a mark at ``value`` stands, to a tenth."""
        return round(float(self.at(value)), 1)

    def drawn_ticks(self) -> tuple[Tick, ...]:
        """``ticks`` of a value axis."""
        values = self.ticks()
        return tuple(Tick(self.pixel(v), text) for v, text in zip(values, tick_labels(values, self.log), strict=True))

    def drawn_steps(self, last: float | None = None) -> tuple[Tick, ...]:
        """Ticks of a step axis: round steps, none behind ``last`` (None: the axis's end)."""
        steps = step_ticks(self.low, self.high if last is None else max(last, self.low))
        return tuple(Tick(self.pixel(step), number(step)) for step in steps)

    def ticks(self) -> list[float]:
        """Round values inside the axis."""
        if not self.log:
            return round_ticks(self.low, self.high)
        low, high = math.log10(self.low), math.log10(self.high)
        if high - low < 1.5:  # less than two powers of ten apart
            return [t for t in round_ticks(self.low, self.high) if t > 0]
        every = max(1, round((high - low) / 5))
        return [10.0**k for k in range(math.ceil(low - 1e-9), math.floor(high + 1e-9) + 1, every)]


def value_axis(values: NDArray[np.float64], *, log: bool, share: bool) -> Axis:
    """The axis of finite ``values``; logarithmic only where they are positive and span two powers of ten."""
    start, end = float(BOTTOM), float(TOP)
    if share and values.min(initial=0) >= 0 and values.max(initial=1) <= 1:
        return Axis(0.0, 1.0, start, end)
    low, high = float(values.min(initial=np.inf)), float(values.max(initial=-np.inf))
    if not len(values):
        low, high = 0.0, 1.0
    if log and low > 0 and high / low >= 100:
        return Axis(low / 1.2, high * 1.2, start, end, log=True)
    if 0 <= low < 0.5 * high:
        low = 0.0
    span = high - low
    if max(abs(low), abs(high)) < TINY:
        return Axis(0.0, 1.0, start, end)
    if span <= 1e-9 * max(abs(high), abs(low)):  # constant: the line goes through the middle
        span = 0.2 * max(abs(high), abs(low))
        return Axis(low - span, high + span, start, end)
    return Axis(low if low == 0 else low - 0.05 * span, high + 0.05 * span, start, end)


def step_axis(first: float, last: float) -> Axis:
    """The axis of the steps ``first`` to ``last``."""
    return Axis(first, last if last > first else first + 1, float(LEFT), float(RIGHT))


def round_ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers from ``low`` to ``high``, about so many."""
    raw = (high - low) / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [k * step for k in range(first, last + 1)]


def tick_labels(values: Sequence[float], log: bool = False) -> list[str]:
    """Labels of ticks: as many digits as tell neighbours apart."""
    if log or len(values) < 2 or max(map(abs, values)) >= 1e4:
        return [number(v) for v in values]
    step = min(b - a for a, b in zip(values[:-1], values[1:], strict=True))
    if max(map(abs, values)) < 1e-3:
        return [number(round(v / step) * step) for v in values]
    digits = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{v:.{digits}f}" if v else "0" for v in values]


def step_ticks(low: float, high: float) -> list[float]:
    """Ticks of the step axis: whole numbers."""
    found = [t for t in round_ticks(low, high, 6) if t == round(t)] if high > low else []
    return found or [low]
