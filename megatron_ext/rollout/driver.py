"""The rollout driver: runs the episodes of leased groups against an engine and environment workers.

One driver a node, in a process of its own, so that it never shares an interpreter with the training loop. It writes the
tokens of a finished group to the store and answers with metadata only.

Invariants (``tests/rollout/test_driver.py``):

1. Every order is answered exactly once, by a ``GroupDone``.
2. At most ``concurrency`` episodes run at a time; orders start in the order they came.
3. A failing environment fails its trajectory, never the driver.
4. Every wait has a deadline and names whom it waits for.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait

from megatron_ext.environments.pool import EnvironmentPool
from megatron_ext.environments.protocol import ToolSpec
from megatron_ext.harness.protocol import Harness
from megatron_ext.harness.template import ChatCodec
from megatron_ext.rewards.compose import RewardSet
from megatron_ext.rollout.engine import GenerateRequest, GenerationClient
from megatron_ext.rollout.episode import EpisodeLimits, EpisodeRun, Sampling, sampling_seed
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.trajectory.builder import build_group
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.store import TrajectoryStore
from megatron_ext.trajectory.task import Task


class DriverError(RuntimeError):
    """The driver or something it waits for is gone; the message names it."""


@dataclass(frozen=True)
class GroupOrder:
    """Run ``samples`` episodes of one task. ``store`` keeps the tokens (training); evaluation needs outcomes only."""

    group_id: str
    lease_id: str
    task: Task
    samples: int
    sampling: Sampling
    store: bool


@dataclass(frozen=True)
class GroupDone:
    """A finished group: its metadata (``meta.ref`` is "" when the tokens were not kept) and what the driver counted."""

    lease_id: str
    meta: GroupMeta
    malformed: int
    invalid_actions: int
    problems: tuple[str, ...]
    seconds: float

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
        return build_group(self.order.group_id, self.order.task.task_id, [f for f in finished if f is not None])


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
        self._calls: dict[str, str] = {}  # request id -> episode id
        self._tools: dict[str, tuple[ToolSpec, ...]] = {}
        self._ended: list[str] = []  # episodes whose cache the engine may drop
        self._last_token = time.monotonic()

    @property
    def busy(self) -> bool:
        return bool(self._groups)

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
            wait([*self._client.handles(), *self._pool.handles()], timeout)
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
        if requests:
            if not self._calls:
                self._last_token = time.monotonic()
            self._calls |= {r.request_id: r.session_id for r in requests}
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
                rewards=self._rewards,
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
        """Queues the next call of an episode, or closes it and, with its last episode, its group."""
        if request is not None:
            requests.append(request)
            return
        if run.finished is None:
            raise DriverError(f"episode {run.episode_id!r} stopped without a result")
        del self._runs[run.episode_id]
        self._pool.release(run.episode_id)
        self._ended.append(run.episode_id)
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
        return GroupDone(
            lease_id=group.order.lease_id,
            meta=GroupMeta.from_batch(batch, ref),
            malformed=sum(r.counts.malformed for r in runs),
            invalid_actions=sum(r.counts.invalid_actions for r in runs),
            problems=tuple(p for r in runs for p in (r.counts.env_problem, r.counts.reward_problem) if p),
            seconds=time.monotonic() - group.started,
        )
