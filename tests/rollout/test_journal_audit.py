"""The audit finds what is wrong in journals that were made wrong, and nothing in those of a coordinator."""

from __future__ import annotations

import random

import pytest

from megatron_ext.rollout.coordinator import Coordinator
from megatron_ext.rollout.events import Added, Consumed, Event, Finished, GroupMeta, Leased, Opened
from megatron_ext.rollout.journal_audit import Audit, journal_audit
from megatron_ext.trajectory.task import Task


def meta(group: str) -> GroupMeta:
    return GroupMeta(group, f"ref-{group}", (5,), (3,), (1,), (1.0,), (True,), (0,), 0, 0)


def added(*groups: str) -> Added:
    return Added(groups, tuple(Task(f"t{name}", "walk", 1, "train") for name in groups), 1)


def finished(*groups: str) -> list[Event]:
    return [Finished(name, f"lease-{name}", meta(name)) for name in groups]


def test_a_history_that_was_undone_and_repeated_is_clean() -> None:
    audit = journal_audit(
        [
            Opened(0, 0),
            added("a", "b", "c", "d"),
            *finished("a", "b", "c", "d"),
            Consumed(1, ("a",), (("b", "constant reward"),)),
            Consumed(2, ("c",)),
            Opened(1, 1, ("d",)),
            Consumed(2, ("c",)),
            *finished("d"),
            Consumed(3, ("d",)),
        ]
    )
    assert audit == Audit((), (), (), steps=3, taken=4, resumes=1) and audit.clean


def test_groups_that_were_drawn_and_not_needed_yet_are_not_lost() -> None:
    audit = journal_audit([Opened(0, 0), added("a", "b", "c"), *finished("a", "b"), Consumed(1, ("a",))])
    assert audit.clean and audit.taken == 1


def test_a_group_that_was_passed_over_is_lost() -> None:
    audit = journal_audit([Opened(0, 0), added("a", "b", "c"), *finished("a", "c"), Consumed(1, ("a", "c"))])
    assert audit.lost == ("b",) and not audit.clean


def test_a_group_that_is_only_in_an_undone_step_is_lost() -> None:
    audit = journal_audit(
        [Opened(0, 0), added("a", "b"), *finished("a", "b"), Consumed(1, ("a",)), Opened(1, 0), Consumed(1, ("b",))]
    )
    assert audit.lost == ("a",)


def test_a_group_in_two_surviving_steps_is_doubled() -> None:
    audit = journal_audit(
        [Opened(0, 0), added("a", "b"), *finished("a", "b"), Consumed(1, ("a",)), Consumed(2, ("b", "a"))]
    )
    assert audit.doubled == ("a",)
    audit = journal_audit([Opened(0, 0), added("a"), *finished("a"), Consumed(1, ("a",)), Consumed(1, ("a",))])
    assert audit.doubled == ("a",), "a step that was not undone came twice"


def test_a_group_without_a_result_is_unfounded() -> None:
    audit = journal_audit([Opened(0, 0), added("a", "b"), *finished("a"), Consumed(1, ("a", "b"))])
    assert audit.unfounded == ("b",)
    audit = journal_audit([Opened(0, 0), added("a"), *finished("a"), Opened(1, 0, ("a",)), Consumed(1, ("a",))])
    assert audit.unfounded == ("a",), "its data were lost to the resume"


def test_a_missing_step_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"holds the steps \[1, 3\]"):
        journal_audit([Opened(0, 0), added("a", "b"), *finished("a", "b"), Consumed(1, ("a",)), Consumed(3, ("b",))])


@pytest.mark.parametrize("seed", range(30))
def test_whatever_a_coordinator_goes_through_in_order_is_clean(seed: int) -> None:
    """Invariant 2: random runs with kills anywhere, lost data and filtered groups."""
    rng = random.Random(seed)
    coordinator, events = Coordinator(), []

    def do(event: Event) -> None:
        coordinator.apply(event)
        events.append(event)

    do(coordinator.resume(0, lambda _: True))
    checkpoints, opened = [0], 0
    for _ in range(120):
        choice = rng.random()
        ready = [m.group_id for m in coordinator.ready(in_order=True)]
        if choice < 0.2:
            do(
                coordinator.add(
                    [Task(f"t{coordinator.draws + i}", "walk", 1, "train") for i in range(rng.randint(1, 3))], 1
                )
            )
        elif choice < 0.4:
            for event in coordinator.lease("d", rng.randint(1, 3), 0.0, 1.0):
                do(event)
        elif choice < 0.65:
            leased = [e for e in events if isinstance(e, Leased) and coordinator.groups[e.group].lease == e.lease]
            if leased:
                lease = rng.choice(leased)
                do(coordinator.finish(lease.lease, meta(lease.group)))
        elif choice < 0.85 and ready:
            chosen = ready[: rng.randint(1, len(ready))]
            kept = {name for name in chosen if rng.random() < 0.7}
            filtered = [(name, "constant reward") for name in chosen if name not in kept]
            do(coordinator.consume(coordinator.step + 1, [n for n in chosen if n in kept], filtered))
            if rng.random() < 0.4:
                checkpoints.append(coordinator.step)
        elif choice > 0.93:
            do(coordinator.resume(checkpoints[-1], lambda _: rng.random() < 0.7))
            opened += 1
    audit = journal_audit(events)
    assert audit.clean and audit.resumes == opened and audit.steps == coordinator.step
