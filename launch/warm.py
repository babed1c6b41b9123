"""Processes that train one run after the other: the stack is imported once, each run starts and ends everything else.

Invariants (``tests/launch/test_warm.py``):

1. A run's metrics do not depend on the runs that its process made before.
2. A run that failed ends its process, and the next gets a new one: what an error left behind touches no other run.
3. A process ends when the one that started it ends, however that ends; killed in between, a run goes on from its
   checkpoint.
"""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from launch.errors import status
from launch.runner import INTERRUPTED, Job, Running
from megatron_ext.process import start_child
from megatron_ext.training.interrupt import InterruptFlag

_FAILED = 1
_SERVE = "launch.warm:serve"


# -- the process that trains -----------------------------------------------------------------------------------------
def serve(connection: Connection) -> None:
    """Trains what it is told, (argv, recipes, log) after (argv, recipes, log), and answers with each exit status."""
    while True:
        try:
            argv, recipes, log = connection.recv()
        except EOFError:
            return
        _write_to(Path(log))
        code = _train(list(argv), Path(recipes))
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send(code)
        if code not in (0, INTERRUPTED):
            return


def _write_to(log: Path) -> None:
    with log.open("ab") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)


def _train(argv: list[str], recipes: Path) -> int:
    # Imported with the first run: its own log says what goes wrong then.
    from launch.prepare import prepare
    from megatron_ext.training.run import train

    sys.orig_argv[:] = [sys.executable, "-m", "launch.train", *argv]  # what the run's provenance tells
    with InterruptFlag() as flag:  # for the moments before the run listens itself
        try:
            config = prepare(argv, recipes)
            if flag.raised:
                return INTERRUPTED
            result = train(config, recipes)
        except (Exception, KeyboardInterrupt) as error:
            try:
                return status(error)
            except Exception:
                traceback.print_exc()
                return _FAILED
    gc.collect()  # the models of the run that ended hold themselves
    return INTERRUPTED if result.interrupted else 0


# -- the process that asks -------------------------------------------------------------------------------------------
class _Worker:
    def __init__(self, log: Path) -> None:
        self.process: subprocess.Popen[bytes]
        self.process, self.connection = start_child(_SERVE, log=log)

    def end(self) -> None:
        """An idle one ends by itself once nobody can ask it."""
        self.connection.close()
        self.process.wait()


class WarmRun:
    """A run in a warm process."""

    def __init__(self, pool: WarmPool, worker: _Worker) -> None:
        self._pool, self._worker = pool, worker
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None and self._worker.connection.poll():
            try:
                self._code = int(self._worker.connection.recv())
            except (EOFError, ConnectionResetError):  # it died
                self._code = self._worker.process.wait() or _FAILED
            self._pool.give_back(self._worker, healthy=self._code in (0, INTERRUPTED))
        return self._code

    def stop(self) -> None:
        self._worker.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self._worker.process.kill()
        self._pool.give_back(self._worker, healthy=False)


class WarmPool:
    """Warm processes, started as they are needed; a context that ends them."""

    def __init__(self, recipes: Path) -> None:
        self._recipes = recipes
        self._idle: list[_Worker] = []
        self._all: list[_Worker] = []

    def __enter__(self) -> WarmPool:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in list(self._all):
            if worker not in self._idle:
                worker.process.kill()
            self.give_back(worker, healthy=False)

    @property
    def processes(self) -> Sequence[int]:
        """Pids of those that run."""
        return [worker.process.pid for worker in self._all]

    def start(self, job: Job, log: Path) -> Running:
        """``runner.Start``: the run goes to an idle process, or to a new one."""
        if not self._idle:
            worker = _Worker(log)
            self._all.append(worker)
            self._idle.append(worker)
        worker = self._idle.pop()
        worker.connection.send((job.argv, str(self._recipes), str(log)))
        return WarmRun(self, worker)

    def give_back(self, worker: _Worker, *, healthy: bool) -> None:
        if healthy:
            self._idle.append(worker)
            return
        if worker in self._idle:
            self._idle.remove(worker)
        if worker in self._all:
            self._all.remove(worker)
            worker.end()
