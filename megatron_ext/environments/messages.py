"""What the environment pool and its worker processes say to each other, and what the pool answers its driver."""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from megatron_ext.environments.protocol import Action, Observation
from megatron_ext.trajectory.task import Task


class ReplyKind(StrEnum):
    OK = "ok"
    ERROR = "error"  # the environment raised, or its worker died under it
    DEADLINE = "deadline"  # the call outlasted the deadline and its worker was killed


@dataclass(frozen=True)
class EnvReply:
    """Answer to one ``reset`` or ``step``.

    ``observation`` and ``state_hash`` (of the state the agent acts in next) are set when ``kind`` is OK, ``error`` (one
    line) otherwise; after an answer that is not OK the episode only waits for its ``release``.
    """

    episode_id: str
    observation: Observation | None
    state_hash: str
    error: str | None
    kind: ReplyKind


@dataclass(frozen=True)
class Demonstration:
    """A scripted episode: first observation, then (action, observation it led to), and whether it solved the task.

    ``summaries``: what the script would write if its dialogue were compressed before the step, one a step; empty when
    the environment is no ``Summarizer``.
    """

    task: Task
    first: Observation
    steps: tuple[tuple[Action, Observation], ...]
    success: bool
    summaries: tuple[str, ...] = ()


# -- driver to worker: every request but Release is answered by exactly one Reply, in order -------------------------
@dataclass(frozen=True)
class Reset:
    episode_id: str
    environment: str
    task: Task


@dataclass(frozen=True)
class Step:
    episode_id: str
    action: Action


@dataclass(frozen=True)
class Restore:
    """Rebuild an episode of a dead worker by replay; ``state_hash`` is what the replay has to arrive at."""

    episode_id: str
    environment: str
    task: Task
    actions: tuple[Action, ...]
    state_hash: str


@dataclass(frozen=True)
class Release:
    episode_id: str


@dataclass(frozen=True)
class Call:
    """One of the blocking helpers: ``tasks``, ``tools``, ``labels``, ``demonstrate`` or ``corpus``."""

    call_id: int
    environment: str
    method: str
    arguments: Mapping[str, Any]


Request = Reset | Step | Restore | Call


@dataclass(frozen=True)
class Setup:
    """First message to a worker: environments by key, each ``{_target_, ...}``."""

    environments: Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Reply:
    """Answer to one request. ``value`` is the result of a Call."""

    observation: Observation | None = None
    state_hash: str = ""
    error: str | None = None
    value: Any = field(default=None)


Replies = Sequence[Reply]


class Counters(NamedTuple):
    """How far a worker is.

    ``begun`` and ``completed``: requests since the start. ``starting``: 1 while something slow and legitimate runs
    (process start, building an environment, listing tasks). ``beat``: rises while one request makes progress.
    """

    begun: int = 0
    completed: int = 0
    starting: int = 1
    beat: int = 0


class Progress:
    """The counters of one worker in memory that it shares with the driver, readable while the worker is stuck."""

    _LAYOUT = struct.Struct("<QQQQ")

    def __init__(self, descriptor: int) -> None:
        self._memory = mmap.mmap(descriptor, self._LAYOUT.size)

    @staticmethod
    def allocate() -> int:
        """File descriptor of fresh counters."""
        descriptor = os.memfd_create("environment-progress")
        os.ftruncate(descriptor, Progress._LAYOUT.size)
        return descriptor

    def read(self) -> Counters:
        return Counters(*self._LAYOUT.unpack_from(self._memory))

    def write(self, counters: Counters) -> None:
        self._LAYOUT.pack_into(self._memory, 0, *counters)

    def close(self) -> None:
        self._memory.close()
