"""Journal: the coordinator's events on disk, one JSON object a line, and the coordinator that writes it.

Invariants (``tests/rollout/test_journal.py`` asserts each):

1. ``append`` returns after its events are on disk: one write and one sync for all of them.
2. A failed append leaves the file as it was, and the coordinator's state with it.
3. Lines are numbered 0, 1, 2, ... (``seq``); a gap, or a broken line before the last, is an error that names the line.
4. A torn tail (last line without its newline, or not JSON) was never acknowledged: opening cuts it off and says so.
5. The journal is the only state on disk: replaying it gives the state.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from megatron_ext.rollout.coordinator import Coordinator, CoordinatorError, Counts, LeasedGroup
from megatron_ext.rollout.events import Event, Finished, GroupMeta, from_json, to_json
from megatron_ext.trajectory.task import Task


class JournalError(RuntimeError):
    """A journal that cannot be read or written; the message names the file and the line."""


def read(path: Path | str) -> tuple[list[Event], int, str]:
    """Events of a journal, bytes they take, and a warning about a torn tail (empty when there is none)."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise JournalError(f"{path}: cannot be read: {error.strerror}") from error
    lines = data.split(b"\n")
    rest = lines.pop()  # what follows the last newline; empty when the file ends well
    events: list[Event] = []
    position = 0
    for number, line in enumerate(lines, start=1):
        try:
            value = json.loads(line)
        except ValueError as error:
            if number == len(lines) and not rest:
                rest = line
                break
            raise JournalError(f"{path}, line {number}: not JSON ({error}); the journal was damaged") from error
        events.append(_event(path, number, value))
        position += len(line) + 1
    if not rest:
        return events, position, ""
    warning = f"{path}: torn line {len(events) + 1} ({len(data) - position} bytes) was never acknowledged; cut off"
    return events, position, warning


def _event(path: Path, number: int, value: Any) -> Event:
    if not isinstance(value, dict) or value.get("seq") != number - 1:
        seq = value.get("seq") if isinstance(value, dict) else value
        raise JournalError(f"{path}, line {number}: seq is {seq}, expected {number - 1}; lines are missing or repeated")
    try:
        return from_json(value)
    except (ValueError, KeyError, TypeError) as error:
        raise JournalError(f"{path}, line {number}: {error}") from error


