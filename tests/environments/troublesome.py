"""Environments that misbehave on command, for the tests of the pool."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any

from megatron_ext.environments.protocol import Action, EnvironmentEnded, Observation, ToolSpec, stable_hash
from megatron_ext.trajectory.task import Task


class Troublesome:
    """Counts its steps. ``hang``, ``raise``, ``die`` and ``exit`` do what they say; anything else counts."""

    built = 0

    def __init__(
        self, steps: int = 100, build_s: float = 0.0, forgetful: bool = False, scripted: str = "count"
    ) -> None:
        time.sleep(build_s)
        Troublesome.built += 1
        self._instance = Troublesome.built
        self._arguments = (steps, 0.0, forgetful, scripted)
        self._steps, self._forgetful, self._scripted = steps, forgetful, scripted
        self._seed = self._count = 0

    def reset(self, seed: int, *, split: str = "train", data: Mapping[str, Any] | None = None) -> Observation:
        if data is not None and "on_reset" in data:
            self._trouble(data["on_reset"])
        self._seed, self._count = seed, 0
        return Observation(f"seed {seed} count 0", info={"instance": self._instance})

    def step(self, action: Action) -> Observation:
        if self._count >= self._steps:
            raise EnvironmentEnded("over")
        self._trouble(str(action))
        self._count += 1
        done = self._count >= self._steps
        return Observation(f"seed {self._seed} count {self._count}", done=done, success=done, score=float(done))

    def _trouble(self, action: str) -> None:
        if action == "hang":
            time.sleep(3600)
        if action == "raise":
            raise RuntimeError("this went wrong\nand this is the second line")
        if action == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if action == "exit":
            os._exit(3)

    def copy(self) -> Troublesome:
        twin = Troublesome(*self._arguments)
        twin._seed, twin._count = self._seed, self._count
        return twin

    def state_hash(self) -> str:
        salt = str(os.getpid()) if self._forgetful else ""
        return stable_hash(str(self._seed), str(self._count), salt)

    def tools(self) -> Sequence[ToolSpec]:
        return ()

    def tasks(self, split: str, count: int, *, start: int = 0) -> Sequence[Task]:
        return [Task(f"troublesome/{split}/{i}", "troublesome", i, split) for i in range(start, start + count)]

    def close(self) -> None: ...

    def expert_action(self, rng: Random, mistake_rate: float) -> str:
        return self._scripted if rng.random() >= mistake_rate else "mistake"

    def corpus(self, split: str, count: int) -> Iterator[str]:
        return iter(["count"] * count)
