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
from enum import IntEnum
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


def canonical_action(action: str | ToolCall) -> str:
    """Text under which equal actions are equal."""
    if isinstance(action, ToolCall):
        return f"{action.name}({', '.join(f'{k}={action.arguments[k]!r}' for k in sorted(action.arguments))})"
    return " ".join(action.split())


@dataclass(frozen=True)
class ToolSpec:
    """A tool as the harness shows it: JSON-schema ``parameters``."""

    name: str
    description: str
    parameters: Mapping[str, Any]


class SessionChange(IntEnum):
    """What an observation does to the dialogue that the agent is in."""

    STAY = 0
    OPEN = 1
    CLOSE = 2


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
        session: ``OPEN``: a sub-agent begins, and ``text`` is what it is told; ``CLOSE``: the sub-agent ends, and
            ``text`` is what its parent gets to see. ``STAY`` on ``reset``.
        labels: name -> value of the action that led here (such as the operation it was), kept in the record's
            ``turn_labels``; the names and values are those that the environment declares (``Labelling``).
        action: name of the action that led here, where its words have several forms: actions of one name in one state
            lead to one state, and credit that compares actions takes them as the same. "": the action's own words.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    success: bool = False
    score: float = 0.0
    valid: bool = True
    info: Mapping[str, Any] = field(default_factory=dict)
    session: SessionChange = SessionChange.STAY
    labels: Mapping[str, int] = field(default_factory=dict)
    action: str = ""


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


@runtime_checkable
class Labelling(Protocol):
    """An environment whose observations carry labels."""

    def label_words(self) -> Mapping[str, Sequence[str]]:
        """Name of each label -> what its values 0, 1, ... mean."""


@runtime_checkable
class Summarizer(Protocol):
    """A demonstrator that can also say what it would keep if its dialogue were compressed now, so that a warm start
    holds compressions."""

    def expert_summary(self) -> str:
        """What the script would write down in the current state to go on from it alone; not empty."""


def check_labels(environment: Environment, observation: Observation) -> Observation:
    """The observation; raises ``ValueError`` when it carries a label that the environment does not declare."""
    if not observation.labels:
        return observation
    words = environment.label_words() if isinstance(environment, Labelling) else {}
    for name, value in observation.labels.items():
        if not 0 <= value < len(words.get(name, ())):
            raise ValueError(
                f"label {name!r} = {value} is not declared by label_words() of {type(environment).__name__}"
            )
    return observation


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
