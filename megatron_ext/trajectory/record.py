"""The record: groups > trajectories > sessions > segments > turns > tokens, as flat arrays with offsets.

Invariants (checked on construction; ``tests/trajectory/test_record.py`` asserts each):

1. Every level is a partition of the one below it: offsets start at 0, never fall, and end at its size. A session's
   parent is an earlier session of its trajectory, and what it returned is a span of that parent's tokens.
2. A turn is one contiguous span of tokens inside one segment; ``turn[t]`` is its index, or -1 off turn. Its number is
   unique in the trajectory and rises within a segment.
3. ``loss_mask[t]`` implies that token t was sampled (``version[t] >= 0``) in a turn whose role is ``MODEL``.
4. Versions never fall inside a turn (a partial rollout may resume under newer weights, never under older ones).
5. ``rollout_logp`` is finite and <= 0 where a token was sampled, and exactly 0 elsewhere.
6. ``routed[t]`` belongs to the forward of token t and is read only where ``routed_valid[t]``; both or neither are
   given.
7. Ids that were sampled are the ids that are trained: nothing here re-tokenises.
8. A frozen batch never changes: its arrays are read-only. A value that its column cannot hold exactly is refused, not
   cut to fit (floats are rounded to float32).

A session that is rewritten or forked starts a new segment. Tokens that the new segment repeats from an older one
carry mask 0 and turn -1: a model token belongs to exactly one turn.

A COMPRESS session repeats the session that it compresses, its parent, and ends in the summary; the next session of the
trajectory, of the parent's kind and with the parent's own parent, goes on from there. A SUBAGENT session's parent is
the session that spawned it; where it was compressed, the last of its sessions holds what it returned.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from megatron_ext.trajectory.fields import (
    ARRAY_FIELDS,
    DTYPES,
    MAP_DTYPES,
    MAP_FIELDS,
    Array,
    Field,
    RecordError,
    Role,
    SessionKind,
    Status,
    frozen,
)
from megatron_ext.trajectory.ragged import Ragged
from megatron_ext.trajectory.validation import validate

__all__ = [
    "ARRAY_FIELDS",
    "Array",
    "Field",
    "Ragged",
    "RecordError",
    "Role",
    "SessionKind",
    "Status",
    "TrajectoryBatch",
    "TrajectoryView",
    "equal",
    "owners",
]


@dataclass(frozen=True, eq=False)
class TrajectoryBatch:
    """Trajectories of whole groups. T tokens, N turns, S segments, Q sessions, J trajectories, G groups.

    Tokens: ``ids`` int32 [T]; ``loss_mask`` bool [T]; ``turn`` int32 [T]; ``field`` int8 [T];
    ``rollout_logp`` float32 [T], nats, log p(ids[t] | ids before t) of the sampling distribution at its temperature;
    ``version`` int64 [T], packed policy version; ``weight`` float32 [T], multiplies the token's loss;
    ``routed`` uint8/uint16/uint32 [T, L, k] or None, expert ids per MoE layer; ``routed_valid`` bool [T].

    Turns: ``turn_role`` [N]; ``turn_start``/``turn_end`` int64 [N], token span; ``turn_number`` int32 [N], counted over
    the whole trajectory across its sessions; ``turn_state_key``/``turn_action_key`` int64 [N], 0 where unknown: hash of
    the environment state before the action, and of the canonical action; ``turn_reward`` float32 [N];
    ``turn_labels`` name -> int16 [N], -1 where unlabelled.

    Offsets: ``segment_tokens`` [S+1], ``segment_turns`` [S+1], ``session_segments`` [Q+1], ``trajectory_sessions``
    [J+1], ``group_trajectories`` [G+1].

    Sessions: ``session_kind`` int8 [Q]; ``session_parent`` int32 [Q], index of the spawning session or -1;
    ``session_return`` int64 [Q, 2], token span in the parent where its result appears, or (-1, -1).

    Trajectories: ``trajectory_id`` [J]; ``sample`` int32 [J], number within the group; ``reward`` float32 [J];
    ``reward_parts`` name -> float32 [J], NaN where the part has no value (the reward holds what its group makes of
    that, ``rewards/missing.py``); ``success`` bool [J]; ``status`` int8 [J]; ``harness`` [J]; ``prepared``
    name -> ``Ragged`` of J rows, ids that the harness tokenised for scoring (credit edits make their requests of them)
    and that were never part of a dialogue; an empty row where it prepared nothing.

    Groups: ``group_id`` [G]; ``task_id`` [G].
    """

    ids: Array
    loss_mask: Array
    turn: Array
    field: Array
    rollout_logp: Array
    version: Array
    weight: Array
    turn_role: Array
    turn_start: Array
    turn_end: Array
    turn_number: Array
    turn_state_key: Array
    turn_action_key: Array
    turn_reward: Array
    segment_tokens: Array
    segment_turns: Array
    session_segments: Array
    trajectory_sessions: Array
    group_trajectories: Array
    session_kind: Array
    session_parent: Array
    session_return: Array
    trajectory_id: tuple[str, ...]
    sample: Array
    reward: Array
    success: Array
    status: Array
    harness: tuple[str, ...]
    group_id: tuple[str, ...]
    task_id: tuple[str, ...]
    reward_parts: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    turn_labels: Mapping[str, Array] = dataclasses.field(default_factory=dict)
    prepared: Mapping[str, Ragged] = dataclasses.field(default_factory=dict)
    routed: Array | None = None
    routed_valid: Array | None = None

    def __post_init__(self) -> None:
        self._freeze()
        validate(self)

    @classmethod
    def part(cls, **values: Any) -> TrajectoryBatch:
        """A batch that is not validated yet: a piece of one that will be, as a whole, when it is complete."""
        batch = object.__new__(cls)
        for item in dataclasses.fields(cls):
            value = values.pop(item.name, None)
            object.__setattr__(batch, item.name, {} if value is None and item.name in MAP_FIELDS else value)
        if values:
            raise TypeError(f"TrajectoryBatch has no field {next(iter(values))!r}")
        batch._freeze()
        return batch

    def _freeze(self) -> None:
        for name in ARRAY_FIELDS:
            value = getattr(self, name)
            if value is None:
                continue
            object.__setattr__(self, name, frozen(name, value, DTYPES.get(name)))
        for name, dtype in MAP_DTYPES.items():
            values = {key: frozen(f"{name}/{key}", value, dtype) for key, value in getattr(self, name).items()}
            object.__setattr__(self, name, values)
        object.__setattr__(self, "prepared", dict(self.prepared))

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Unpickling gives writeable arrays: freeze them again, so that invariant 8 survives a process boundary."""
        for name, value in state.items():
            for array in value.values() if isinstance(value, dict) else (value,):
                if isinstance(array, np.ndarray):
                    array.flags.writeable = False
            object.__setattr__(self, name, value)

    # -- sizes -----------------------------------------------------------------------------------------------------
    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def num_turns(self) -> int:
        return len(self.turn_role)

    @property
    def num_segments(self) -> int:
        return len(self.segment_tokens) - 1

    @property
    def num_sessions(self) -> int:
        return len(self.session_segments) - 1

    @property
    def num_trajectories(self) -> int:
        return len(self.trajectory_sessions) - 1

    @property
    def num_groups(self) -> int:
        return len(self.group_trajectories) - 1

    # -- keys: for each element of one level, the index of its owner at another -----------------------------------
    def segment_session(self) -> Array:
        return owners(self.session_segments)

    def session_trajectory(self) -> Array:
        return owners(self.trajectory_sessions)

    def segment_trajectory(self) -> Array:
        return self.session_trajectory()[self.segment_session()]

    def trajectory_group(self) -> Array:
        return owners(self.group_trajectories)

    def token_segment(self) -> Array:
        return owners(self.segment_tokens)

    def token_trajectory(self) -> Array:
        return self.segment_trajectory()[self.token_segment()]

    def turn_segment(self) -> Array:
        return owners(self.segment_turns)

    def turn_trajectory(self) -> Array:
        return self.segment_trajectory()[self.turn_segment()]

    def trajectory_tokens(self) -> Array:
        """Token offsets of the trajectories, int64 [J+1]."""
        return self.segment_tokens[self.session_segments[self.trajectory_sessions]]

    def trainable(self) -> Array:
        """bool [J]: trajectories whose end says something about the policy."""
        return self.status < int(Status.ENV_ERROR)

    # -- views -----------------------------------------------------------------------------------------------------
    def trajectory(self, index: int) -> TrajectoryView:
        if not 0 <= index < self.num_trajectories:
            raise IndexError(f"trajectory {index} of a batch that holds {self.num_trajectories}")
        return TrajectoryView(self, index)

    def trajectories(self) -> Iterator[TrajectoryView]:
        return (TrajectoryView(self, j) for j in range(self.num_trajectories))

    def with_rewards(self, reward: Array) -> TrajectoryBatch:
        """The same batch with other trajectory rewards (``reward`` float32 [J])."""
        return replace(self, reward=reward)


