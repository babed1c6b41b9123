"""The coordinator: which group is where. A pure state machine over metadata; token arrays never pass through it.

    queued -> leased -> finished -> consumed | filtered

Invariants (``tests/rollout/test_coordinator.py`` asserts each):

1. Methods that decide return events and change nothing; only ``apply`` changes the state, and it reads nothing but the
   event. Replaying the events of a run gives its state.
2. No group is ever lost: each is in exactly one state, and an ended lease queues its group again.
3. Each group is consumed or filtered at most once on the surviving history (the one left after undoing).
4. Groups are leased in the order they were added; one that comes back stands at its old place, before all later ones.
5. Finished groups are offered in the order they finished; groups that a resume brings back keep their place.
6. A result for a lease that has ended is refused and counted, never taken.
7. An event that does not fit the state raises ``CoordinatorError`` and changes nothing.

Time is a number passed in (seconds of the wall clock, so that deadlines mean the same to every process).

**Resume.** ``resume(step)`` goes on from the checkpoint of ``step``: whatever later steps consumed or filtered is
finished again with the data in the store, or queued again where those are gone. Draws are never undone: every task that
was drawn is in the journal and will be trained or filtered, so after a resume the task source must continue behind the
last recorded draw. ``draws`` counts them. A source whose state was saved with a checkpoint, together with ``draws`` at
that moment, skips the difference by drawing and throwing away. An adaptive source may draw other tasks in that skip
than the journal holds (its reports of undone steps are undone with the model); the recorded ones count, the skip only
moves its position.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from megatron_ext.rollout.events import (
    Added,
    Checkpointed,
    Consumed,
    Event,
    Finished,
    GroupMeta,
    Leased,
    Opened,
    Refused,
    Renewed,
    Returned,
)
from megatron_ext.trajectory.task import Task

E = TypeVar("E", bound=Event)


class CoordinatorError(RuntimeError):
    """A transition that the state does not allow; the message names the group and its state."""


class State(StrEnum):
    QUEUED = "queued"
    LEASED = "leased"
    FINISHED = "finished"
    CONSUMED = "consumed"
    FILTERED = "filtered"


@dataclass
class Group:
    """What is known of one group. ``attempts`` counts leases that ended without a result in the driver's hands;
    ``finished_in``: how many steps the run had finished when the group's result came."""

    number: int
    group_id: str
    task: Task
    samples: int
    state: State = State.QUEUED
    lease: str = ""
    driver: str = ""
    deadline: float = 0.0
    attempts: int = 0
    meta: GroupMeta | None = None
    finish_order: int = -1
    finished_in: int = -1
    step: int = -1
    reason: str = ""


@dataclass(frozen=True)
class LeasedGroup:
    """A group handed to a driver. ``attempts`` > 0: it failed before; a caller may give up by finishing it aborted."""

    group_id: str
    task: Task
    lease_id: str
    samples: int
    attempts: int = 0


@dataclass(frozen=True)
class Counts:
    """Groups by state, and what was counted over the run."""

    queued: int
    leased: int
    finished: int
    consumed: int
    filtered: int
    draws: int
    refused: int
    returned: int


def _lease_id(number: int) -> str:
    return f"lease-{number}"


