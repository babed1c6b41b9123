"""Collects the groups of one step: leases, orders, results, step agreement.

Rank 0 alone holds the coordinator and the driver (``Collector``). It offers metadata of finished groups; every rank
then agrees on the step by itself and reads the tokens of the groups that are at home on it (``take``).

Invariants (``tests/training/test_collect.py``):

1. Each group that is consumed or filtered was finished under a live lease; nothing is taken twice.
2. A step draws at most ``draw_limit * tasks_per_step`` groups, then trains on what it has.
3. A driver that finishes nothing for the lease deadline is an error that names the groups that are missing; one that
   makes progress gets more time.
4. Groups are agreed on in the order they were added, not in the order they happened to finish.
5. A resumed step draws no more than the same step without the interruption: what is under way again is waited for.
   After ``play_again`` it also plays no more, so that every group is sampled by the weights of the step it belongs to.
6. Every group to train is at home on exactly one data-parallel rank, whole; token arrays pass through no other.
7. A step in which the reward of every trajectory is broken is an error that says how.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.config.schema import Config
from megatron_ext.rollout.agreement import Agreement, agree, permute_rewards
from megatron_ext.rollout.driver import DriverError, GroupDone, GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import Sampling
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.rollout.journal import JournaledCoordinator
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore

DRIVER = "driver-0"


@dataclass(frozen=True)
class Offer:
    """What rank 0 tells all ranks of a step: metadata of the finished groups, in their order, and what the agreement
    needs besides (see ``agree``). Small, whatever the groups' tokens."""

    metas: tuple[GroupMeta, ...]
    draws_so_far: int
    in_flight: int

    def agree(self, config: Config, own_signal: bool, ranks: int) -> Agreement:
        """The step's agreement; the same on every rank."""
        return agree(
            self.metas,
            tasks_per_step=config.batch.tasks_per_step,
            filters=config.credit.filter,
            own_signal=own_signal,
            draws_so_far=self.draws_so_far,
            in_flight=self.in_flight,
            ranks=ranks,
        )


