"""Task source protocol (curriculum): which task comes next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megatron_ext.trajectory.task import Task


class TaskSource(Protocol):
    """A stream of tasks whose whole state is in ``state_dict``.

    ``draw`` is deterministic given the state: after ``load_state_dict(s)`` the same tasks follow that followed when
    ``s`` was taken. ``report`` feeds outcomes back to sources that adapt. The contract test restores at every position.
    """

    def draw(self, count: int) -> Sequence[Task]:
        """The next ``count`` tasks. An endless source starts a new, reshuffled epoch when it runs out."""

    def report(self, task_id: str, success_rate: float, step: int) -> None:
        """Outcome of a finished group (mean success, 0..1)."""

    def __len__(self) -> int:
        """Number of distinct tasks."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
