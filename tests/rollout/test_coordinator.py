"""The coordinator's numbered invariants, by example and over random interleavings of everything that can happen."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import FrozenInstanceError, replace
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.rollout.coordinator import Coordinator, CoordinatorError, State
from megatron_ext.rollout.events import (
    Consumed,
    Event,
    Finished,
    GroupMeta,
    Leased,
    Opened,
    Refused,
    Returned,
    from_json,
    to_json,
)
from megatron_ext.trajectory.task import Task

SAMPLES = 2


def task(number: int) -> Task:
    return Task(f"task/{number}", "env", number, "train", {"k": [number, {"x": 0.1}]})


def meta(group_id: str, ref: str = "") -> GroupMeta:
    return GroupMeta(group_id, ref or group_id, (5, 6), (2, 3), (1, 1), (0.0, 1.0), (False, True), (0, 0), 1, 2)


class Run:
    """A coordinator with the events it was given, as the journal would hold them."""

    def __init__(self) -> None:
        self.c = Coordinator()
        self.events: list[Event] = []
        self.do(self.c.resume(0, lambda _: True))

    def do(self, events: Event | Iterable[Event] | None) -> None:
        many = [] if events is None else [events] if isinstance(events, Event) else list(events)
        for event in many:
            self.c.apply(event)
            self.events.append(event)

    def add(self, count: int) -> None:
        self.do(self.c.add([task(i) for i in range(self.c.draws, self.c.draws + count)], SAMPLES))

    def lease(self, count: int, driver: str = "d0", now: float = 0.0, deadline: float = 10.0) -> list[Leased]:
        leased = self.c.lease(driver, count, now, deadline)
        self.do(leased)
        return leased

    def finish(self, leased: Leased, ref: str = "") -> None:
        self.do(self.c.finish(leased.lease, meta(leased.group, ref)))

    def ready(self) -> list[str]:
        return [m.group_id for m in self.c.ready()]


def test_the_straight_line() -> None:
    run = Run()
    run.add(3)
    first, second = run.lease(2)
    assert [first.group, second.group] == ["g0000000", "g0000001"]
    assert first.lease != second.lease
    run.finish(second)
    run.finish(first)
    assert run.ready() == [second.group, first.group]  # first finished first
    assert [m.group_id for m in run.c.ready(1)] == [second.group]
    run.do(run.c.consume(1, [second.group], [(first.group, "constant reward")]))
    run.do(run.c.checkpointed(1))
    counts = run.c.counts()
    assert (counts.queued, counts.leased, counts.finished, counts.consumed, counts.filtered) == (1, 0, 0, 1, 1)
    assert counts.draws == 3 and run.c.step == 1 and run.c.checkpoints == [1]
    assert run.c.consumed_at(1).groups == (second.group,)
    assert run.c.groups[first.group].reason == "constant reward"


def test_deciding_changes_nothing() -> None:
    run = Run()
    run.add(4)
    a, b, _ = run.lease(3)
    run.finish(a)
    before = run.c.snapshot()
    run.c.add([task(9)], 1)
    run.c.lease("d1", 2, 0.0, 1.0)
    run.c.renew(b.lease, 99.0)
    run.c.finish(b.lease, meta(b.group))
    run.c.fail(b.lease, "x")
    run.c.expire(99.0)
    run.c.release("d0", "died")
    run.c.consume(1, [a.group])
    run.c.resume(0, lambda _: False)
    assert run.c.snapshot() == before


def test_ready_in_order_waits_for_the_first() -> None:
    run = Run()
    run.add(4)
    a, b, c = run.lease(3)
    run.finish(b)
    run.finish(c)
    assert run.c.ready(in_order=True) == []
    run.finish(a)
    assert [m.group_id for m in run.c.ready(in_order=True)] == [a.group, b.group, c.group]
    assert [m.group_id for m in run.c.ready(2, in_order=True)] == [a.group, b.group]
    run.do(run.c.consume(1, [a.group]))
    assert [m.group_id for m in run.c.ready(in_order=True)] == [b.group, c.group]


def test_ended_leases_queue_in_front_in_recorded_order() -> None:
    run = Run()
    run.add(5)
    a = run.lease(1, deadline=5.0)[0]
    b = run.lease(1, driver="d1", deadline=50.0)[0]
    c = run.lease(1, driver="d2", deadline=50.0)[0]
    assert [e.group for e in run.c.expire(4.9)] == []
    run.do(run.c.fail(c.lease, "engine refused"))
    run.do(run.c.release("d1", "died"))
    expired = run.c.expire(5.0)
    assert [(e.group, e.reason) for e in expired] == [(a.group, "expired")]
    run.do(expired)
    again = run.lease(5)
    assert [e.group for e in again] == [f"g{i:07d}" for i in range(5)]
    assert run.c.groups[a.group].attempts == 1 and run.c.groups["g0000004"].attempts == 0
    assert run.c.counts().returned == 3
    assert b.lease not in {e.lease for e in again}


def test_renewing_moves_the_deadline() -> None:
    run = Run()
    run.add(1)
    (a,) = run.lease(1, deadline=5.0)
    run.do(run.c.renew(a.lease, 8.0))
    assert run.c.expire(7.0) == []
    run.do(run.c.expire(8.0))
    assert run.c.renew(a.lease, 99.0) is None and run.c.fail(a.lease, "late") is None


def test_a_late_result_is_refused_and_counted() -> None:
    run = Run()
    run.add(1)
    (old,) = run.lease(1, deadline=5.0)
    run.do(run.c.expire(5.0))
    run.finish(old)
    assert isinstance(run.events[-1], Refused) and run.c.counts().refused == 1
    (new,) = run.lease(1, driver="d1")
    run.finish(old)  # while someone else holds it
    run.finish(new)
    run.finish(new)  # the same result twice
    assert run.ready() == [new.group] and run.c.counts().refused == 3


def test_resume_undoes_later_steps_in_recorded_order() -> None:
    run = Run()
    run.add(6)
    leased = run.lease(5)
    for i in (3, 1, 0, 2):
        run.finish(leased[i])
    g = [e.group for e in leased]
    run.do(run.c.consume(1, [g[3]]))
    run.do(run.c.checkpointed(1))
    run.do(run.c.consume(2, [g[1]], [(g[0], "constant reward")]))
    run.do(run.c.resume(1, lambda m: m.group_id != g[0]))  # the filtered one's data are gone
    assert run.c.incarnation == 1 and run.c.step == 1
    assert run.ready() == [g[1], g[2]]
    assert [e.group for e in run.lease(9)] == [g[0], g[4], "g0000005"]
    run.finish(leased[4])  # of the dead incarnation
    assert run.c.counts().refused == 1
    run.do(run.c.consume(2, [g[2]]))
    assert run.c.groups[g[1]].state is State.FINISHED
    with pytest.raises(CoordinatorError, match="step 2 was not consumed|step 3 was not consumed"):
        run.c.consumed_at(3)


def test_resume_may_go_back_behind_the_last_checkpoint() -> None:
    run = Run()
    run.add(3)
    for e in run.lease(3):
        run.finish(e)
    for step, group in enumerate(["g0000002", "g0000000", "g0000001"], start=1):
        run.do(run.c.consume(step, [group]))
        run.do(run.c.checkpointed(step))
    run.do(run.c.resume(0, lambda _: True))
    assert run.c.checkpoints == [] and run.ready() == ["g0000000", "g0000001", "g0000002"]
    with pytest.raises(CoordinatorError, match="checkpoint of step 1.*journal ends at step 0"):
        run.c.resume(1, lambda _: True)


def test_shortage_counts_what_is_on_its_way() -> None:
    run = Run()
    assert run.c.shortage(4) == 4
    run.add(4)
    leased = run.lease(2)
    run.finish(leased[0])
    assert run.c.shortage(4) == 0 and run.c.shortage(6) == 2
    run.do(run.c.consume(1, [leased[0].group]))
    assert run.c.shortage(4) == 1


def test_illegal_transitions_name_group_and_state_and_change_nothing() -> None:
    run = Run()
    run.add(3)
    a, b = run.lease(2)
    run.finish(a)
    run.do(run.c.consume(1, [a.group]))
    before = run.c.snapshot()
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: run.c.consume(2, [a.group]), f"{a.group} is consumed"),
        (lambda: run.c.consume(2, [b.group]), f"{b.group} is leased"),
        (lambda: run.c.consume(2, [], [("g0000002", "x")]), "g0000002 is queued"),
        (lambda: run.c.consume(2, ["nope"]), "nope is unknown"),
        (lambda: run.c.consume(3, []), "step 3 cannot follow step 1"),
        (lambda: run.c.finish("lease-7", meta(b.group)), "lease-7.*never given"),
        (lambda: run.c.finish("lease-01", meta(b.group)), "lease-01.*never given"),
        (lambda: run.c.finish(b.lease, meta("other")), "other is unknown"),
        (lambda: run.c.finish(b.lease, meta(a.group)), f"{a.group} is consumed"),
        (lambda: run.c.finish(b.lease, replace(meta(b.group), **one_trajectory())), "1 trajectories, leased for 2"),
        (lambda: run.c.lease("d", 1, 5.0, 5.0), "driver d"),
        (lambda: run.c.checkpointed(2), "step 2.*at step 1"),
        (lambda: run.c.add([task(1)], 0), "0 trajectories"),
        (lambda: run.c.resume(5, lambda _: True), "step 5"),
        (lambda: run.c.apply(Leased(a.group, "lease-2", "d", 1.0)), f"{a.group} is consumed"),
        (lambda: run.c.apply(Leased("g0000002", "lease-9", "d", 1.0)), "next lease is lease-2"),
        (lambda: run.c.apply(Returned(b.group, "lease-0", "x")), f"{b.group} is leased under lease lease-1"),
        (lambda: run.c.apply(Refused(b.group, b.lease)), "not one that has ended"),
        (lambda: run.c.apply(Opened(5, 0)), "incarnation 5"),
        (lambda: run.c.apply(Opened(1, 1, (a.group,))), f"{a.group} is consumed"),
        (lambda: run.c.apply(Consumed(2, ("g0000002", "g0000002"))), "g0000002: named twice"),
        (lambda: Coordinator().add([task(0)], 1), "was not opened"),
    ]
    for action, message in bad:
        with pytest.raises(CoordinatorError, match=message):
            action()
        assert run.c.snapshot() == before
    run.do(run.c.checkpointed(1))
    run.do(run.c.checkpointed(1))
    assert run.c.checkpoints == [1]


def one_trajectory() -> dict[str, Any]:
    return {
        "tokens": (1,),
        "trained_tokens": (1,),
        "turns": (1,),
        "rewards": (0.0,),
        "success": (False,),
        "status": (0,),
    }


def test_events_are_frozen_and_survive_json() -> None:
    run = Run()
    run.add(3)
    a, b = run.lease(2, deadline=1e9 + 0.123456789)
    run.do(run.c.renew(a.lease, 2e9))
    run.do(run.c.fail(b.lease, 'a "quoted" reason\n'))
    run.do(run.c.finish(a.lease, replace(meta(a.group), rewards=(1 / 3, 1e-45))))
    run.do(run.c.finish(b.lease, meta(b.group)))
    run.do(run.c.consume(1, [a.group], []))
    run.do(run.c.checkpointed(1))
    run.do(run.c.resume(0, lambda _: False))
    assert len({e.tag for e in run.events}) == 9
    for event in run.events:
        again = from_json(json.loads(json.dumps({"seq": 1, **to_json(event)}, allow_nan=False)))
        assert again == event and type(again) is type(event)
        with pytest.raises(FrozenInstanceError):
            event.step = 3  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="unknown event 'dance'"):
        from_json({"event": "dance"})
    with pytest.raises(ValueError, match="'checkpoint' has fields"):
        from_json({"event": "checkpoint"})


# -- random interleavings ----------------------------------------------------------------------------------------------
OPERATIONS = ("add", "lease", "finish", "fail", "late", "expire", "release", "renew", "consume", "checkpoint", "resume")


def random_run(data: st.DataObject, length: int) -> Run:
    run, clock, held, ended = Run(), 0.0, {}, []  # type: tuple[Run, float, dict[str, Leased], list[Leased]]

    def sync() -> None:
        """What the drivers hold, kept apart from the coordinator's own books."""
        live = {g.lease for g in run.c.groups.values() if g.state is State.LEASED}
        for lease in [lease for lease in held if lease not in live]:
            ended.append(held.pop(lease))

    for _ in range(length):
        operation = data.draw(st.sampled_from(OPERATIONS))
        clock += 1.0
        pick = data.draw(st.integers(0, 10**6))
        if operation == "add":
            run.add(pick % 4)
        elif operation == "lease":
            for leased in run.lease(pick % 4, f"d{pick % 2}", clock, clock + pick % 9 + 1):
                held[leased.lease] = leased
        elif operation in ("finish", "fail", "renew") and held:
            leased = list(held.values())[pick % len(held)]
            if operation == "finish":
                run.finish(leased, f"{leased.group}@{leased.lease}")
            elif operation == "fail":
                run.do(run.c.fail(leased.lease, "failed"))
            else:
                run.do(run.c.renew(leased.lease, clock + 20))
        elif operation == "late" and ended:
            run.finish(ended[pick % len(ended)], "late")
        elif operation == "expire":
            run.do(run.c.expire(clock))
        elif operation == "release":
            run.do(run.c.release(f"d{pick % 2}", "died"))
        elif operation == "consume":
            ready = run.ready()
            data_filtered = [g for i, g in enumerate(ready) if (pick >> i) % 3 == 0]
            taken = [g for i, g in enumerate(ready) if (pick >> i) % 3 == 1]
            run.do(run.c.consume(run.c.step + 1, taken, [(g, "constant reward") for g in data_filtered]))
        elif operation == "checkpoint":
            run.do(run.c.checkpointed(run.c.step))
        elif operation == "resume":
            resume(run, pick)
        sync()
        check_books(run.c)
    return run


