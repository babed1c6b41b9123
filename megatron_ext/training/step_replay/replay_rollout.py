"""A step's groups sampled again: which trajectories have the same tokens, and how far their log-probs are apart.

Invariant (``tests/launch/test_replay.py``): the weights that the step started from sample the recorded tokens, all of
them under ``run.deterministic``; without it rounding may part a few trajectories.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from megatron_ext.rollout.driver import GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import Sampling
from megatron_ext.rollout.events import Added
from megatron_ext.rollout.journal import read as read_journal
from megatron_ext.training.evaluate import run_orders
from megatron_ext.training.publish import publish
from megatron_ext.training.session import (
    driver_spec,
    start_engine,
)
from megatron_ext.training.step_replay.kept_step import KeptStepError
from megatron_ext.training.step_replay.replay import Opened, replaying
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task

SAME_TRAJECTORIES = 0.9  # share of trajectories that rounding must not part


@dataclass(frozen=True)
class GroupReplay:
    """A group sampled again. ``rewards`` (recorded, replayed) and ``same`` ids, one entry a trajectory; ``parted`` the
    first sampled token that differs, counted in the trajectory's tokens (-1: none)."""

    group: str
    task: str
    rewards: tuple[tuple[float, float], ...]
    same: tuple[bool, ...]
    parted: tuple[int, ...]


@dataclass(frozen=True)
class RolloutReplay:
    """``logp`` is the largest difference of a sampled token's log-prob, over trajectories whose ids are the same."""

    opened: Opened
    groups: tuple[GroupReplay, ...]
    logp: float

    @property
    def same(self) -> float:
        """Share of the trajectories whose ids are all the same."""
        return float(np.mean([same for group in self.groups for same in group.same]))

    @property
    def agrees(self) -> bool:
        for group in self.groups:
            if any(same and a != b for (a, b), same in zip(group.rewards, group.same, strict=True)):
                return False
        return self.same >= (1.0 if self.opened.exact else SAME_TRAJECTORIES)


def replay_rollout(opened: Opened) -> RolloutReplay:
    """The kept groups again: the same tasks, seeds and limits, the weights that the step started from. On one rank."""
    config, kept = opened.config, opened.kept
    tasks = _tasks(opened)
    with replaying(opened) as session, ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="replay-")))
        logs, store = scratch / "logs", scratch / "store"
        logs.mkdir()
        driver = DriverProcess(driver_spec(config, store, logs))
        stack.callback(driver.close)
        engine = start_engine(config, opened.hf, logs)
        stack.callback(engine.close)
        driver.open(engine.connect(), opened.path / "tokenizer")
        publish(engine, session.trainer.chunks, opened.hf, max(kept.opened or 0, 0))
        sampling = Sampling.of(config.rollout)
        sizes = np.diff(kept.batch.group_trajectories)
        orders = [
            GroupOrder(group, f"replay/{group}", tasks[group], int(size), sampling, store=True)
            for group, size in zip(kept.batch.group_id, sizes, strict=True)
        ]
        done = run_orders(
            driver,
            orders,
            progress=lambda count: None,
            check=session.flag.check,
            timeout=config.rollout.lease_deadline_s,
        )
        read = TrajectoryStore(store)
        again = concat([read.read(Ref(done[group].meta.ref)) for group in kept.batch.group_id])
    groups, logp = compare_rollouts(kept.batch, again, tasks)
    return RolloutReplay(_with_ages(opened), groups, logp)


def _tasks(opened: Opened) -> dict[str, Task]:
    """The task of each kept group, from the run's journal."""
    events = read_journal(opened.path / "journal.jsonl")[0]
    known = {
        group: task
        for event in events
        if isinstance(event, Added)
        for group, task in zip(event.groups, event.tasks, strict=True)
    }
    missing = [group for group in opened.kept.batch.group_id if group not in known]
    if missing:
        raise KeptStepError(f"{opened.path}: the journal does not know group {missing[0]!r} of step {opened.kept.step}")
    return known


def _with_ages(opened: Opened) -> Opened:
    """Notes tokens that were sampled by other weights than those that opened the step."""
    sampled = opened.kept.batch.version[opened.kept.batch.version >= 0]
    if opened.kept.opened is None or not len(sampled):
        return opened
    older = int((sampled != opened.kept.opened).sum())
    if not older:
        return opened
    note = f"{older} of {len(sampled)} recorded tokens were sampled by other weights than those that opened the step"
    return replace(opened, notes=(*opened.notes, note))


def compare_rollouts(
    recorded: TrajectoryBatch, replayed: TrajectoryBatch, tasks: Mapping[str, Task]
) -> tuple[tuple[GroupReplay, ...], float]:
    """Group by group, and the largest difference of a log-prob where ids are the same. Pure."""
    groups, logp = [], 0.0
    offsets, again = recorded.trajectory_tokens(), replayed.trajectory_tokens()
    for number, group in enumerate(recorded.group_id):
        rewards, same, parted = [], [], []
        for j in range(*recorded.group_trajectories[number : number + 2].tolist()):
            a, b = slice(offsets[j], offsets[j + 1]), slice(again[j], again[j + 1])
            ids, others = recorded.ids[a], replayed.ids[b]
            common = min(len(ids), len(others))
            unlike = np.flatnonzero(ids[:common] != others[:common])
            first = int(unlike[0]) if len(unlike) else -1 if len(ids) == len(others) else common
            parted.append(first)
            same.append(first < 0)
            rewards.append((float(recorded.reward[j]), float(replayed.reward[j])))
            if first < 0:
                difference = np.abs(recorded.rollout_logp[a].astype(np.float64) - replayed.rollout_logp[b])
                logp = max(logp, float(difference.max(initial=0.0)))
        groups.append(GroupReplay(group, tasks[group].task_id, tuple(rewards), tuple(same), tuple(parted)))
    return tuple(groups), logp
