"""Ctrl-C: the first one is a flag that phases check, a second one interrupts at once.

SLURM's warning signal before the time limit (``--signal=B:USR1``) is treated like the first Ctrl-C.
"""

from __future__ import annotations

import signal
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


class Interrupted(Exception):
    """The user or the scheduler asked to stop; raised where a phase may stop."""


class InterruptFlag:
    """Context manager that catches the signals while a run lasts."""

    def __init__(self) -> None:
        self.raised = False
        self._received = False
        self._old: dict[signal.Signals, Any] = {}

    def __enter__(self) -> InterruptFlag:
        self._old = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, signum: int, frame: object) -> None:
        if self._received:
            raise KeyboardInterrupt
        self._received = self.raised = True

    def raise_it(self) -> None:
        """Another rank of the job received a signal. This one's own may follow, and is still its first."""
        self.raised = True

    def check(self) -> None:
        """Raises ``Interrupted`` once a signal has come."""
        if self.raised:
            raise Interrupted