class Coordinator:
    """State of a run's groups. See the module docstring."""

    def __init__(self) -> None:
        self.groups: dict[str, Group] = {}
        self.incarnation = -1
        self.step = 0
        self.checkpoints: list[int] = []
        self._order: list[str] = []  # number -> group id
        self._queue: list[int] = []  # numbers of queued groups, ascending
        self._ready: list[tuple[int, int]] = []  # (finish order, number) of finished groups, ascending
        self._leases: dict[str, str] = {}
        self._steps: dict[int, Consumed] = {}
        self._leases_given = 0
        self._next_finish = 0
        self._refused = 0
        self._returned = 0

    # -- queries ---------------------------------------------------------------------------------------------------
    @property
    def draws(self) -> int:
        """Tasks drawn from the source so far; each made one group."""
        return len(self._order)

    def counts(self) -> Counts:
        consumed = sum(len(event.groups) for event in self._steps.values())
        filtered = sum(len(event.filtered) for event in self._steps.values())
        return Counts(
            queued=len(self._queue),
            leased=len(self._leases),
            finished=len(self._ready),
            consumed=consumed,
            filtered=filtered,
            draws=self.draws,
            refused=self._refused,
            returned=self._returned,
        )

    def shortage(self, target: int) -> int:
        """Tasks to add so that ``target`` groups are queued, leased or finished (over-provisioning)."""
        return max(0, target - len(self._queue) - len(self._leases) - len(self._ready))

    def ready(self, limit: int | None = None, *, in_order: bool = False) -> list[GroupMeta]:
        """Finished groups, first finished first. ``in_order`` instead gives them as they were added and stops at the
        first group that is not finished: what a run that must repeat exactly consumes."""
        if not in_order:
            numbers = [number for _, number in self._ready[:limit]]
        else:
            numbers = sorted(number for _, number in self._ready)
            waiting = [self.groups[group_id].number for group_id in self._leases.values()] + self._queue[:1]
            numbers = numbers[: bisect_left(numbers, min(waiting))] if waiting else numbers
        return [self._meta(self._order[number]) for number in numbers[:limit]]

    def queued(self) -> list[Group]:
        """Groups that wait for a lease, in the order in which they are leased."""
        return [self.groups[self._order[number]] for number in self._queue]

    def consumed_at(self, step: int) -> Consumed:
        """What a step took, on the surviving history."""
        if step not in self._steps:
            raise CoordinatorError(f"step {step} was not consumed; the last is {self.step}")
        return self._steps[step]

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain values, for comparison."""
        return deepcopy(vars(self))

    # -- decisions: each returns the event(s), changes nothing ---------------------------------------------------------
    def resume(self, step: int, available: Callable[[GroupMeta], bool]) -> Opened:
        """A process opens the run at the checkpoint of ``step``. ``available``: whether a group's data can be read."""
        kept = (g for g in self.groups.values() if g.meta is not None and (g.state is State.FINISHED or g.step > step))
        lost = tuple(group.group_id for group in kept if group.meta is not None and not available(group.meta))
        return self._checked(Opened(self.incarnation + 1, step, lost))

    def add(self, tasks: Sequence[Task], samples: int) -> Added:
        """Groups for tasks just drawn from the source."""
        names = tuple(f"g{number:07d}" for number in range(self.draws, self.draws + len(tasks)))
        return self._checked(Added(names, tuple(tasks), samples))

    def lease(self, driver: str, count: int, now: float, deadline: float) -> list[Leased]:
        """Up to ``count`` groups for a driver, oldest first, until ``deadline``."""
        if count < 0 or deadline <= now:
            raise CoordinatorError(f"driver {driver}: lease of {count} groups until {deadline}, asked at {now}")
        self._check_open()
        numbers = self._queue[:count]
        names = (self._order[number] for number in numbers)
        return [Leased(name, _lease_id(self._leases_given + i), driver, deadline) for i, name in enumerate(names)]

    def renew(self, lease: str, deadline: float) -> Renewed | None:
        """A later deadline; None when the lease has ended (its driver should drop the group)."""
        group = self._holder(lease)
        return None if group is None else self._checked(Renewed(group.group_id, lease, deadline))

    def finish(self, lease: str, meta: GroupMeta) -> Finished | Refused:
        """A driver's result; refused when its lease has ended."""
        group = self._holder(lease)
        if group is None:
            return self._checked(Refused(meta.group_id, lease))
        return self._checked(Finished(meta.group_id, lease, meta))

    def fail(self, lease: str, reason: str) -> Returned | None:
        """A driver gives a group back; None when the lease had ended already."""
        group = self._holder(lease)
        return None if group is None else self._checked(Returned(group.group_id, lease, reason))

    def expire(self, now: float) -> list[Returned]:
        """Ends every lease whose deadline has passed."""
        held = (self.groups[group_id] for group_id in self._leases.values())
        return [Returned(group.group_id, group.lease, "expired") for group in held if group.deadline <= now]

    def release(self, driver: str, reason: str) -> list[Returned]:
        """Ends every lease of a driver (it died or was stopped)."""
        held = (self.groups[group_id] for group_id in self._leases.values())
        return [Returned(group.group_id, group.lease, reason) for group in held if group.driver == driver]

    def consume(self, step: int, groups: Iterable[str], filtered: Iterable[tuple[str, str]] = ()) -> Consumed:
        """What the step agreement of ``step`` took, in order, and what it dropped with a reason."""
        return self._checked(Consumed(step, tuple(groups), tuple((group, reason) for group, reason in filtered)))

    def checkpointed(self, step: int) -> Checkpointed:
        return self._checked(Checkpointed(step))

    # -- applying ----------------------------------------------------------------------------------------------------
    @staticmethod
    def replay(events: Iterable[Event]) -> Coordinator:
        """The state after these events."""
        coordinator = Coordinator()
        for event in events:
            coordinator.apply(event)
        return coordinator

    def apply(self, event: Event) -> None:
        """Changes the state; raises ``CoordinatorError`` and changes nothing when the event does not fit."""
        self._check(event)
        match event:
            case Opened():
                self._apply_opened(event)
            case Added():
                for group_id, task in zip(event.groups, event.tasks, strict=True):
                    number = len(self._order)
                    self.groups[group_id] = Group(number, group_id, task, event.samples)
                    self._order.append(group_id)
                    self._queue.append(number)
            case Leased():
                group = self.groups[event.group]
                del self._queue[bisect_left(self._queue, group.number)]
                group.state, group.lease = State.LEASED, event.lease
                group.driver, group.deadline = event.driver, event.deadline
                self._leases[event.lease] = event.group
                self._leases_given += 1
            case Renewed():
                self.groups[event.group].deadline = event.deadline
            case Returned():
                self.groups[event.group].attempts += 1
                self._returned += 1
                self._end_lease(self.groups[event.group])
                self._requeue(self.groups[event.group])
            case Finished():
                group = self.groups[event.group]
                self._end_lease(group)
                group.meta, group.finish_order, group.finished_in = event.meta, self._next_finish, self.step
                self._next_finish += 1
                self._offer(group)
            case Refused():
                self._refused += 1
            case Consumed():
                self._apply_consumed(event)
            case Checkpointed():
                # Saving one step twice is fine (a periodic save, then an interrupt): the later one replaced it.
                if event.step not in self.checkpoints:
                    self.checkpoints.append(event.step)

    def _apply_opened(self, event: Opened) -> None:
        for group_id in list(self._leases.values()):
            self._end_lease(self.groups[group_id])
            self._requeue(self.groups[group_id])
        for step in range(event.step + 1, self.step + 1):
            undone = self._steps.pop(step)
            for group_id in (*undone.groups, *(group_id for group_id, _ in undone.filtered)):
                group = self.groups[group_id]
                group.step, group.reason = -1, ""
                self._offer(group)
        for group_id in event.lost:
            group = self.groups[group_id]
            del self._ready[bisect_left(self._ready, (group.finish_order, group.number))]
            group.meta, group.finish_order, group.finished_in = None, -1, -1
            self._requeue(group)
        self.checkpoints = [step for step in self.checkpoints if step <= event.step]
        self.step, self.incarnation = event.step, event.incarnation

    def _apply_consumed(self, event: Consumed) -> None:
        trained = ((group_id, State.CONSUMED, "") for group_id in event.groups)
        dropped = ((group_id, State.FILTERED, reason) for group_id, reason in event.filtered)
        for group_id, state, reason in (*trained, *dropped):
            group = self.groups[group_id]
            del self._ready[bisect_left(self._ready, (group.finish_order, group.number))]
            group.state, group.step, group.reason = state, event.step, reason
        self.step = event.step
        self._steps[event.step] = event

    def _end_lease(self, group: Group) -> None:
        del self._leases[group.lease]
        group.lease, group.driver, group.deadline = "", "", 0.0

    def _requeue(self, group: Group) -> None:
        group.state = State.QUEUED
        insort(self._queue, group.number)

    def _offer(self, group: Group) -> None:
        group.state = State.FINISHED
        insort(self._ready, (group.finish_order, group.number))

    # -- checking ----------------------------------------------------------------------------------------------------
    def _checked(self, event: E) -> E:
        self._check(event)
        return event

    def _check(self, event: Event) -> None:
        """Raises ``CoordinatorError`` unless the event fits the state."""
        if isinstance(event, Opened):
            self._check_opened(event)
            return
        self._check_open()
        match event:
            case Added():
                if event.samples < 1 or len(event.groups) != len(event.tasks):
                    raise CoordinatorError(
                        f"add: {len(event.tasks)} tasks for {len(event.groups)} groups of {event.samples} trajectories"
                    )
                again = [name for name in event.groups if name in self.groups]
                if again or len(set(event.groups)) < len(event.groups):
                    raise CoordinatorError(f"add: group {(again or event.groups)[0]} is there already")
            case Leased():
                self._expect(event.group, State.QUEUED, "leased")
                if event.lease != _lease_id(self._leases_given):
                    expected = _lease_id(self._leases_given)
                    raise CoordinatorError(f"group {event.group}: the next lease is {expected}, not {event.lease}")
            case Renewed() | Returned():
                self._expect_lease(event.group, event.lease, event.tag)
            case Finished():
                self._expect_lease(event.group, event.lease, event.tag)
                if event.meta.group_id != event.group or len(event.meta.tokens) != self.groups[event.group].samples:
                    raise CoordinatorError(
                        f"group {event.group}: finished with metadata of {event.meta.group_id} and "
                        f"{len(event.meta.tokens)} trajectories, leased for {self.groups[event.group].samples}"
                    )
            case Refused():
                if event.lease in self._leases or not self._was_given(event.lease):
                    raise CoordinatorError(f"group {event.group}: lease {event.lease} is not one that has ended")
            case Consumed():
                names = [*event.groups, *(group_id for group_id, _ in event.filtered)]
                if event.step != self.step + 1:
                    raise CoordinatorError(f"step {event.step} cannot follow step {self.step}")
                if len(set(names)) < len(names):
                    twice = next(name for name in names if names.count(name) > 1)
                    raise CoordinatorError(f"group {twice}: named twice in step {event.step}")
                for name in names:
                    self._expect(name, State.FINISHED, f"consumed by step {event.step}")
            case Checkpointed():
                # Later than its step when it was written while the run went on.
                if not 0 <= event.step <= self.step:
                    raise CoordinatorError(f"checkpoint of step {event.step}: the run is at step {self.step}")

    def _check_opened(self, event: Opened) -> None:
        if event.incarnation != self.incarnation + 1:
            raise CoordinatorError(f"incarnation {event.incarnation} cannot follow {self.incarnation}")
        if not 0 <= event.step <= self.step:
            raise CoordinatorError(
                f"cannot resume from the checkpoint of step {event.step}: the journal ends at step {self.step}; the "
                "checkpoint belongs to another run, or the journal was cut"
            )
        if len(set(event.lost)) < len(event.lost):
            raise CoordinatorError(f"incarnation {event.incarnation}: a lost group is named twice: {event.lost}")
        for name in event.lost:
            group = self._known(name)
            if group.state is not State.FINISHED and group.step <= event.step:
                raise CoordinatorError(f"group {name} is {group.state.value}: its data cannot be lost to this resume")

    def _check_open(self) -> None:
        if self.incarnation < 0:
            raise CoordinatorError("the run was not opened; resume(0) comes first")

    def _known(self, group_id: str) -> Group:
        if group_id not in self.groups:
            raise CoordinatorError(f"group {group_id} is unknown")
        return self.groups[group_id]

    def _expect(self, group_id: str, state: State, what: str) -> None:
        group = self._known(group_id)
        if group.state is not state:
            raise CoordinatorError(f"group {group_id} is {group.state.value}: it cannot be {what}")

    def _expect_lease(self, group_id: str, lease: str, what: str) -> None:
        group = self._known(group_id)
        if group.state is not State.LEASED or group.lease != lease:
            held = f" under lease {group.lease}" if group.state is State.LEASED else ""
            raise CoordinatorError(f"group {group_id} is {group.state.value}{held}: no {what} of lease {lease}")

    def _holder(self, lease: str) -> Group | None:
        """The group under a lease; None when the lease has ended. A lease never given out is an error."""
        if not self._was_given(lease):
            raise CoordinatorError(f"lease {lease!r} was never given out")
        return self.groups[self._leases[lease]] if lease in self._leases else None

    def _was_given(self, lease: str) -> bool:
        number = lease.removeprefix("lease-")
        return number.isdecimal() and lease == _lease_id(int(number)) and int(number) < self._leases_given

    def _meta(self, group_id: str) -> GroupMeta:
        meta = self.groups[group_id].meta
        if meta is None:
            raise CoordinatorError(f"group {group_id} is {self.groups[group_id].state.value}: it has no result")
        return meta
