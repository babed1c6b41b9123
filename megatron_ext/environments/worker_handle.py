"""The driver's end of one environment worker: its process, what is queued for it and under way, and how it ended.

Invariants (``tests/environments/test_worker_handle.py``):

1. One batch is under way at most: the driver writes only to a worker that waits for it, so that neither side can block
   on a full pipe while the other does too.
2. Every request that was sent is answered once, in order, or is left when the worker ends: at most one of those is its
   culprit, the call that it was running.
3. The deadline runs per call: it starts when the worker turns to the call, and building an environment or listing tasks
   has a longer one.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from megatron_ext.environments.messages import Counters, Progress, Release, Replies, Reply, Request, Setup
from megatron_ext.process import start_child

Answers = list[tuple[Request, Reply]]
_BATCH = 64  # requests that a worker gets at a time


@dataclass(frozen=True)
class Deadlines:
    """Longest that one call may take, and longest that a start (of a worker, of an environment, a list of tasks) may,
    in seconds."""

    call_s: float
    start_s: float


@dataclass(frozen=True)
class Ended:
    """What a worker left: ``how`` it ended, whether it ever began, the ``culprit`` (None: it ran no call) and the other
    requests that it did not answer, those still queued included, in order."""

    how: str
    began: bool
    culprit: Request | None
    left: tuple[Request | Release, ...]


@dataclass
class WorkerHandle:
    """One worker process. ``queue`` is what the driver wants of it next."""

    popen: subprocess.Popen[bytes]
    connection: Connection
    progress: Progress
    deadlines: Deadlines
    queue: deque[Request | Release] = field(default_factory=deque)
    under_way: deque[Request] = field(default_factory=deque)
    answered: int = 0
    seen: Counters = Counters()
    changed_at: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, environments: Mapping[str, Any], deadlines: Deadlines, log: Path | None) -> WorkerHandle:
        """Starts a worker that can build ``environments``; its output goes to ``log``, or to the driver's own."""
        progress_fd = Progress.allocate()
        progress = Progress(progress_fd)
        progress.write(Counters())
        try:
            popen, connection = start_child(
                "megatron_ext.environments.worker:main", str(progress_fd), log=log, pass_fds=(progress_fd,)
            )
        finally:
            os.close(progress_fd)
        with suppress(BrokenPipeError, ConnectionResetError):  # it died at once: the first receive finds out
            connection.send(Setup(environments))
        return cls(popen, connection, progress, deadlines)

    # -- messages --------------------------------------------------------------------------------------------------
    def send(self) -> bool:
        """Sends what is queued, if the worker waits for it; False: it is dead."""
        if self.under_way or not self.queue:
            return True
        batch: list[Request | Release] = []
        answered = 0  # releases cost next to nothing and have no answer
        while self.queue and answered < _BATCH:
            batch.append(self.queue.popleft())
            answered += not isinstance(batch[-1], Release)
        self.under_way.extend(request for request in batch if not isinstance(request, Release))
        self.changed_at = time.monotonic()
        try:
            self.connection.send(batch)
        except (BrokenPipeError, ConnectionResetError):
            return False
        return True

    def receive(self) -> Answers | None:
        """The answers that have come (the connection is readable); None: it is dead."""
        try:
            replies: Replies = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return None
        return self._answers(replies)

    def _answers(self, replies: Replies) -> Answers:
        self.changed_at = time.monotonic()
        self.answered += len(replies)
        return [(self.under_way.popleft(), reply) for reply in replies]

    # -- the deadline ----------------------------------------------------------------------------------------------
    @property
    def limit_s(self) -> float:
        """The deadline of what it does now, in seconds."""
        return self.deadlines.start_s if self.seen.starting else self.deadlines.call_s

    def look_in_s(self, now: float) -> float:
        """When a busy worker's deadline is to be looked at: a quarter of the limit bounds how late a change of the
        counters can be noticed."""
        return min(self.changed_at + self.limit_s - now, self.limit_s / 4)

    def overrun(self) -> float | None:
        """The limit in seconds that its call has outlasted, if it has."""
        if not self.under_way:
            return None
        now, counters = time.monotonic(), self.progress.read()
        if counters != self.seen:
            self.seen, self.changed_at = counters, now
        elif now - self.changed_at > self.limit_s:
            return self.limit_s
        return None

    # -- the end ---------------------------------------------------------------------------------------------------
    def end(self, *, kill: bool) -> tuple[Answers, Ended]:
        """Waits for a worker that has died, or kills it; what it had still answered, and what it left."""
        if kill:
            self.popen.send_signal(signal.SIGKILL)
        code = self.popen.wait()
        answers = self._drain()
        counters = self.progress.read()
        left = list(self.under_way)
        # Calls that were finished but whose answers died with the worker, and calls it never began, are done again.
        culprit = left[counters.completed - self.answered] if counters.begun > counters.completed else None
        self.connection.close()
        self.progress.close()
        how = f"killed by signal {-code}" if code < 0 else f"exit code {code}"
        others = tuple(request for request in (*left, *self.queue) if request is not culprit)
        return answers, Ended(how, counters != Counters(), culprit, others)

    def _drain(self) -> Answers:
        """What a dead worker had still sent."""
        answers: Answers = []
        while True:
            try:
                if not self.connection.poll(0):
                    return answers
                answers += self._answers(self.connection.recv())
            except (EOFError, OSError):
                return answers  # the rest of the last message died with the worker

    def hang_up(self) -> None:
        """Tells a worker that waits to close its environments and end."""
        self.connection.close()

    def reap(self, patience_s: float) -> None:
        """Ends a worker that was hung up on: killed unless it goes by itself in time."""
        try:
            self.popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            self.popen.kill()
            self.popen.wait()
        self.progress.close()