@dataclass(frozen=True)
class TrajectoryView:
    """One trajectory of a batch; holds no data of its own."""

    batch: TrajectoryBatch
    index: int

    @property
    def trajectory_id(self) -> str:
        return self.batch.trajectory_id[self.index]

    @property
    def status(self) -> Status:
        return Status(int(self.batch.status[self.index]))

    @property
    def reward(self) -> float:
        return float(self.batch.reward[self.index])

    @property
    def tokens(self) -> slice:
        offsets = self.batch.trajectory_tokens()
        return slice(int(offsets[self.index]), int(offsets[self.index + 1]))

    @property
    def segments(self) -> range:
        b = self.batch
        first, last = b.trajectory_sessions[self.index], b.trajectory_sessions[self.index + 1]
        return range(int(b.session_segments[first]), int(b.session_segments[last]))

    @property
    def turns(self) -> range:
        segments = self.segments
        offsets = self.batch.segment_turns
        return range(int(offsets[segments.start]), int(offsets[segments.stop]))

    @property
    def num_model_turns(self) -> int:
        turns = self.turns
        return int(np.count_nonzero(self.batch.turn_role[turns.start : turns.stop] == Role.MODEL))


def owners(offsets: Array) -> Array:
    """For each element of a partition given by its offsets, the index of the part that holds it."""
    return np.repeat(np.arange(len(offsets) - 1, dtype=np.int64), np.diff(offsets))


def _same_bits(x: Array, y: Array) -> bool:
    """Bitwise equality: NaN equals itself, 0.0 and -0.0 differ."""
    if x.dtype != y.dtype or x.shape != y.shape:
        return False
    return np.array_equal(x.reshape(-1).view(np.uint8), y.reshape(-1).view(np.uint8))


def _same(x: Array | Ragged, y: Array | Ragged) -> bool:
    if isinstance(x, Ragged) or isinstance(y, Ragged):
        return isinstance(x, Ragged) and isinstance(y, Ragged) and x.same(y)
    return _same_bits(x, y)


def equal(a: TrajectoryBatch, b: TrajectoryBatch) -> bool:
    """Exact equality of every field, bit for bit."""
    for item in fields(TrajectoryBatch):
        x, y = getattr(a, item.name), getattr(b, item.name)
        if isinstance(x, Mapping):
            if set(x) != set(y) or any(not _same(x[k], y[k]) for k in x):
                return False
        elif isinstance(x, np.ndarray) and isinstance(y, np.ndarray):
            if not _same_bits(x, y):
                return False
        elif x is not y and x != y:
            return False
    return True
