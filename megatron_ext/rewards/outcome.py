"""Reward parts read off an episode's outcome and its steps.

Penalties are counts <= 0 of what is unwanted; the weight in the configuration says what one of them costs.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.rewards.protocol import Episode


@dataclass(frozen=True)
class Success:
    """1 if the episode ended in success, else 0."""

    def __call__(self, episode: Episode) -> float:
        return 1.0 if episode.last.success else 0.0


@dataclass(frozen=True)
class Score:
    """The task progress at the end, 0..1 by the environment protocol."""

    def __call__(self, episode: Episode) -> float:
        return float(episode.last.score)


@dataclass(frozen=True)
class StepRewardSum:
    """Sum of the environment's step rewards, each times ``discount`` to the number of turns before it."""

    discount: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.discount <= 1:
            raise ValueError(f"StepRewardSum: discount must be in 0..1, got {self.discount}")

    def __call__(self, episode: Episode) -> float:
        return float(sum(step.observation.reward * self.discount**t for t, step in enumerate(episode.steps)))


@dataclass(frozen=True)
class MalformedPenalty:
    """Minus the number of turns that held no action (and, with ``count_refused``, of actions that the environment did
    not understand)."""

    count_refused: bool = False

    def __call__(self, episode: Episode) -> float:
        bad = sum(step.action is None or (self.count_refused and not step.observation.valid) for step in episode.steps)
        return -float(bad)


@dataclass(frozen=True)
class TurnPenalty:
    """Minus the number of model turns beyond ``free``."""

    free: int = 0

    def __post_init__(self) -> None:
        if self.free < 0:
            raise ValueError(f"TurnPenalty: free must be >= 0, got {self.free}")

    def __call__(self, episode: Episode) -> float:
        return -float(max(0, len(episode.steps) - self.free))
