"""What a bench reports."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite
from typing import Literal


@dataclass(frozen=True)
class Measurement:
    """One number. ``bar`` is what it must reach (None: informative only), ``better`` which side of the bar is good,
    ``size`` what it was measured on."""

    name: str
    value: float
    unit: str
    bar: float | None
    better: Literal["lower", "higher"]
    size: str

    def __post_init__(self) -> None:
        if not isfinite(self.value):
            raise ValueError(f"bench {self.name}: measured {self.value}, which is no number")

    @property
    def holds(self) -> bool | None:
        if self.bar is None:
            return None
        return self.value <= self.bar if self.better == "lower" else self.value >= self.bar


Report = Callable[[Measurement], None]
