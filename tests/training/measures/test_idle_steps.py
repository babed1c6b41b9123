"""The invariants of ``megatron_ext/training/measures/idle_steps.py``."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from megatron_ext.config.schema import Config
from megatron_ext.rollout.agreement import CONSTANT, UNTRAINABLE
from megatron_ext.rollout.coordinator import Coordinator
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.training.measures.idle_steps import IdleSteps, idle_steps
from megatron_ext.trajectory.task import Task

LOST, WON, MIXED = (False, False), (True, True), (True, False)


def journal(*steps: Sequence[tuple[tuple[bool, bool], str]]) -> Coordinator:
    """A run whose steps took the groups that are given by their successes and why each was dropped ("": it was
    trained)."""
    state = Coordinator()
    state.apply(state.resume(0, lambda meta: True))
    for number, groups in enumerate(steps, 1):
        added = state.add([Task(f"t{number}-{i}", "walk", i, "train") for i in range(len(groups))], 2)
        state.apply(added)
        for (success, _), lease in zip(groups, state.lease("driver", len(groups), 0.0, 1e9), strict=True):
            state.apply(lease)
            rewards = tuple(float(s) for s in success)
            meta = GroupMeta(lease.group, lease.group, (3, 3), (2, 2), (1, 1), rewards, success, (0, 0), 0, 0)
            state.apply(state.finish(lease.lease, meta))
        names = list(zip(added.groups, (why for _, why in groups), strict=True))
        state.apply(state.consume(number, [g for g, why in names if not why], [(g, why) for g, why in names if why]))
    return state


def test_a_step_counts_when_it_kept_no_group() -> None:
    state = journal(
        [(LOST, CONSTANT), (WON, CONSTANT), (LOST, UNTRAINABLE)],
        [(MIXED, ""), (LOST, CONSTANT)],
        [(LOST, CONSTANT), (LOST, CONSTANT)],
    )
    assert idle_steps(state, 3) == IdleSteps(3, 2, failed=3, solved=1, untrainable=1)
    assert idle_steps(state, 2) == IdleSteps(2, 1, failed=1, solved=1, untrainable=1)
    assert idle_steps(state, 0) == IdleSteps(0, 0)
    state.apply(state.resume(1, lambda meta: True))  # later steps are undone
    assert idle_steps(state, 1).idle == 1


def test_no_hint_without_a_reason() -> None:
    assert IdleSteps(3, 0).hint() == ""


@pytest.mark.parametrize(
    ("idle", "words"),
    [
        (
            IdleSteps(3, 3, failed=48),
            "3 of 3 steps trained nothing, as none of their groups was kept (48 always failed)",
        ),
        (IdleSteps(3, 3, failed=48), "a longer warm start (warm_start.max_epochs, warm_start.target_success)"),
        (IdleSteps(9, 1, solved=16, failed=1), "Harder tasks, or a higher rollout.temperature"),
        (IdleSteps(9, 1, untrainable=16, failed=1), "logs/driver.log"),
        (IdleSteps(9, 1, rest=4), "(4 had equal rewards). Easier tasks"),
    ],
)
def test_the_hint_follows_from_the_outcomes(idle: IdleSteps, words: str) -> None:
    hint = idle.hint()
    assert words in hint and "\n" not in hint
    for path in re.findall(r"\b(?:warm_start|batch|rollout)\.\w+", hint):
        section, key = path.split(".")
        assert hasattr(getattr(Config(), section), key), path
