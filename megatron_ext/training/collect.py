"""Collects the groups of one step: leases, orders, results, step agreement.

Invariants (``tests/training/test_collect.py``):

1. Each group that is consumed or filtered was finished under a live lease; nothing is taken twice.
2. A step draws at most ``draw_limit * tasks_per_step`` groups, then trains on what it has.
3. A driver that finishes nothing for the lease deadline is an error that names the groups that are missing; one that
   makes progress gets more time.
4. Groups are agreed on in the order they were added, not in the order they happened to finish.
5. A resumed step draws no more than the same step without the interruption: what is under way again is waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_ext.config.schema import Config
from megatron_ext.rollout.agreement import Agreement, agree, permute_rewards
from megatron_ext.rollout.driver import DriverError, GroupDone, GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import Sampling
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.rollout.journal import JournaledCoordinator
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.trajectory.record import TrajectoryBatch, concat
from megatron_ext.trajectory.store import Ref, TrajectoryStore

DRIVER = "driver-0"


@dataclass(frozen=True)
class StepGroups:
    """What a step found: ``drawn`` the driver's report of each group that was looked at (groups finished before a
    resume have none), ``metas`` their metadata, ``train`` ids in order, ``filtered`` (id, reason), and the batch of the
    groups to train on (None when every group was filtered)."""

    drawn: Sequence[GroupDone]
    metas: Sequence[GroupMeta]
    train: tuple[str, ...]
    filtered: tuple[tuple[str, str], ...]
    batch: TrajectoryBatch | None


class Collector:
    """The trainer's side of the rollout phase, in sync mode: the weights that a step starts from sample its groups."""

    def __init__(
        self,
        config: Config,
        coordinator: JournaledCoordinator,
        source: TaskSource,
        driver: DriverProcess,
        store: TrajectoryStore,
        *,
        own_signal: bool,
        check: Callable[[], None],
        progress: Callable[[int], None],
    ) -> None:
        self._config, self._coordinator, self._source = config, coordinator, source
        self._driver, self._store = driver, store
        self._own_signal, self._check, self._progress = own_signal, check, progress
        self._done: dict[str, GroupDone] = {}
        self._open: dict[str, str] = {}  # groups the driver holds -> lease
        self._renewed = 0.0

    def collect(self, step: int) -> StepGroups:
        """The groups of the step after ``step`` finished ones. Draws tasks until the step is full or the limit met."""
        state = self._coordinator.state
        while True:
            metas = self._ready(step)
            counts = state.counts()
            agreement = agree(
                metas,
                tasks_per_step=self._config.batch.tasks_per_step,
                filters=self._config.credit.filter,
                own_signal=self._own_signal,
                draws_so_far=counts.draws - counts.consumed - counts.filtered,
                # Groups that finished behind one that is queued again are not offered yet, and need no substitute.
                in_flight=counts.queued + counts.leased + counts.finished - len(metas),
                ranks=1,
            )
            if agreement.missing == 0 or agreement.exhausted:
                return self._take(agreement, metas)
            if agreement.draw:
                tasks = self._source.draw(agreement.draw)
                self._coordinator.add(tasks, self._config.batch.trajectories_per_task)
            self._order()
            self._wait()

    def _ready(self, step: int) -> list[GroupMeta]:
        metas = self._coordinator.ready(in_order=True)
        if self._config.control.permute_rewards:
            metas = permute_rewards(metas, self._config.run.seed, step)
        return metas

    def _order(self) -> None:
        """Leases every queued group to the driver and orders it."""
        rollout = self._config.rollout
        now = time.time()
        count = self._coordinator.counts().queued
        if not count:
            return
        leased = self._coordinator.lease(DRIVER, count, now, now + rollout.lease_deadline_s)
        self._open |= {g.group_id: g.lease_id for g in leased}
        self._renewed = now
        sampling = Sampling(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.record_routing, rollout.ignore_stop
        )
        self._driver.run([GroupOrder(g.group_id, g.lease_id, g.task, g.samples, sampling, store=True) for g in leased])

    def _wait(self) -> None:
        """Takes results until nothing is leased: a step is agreed on whole rounds, whatever finished first."""
        while self._coordinator.counts().leased:
            self._check()
            done = self._driver.poll(0.5)
            taken = self._coordinator.finish_many([(group.lease_id, group.meta) for group in done])
            for group, accepted in zip(done, taken, strict=True):
                self._open.pop(group.group_id, None)
                if accepted:
                    self._done[group.group_id] = group
                else:
                    self._drop(group)
            self._progress(len(self._done))
            if done:
                self._renew(time.time())
            expired = self._coordinator.expire(time.time())
            if expired:
                raise DriverError(
                    f"rollout driver: {len(expired)} groups not finished within rollout.lease_deadline_s="
                    f"{self._config.rollout.lease_deadline_s:.0f}, first {expired[0]!r}"
                )

    def _renew(self, now: float) -> None:
        """A driver that finishes groups is alive: what it still holds gets more time, now and then."""
        deadline_s = self._config.rollout.lease_deadline_s
        if now - self._renewed > deadline_s / 4:
            self._renewed = now
            for lease_id in self._open.values():
                self._coordinator.renew(lease_id, now + deadline_s)

    def _drop(self, group: GroupDone) -> None:
        """Deletes the data of a refused result, unless the result that was taken is the same: names tell contents."""
        taken = self._coordinator.state.groups[group.group_id].meta
        if taken is None or taken.ref != group.meta.ref:
            self._store.delete(Ref(group.meta.ref))

    def _take(self, agreement: Agreement, metas: Sequence[GroupMeta]) -> StepGroups:
        looked_at = {*agreement.train, *(group for group, _ in agreement.filtered)}
        by_id = {meta.group_id: meta for meta in metas if meta.group_id in looked_at}
        drawn = [self._done.pop(group) for group in by_id if group in self._done]
        batch = concat([self._read(by_id[group]) for group in agreement.train]) if agreement.train else None
        return StepGroups(drawn, list(by_id.values()), agreement.train, agreement.filtered, batch)

    def _read(self, meta: GroupMeta) -> TrajectoryBatch:
        """A group's tokens, with the rewards that were agreed on (the control experiment permutes them)."""
        group = self._store.read(Ref(meta.ref))
        if self._config.control.permute_rewards:
            return group.with_rewards(np.array(meta.rewards, dtype=np.float32))
        return group
