"""Environment pool: episodes in worker processes that can be killed, behind a non-blocking interface.

Invariants (``tests/environments/test_pool.py``):

1. Every ``reset`` and ``step`` is answered by exactly one ``EnvReply``, whatever happens to the worker.
2. A call that outlasts the deadline costs its own episode (``DEADLINE``); the worker is killed and restarted, and its
   other episodes go on as if nothing had happened: they are rebuilt by replay, checked by state hash.
3. A worker that dies costs the episode whose call it was running (``ERROR``), likewise.
4. No call of the driver waits for an environment, except the helpers that say so.
5. Workers do not outlive the driver, also when it is killed.

``worker_handle.py`` is one worker as the pool sees it. A pool belongs to the thread that made it: the kernel ends the
workers when that thread ends.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

from megatron_ext.environments.messages import (
    Call,
    Demonstration,
    EnvReply,
    Release,
    Reply,
    ReplyKind,
    Request,
    Reset,
    Restore,
    Step,
)
from megatron_ext.environments.protocol import Action, ToolSpec
from megatron_ext.environments.worker_handle import Answers, Deadlines, WorkerHandle
from megatron_ext.trajectory.task import Task

__all__ = ["Demonstration", "EnvReply", "EnvironmentFailed", "EnvironmentPool", "PoolError", "ReplyKind"]

_DEATHS_WITHOUT_CAUSE = 3
_CLOSE_S = 1.0


class PoolError(RuntimeError):
    """The pool itself cannot go on: workers do not start, or keep dying while idle."""


class EnvironmentFailed(RuntimeError):
    """An environment raised, hung or died in one of the blocking helpers."""


@dataclass
class _Episode:
    """What it takes to rebuild an episode elsewhere."""

    worker: int
    environment: str
    task: Task
    actions: list[Action] = field(default_factory=list)
    state_hash: str = ""
    pending: Reset | Step | None = None
    failed: EnvReply | None = None


class EnvironmentPool:
    """Episodes of several environments over several worker processes."""

    def __init__(
        self,
        environments: Mapping[str, Mapping[str, Any]],
        *,
        workers: int,
        deadline_s: float,
        log_dir: Path | None = None,
        start_deadline_s: float = 300.0,
    ) -> None:
        """
        Args:
            environments: key -> ``{_target_: import path, ...}``; the other keys are the constructor's arguments.
            workers: worker processes. Environments are built in them on first use and reused.
            deadline_s: longest that one ``reset`` or ``step`` may take.
            log_dir: folder for ``env_worker_<i>.log`` (tracebacks, output of environments); None: the driver's own.
            start_deadline_s: longest that starting a worker, building an environment or listing tasks may take.
        """
        if workers < 1 or deadline_s <= 0 or start_deadline_s <= 0:
            raise ValueError(
                f"pool: workers {workers}, deadline {deadline_s} s and {start_deadline_s} s must be positive"
            )
        if not environments:
            raise ValueError("pool: no environments configured; add one under environments.<name>")
        self._environments = {name: _plain(config) for name, config in environments.items()}
        self._deadlines = Deadlines(deadline_s, start_deadline_s)
        self._log_dir = log_dir
        if log_dir is not None:
            log_dir.mkdir(parents=True, exist_ok=True)
        self._episodes: dict[str, _Episode] = {}
        self._load = [0] * workers  # episodes a worker
        self._ready: list[EnvReply] = []
        self._results: dict[int, Reply] = {}
        self._next_call = 0
        self._causeless = 0
        self._restarts = 0
        self._closed = False
        self._workers = [self._start(i) for i in range(workers)]

    # -- episodes, non-blocking ------------------------------------------------------------------------------------
    def reset(self, episode_id: str, task: Task) -> None:
        """Starts an episode; the first observation comes by ``poll``. Queued until then, like ``step``."""
        if episode_id in self._episodes:
            raise ValueError(f"episode {episode_id!r} is running; release it first")
        self._known(task.environment)
        worker = self._load.index(min(self._load))
        self._load[worker] += 1
        request = Reset(episode_id, task.environment, task)
        self._episodes[episode_id] = _Episode(worker, task.environment, task, pending=request)
        self._workers[worker].queue.append(request)

    def step(self, episode_id: str, action: Action) -> None:
        """Acts; the answer comes by ``poll``. One call of an episode at a time."""
        episode = self._episodes.get(episode_id)
        if episode is None:
            raise ValueError(f"episode {episode_id!r} is not running; reset it first")
        if episode.pending is not None:
            raise ValueError(f"episode {episode_id!r} still waits for the answer to its last call")
        if episode.failed is not None:
            self._ready.append(episode.failed)
            return
        request = Step(episode_id, action)
        episode.pending = request
        self._workers[episode.worker].queue.append(request)

    def poll(self, timeout: float) -> list[EnvReply]:
        """Sends what is queued and returns the answers there are, waiting up to ``timeout`` seconds for the first."""
        end = time.monotonic() + timeout
        while True:
            self._pump(0.0 if self._ready else max(0.0, end - time.monotonic()))
            if self._ready or time.monotonic() >= end:
                ready, self._ready = self._ready, []
                return ready

    def release(self, episode_id: str) -> None:
        """Ends an episode, finished or not; its environment is used again. No answer to it comes after this."""
        episode = self._episodes.pop(episode_id, None)
        if episode is None:
            return
        self._load[episode.worker] -= 1
        if self._ready:
            self._ready = [reply for reply in self._ready if reply.episode_id != episode_id]
        self._workers[episode.worker].queue.append(Release(episode_id))

    def close(self) -> None:
        """Ends the workers: those that wait close their environments, those that do not within a second are killed."""
        if self._closed:
            return
        self._closed = True
        for worker in self._workers:
            worker.hang_up()
        patience = time.monotonic() + _CLOSE_S
        for worker in self._workers:
            worker.reap(max(0.0, patience - time.monotonic()))

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def restarts(self) -> int:
        """Workers restarted so far."""
        return self._restarts

    def handles(self) -> list[Connection]:
        """Connections that become readable when answers come, for ``multiprocessing.connection.wait`` beside others."""
        return [worker.connection for worker in self._workers]

    def worker_pids(self) -> list[int]:
        return [worker.popen.pid for worker in self._workers]

    # -- helpers, blocking -----------------------------------------------------------------------------------------
    def tasks(self, environment: str, split: str, count: int, start: int = 0) -> list[Task]:
        """Tasks of a split, named after the environment's key. Raises ``EnvironmentFailed``."""
        arguments = {"split": split, "count": count, "start": start}
        (found,) = self._call_all(environment, "tasks", [arguments])
        return [
            replace(task, environment=environment, task_id="/".join((environment, *task.task_id.split("/")[1:])))
            for task in found
        ]

    def tools(self, environment: str) -> list[ToolSpec]:
        """The environment's tools. Raises ``EnvironmentFailed``."""
        (found,) = self._call_all(environment, "tools", [{}])
        return list(found)

    def labels(self, environment: str) -> dict[str, list[str]]:
        """The labels that the environment gives, and what the values of each mean. Raises ``EnvironmentFailed``."""
        (found,) = self._call_all(environment, "labels", [{}])
        return dict(found)

    def demonstrate(
        self, environment: str, tasks: Sequence[Task], *, mistake_rate: float, seed: int, max_turns: int
    ) -> list[Demonstration]:
        """Scripted episodes, one a task, in the order of ``tasks``; a task listed again is played with other mistakes.

        Raises ``EnvironmentFailed``, also when the environment has no script.
        """
        size = max(1, min(32, math.ceil(len(tasks) / len(self._workers))))
        how = {"mistake_rate": mistake_rate, "seed": seed, "max_turns": max_turns}
        met: Counter[str] = Counter()
        copies = []
        for task in tasks:
            copies.append(met[task.task_id])
            met[task.task_id] += 1
        chunks = [
            {"tasks": list(tasks[i : i + size]), "copies": copies[i : i + size], "how": how}
            for i in range(0, len(tasks), size)
        ]
        return [demo for part in self._call_all(environment, "demonstrate", chunks) for demo in part]

    def corpus(self, environment: str, split: str, count: int) -> list[str]:
        """Texts of ``count`` tasks of a split, to learn a tokenizer from. Raises ``EnvironmentFailed``."""
        (found,) = self._call_all(environment, "corpus", [{"split": split, "count": count}])
        return list(found)

    def _call_all(self, environment: str, method: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        self._known(environment)
        calls = []
        for i, values in enumerate(arguments):
            calls.append(Call(self._next_call, environment, method, values))
            self._next_call += 1
            self._workers[i % len(self._workers)].queue.append(calls[-1])
        while not all(call.call_id in self._results for call in calls):
            self._pump(1.0)
        replies = [self._results.pop(call.call_id) for call in calls]
        for reply in replies:
            if reply.error is not None:
                raise EnvironmentFailed(f"environment {environment!r}, {method}: {reply.error}")
        return [reply.value for reply in replies]

    def _known(self, environment: str) -> None:
        if environment not in self._environments:
            names = ", ".join(sorted(self._environments))
            raise ValueError(f"no environment {environment!r}; configured are: {names}")

    # -- moving messages -------------------------------------------------------------------------------------------
    def _pump(self, timeout: float) -> None:
        """Sends to idle workers, waits for the first answer or deadline, takes in what came."""
        if self._closed:
            raise PoolError("the pool is closed")
        for index in range(len(self._workers)):
            self._send(index)
        now = time.monotonic()
        timeout = min([timeout, *(worker.look_in_s(now) for worker in self._workers if worker.under_way)])
        by_connection = {id(worker.connection): i for i, worker in enumerate(self._workers)}
        for connection in wait([worker.connection for worker in self._workers], max(0.0, timeout)):
            index = by_connection[id(connection)]
            answers = self._workers[index].receive()
            if answers is None:
                self._recover(index, None)
            else:
                self._take(answers)
        for index in range(len(self._workers)):
            self._send(index)
            overrun = self._workers[index].overrun()
            if overrun is not None:
                self._recover(index, overrun)

    def _send(self, index: int) -> None:
        if not self._workers[index].send():
            self._recover(index, None)

    def _take(self, answers: Answers) -> None:
        if answers:
            self._causeless = 0
        for request, reply in answers:
            self._deliver(request, reply)

    def _deliver(self, request: Request, reply: Reply) -> None:
        if isinstance(request, Call):
            self._results[request.call_id] = reply
            return
        episode = self._episodes.get(request.episode_id)
        # A Restore answers nobody: if it failed, the worker says so at the episode's next call. An episode may also
        # have been released, and even reset under the same id, while its call was under way.
        if episode is None or isinstance(request, Restore) or episode.pending is not request:
            return
        if reply.error is not None:
            self._fail(request.episode_id, ReplyKind.ERROR, reply.error)
            return
        if isinstance(request, Step):
            episode.actions.append(request.action)
        episode.pending = None
        episode.state_hash = reply.state_hash
        self._ready.append(EnvReply(request.episode_id, reply.observation, reply.state_hash, None, ReplyKind.OK))

    def _fail(self, episode_id: str, kind: ReplyKind, error: str) -> None:
        episode = self._episodes[episode_id]
        episode.failed = EnvReply(episode_id, None, "", f"environment {episode.environment!r}: {error}", kind)
        if episode.pending is not None:
            episode.pending = None
            self._ready.append(episode.failed)

    # -- failure ---------------------------------------------------------------------------------------------------
    def _recover(self, index: int, overrun: float | None) -> None:
        """Replaces a worker that died, or hung for ``overrun`` seconds, and puts its episodes on the new one."""
        answers, ended = self._workers[index].end(kill=overrun is not None)
        self._take(answers)
        if not ended.began and overrun is not None:
            raise PoolError(f"environment worker {index} did not start in {overrun:g} s; {self._where_logged(index)}")
        if ended.culprit is None:
            self._causeless += 1
            if self._causeless >= _DEATHS_WITHOUT_CAUSE:
                raise PoolError(f"environment worker {index} keeps dying ({ended.how}); {self._where_logged(index)}")
        fresh = self._workers[index] = self._start(index)
        self._restarts += 1
        if ended.culprit is not None:
            if overrun is not None:
                self._blame(ended.culprit, ReplyKind.DEADLINE, f"a call took longer than {overrun:g} s")
            else:
                self._blame(
                    ended.culprit, ReplyKind.ERROR, f"its worker died ({ended.how}); {self._where_logged(index)}"
                )
        for episode_id, episode in self._episodes.items():
            if episode.worker == index and episode.failed is None and not isinstance(episode.pending, Reset):
                actions = tuple(episode.actions)
                fresh.queue.append(Restore(episode_id, episode.environment, episode.task, actions, episode.state_hash))
        fresh.queue.extend(request for request in ended.left if self._still_wanted(request))

    def _blame(self, request: Request, kind: ReplyKind, error: str) -> None:
        if isinstance(request, Call):
            self._results[request.call_id] = Reply(error=error)
        elif request.episode_id in self._episodes:
            self._fail(request.episode_id, kind, error)

    def _still_wanted(self, request: Request | Release) -> bool:
        """Whether a request of a dead worker has to be made again."""
        if isinstance(request, Call):
            return True
        if isinstance(request, Release | Restore):
            return False
        episode = self._episodes.get(request.episode_id)
        return episode is not None and episode.pending is request

    def _start(self, index: int) -> WorkerHandle:
        return WorkerHandle.start(self._environments, self._deadlines, self._log(index))

    def _log(self, index: int) -> Path | None:
        return None if self._log_dir is None else self._log_dir / f"env_worker_{index}.log"

    def _where_logged(self, index: int) -> str:
        log = self._log(index)
        return "see its output" if log is None else f"see {log}"


def _plain(value: Any) -> Any:
    """Plain dicts and lists, whatever mapping types the configuration library uses: workers do not need it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(item) for item in value]
    return value