@dataclass(frozen=True)
class StepGroups:
    """What a step found: ``drawn`` the driver's report of each group that was looked at (on rank 0; groups finished
    before a resume have none), ``metas`` their metadata, ``train`` ids in order, ``filtered`` (id, reason), and the
    ``batch`` of the groups to train on that are at home here (None when every group was filtered; empty where none is
    at home)."""

    drawn: Sequence[GroupDone]
    metas: Sequence[GroupMeta]
    train: tuple[str, ...]
    filtered: tuple[tuple[str, str], ...]
    batch: TrajectoryBatch | None

    def trajectories(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Tokens int64 [J] of each of the step's trajectories, on whichever rank, in training order, and whether any
        are trained bool [J]."""
        by_id = {meta.group_id: meta for meta in self.metas}
        metas = [by_id[group] for group in self.train]
        tokens = np.array([n for meta in metas for n in meta.tokens], dtype=np.int64)
        trained = np.array([n > 0 for meta in metas for n in meta.trained_tokens], dtype=bool)
        return tokens, trained

    def numbers(self) -> NDArray[np.int64]:
        """Which of those each trajectory of ``batch`` is, int64."""
        if self.batch is None:
            return np.empty(0, dtype=np.int64)
        by_id = {meta.group_id: len(meta.tokens) for meta in self.metas}
        sizes = np.array([by_id[group] for group in self.train], dtype=np.int64)
        first = dict(zip(self.train, (np.cumsum(sizes) - sizes).tolist(), strict=True))
        parts = [first[group] + np.arange(by_id[group]) for group in self.batch.group_id]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


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
        self._again = 0  # queued groups whose tasks the source has not come to again

    @property
    def source_draws(self) -> int:
        """Tasks that the source has drawn: those of the journal, but for the ones that are to be played again."""
        return self._coordinator.state.draws - self._again

    def play_again(self, count: int) -> None:
        """The last ``count`` tasks of the journal were drawn for steps that are undone: they are not played at once,
        but step by step, as the source draws them again."""
        self._again = count

    def state_dict(self) -> dict[str, GroupDone]:
        """The driver's reports of groups that finished and were not looked at."""
        return dict(self._done)

    def load_state_dict(self, state: Mapping[str, GroupDone]) -> None:
        groups = self._coordinator.state.groups
        self._done = {name: done for name, done in state.items() if groups[name].meta == done.meta}

    def offer(self, step: int) -> Offer:
        """The groups of the step after ``step`` finished ones. Draws tasks until the step is full or the limit met."""
        state = self._coordinator.state
        while True:
            metas = self._ready(step)
            counts = state.counts()
            drawn = self.source_draws - counts.consumed - counts.filtered
            # Groups that finished behind one that is queued again are not offered yet, and need no substitute.
            offer = Offer(tuple(metas), draws_so_far=drawn, in_flight=drawn - len(metas))
            agreement = offer.agree(self._config, self._own_signal, ranks=1)
            if agreement.missing == 0 or agreement.exhausted:
                if not agreement.train:
                    self._refuse_broken_rewards(metas)
                return offer
            if agreement.draw:
                self._draw(agreement.draw)
            self._order()
            self._wait()

    def _refuse_broken_rewards(self, metas: Sequence[GroupMeta]) -> None:
        """A reward part that fails on every trajectory of a step is no accident: nothing would ever be trained."""
        if not metas or any(status != Status.REWARD_INVALID for meta in metas for status in meta.status):
            return
        said = [
            problem for meta in metas if meta.group_id in self._done for problem in self._done[meta.group_id].problems
        ]
        raise DriverError(
            f"no trajectory of the step's {len(metas)} groups has a valid reward: "
            f"{said[0] if said else 'see the log of the rollout driver'}"
        )

    def reports(self, groups: Sequence[GroupMeta]) -> list[GroupDone]:
        """The driver's reports of these groups, once."""
        return [self._done.pop(meta.group_id) for meta in groups if meta.group_id in self._done]

    def _ready(self, step: int) -> list[GroupMeta]:
        metas = self._coordinator.ready(in_order=True)
        if self._config.control.permute_rewards:
            metas = permute_rewards(metas, self._config.run.seed, step)
        return metas

    def _draw(self, count: int) -> None:
        """New groups for the source's next tasks, where the journal does not hold them already."""
        tasks = list(self._source.draw(count))
        queued = self._coordinator.state.queued()
        for group, task in zip(queued[len(queued) - self._again :], tasks, strict=False):
            if group.task.task_id != task.task_id:
                raise DriverError(
                    f"group {group.group_id} was drawn for task {group.task.task_id!r}, and the source now draws "
                    f"{task.task_id!r}: the run does not repeat (tasks.source depends on more than its saved state)"
                )
        again = min(count, self._again)
        self._again -= again
        if again < count:
            self._coordinator.add(tasks[again:], self._config.batch.trajectories_per_task)

    def _order(self) -> None:
        """Leases queued groups to the driver, but for those to be played again later, and orders them."""
        rollout = self._config.rollout
        now = time.time()
        count = self._coordinator.counts().queued - self._again
        if not count:
            return
        leased = self._coordinator.lease(DRIVER, count, now, now + rollout.lease_deadline_s)
        self._open |= {g.group_id: g.lease_id for g in leased}
        self._renewed = now
        sampling = Sampling.of(rollout)
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
        """Deletes the data of a refused result, unless they are those of the result that was taken."""
        taken = self._coordinator.state.groups[group.group_id].meta
        if taken is None or taken.ref != group.meta.ref:
            self._store.delete(Ref(group.meta.ref))


def take(
    offer: Offer,
    config: Config,
    store: TrajectoryStore,
    *,
    own_signal: bool,
    rank: int = 0,
    ranks: int = 1,
    reports: Callable[[Sequence[GroupMeta]], list[GroupDone]] = lambda groups: [],
) -> StepGroups:
    """The step that is agreed on, with the tokens that are at home on data-parallel rank ``rank`` of ``ranks``.

    ``reports`` are the driver's, where it is (``Collector.reports``).
    """
    agreement = offer.agree(config, own_signal, ranks)
    looked_at = {*agreement.train, *(group for group, _ in agreement.filtered)}
    by_id = {meta.group_id: meta for meta in offer.metas if meta.group_id in looked_at}
    batch = None
    if agreement.train:
        home = agreement.assignment[rank]
        read = [_read(by_id[group], config, store) for group in home or agreement.train[:1]]
        # A rank that is home to no group has a batch too, an empty one of the same kind.
        batch = concat(read) if home else select_groups(read[0], [])
    metas = list(by_id.values())
    return StepGroups(reports(metas), metas, agreement.train, agreement.filtered, batch)


def _read(meta: GroupMeta, config: Config, store: TrajectoryStore) -> TrajectoryBatch:
    """A group's tokens, with the rewards that were agreed on (the control experiment permutes them)."""
    group = store.read(Ref(meta.ref))
    if config.control.permute_rewards:
        return group.with_rewards(np.array(meta.rewards, dtype=np.float32))
    return group
