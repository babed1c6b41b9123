"""The trackers of a run as one tracker.

Invariants (``tests/tracking/test_composite.py`` asserts each):

1. Every name is checked against the table before any tracker sees a value.
2. ``finish`` reaches every tracker that was started, also when one of them fails; the first failure is then raised.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from megatron_ext.tracking.names import check
from megatron_ext.tracking.protocol import Tracker


class TrackerSet:
    """Passes everything on to each of ``trackers`` (name -> tracker), in order."""

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._started: list[Tracker] = []

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        for tracker in self._trackers.values():
            tracker.start(run_dir, config, resumed_from)
            self._started.append(tracker)

    def phase(self, name: str, total: int | None = None) -> None:
        for tracker in self._started:
            tracker.phase(name, total)

    def advance(self, done: int, note: str = "") -> None:
        for tracker in self._started:
            tracker.advance(done, note)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        check(metrics)
        for tracker in self._started:
            tracker.log(step, metrics)

    def finish(self, summary: Mapping[str, Any]) -> None:
        started, self._started = self._started, []
        with ExitStack() as stack:
            for tracker in reversed(started):  # the stack unwinds backwards: trackers finish in their order
                stack.callback(tracker.finish, summary)
