"""Time per phase of a step, told to the trackers as it happens; and ranges of a trace, while one is recorded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from megatron_ext.tracking.protocol import Tracker

MARK = "step: "  # begins the name of every range of ours in a trace


def span(name: str) -> AbstractContextManager[object]:
    """A range ``name`` in the trace (``training.measures.profiling``); nothing while none is recorded."""
    return torch.profiler.record_function(MARK + name) if torch.autograd._profiler_enabled() else nullcontext()


class Phases:
    """Measures phases; ``take`` returns seconds by name and starts over."""

    def __init__(self, tracker: Tracker) -> None:
        self._tracker = tracker
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str, total: int | None = None) -> Iterator[None]:
        self._tracker.phase(name, total)
        start = time.monotonic()
        try:
            with span(name):
                yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - start

    def seconds(self, name: str) -> float:
        return self._seconds.get(name, 0.0)

    def take(self) -> dict[str, float]:
        taken, self._seconds = self._seconds, {}
        return {f"time/{name}": value for name, value in taken.items()}
