"""A tracker that sends its own process a signal at a chosen moment of a run: a kill or a Ctrl-C, without a race."""

from __future__ import annotations

import os
import signal
import time
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
            os.kill(self._target(), self._number)

    def _target(self) -> int:
        return os.getpid()

    def advance(self, done: int, note: str = "") -> None: ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._logged = step

    def finish(self, summary: Mapping[str, Any]) -> None: ...


class HoldAt(StopAt):
    """Where ``StopAt`` would send a signal the run named ``run`` waits as long as the file ``while_there`` is there:
    whoever watches it from outside has all the time it needs to kill it."""

    def __init__(self, phase: str, step: int, run: str, while_there: str) -> None:
        super().__init__(phase, step)
        self._run, self._while_there, self._here = run, Path(while_there), False

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        super().start(run_dir, config, resumed_from)
        self._here = run_dir.name == self._run

    def phase(self, name: str, total: int | None = None) -> None:
        while self._here and (name, self._logged) == (self._phase, self._step) and self._while_there.exists():
            time.sleep(0.05)


class StopInWarmStart(StopAt):
    """Sends ``number`` once the warm start has made ``step`` optimizer steps, where those are reported."""

    def __init__(self, step: int, number: int = signal.SIGKILL) -> None:
        super().__init__("warm_start", step, number)

    def phase(self, name: str, total: int | None = None) -> None: ...

    def advance(self, done: int, note: str = "") -> None:
        if note.startswith("loss") and done >= self._step and self._phase:
            self._phase = ""
            os.kill(self._target(), self._number)


class StopRank(StopAt):
    """As ``StopAt``, for rank ``rank`` of the same job (trackers live on rank 0). ``stopped`` in the run's folder is
    touched at that moment."""

    def __init__(self, phase: str, step: int, rank: int, number: int = signal.SIGKILL) -> None:
        super().__init__(phase, step, number)
        self._rank = rank
        self._stopped = Path()

    def start(self, run_dir: Path, config: Mapping[str, Any], resumed_from: int | None) -> None:
        super().start(run_dir, config, resumed_from)
        self._stopped = run_dir / "stopped"

    def _target(self) -> int:
        self._stopped.touch()  # when it was
        return pid_of_rank(self._rank, os.environ["MASTER_PORT"])


def pid_of_rank(rank: int, port: str) -> int:
    """The process that a launcher started as ``rank`` of the job at ``port`` on this machine."""
    wanted = {f"RANK={rank}".encode(), f"MASTER_PORT={port}".encode()}
    for folder in Path("/proc").iterdir():
        # Children of a rank inherit its environment; a rank itself runs under the launcher, which has none of this.
        if folder.name.isdecimal() and wanted <= _environment(folder) and not wanted <= _environment(_parent(folder)):
            return int(folder.name)
    raise ProcessLookupError(f"no rank {rank} of a job at port {port} runs here")


def _environment(folder: Path) -> set[bytes]:
    try:
        return set((folder / "environ").read_bytes().split(b"\0"))
    except OSError:  # it ended, or is not ours
        return set()


def _parent(folder: Path) -> Path:
    try:
        fields = (folder / "stat").read_text().rpartition(")")[2].split()
    except OSError:
        return folder
    return folder.parent / fields[1]
