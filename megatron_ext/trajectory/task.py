"""Task: one prompt or environment seed with its data. The unit that a group of trajectories is compared on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Task:
    """One task.

    Attributes:
        task_id: unique and stable across runs, e.g. ``"peckingorder/train/17"``.
        environment: key of the configured environment that plays it.
        seed: the environment's seed.
        split: ``train``, ``dev`` or ``test``.
        data: what the environment needs beyond the seed; JSON types only, so that it can be journalled.
    """

    task_id: str
    environment: str
    seed: int
    split: str
    data: Mapping[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        return {
            "task_id": self.task_id,
            "environment": self.environment,
            "seed": self.seed,
            "split": self.split,
            "data": dict(self.data),
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Task:
        return Task(value["task_id"], value["environment"], int(value["seed"]), value["split"], dict(value["data"]))
