"""A tracker that sends its own process a signal at a chosen moment of a run: a kill or a Ctrl-C, without a race."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any


class StopAt:
    """Sends ``number`` when ``phase`` first begins after step ``step`` was logged (0: before any)."""

    def __init__(self, phase: str, step: int, number: int = signal.SIGKILL) -> None:
        self._phase, self._step, self._number = phase, step, number
        self._logged = 0

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        self._logged = resumed_from or 0

    def phase(self, name: str, total: int | None = None) -> None:
        if (name, self._logged) == (self._phase, self._step):
            self._phase = ""
            os.kill(os.getpid(), self._number)

    def advance(self, done: int, note: str = "") -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged = step

    def finish(self, summary: Mapping[str, Any]) -> None: ...
