"""Task sources: in order, shuffled by epoch, and weighted by how often tasks succeed.

Invariants (``tests/rollout/test_sources.py`` asserts each for every source):

1. What follows depends on the state alone: after ``load_state_dict(s)`` the tasks come that came after ``s`` was taken.
2. ``draw(a)`` then ``draw(b)`` gives what ``draw(a + b)`` gives: how draws are cut changes nothing.
3. Sources are endless. Within one epoch no task comes twice; a draw that crosses epochs may hold one twice.
4. An empty task set, two tasks of one id, and a draw of more tasks than there are, are errors.
5. A state taken on other tasks or under another seed is refused.

Epoch e's order is keyed by (seed, e) alone, so that one integer, the position, is the whole state of the order.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

from megatron_ext.trajectory.task import Task


class TaskSetError(ValueError):
    """A task set that cannot feed a run; the message names sizes and the fix."""


def check_task_set(tasks: Sequence[Task], tasks_per_step: int = 1) -> None:
    """Raises ``TaskSetError`` on an empty set, a repeated id, or fewer tasks than one step takes."""
    if not tasks:
        raise TaskSetError("the task set is empty: check tasks.environment, the split, and tasks.train_tasks")
    if len({task.task_id for task in tasks}) != len(tasks):
        twice = Counter(task.task_id for task in tasks).most_common(1)[0][0]
        raise TaskSetError(f"two tasks have the id {twice!r}: ids must be unique")
    _check_count(len(tasks), tasks_per_step)


def _check_count(available: int, wanted: int) -> None:
    if available < wanted:
        raise TaskSetError(
            f"{wanted} tasks are wanted at once but the task set has {available}: raise tasks.train_tasks or lower "
            "batch.tasks_per_step"
        )


class _EpochSource:
    """Walks over endless epochs of the tasks; ``position`` counts the tasks passed since the beginning."""

    def __init__(self, tasks: Sequence[Task], seed: int, *, shuffled: bool) -> None:
        check_task_set(tasks)
        self._tasks = tuple(tasks)
        self._seed = seed
        self._shuffled = shuffled
        self._position = 0
        self._order_epoch = -1
        self._order: list[int] = []
        ids = "\n".join(task.task_id for task in self._tasks)
        self._fingerprint = hashlib.blake2b(f"{seed if shuffled else ''}\n{ids}".encode(), digest_size=8).hexdigest()

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def position(self) -> int:
        return self._position

    def draw(self, count: int) -> Sequence[Task]:
        """The next ``count`` tasks. Raises ``TaskSetError`` when there are fewer in the set."""
        if count < 0:
            raise ValueError(f"cannot draw {count} tasks")
        _check_count(len(self._tasks), count)
        drawn: list[Task] = []
        while len(drawn) < count:
            task = self._at(self._position)
            if self._takes(task, self._position):
                drawn.append(task)
            self._position += 1
        return drawn

    def report(self, task_id: str, success_rate: float, step: int) -> None:
        """Outcomes change nothing here."""

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises ``TaskSetError`` when the state belongs to other tasks or another seed."""
        if state["fingerprint"] != self._fingerprint:
            raise TaskSetError(
                "the saved position belongs to another task set or seed: restore the checkpoint's tasks.* and "
                "run.seed, or start a new run"
            )
        position = int(state["position"])
        if position < 0:
            raise TaskSetError(f"the saved position is {position}, below 0")
        self._position = position

    def _takes(self, task: Task, position: int) -> bool:
        return True

    def _at(self, position: int) -> Task:
        epoch, offset = divmod(position, len(self._tasks))
        if not self._shuffled:
            return self._tasks[offset]
        if epoch != self._order_epoch:
            self._order = list(range(len(self._tasks)))
            _random("order", self._seed, epoch).shuffle(self._order)
            self._order_epoch = epoch
        return self._tasks[self._order[offset]]


def _random(purpose: str, seed: int, number: int) -> Random:
    """A generator keyed by its arguments, equal in every process."""
    digest = hashlib.blake2b(f"{purpose}/{seed}/{number}".encode(), digest_size=16).digest()
    return Random(int.from_bytes(digest, "little"))


class SequentialTasks(_EpochSource):
    """The tasks in their given order, again and again. ``seed`` is taken as by all sources, and changes nothing."""

    def __init__(self, tasks: Sequence[Task], seed: int = 0) -> None:
        super().__init__(tasks, seed, shuffled=False)


class ShuffledTasks(_EpochSource):
    """Every task once an epoch, each epoch in an order of its own."""

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        super().__init__(tasks, seed, shuffled=True)


class WeightedTasks(_EpochSource):
    """Shuffled epochs thinned by success rate: an adaptive curriculum.

    Tasks not yet tried, and those whose running success rate lies within [``low``, ``high``], are always taken; the
    others, which groups of trajectories learn little from, are taken with probability ``outside``. The random number of
    a position is keyed by (seed, position), so position and running rates are the whole state.

    Args:
        low, high: the band of success rates, 0..1.
        outside: probability of taking a task outside the band, in (0, 1]; keeps rates from going stale.
        smoothing: weight of the newest outcome in the exponential moving average, in (0, 1].
    """

    def __init__(
        self,
        tasks: Sequence[Task],
        seed: int,
        low: float = 0.1,
        high: float = 0.9,
        outside: float = 0.2,
        smoothing: float = 0.5,
    ) -> None:
        super().__init__(tasks, seed, shuffled=True)
        if not 0 <= low <= high <= 1:
            raise ValueError(f"WeightedTasks: want 0 <= low <= high <= 1, got low {low}, high {high}")
        if not 0 < outside <= 1 or not 0 < smoothing <= 1:
            raise ValueError(f"WeightedTasks: outside ({outside}) and smoothing ({smoothing}) must be in (0, 1]")
        self._low, self._high, self._outside, self._smoothing = low, high, outside, smoothing
        self._known = frozenset(task.task_id for task in self._tasks)
        self._rates: dict[str, float] = {}

    def probability(self, task_id: str) -> float:
        """How likely the task is to be taken when its turn comes."""
        rate = self._rates.get(task_id)
        return 1.0 if rate is None or self._low <= rate <= self._high else self._outside

    def report(self, task_id: str, success_rate: float, step: int) -> None:
        """Updates the running rate of a task; ``success_rate`` is the mean success of its group, 0..1."""
        if task_id not in self._known:
            raise KeyError(f"WeightedTasks: outcome of an unknown task {task_id!r}")
        if not 0 <= success_rate <= 1:  # also refuses NaN
            raise ValueError(f"WeightedTasks: success rate of {task_id!r} must be in 0..1, got {success_rate}")
        before = self._rates.get(task_id)
        self._rates[task_id] = success_rate if before is None else before + self._smoothing * (success_rate - before)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "rates": dict(sorted(self._rates.items()))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        rates = {str(task_id): float(rate) for task_id, rate in state["rates"].items()}
        if not rates.keys() <= self._known or not all(math.isfinite(rate) for rate in rates.values()):
            raise TaskSetError("the saved success rates name tasks that are not in the set, or are not finite")
        self._rates = rates

    def _takes(self, task: Task, position: int) -> bool:
        probability = self.probability(task.task_id)
        return probability >= 1 or _random("take", self._seed, position).random() < probability
