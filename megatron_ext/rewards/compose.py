"""The reward of a trajectory: a weighted, capped sum of named parts.

Invariants (``tests/rewards/test_compose.py`` asserts each):

1. ``total`` is the sum of ``parts``, and ``parts[name]`` is weight x value, clamped to [-cap, cap].
2. A part that raises, or whose value is not a finite number, makes the whole result invalid: ``total`` is NaN and
   ``problem`` names the part. An invalid reward is never 0 by accident.
3. Parts see the same episode and are summed in a fixed order, whatever order the configuration was written in.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.rewards.protocol import Episode, Reward

PLUG_KEYS = ("order", "weight", "cap")


@dataclass(frozen=True)
class RewardPart:
    """``weight`` x reward, clamped to [-``cap``, ``cap``] (infinite = not clamped)."""

    name: str
    reward: Reward
    weight: float = 1.0
    cap: float = math.inf


@dataclass(frozen=True)
class RewardResult:
    """``total`` and ``parts`` (contributions that add up to it). Invalid: ``total`` and the failed parts are NaN, and
    the trajectory's status must become ``REWARD_INVALID``."""

    total: float
    parts: dict[str, float] = field(default_factory=dict)
    valid: bool = True
    problem: str = ""


class RewardSet:
    """All parts of the configured reward."""

    def __init__(self, parts: Sequence[RewardPart]) -> None:
        """Raises ``ValueError`` on no parts, two of one name, a weight that is not finite or a cap that is not > 0."""
        if not parts:
            raise ValueError("rewards: there is no part, so every reward would be 0; configure at least one")
        names = [part.name for part in parts]
        for part in parts:
            if names.count(part.name) > 1:
                raise ValueError(f"rewards: two parts are named {part.name!r}")
            if not math.isfinite(part.weight):
                raise ValueError(f"rewards.{part.name}.weight must be finite, got {part.weight}")
            if not part.cap > 0:
                raise ValueError(f"rewards.{part.name}.cap must be > 0, got {part.cap}")
        self.parts = tuple(parts)

    @staticmethod
    def from_config(nodes: Mapping[str, Any], where: str = "rewards") -> RewardSet:
        """From ``name -> {_target_, weight = 1, cap = null, order = 0, ...}``; null entries are left out."""
        return RewardSet(
            [
                RewardPart(
                    name,
                    instantiate(node, skip=PLUG_KEYS, where=f"{where}.{name}"),
                    _number(node, "weight", 1.0, f"{where}.{name}"),
                    _number(node, "cap", math.inf, f"{where}.{name}"),
                )
                for name, node in ordered(nodes, where)
            ]
        )

    def __call__(self, episode: Episode) -> RewardResult:
        parts: dict[str, float] = {}
        problems: list[str] = []
        for part in self.parts:
            value, problem = _evaluate(part, episode)
            if problem:
                problems.append(f"reward {part.name!r} of task {episode.task.task_id!r} {problem}")
            parts[part.name] = max(-part.cap, min(part.cap, part.weight * value)) if not problem else math.nan
        total = math.fsum(parts.values()) if not problems else math.nan
        return RewardResult(total, parts, not problems, "; ".join(problems))


def _evaluate(part: RewardPart, episode: Episode) -> tuple[float, str]:
    """Value and what is wrong with it. Whatever a user's reward raises is reported, never hidden and never fatal: one
    bad episode must not end a run."""
    try:
        value = part.reward(episode)
    except Exception as error:
        return math.nan, f"raised {type(error).__name__}: {error}{_place(error)}"
    if not isinstance(value, Real):
        return math.nan, f"returned {type(value).__name__}, not a number"
    try:
        number = float(value)
    except OverflowError:
        return math.nan, "is too large for a float"
    if not math.isfinite(number) or not math.isfinite(part.weight * number):
        return math.nan, f"is {number}, not finite"
    return number, ""


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""


def _number(node: Mapping[str, Any], key: str, default: float, where: str) -> float:
    value = node.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError(f"{where}.{key}: expected a number, got {value!r}")
    return float(value)
