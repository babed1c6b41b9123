"""Tracker protocol: a sink of metrics. Every name is in ``megatron_ext.tracking.names``; an unknown one is an error."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Tracker(Protocol):
    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        """Opens the sink. ``resumed_from`` is the optimizer step of the checkpoint a run continues from: points of
        later, undone steps are dropped."""

    def phase(self, name: str, total: int | None = None) -> None:
        """A phase begins (rollout, scoring, update, publish, evaluate, save, warm_start)."""

    def advance(self, done: int, note: str = "") -> None:
        """Progress within the phase."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of one optimizer step."""

    def finish(self, summary: Mapping[str, Any]) -> None: ...
