"""What a bench reports, and what it says of itself."""

from __future__ import annotations

import re
from argparse import ArgumentParser
from collections.abc import Callable, Mapping
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


def no_options(parser: ArgumentParser) -> None:
    """Of a bench that has none of its own."""


@dataclass(frozen=True)
class About:
    """What ``--help`` says of a bench besides its module's docstring. ``line`` is its line in the list of benches,
    ``takes`` how long it runs and on what; ``keys`` are the names that it prints, or families of them with ``<...>``
    (``[...]``: with or without), each with what it is; ``options`` adds its own, which ``run`` takes as arguments of
    the same names."""

    line: str
    takes: str
    keys: Mapping[str, str]
    options: Callable[[ArgumentParser], None] = no_options

    def knows(self, name: str) -> bool:
        """Whether a printed name is among ``keys``."""
        patterns = (re.sub(r"\[(\w+)\]", r"(?:\1)?", re.sub(r"<\w+>", r"\\w+", key)) for key in self.keys)
        return any(re.fullmatch(pattern, name) for pattern in patterns)
