"""Reward protocol: one named part of a trajectory's reward, from what the episode recorded.

A part answers with a number, or with a ``RewardValue`` when it also labels turns, counts what it did, or has no value.
Three ends are told apart: a value; no value (``missing``: a judge did not answer), which is left out and made neutral
inside the group; and a part that is broken (it raises, or its value is not finite), which makes the trajectory
REWARD_INVALID.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from megatron_ext.environments.protocol import Action, Observation
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task


@dataclass(frozen=True)
class EpisodeStep:
    """One model turn: its text, the action parsed from it (None when malformed) and what the environment answered.

    ``turn`` is the turn's number in the record (-1: not recorded); ``state`` the hash of the environment's state after
    the action ("" where it is not known).
    """

    text: str
    action: Action | None
    observation: Observation
    turn: int = -1
    state: str = ""


@dataclass(frozen=True)
class Episode:
    """A finished episode as text, for rewards and judges. ``first_state``: hash of the state that it began in."""

    task: Task
    first: Observation
    steps: Sequence[EpisodeStep]
    status: Status
    first_state: str = ""

    @property
    def last(self) -> Observation:
        return self.steps[-1].observation if self.steps else self.first


@dataclass(frozen=True)
class RewardValue:
    """What a part has to say about an episode.

    Attributes:
        value: the part's value before its weight; not read when ``missing``.
        labels: name -> one whole number for each of ``episode.steps``, -1 where a step has none; they become the
            record's ``turn_labels``. Labels of a missing part are kept. The part declares their names
            (``LabellingReward``).
        missing: the part has no value for this episode.
        why: why it is missing, in one line.
        counts: metric name -> what this episode adds to it (``judge/calls``).
    """

    value: float = 0.0
    labels: Mapping[str, Sequence[int]] = field(default_factory=dict)
    missing: bool = False
    why: str = ""
    counts: Mapping[str, float] = field(default_factory=dict)


class Reward(Protocol):
    """One part. Deterministic; a value that is not finite marks the trajectory REWARD_INVALID (masked and counted)."""

    def __call__(self, episode: Episode) -> float | RewardValue: ...


@runtime_checkable
class LabellingReward(Protocol):
    """A part that labels turns, and says so before any episode is played."""

    @property
    def written_labels(self) -> frozenset[str]:
        """Names of the labels that its answers may hold; an answer with another one is broken."""

    def __call__(self, episode: Episode) -> float | RewardValue: ...


def written_labels(reward: Reward) -> frozenset[str]:
    """Names of the turn labels that a part writes."""
    return reward.written_labels if isinstance(reward, LabellingReward) else frozenset()


@runtime_checkable
class SlowReward(Protocol):
    """A part that waits for something outside (a judge behind an address), so that it runs beside the episodes.

    ``start`` returns at once. Its future is done within ``deadline_s`` seconds; one that is later counts as missing.
    """

    @property
    def deadline_s(self) -> float: ...

    def __call__(self, episode: Episode) -> float | RewardValue: ...

    def start(self, episode: Episode) -> Future[RewardValue]: ...

    def close(self) -> None: ...