class Journal:
    """An open journal. ``events`` are those found on opening; ``warning`` tells of a torn tail that was cut off.

    One process writes a journal; another one writing to it is noticed at the next append.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.events: list[Event] = []
        self.warning = ""
        size = 0
        if self.path.exists():
            self.events, size, self.warning = read(self.path)
        self._seq = len(self.events)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o644)
            if self.warning:
                os.ftruncate(self._handle, size)
            os.fsync(self._handle)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as error:
            raise JournalError(f"{self.path}: cannot be opened for writing: {error.strerror}") from error
        self._size = size

    def append(self, events: Sequence[Event]) -> None:
        """Makes events durable, all with one sync. Raises ``JournalError``, the file as it was, when that fails."""
        if not events:
            return
        try:
            lines = [
                json.dumps({"seq": self._seq + i, **to_json(event)}, separators=(",", ":"), allow_nan=False)
                for i, event in enumerate(events)
            ]
        except (ValueError, TypeError) as error:
            raise JournalError(f"{self.path}: event {events[0].tag!r} does not fit JSON: {error}") from error
        data = ("\n".join(lines) + "\n").encode()
        found = os.fstat(self._handle).st_size
        if found != self._size:
            raise JournalError(
                f"{self.path}: holds {found} bytes, {self._size} were written here; another process writes to this run"
            )
        try:
            self._write(data)
        except OSError as error:
            os.ftruncate(self._handle, self._size)
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            advice = "the disk is full; free space and go on" if full else str(error.strerror)
            raise JournalError(f"{self.path}: event {events[0].tag!r} not written: {advice}") from error
        self._size += len(data)
        self._seq += len(events)

    def _write(self, data: bytes) -> None:
        view, position = memoryview(data), self._size
        while view.nbytes:
            written = os.pwrite(self._handle, view, position)
            view, position = view[written:], position + written
        os.fsync(self._handle)

    def close(self) -> None:
        os.close(self._handle)


class JournaledCoordinator:
    """The coordinator as the loop uses it: decide, write to the journal, apply, answer.

    Reading goes through ``state`` (a ``Coordinator``, whose ``apply`` is for this class alone).
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        try:
            self.state = Coordinator.replay(journal.events)
        except CoordinatorError as error:
            raise JournalError(f"{journal.path}: events do not follow from each other: {error}") from error
        journal.events = []  # the state holds what counts

    @property
    def warning(self) -> str:
        """About a torn tail that was cut off on opening; empty when there was none."""
        return self._journal.warning

    def _commit(self, events: Sequence[Event | None]) -> None:
        present = [event for event in events if event is not None]
        self._journal.append(present)
        for event in present:
            self.state.apply(event)

    def resume(self, step: int, available: Callable[[GroupMeta], bool]) -> int:
        """Opens the run at the checkpoint of ``step`` (0: none yet). Returns the new incarnation."""
        self._commit([self.state.resume(step, available)])
        return self.state.incarnation

    def add(self, tasks: Sequence[Task], samples: int) -> tuple[str, ...]:
        """Makes a group of ``samples`` trajectories of each task; returns the group ids."""
        event = self.state.add(tasks, samples)
        self._commit([event])
        return event.groups

    def lease(self, driver: str, count: int, now: float, deadline: float) -> list[LeasedGroup]:
        """Hands up to ``count`` queued groups to a driver, oldest first."""
        events = self.state.lease(driver, count, now, deadline)
        self._commit(events)
        leased = ((self.state.groups[event.group], event.lease) for event in events)
        return [LeasedGroup(g.group_id, g.task, lease, g.samples, g.attempts) for g, lease in leased]

    def renew(self, lease_id: str, deadline: float) -> bool:
        """Whether the lease still holds; its deadline is then the later one."""
        event = self.state.renew(lease_id, deadline)
        self._commit([event])
        return event is not None

    def finish(self, lease_id: str, meta: GroupMeta) -> bool:
        """Whether the result was taken; False (counted) when its lease had ended: delete its data."""
        event = self.state.finish(lease_id, meta)
        self._commit([event])
        return isinstance(event, Finished)

    def finish_many(self, results: Iterable[tuple[str, GroupMeta]]) -> list[bool]:
        """``finish`` for several (lease, result) pairs with one sync."""
        events: dict[str, Event] = {}
        taken: list[bool] = []
        for lease_id, meta in results:
            if lease_id in events:  # the second result of one lease: it is decided after the first was applied
                self._commit(list(events.values()))
                events = {}
            events[lease_id] = self.state.finish(lease_id, meta)
            taken.append(isinstance(events[lease_id], Finished))
        self._commit(list(events.values()))
        return taken

    def fail(self, lease_id: str, reason: str) -> bool:
        """Queues a group again; False when its lease had ended already."""
        event = self.state.fail(lease_id, reason)
        self._commit([event])
        return event is not None

    def expire(self, now: float) -> list[str]:
        """Ends leases past their deadline; returns the groups queued again."""
        events = self.state.expire(now)
        self._commit(events)
        return [event.group for event in events]

    def release(self, driver: str, reason: str) -> list[str]:
        """Ends all leases of a driver; returns the groups queued again."""
        events = self.state.release(driver, reason)
        self._commit(events)
        return [event.group for event in events]

    def ready(self, limit: int | None = None, *, in_order: bool = False) -> list[GroupMeta]:
        return self.state.ready(limit, in_order=in_order)

    def consume(self, step: int, groups: Iterable[str], filtered: Iterable[tuple[str, str]] = ()) -> None:
        self._commit([self.state.consume(step, groups, filtered)])

    def checkpointed(self, step: int) -> None:
        self._commit([self.state.checkpointed(step)])

    def counts(self) -> Counts:
        return self.state.counts()

    def close(self) -> None:
        self._journal.close()


def open_coordinator(path: Path | str) -> JournaledCoordinator:
    """The coordinator of the run whose journal is at ``path`` (made when missing). ``resume`` must be called next."""
    return JournaledCoordinator(Journal(path))