def resume(run: Run, pick: int) -> None:
    """From any step up to the present, with some of the data gone."""
    run.do(run.c.resume(pick % (run.c.step + 1), lambda m: (crc32(m.ref.encode()) + pick) % 4 != 0))


def check_books(c: Coordinator) -> None:
    """Every group is in exactly one state, and the indices say the same as the groups."""
    counts = c.counts()
    total = counts.queued + counts.leased + counts.finished + counts.consumed + counts.filtered
    assert total == len(c.groups) == counts.draws
    by_state = {state: {g.group_id for g in c.groups.values() if g.state is state} for state in State}
    assert {m.group_id for m in c.ready()} == by_state[State.FINISHED]
    assert [e.group for e in c.lease("probe", 10**6, 0.0, 1.0)] == sorted(by_state[State.QUEUED])
    assert counts.leased == len(by_state[State.LEASED])
    for group in c.groups.values():
        assert (group.meta is not None) == (group.state not in (State.QUEUED, State.LEASED))
        assert (group.lease != "") == (group.state is State.LEASED)
        assert (group.step > 0) == (group.state in (State.CONSUMED, State.FILTERED))


def surviving(events: Iterable[Event]) -> dict[int, Consumed]:
    """The history that is left, told from the events alone: step -> what it took."""
    history: dict[int, Consumed] = {}
    for event in events:
        if isinstance(event, Opened):
            history = {step: taken for step, taken in history.items() if step <= event.step}
        if isinstance(event, Consumed):
            assert event.step not in history
            history[event.step] = event
    return history


