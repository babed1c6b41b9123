"""Environment protocol: a deterministic, seeded world that an agent acts in.

Invariants (the contract test in ``tests/environments/test_contract.py`` asserts each for every environment):

1. The same seed, split and actions give the same observations, rewards, ends and state hashes, in any process.
2. ``copy()`` is independent: stepping the copy leaves the original as it was.
3. ``state_hash()`` is stable across processes and equal for equal states.
4. A bad action never raises: it is answered by an observation, and costs a turn.
5. ``step`` after the end raises ``EnvironmentEnded``.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Protocol, runtime_checkable

from megatron_ext.trajectory.task import Task


class EnvironmentEnded(RuntimeError):
    """``step`` was called after the episode ended."""


@dataclass(frozen=True)
class ToolCall:
    """One parsed tool call: ``name`` and JSON ``arguments``."""

    name: str
    arguments: Mapping[str, Any]


Action = str | ToolCall


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the harness shows it: JSON-schema ``parameters``."""

    name: str
    description: str
    parameters: Mapping[str, Any]


@dataclass(frozen=True)
class Observation:
    """What the agent sees after ``reset`` or ``step``.

    Attributes:
        text: the observation.
        reward: reward of this step (``turn_reward`` of the action that led here).
        done: the episode ended.
        success: the task was solved; meaningful when ``done``.
        score: task progress, 0..1.
        valid: whether the action was one that the environment understands (malformed actions are counted).
        info: JSON values for reward functions and logs; never shown to the agent.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    success: bool = False
    score: float = 0.0
    valid: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class Environment(Protocol):
    """One playable world. Instances are built in worker processes from the configuration's ``_target_``."""

    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation: ...

    def step(self, action: Action) -> Observation: ...

    def copy(self) -> Environment:
        """An independent environment in the same state (by snapshot, or by replaying the actions)."""

    def state_hash(self) -> str:
        """Hash of everything that decides the future."""

    def tools(self) -> Sequence[ToolSpec]:
        """Tools the agent may call; empty for free-text environments."""

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        """``count`` tasks of a split. Splits are disjoint in content (fingerprints), not only in seeds."""

    def close(self) -> None: ...


@runtime_checkable
class Demonstrator(Protocol):
    """An environment that can also play itself: scripted demonstrations for a warm start.

    The script may be imperfect on purpose (``mistake_rate``): a warm start that is weak under greedy decoding leaves RL
    something to teach beyond sharpening.
    """

    def expert_action(self, rng: Random, mistake_rate: float) -> str | ToolCall:
        """The script's next action in the current state."""

    def corpus(self, split: str, count: int) -> Iterator[str]:
        """Texts of the split (observations and actions) to learn a tokenizer from."""


def stable_hash(*parts: str) -> str:
    """Hex digest that is equal in every process and Python version (unlike ``hash``)."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part.encode())
    return digest.hexdigest()


def key_of(hexdigest: str) -> int:
    """A positive int64 key from a hex digest, as ``turn_state_key`` and ``turn_action_key`` store it; never 0."""
    return (int(hexdigest[:16], 16) & ((1 << 63) - 1)) or 1
