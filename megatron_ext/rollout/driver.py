"""The rollout driver: runs the episodes of leased groups against an engine and environment workers.

One driver a node, in a process of its own, so that it never shares an interpreter with the training loop. It writes the
tokens of a finished group to the store and answers with metadata only.

Invariants (``tests/rollout/test_driver.py``):

1. Every order is answered exactly once, by a ``GroupDone``.
2. At most ``concurrency`` episodes are played at a time; orders start in the order they came.
3. A failing environment fails its trajectory, never the driver.
4. Every wait has a deadline and names whom it waits for.
5. An episode that waits for its reward holds neither environment nor engine, and keeps no other episode waiting; a
   reward part that is late is missing.
6. What a reward part lacks in some trajectories of a group is made neutral before the group is stored.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import wait

import numpy as np

from megatron_ext.environments.pool import EnvironmentPool
from megatron_ext.environments.protocol import ToolSpec
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.rewards.missing import neutral_rewards
from megatron_ext.rollout.dialogues import SessionCounts
from megatron_ext.rollout.engine import GenerateRequest, GenerationClient
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling, sampling_seed
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.rollout.wakeup import Wakeup
from megatron_ext.trajectory.builder import build_group
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.routed_rows import RerunCounts
from megatron_ext.trajectory.store import TrajectoryStore
from megatron_ext.trajectory.task import Task


class DriverError(RuntimeError):
    """The driver or something it waits for is gone; the message names it."""


LATE_REWARDS_S = 1.0
"""Seconds between two looks for rewards that are late; one that comes in time wakes the driver itself."""


@dataclass(frozen=True)
class GroupOrder:
    """Run ``samples`` episodes of one task. ``store`` keeps the tokens (training); evaluation needs outcomes only, and
    asks no reward part that waits for something outside."""

    group_id: str
    lease_id: str
    task: Task
    samples: int
    sampling: Sampling
    store: bool


@dataclass(frozen=True)
class GroupDone:
    """A finished group: its metadata (``meta.ref`` is "" when the tokens were not kept) and what the driver counted;
    ``rewards`` is what the reward parts counted, by metric name; ``reruns``, of recorded routing, None without it."""

    lease_id: str
    meta: GroupMeta
    malformed: int
    invalid_actions: int
    problems: tuple[str, ...]
    seconds: float
    rewards: Mapping[str, float] = field(default_factory=dict)
    sessions: SessionCounts = SessionCounts()
    reruns: RerunCounts | None = None

    @property
    def group_id(self) -> str:
        return self.meta.group_id


@dataclass
class _Group:
    order: GroupOrder
    started: float
    runs: dict[int, EpisodeRun]
    done: int = 0

    def batch(self) -> TrajectoryBatch:
        """The finished trajectories, by sample."""
        finished = [self.runs[i].finished for i in range(self.order.samples)]
        batch = build_group(self.order.group_id, self.order.task.task_id, [f for f in finished if f is not None])
        if not any(np.isnan(part).any() for part in batch.reward_parts.values()):
            return batch
        return batch.with_rewards(neutral_rewards(batch.reward, batch.reward_parts, batch.trainable()))


class Driver:
    """Runs orders. ``step`` does a little work and returns the groups that finished, within about ``timeout``."""

    def __init__(
        self,
        *,
        pool: EnvironmentPool,
        client: GenerationClient,
        codec: ChatCodec,
        harness: Harness,
        rewards: RewardSet,
        store: TrajectoryStore,
        limits: EpisodeLimits,
        concurrency: int,
        run_seed: int,
        engine_deadline_s: float,
    ) -> None:
        self._pool, self._client, self._codec = pool, client, codec
        self._harness, self._rewards, self._store = harness, rewards, store
        self._limits, self._concurrency, self._run_seed = limits, concurrency, run_seed
        self._engine_deadline_s = engine_deadline_s
        self._queue: deque[tuple[str, int]] = deque()
        self._groups: dict[str, _Group] = {}
        self._runs: dict[str, tuple[str, EpisodeRun]] = {}
        self._quick_rewards = rewards.quick()
        self._graded: dict[str, tuple[str, EpisodeRun]] = {}  # played, and waiting for a reward
        self._wakeup = Wakeup()
        self._next_look = 0.0
        self._calls: dict[str, str] = {}  # request id -> episode id
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}
        self._ended: list[str] = []  # engine sessions that nothing more will come of
        self._last_token = time.monotonic()

    @property
    def busy(self) -> bool:
        return bool(self._groups)

    def close(self) -> None:
        """Ends what rewards run in the background. Orders that are running are not answered any more."""
        self._rewards.close()
        self._wakeup.close()

    def submit(self, orders: Sequence[GroupOrder]) -> None:
        for order in orders:
            if order.group_id in self._groups:
                raise DriverError(f"group {order.group_id!r} is already running")
            self._groups[order.group_id] = _Group(order, time.monotonic(), {})
            self._queue.extend((order.group_id, sample) for sample in range(order.samples))

    def step(self, timeout: float) -> list[GroupDone]:
        self._admit()
        replies, results = self._pool.poll(0.0), self._client.poll(0.0)
        if not replies and not results:
            wait([*self._client.handles(), *self._pool.handles(), self._wakeup.fileno()], timeout)
            replies, results = self._pool.poll(0.0), self._client.poll(0.0)
        done: list[_Group] = []
        requests: list[GenerateRequest] = []
        for reply in replies:
            group_id, run = self._runs[reply.episode_id]
            if reply.observation is None:
                run.on_environment_failure(reply.kind, reply.error or "")
                request = None
            elif run.first is None:
                request = run.on_reset(reply.observation, reply.state_hash)
            else:
                request = run.on_step(reply.observation, reply.state_hash)
            self._after(group_id, run, request, requests, done)
        for result in results:
            self._last_token = time.monotonic()
            group_id, run = self._runs[self._calls.pop(result.request_id)]
            outcome = run.on_tokens(result)
            if outcome is not None and not isinstance(outcome, GenerateRequest):
                self._pool.step(run.episode_id, outcome)
                continue
            self._after(group_id, run, outcome, requests, done)
        for group_id, run in self._rewarded():
            run.on_reward()
            self._close(group_id, run, done)
        if requests:
            if not self._calls:
                self._last_token = time.monotonic()
            self._calls |= {r.request_id: r.request_id.rpartition("#")[0] for r in requests}
            self._client.submit(requests)
        if self._ended:
            self._client.end_sessions(self._ended)
            self._ended = []
        if self._calls and time.monotonic() - self._last_token > self._engine_deadline_s:
            raise DriverError(
                f"engine answered none of {len(self._calls)} requests for {self._engine_deadline_s:.0f} s "
                f"(first: {next(iter(self._calls))})"
            )
        return self._finished(done)

    def _admit(self) -> None:
        while self._queue and len(self._runs) < self._concurrency:
            group_id, sample = self._queue.popleft()
            order = self._groups[group_id].order
            environment = order.task.environment
            if environment not in self._tools:
                self._tools[environment] = tuple(self._pool.tools(environment))
            run = EpisodeRun(
                episode_id=f"{group_id}/{sample}",
                task=order.task,
                sample=sample,
                seed=sampling_seed(self._run_seed, group_id, sample),
                sampling=order.sampling,
                limits=self._limits,
                harness=self._harness,
                codec=self._codec,
                rewards=self._rewards if order.store else self._quick_rewards,
                tools=self._tools[environment],
            )
            self._runs[run.episode_id] = (group_id, run)
            self._groups[group_id].runs[sample] = run
            self._pool.reset(run.episode_id, order.task)

    def _after(
        self,
        group_id: str,
        run: EpisodeRun,
        request: GenerateRequest | None,
        requests: list[GenerateRequest],
        done: list[_Group],
    ) -> None:
        """Queues the next call of an episode; closes one that was played, or lets it wait for its reward."""
        self._ended += run.dialogues.take_ended()
        if request is not None:
            requests.append(request)
            return
        del self._runs[run.episode_id]
        self._pool.release(run.episode_id)
        if run.grading is not None:
            self._graded[run.episode_id] = (group_id, run)
            run.grading.when_done(self._wakeup.set)
        else:
            self._close(group_id, run, done)

    def _rewarded(self) -> list[tuple[str, EpisodeRun]]:
        """Takes the episodes whose rewards are there, or late."""
        now = time.monotonic()
        if not self._wakeup.clear() and now < self._next_look:
            return []
        self._next_look = now + LATE_REWARDS_S
        ready = [name for name, (_, run) in self._graded.items() if run.grading is None or run.grading.done]
        return [self._graded.pop(name) for name in ready]

    def _close(self, group_id: str, run: EpisodeRun, done: list[_Group]) -> None:
        """Counts a finished episode; with the last one its group is done."""
        if run.finished is None:
            raise DriverError(f"episode {run.episode_id!r} stopped without a result")
        group = self._groups[group_id]
        group.done += 1
        if group.done < group.order.samples:
            return
        done.append(self._groups.pop(group_id))

    def _finished(self, groups: Sequence[_Group]) -> list[GroupDone]:
        """The answers to orders whose episodes are over. Groups that end together are made durable together."""
        if not groups:
            return []
        batches = [group.batch() for group in groups]
        kept = [index for index, group in enumerate(groups) if group.order.store]
        refs = dict(zip(kept, self._store.write_many([batches[index] for index in kept]), strict=True))
        return [self._answer(group, batches[index], str(refs.get(index, ""))) for index, group in enumerate(groups)]

    def _answer(self, group: _Group, batch: TrajectoryBatch, ref: str) -> GroupDone:
        runs = [group.runs[i] for i in range(group.order.samples)]
        reruns = sum((run.finished.reruns for run in runs if run.finished is not None), RerunCounts())
        return GroupDone(
            lease_id=group.order.lease_id,
            meta=GroupMeta.from_batch(batch, ref),
            malformed=sum(r.counts.malformed for r in runs),
            invalid_actions=sum(r.counts.invalid_actions for r in runs),
            problems=tuple(
                p for r in runs for p in (r.counts.env_problem, r.counts.reward_problem, *r.counts.missing) if p
            ),
            seconds=time.monotonic() - group.started,
            rewards=_added(r.counts.rewards for r in runs),
            sessions=sum((r.counts.sessions for r in runs), SessionCounts()),
            reruns=None if batch.routed is None else reruns,
        )


def _added(counts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for one in counts:
        for name, value in one.items():
            total[name] = total.get(name, 0.0) + value
    return total
