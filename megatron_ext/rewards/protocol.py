"""Reward protocol: one named part of a trajectory's reward, from what the episode recorded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from megatron_ext.environments.protocol import Action, Observation
from megatron_ext.trajectory.record import Status
from megatron_ext.trajectory.task import Task


@dataclass(frozen=True)
class EpisodeStep:
    """One model turn: its text, the action parsed from it (None when malformed) and what the environment answered."""

    text: str
    action: Action | None
    observation: Observation


@dataclass(frozen=True)
class Episode:
    """A finished episode as text, for rewards and judges."""

    task: Task
    first: Observation
    steps: Sequence[EpisodeStep]
    status: Status

    @property
    def last(self) -> Observation:
        return self.steps[-1].observation if self.steps else self.first


class Reward(Protocol):
    """One part. Deterministic; a value that is not finite marks the trajectory REWARD_INVALID (masked and counted)."""

    def __call__(self, episode: Episode) -> float: ...