def check_history(run: Run) -> list[str]:
    history = surviving(run.events)
    assert sorted(history) == list(range(1, run.c.step + 1))
    taken = [g for event in history.values() for g in (*event.groups, *(g for g, _ in event.filtered))]
    assert len(set(taken)) == len(taken)
    assert set(taken) == {g.group_id for g in run.c.groups.values() if g.step > 0}
    # A result was taken only for the lease that held the group when it came.
    holder: dict[str, str] = {}
    for event in run.events:
        if isinstance(event, Leased):
            assert event.group not in holder
            holder[event.group] = event.lease
        elif isinstance(event, Returned | Finished):
            assert holder.pop(event.group) == event.lease
        elif isinstance(event, Opened):
            holder.clear()
    return taken


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_random_interleavings_lose_and_repeat_nothing(data: st.DataObject) -> None:
    run = random_run(data, data.draw(st.integers(1, 40)))
    assert Coordinator.replay(run.events).snapshot() == run.c.snapshot()
    through_json = [from_json(json.loads(json.dumps(to_json(e)))) for e in run.events]
    assert Coordinator.replay(through_json).snapshot() == run.c.snapshot()
    check_history(run)


@settings(max_examples=120, deadline=None)
@given(st.data())
def test_killed_at_any_event_the_run_resumes_and_trains_each_group_once(data: st.DataObject) -> None:
    before = random_run(data, 30)
    cut = data.draw(st.integers(0, len(before.events)))
    run = Run()
    run.events = before.events[:cut]
    run.c = Coordinator.replay(run.events)
    order_before = {g.group_id: g.finish_order for g in run.c.groups.values()}
    resume(run, data.draw(st.integers(0, 10**6)))
    check_books(run.c)
    assert run.c.counts().leased == 0
    brought_back = run.ready()
    assert brought_back == sorted(brought_back, key=lambda g: order_before[g])
    while run.c.counts().queued or run.ready():
        for leased in run.lease(3):
            run.finish(leased)
        run.do(run.c.consume(run.c.step + 1, run.ready()[:2]))
        check_books(run.c)
    assert sorted(check_history(run)) == sorted(run.c.groups)
    assert Coordinator.replay(run.events).snapshot() == run.c.snapshot()
