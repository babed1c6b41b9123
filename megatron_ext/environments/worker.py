"""Environment worker: a process that builds environments and runs the pool's requests on them, one after the other.

Invariants (``tests/environments/test_pool.py``):

1. An environment that raises costs its own episode only: the request is answered by one line, the instance is thrown
   away, the worker lives on.
2. The worker dies with its driver, also when the driver is killed.
3. Instances are reused between episodes of the same environment.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from random import Random
from typing import TYPE_CHECKING, Any

from megatron_ext.config.instantiate import instantiate
from megatron_ext.environments.messages import (
    Call,
    Counters,
    Demonstration,
    Progress,
    Release,
    Reply,
    Request,
    Reset,
    Restore,
    Setup,
    Step,
)
from megatron_ext.environments.protocol import (
    Action,
    Demonstrator,
    Environment,
    Labelling,
    Observation,
    Summarizer,
    check_labels,
    stable_hash,
)
from megatron_ext.trajectory.task import Task

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

# Answers are sent at least this often while a long batch runs, so that the driver can use the first ones early.
_SEND_EVERY_S = 0.005


def build_environment(name: str, config: Mapping[str, Any]) -> Environment:
    """The environment that ``{_target_: package.module.Class, ...}`` describes; the other keys are its arguments."""
    environment = instantiate(config, where=f"environments.{name}")
    if not isinstance(environment, Environment):
        raise ValueError(f"environments.{name}: {config['_target_']} does not implement the environment protocol")
    return environment


class _Broken(RuntimeError):
    """An episode that could not be restored; the message is its error from then on."""


class Worker:
    """Runs requests. ``episodes`` maps an episode to its environment key and instance."""

    def __init__(self, environments: Mapping[str, Mapping[str, Any]], progress: Progress) -> None:
        self._configs = environments
        self._progress = progress
        self._counters = Counters(starting=0)
        self._free: dict[str, list[Environment]] = {}
        self._episodes: dict[str, tuple[str, Environment]] = {}
        self._broken: dict[str, str] = {}
        self._progress.write(self._counters)

    def serve(self, connection: Connection) -> None:
        """Answers batches until the driver hangs up."""
        while True:
            try:
                batch: Sequence[Request | Release] = connection.recv()
            except EOFError:
                self.close()
                return
            replies: list[Reply] = []
            sent = time.monotonic()
            for request in batch:
                if isinstance(request, Release):
                    self._release(request.episode_id)
                    continue
                self._count(begun=self._counters.begun + 1)
                replies.append(self._answer(request))
                self._count(completed=self._counters.completed + 1)
                if time.monotonic() - sent > _SEND_EVERY_S:
                    connection.send(replies)
                    replies = []
                    sent = time.monotonic()
            if replies:
                connection.send(replies)

    def close(self) -> None:
        """Closes every environment."""
        for _, environment in self._episodes.values():
            environment.close()
        for free in self._free.values():
            for environment in free:
                environment.close()

    def _answer(self, request: Request) -> Reply:
        try:
            if isinstance(request, Call):
                return Reply(value=self._call(request))
            if isinstance(request, Step):
                if request.episode_id in self._broken:
                    raise _Broken(self._broken[request.episode_id])
                environment = self._episodes[request.episode_id][1]
                observation = check_labels(environment, environment.step(request.action))
            else:
                self._release(request.episode_id)
                environment = self._acquire(request.environment)
                self._episodes[request.episode_id] = (request.environment, environment)
                observation = self._open(environment, request)
            return Reply(observation, environment.state_hash())
        except Exception as error:  # the one place where an environment's failure becomes data
            traceback.print_exc(file=sys.stderr)
            sys.stderr.flush()
            line = one_line(error)
            if not isinstance(request, Call):
                # An instance that raised may be in any state: it is not used again.
                self._episodes.pop(request.episode_id, None)
                self._broken[request.episode_id] = line
            return Reply(error=line)

    def _open(self, environment: Environment, request: Reset | Restore) -> Observation:
        task = request.task
        observation = environment.reset(task.seed, split=task.split, data=task.data)
        if isinstance(request, Restore):
            for action in request.actions:
                self._tick()
                observation = environment.step(action)
            if request.state_hash and environment.state_hash() != request.state_hash:
                raise _Broken(
                    f"environment {request.environment!r} is not deterministic: replaying {len(request.actions)} "
                    f"actions of task {task.task_id!r} led to another state"
                )
        return observation

    def _call(self, call: Call) -> Any:
        environment = self._acquire(call.environment)
        arguments = call.arguments
        if call.method == "tools":
            result: Any = list(environment.tools())
        elif call.method == "labels":
            words = environment.label_words() if isinstance(environment, Labelling) else {}
            result = {name: list(values) for name, values in words.items()}
        elif call.method == "tasks":
            with self._slow():
                result = list(environment.tasks(arguments["split"], arguments["count"], start=arguments["start"]))
        else:
            if not isinstance(environment, Demonstrator):
                raise ValueError(f"environment {call.environment!r} has no script to demonstrate with")
            if call.method == "corpus":
                with self._slow():
                    result = list(environment.corpus(arguments["split"], arguments["count"]))
            else:
                numbered = zip(arguments["tasks"], arguments["copies"], strict=True)
                result = [self._demonstrate(environment, task, copy, **arguments["how"]) for task, copy in numbered]
        self._free[call.environment].append(environment)
        return result

    def _demonstrate(
        self, environment: Environment, task: Task, copy: int, mistake_rate: float, seed: int, max_turns: int
    ) -> Demonstration:
        assert isinstance(environment, Demonstrator)
        # Keyed by the task, so that a demonstration does not depend on which worker made it.
        rng = Random(int(stable_hash("demonstration", str(seed), task.task_id, str(copy))[:15], 16))
        first = environment.reset(task.seed, split=task.split, data=task.data)
        steps: list[tuple[Action, Observation]] = []
        summaries: list[str] = []
        last = first
        while not last.done and len(steps) < max_turns:
            self._tick()
            if isinstance(environment, Summarizer):
                summaries.append(environment.expert_summary())
            action = environment.expert_action(rng, mistake_rate)
            last = check_labels(environment, environment.step(action))
            steps.append((action, last))
        return Demonstration(task, first, tuple(steps), last.success, tuple(summaries))

    # -- instances -------------------------------------------------------------------------------------------------
    def _acquire(self, name: str) -> Environment:
        free = self._free.setdefault(name, [])
        if free:
            return free.pop()
        with self._slow():
            return build_environment(name, self._configs[name])

    def _release(self, episode_id: str) -> None:
        self._broken.pop(episode_id, None)
        if episode_id in self._episodes:
            name, environment = self._episodes.pop(episode_id)
            self._free[name].append(environment)

    # -- progress --------------------------------------------------------------------------------------------------
    def _tick(self) -> None:
        self._count(beat=self._counters.beat + 1)

    @contextmanager
    def _slow(self) -> Iterator[None]:
        self._count(starting=1)
        try:
            yield
        finally:
            self._count(starting=0)

    def _count(self, **changes: int) -> None:
        self._counters = self._counters._replace(**changes)
        self._progress.write(self._counters)


def one_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def main(connection: Connection, progress_fd: str) -> None:
    """Entry point of the process that ``EnvironmentPool`` starts."""
    progress = Progress(int(progress_fd))
    try:
        setup: Setup = connection.recv()
        Worker(setup.environments, progress).serve(connection)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return  # the driver closed the pool while this worker was busy
