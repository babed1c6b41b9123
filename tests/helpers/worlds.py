"""A walk: an environment small enough to know every answer of, that misbehaves on command."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolSpec, stable_hash
from megatron_ext.rewards.protocol import Episode
from megatron_ext.trajectory.task import Task

WALK = {"_target_": "tests.helpers.worlds.Walk"}


class Walk:
    """``go`` takes one of ``length`` steps, the last one succeeds; ``stop`` ends in failure; ``talk N`` is answered by
    N words; ``nan`` earns a step reward of NaN; ``hang``, ``raise`` and ``die`` do what they say. Everything else is
    not understood. ``data['on_reset']`` is done on reset."""

    def __init__(self, length: int = 3) -> None:
        if length < 1:
            raise ValueError(f"walk.length must be >= 1, got {length}")
        self._length = length
        self._seed = self._at = 0
        self._done = False

    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        self._seed, self._at, self._done = seed, 0, False
        said = dict(data or {}).get("on_reset", "")
        self._trouble(said)
        return Observation(
            " ".join(["word"] * int(said.split()[1])) if said.startswith("talk") else f"walk {seed} at 0"
        )

    def step(self, action: Action) -> Observation:
        if self._done:
            raise EnvironmentEnded("walk: over")
        said = str(action)
        self._trouble(said)
        if said.startswith("talk "):
            return Observation(" ".join(["word"] * int(said.split()[1])))
        if said not in ("go", "stop", "nan"):
            return Observation("what?", valid=False)
        self._at += said == "go"
        won = self._at >= self._length
        self._done = won or said == "stop"
        reward = float("nan") if said == "nan" else 0.125
        return Observation(f"at {self._at}", reward=reward, done=self._done, success=won, score=self._at / self._length)

    def _trouble(self, said: str) -> None:
        if said == "hang":
            time.sleep(3600)
        if said == "raise":
            raise RuntimeError("the walk broke down")
        if said == "die":
            os.kill(os.getpid(), signal.SIGKILL)

    def copy(self) -> Walk:
        twin = Walk(self._length)
        twin._seed, twin._at, twin._done = self._seed, self._at, self._done
        return twin

    def state_hash(self) -> str:
        return stable_hash("walk", str(self._seed), str(self._at), str(self._done))

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        return [Task(f"walk/{split}/{i}", "walk", i, split) for i in range(start, start + count)]

    def close(self) -> None: ...

    def expert_action(self, rng: Random, mistake_rate: float) -> str:
        return "stop" if rng.random() < mistake_rate else "go"

    def corpus(self, split: str, count: int) -> Iterator[str]:
        return iter(["walk 0 at 0", "go", "stop", "at 1", "what?", "word word word", "talk 5", "hang raise die nan"])


class NotANumber:
    """A reward that is NaN for tasks of an odd seed, and 1 for the others."""

    def __call__(self, episode: Episode) -> float:
        return float("nan") if episode.task.seed % 2 else 1.0


class Raising:
    """A reward that fails."""

    def __call__(self, episode: Episode) -> float:
        raise ZeroDivisionError("reward by zero")
