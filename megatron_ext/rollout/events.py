"""What can happen to a group: the events that the coordinator decides, the journal keeps and a replay applies.

Invariants (``tests/rollout/test_coordinator.py`` asserts each):

1. An event is frozen and holds JSON values only: ``from_json(to_json(e)) == e``.
2. Applying an event needs nothing else: no clock, no disk, no random numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar

import numpy as np

from megatron_ext.trajectory.record import Role, Status, TrajectoryBatch
from megatron_ext.trajectory.task import Task
from megatron_ext.trajectory.version import UNSAMPLED


@dataclass(frozen=True)
class GroupMeta:
    """What a step agreement needs of a finished group; one entry a trajectory, tokens stay in the store.

    ``ref`` names the data in the store; ``tokens`` all tokens, ``trained_tokens`` those of the loss mask, ``turns``
    model turns; ``status`` values of ``Status``; ``min_version``/``max_version`` packed policy versions over all
    sampled tokens, -1 when nothing was sampled.
    """

    group_id: str
    ref: str
    tokens: tuple[int, ...]
    trained_tokens: tuple[int, ...]
    turns: tuple[int, ...]
    rewards: tuple[float, ...]
    success: tuple[bool, ...]
    status: tuple[int, ...]
    min_version: int
    max_version: int

    def __post_init__(self) -> None:
        count = len(self.tokens)
        for name in ("trained_tokens", "turns", "rewards", "success", "status"):
            if len(getattr(self, name)) != count:
                raise ValueError(
                    f"group {self.group_id}: {name} has {len(getattr(self, name))} entries, tokens {count}"
                )

    @property
    def trainable(self) -> tuple[bool, ...]:
        """Trajectories with a trained token whose end says something about the policy."""
        return tuple(
            n > 0 and Status(status).trainable for n, status in zip(self.trained_tokens, self.status, strict=True)
        )

    @property
    def total_tokens(self) -> int:
        return sum(self.tokens)

    @staticmethod
    def from_batch(batch: TrajectoryBatch, ref: str, group: int = 0) -> GroupMeta:
        """Metadata of group ``group`` of a batch that was stored as ``ref``."""
        first, last = int(batch.group_trajectories[group]), int(batch.group_trajectories[group + 1])
        offsets = batch.trajectory_tokens()[first : last + 1]
        trained = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
        model = (batch.turn_role == Role.MODEL).astype(np.int64)
        turns = np.bincount(batch.turn_trajectory(), weights=model, minlength=batch.num_trajectories).astype(np.int64)
        versions = batch.version[offsets[0] : offsets[-1]]
        versions = versions[versions > UNSAMPLED]
        return GroupMeta(
            group_id=batch.group_id[group],
            ref=ref,
            tokens=tuple(np.diff(offsets).tolist()),
            trained_tokens=tuple(np.diff(trained[offsets]).tolist()),
            turns=tuple(turns[first:last].tolist()),
            rewards=tuple(batch.reward[first:last].tolist()),
            success=tuple(batch.success[first:last].tolist()),
            status=tuple(batch.status[first:last].tolist()),
            min_version=int(versions.min()) if len(versions) else UNSAMPLED,
            max_version=int(versions.max()) if len(versions) else UNSAMPLED,
        )


@dataclass(frozen=True)
class Event:
    """One change of the coordinator's state."""

    tag: ClassVar[str]


@dataclass(frozen=True)
class Opened(Event):
    """A process opened the run, going on from the checkpoint of ``step`` (0: from the start) as ``incarnation``. All
    leases end; what was consumed after ``step`` is undone; the groups in ``lost`` have no data any more."""

    tag = "open"
    incarnation: int
    step: int
    lost: tuple[str, ...] = ()


@dataclass(frozen=True)
class Added(Event):
    """Tasks drawn from the source, each a new group of ``samples`` trajectories."""

    tag = "add"
    groups: tuple[str, ...]
    tasks: tuple[Task, ...]
    samples: int


@dataclass(frozen=True)
class Leased(Event):
    tag = "lease"
    group: str
    lease: str
    driver: str
    deadline: float


@dataclass(frozen=True)
class Renewed(Event):
    tag = "renew"
    group: str
    lease: str
    deadline: float


@dataclass(frozen=True)
class Returned(Event):
    """A lease ended without a result; the group is queued again."""

    tag = "return"
    group: str
    lease: str
    reason: str


@dataclass(frozen=True)
class Finished(Event):
    tag = "finish"
    group: str
    lease: str
    meta: GroupMeta


@dataclass(frozen=True)
class Refused(Event):
    """A result that came for a lease that had ended; only counted."""

    tag = "refuse"
    group: str
    lease: str


@dataclass(frozen=True)
class Consumed(Event):
    """Step ``step`` took these groups for training, in this order, and dropped the filtered (group, reason) pairs."""

    tag = "consume"
    step: int
    groups: tuple[str, ...]
    filtered: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Checkpointed(Event):
    """The checkpoint of ``step`` is durable."""

    tag = "checkpoint"
    step: int


_KINDS: dict[str, type[Event]] = {
    kind.tag: kind for kind in (Opened, Added, Leased, Renewed, Returned, Finished, Refused, Consumed, Checkpointed)
}


def to_json(event: Event) -> dict[str, Any]:
    """``{"event": tag, ...}``, JSON types only."""
    values: dict[str, Any] = {"event": event.tag} | {item.name: getattr(event, item.name) for item in fields(event)}
    if isinstance(event, Added):
        values["tasks"] = [task.to_json() for task in event.tasks]
    if isinstance(event, Finished):
        values["meta"] = asdict(event.meta)
    return values


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value


def from_json(value: Mapping[str, Any]) -> Event:
    """The event of one journal line; raises ``ValueError`` on an unknown tag or fields that do not fit."""
    kind = _KINDS.get(value.get("event", ""))
    if kind is None:
        raise ValueError(f"unknown event {value.get('event')!r}")
    values = {key: item for key, item in value.items() if key not in ("event", "seq")}
    expected = {item.name for item in fields(kind)}
    if set(values) != expected:
        raise ValueError(f"event {kind.tag!r} has fields {sorted(values)}, expected {sorted(expected)}")
    if kind is Added:
        values["tasks"] = [Task.from_json(task) for task in values["tasks"]]
    if kind is Finished:
        values["meta"] = GroupMeta(**{key: _tuples(item) for key, item in values["meta"].items()})
    return kind(**{key: _tuples(item) for key, item in values.items()})
