"""A batch as an Arrow table and back: one row a trajectory, everything a token, turn or session has as list columns.

Invariants (``tests/trajectory/test_columns.py`` asserts each):

1. ``from_arrow(*to_arrow(batch))`` is the batch, bit for bit, dtypes included.
2. A row stands alone: its turn, token and session indices count from the start of its trajectory.
3. Arrays go both ways without a copy, but for those indices (and routing that fits a smaller type).
4. Routing is kept in the smallest unsigned type that holds its expert ids.

Columns: ``group_id``, ``task_id``, ``trajectory_id``, ``harness`` (text); ``sample``, ``reward``, ``success``,
``status``; ``reward_parts/NAME``; ``prepared/NAME`` (a list of ids).
Lists over tokens: ``ids``, ``loss_mask``, ``turn``, ``field``, ``rollout_logp``, ``version``, ``weight`` and, where
recorded, ``routed`` ([L][k] a token) and ``routed_valid``. Masks are one byte a token (Arrow's bool8), so that they are
read in place.
Lists over turns: ``turn_*``, ``turn_labels/NAME``. Over segments: ``segment_tokens`` and ``segment_turns``, how many
each holds. Over sessions: ``session_kind``, ``session_parent``, ``session_return`` and ``session_segments``, how many
each holds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa

from megatron_ext.trajectory.fields import (
    ROUTED_DTYPES,
    SESSION_DTYPES,
    TOKEN_DTYPES,
    TRAJECTORY_DTYPES,
    TURN_DTYPES,
    Array,
    RecordError,
)
from megatron_ext.trajectory.ragged import Ragged
from megatron_ext.trajectory.record import TrajectoryBatch

V = TypeVar("V")

_COUNTS = {"segment_tokens": "segment", "segment_turns": "segment", "session_segments": "session"}
_RELATIVE = {
    **{"turn": "turn", "turn_start": "token", "turn_end": "token"},
    **{"session_parent": "session", "session_return": "token"},
}


@dataclass(frozen=True)
class Groups:
    """What rows of trajectories cannot say: the groups in order, empty ones too, and the record's routing dtype."""

    group_id: tuple[str, ...]
    task_id: tuple[str, ...]
    trajectories: tuple[int, ...]
    routed: str | None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Groups:
        return cls(tuple(values["group_id"]), tuple(values["task_id"]), tuple(values["trajectories"]), values["routed"])


def _starts(batch: TrajectoryBatch) -> dict[str, Array]:
    """Offsets of the trajectories, int64 [J+1], at each level below them."""
    segment = batch.session_segments[batch.trajectory_sessions]
    return {
        "session": batch.trajectory_sessions,
        "segment": segment,
        "turn": batch.segment_turns[segment],
        "token": batch.segment_tokens[segment],
    }


def _moved(values: Array, spans: Array, base: Array, sign: int) -> Array:
    """``values`` of the elements between ``spans``, each plus ``sign * base`` of its trajectory; -1 stays -1."""
    if not np.any(base[:-1]):
        return values
    shift = np.repeat((sign * base[:-1]).astype(values.dtype), np.diff(spans))
    return np.where(values >= 0, values + shift.reshape(-1, *[1] * (values.ndim - 1)), values)


# -- to Arrow -------------------------------------------------------------------------------------------------------
def _flat(values: Array) -> pa.Array:
    """A column of an array's rows: numbers, or nested lists of fixed size."""
    flat = pa.array(values.reshape(-1).view(np.int8) if values.dtype == np.bool_ else values.reshape(-1))
    if values.dtype == np.bool_:
        flat = pa.ExtensionArray.from_storage(pa.bool8(), flat)
    for size in reversed(values.shape[1:]):
        flat = pa.FixedSizeListArray.from_arrays(flat, size)
    return flat


def _text(name: str, values: Sequence[str]) -> pa.Array:
    try:
        return pa.array(values, type=pa.string())
    except UnicodeEncodeError as error:
        raise RecordError(f"{name}: {error.object!r} is no valid text and cannot be stored") from error


def _smallest(routed: Array) -> Array:
    top = int(routed.max(initial=0)) if routed.dtype.itemsize > 1 else 0
    return routed.astype(next(d for d in ROUTED_DTYPES if d == routed.dtype or top <= np.iinfo(d).max), copy=False)


def to_arrow(batch: TrajectoryBatch) -> tuple[pa.RecordBatch, Groups]:
    """The rows of a batch, and what they cannot say. The rows share the batch's memory."""
    starts = _starts(batch)
    columns: dict[str, pa.Array] = {}

    def add(level: str, name: str, values: Array) -> None:
        if name in _COUNTS:
            values = np.diff(values)
        elif name in _RELATIVE:
            values = _moved(values, starts[level], starts[_RELATIVE[name]], -1)
        columns[name] = pa.LargeListArray.from_arrays(pa.array(starts[level]), _flat(values))

    members = np.diff(batch.group_trajectories)
    for name in ("group_id", "task_id"):
        columns[name] = _text(name, np.repeat(np.array(getattr(batch, name), dtype=object), members).tolist())
    for name in ("trajectory_id", "harness"):
        columns[name] = _text(name, getattr(batch, name))
    for name in TRAJECTORY_DTYPES:
        columns[name] = pa.array(getattr(batch, name))
    for key, values in batch.reward_parts.items():
        columns[f"reward_parts/{key}"] = pa.array(values)
    for key, ragged in batch.prepared.items():
        columns[f"prepared/{key}"] = pa.LargeListArray.from_arrays(pa.array(ragged.offsets), _flat(ragged.ids))
    for name in (*SESSION_DTYPES, "session_segments"):
        add("session", name, getattr(batch, name))
    for name in ("segment_tokens", "segment_turns"):
        add("segment", name, getattr(batch, name))
    for name in TURN_DTYPES:
        add("turn", name, getattr(batch, name))
    for key, values in batch.turn_labels.items():
        add("turn", f"turn_labels/{key}", values)
    for name in TOKEN_DTYPES:
        add("token", name, getattr(batch, name))
    if batch.routed is not None and batch.routed_valid is not None:
        add("token", "routed", _smallest(batch.routed))
        add("token", "routed_valid", batch.routed_valid)
    fields = [pa.field(_utf8(name), column.type, nullable=False) for name, column in columns.items()]
    rows = pa.RecordBatch.from_arrays(list(columns.values()), schema=pa.schema(fields))
    dtype = None if batch.routed is None else batch.routed.dtype.name
    return rows, Groups(batch.group_id, batch.task_id, tuple(members.tolist()), dtype)


def _utf8(name: str) -> str:
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise RecordError(f"{name!r} is no valid text and cannot be stored") from error
    return name


# -- from Arrow -----------------------------------------------------------------------------------------------------
def _numbers(column: pa.Array) -> Array:
    """The values of a column as an array that shares its memory."""
    shape: list[int] = []
    while pa.types.is_fixed_size_list(column.type):
        shape.append(column.type.list_size)
        column = column.values
    if isinstance(column, pa.ExtensionArray):
        return column.storage.to_numpy().view(np.bool_)
    return column.to_numpy(zero_copy_only=not pa.types.is_boolean(column.type)).reshape(-1, *shape)


def _offsets(counts: Array) -> Array:
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(counts, dtype=np.int64)])


def from_arrow(rows: pa.RecordBatch, groups: Groups) -> TrajectoryBatch:
    """The batch whose rows these are, all of them and in order. Its arrays share the memory of the rows.

    Raises ``RecordError``.
    """
    columns = dict(zip(rows.schema.names, rows.columns, strict=True))
    starts = {
        level: np.asarray(columns[name].offsets)
        for level, name in (
            ("session", "session_kind"),
            ("segment", "segment_tokens"),
            ("turn", "turn_role"),
            ("token", "ids"),
        )
    }

    def take(level: str, name: str) -> Array:
        values = _numbers(columns[name].values)
        if name in _COUNTS:
            return _offsets(values)
        if name in _RELATIVE:
            return _moved(values, starts[level], starts[_RELATIVE[name]], 1)
        return values

    def ragged(key: str) -> Ragged:
        return Ragged(np.asarray(columns[key].offsets), _numbers(columns[key].values))

    def keyed(name: str, of: Callable[[str], V]) -> dict[str, V]:
        return {key.removeprefix(f"{name}/"): of(key) for key in columns if key.startswith(f"{name}/")}

    values: dict[str, Any] = {name: take("session", name) for name in (*SESSION_DTYPES, "session_segments")}
    values |= {name: take("segment", name) for name in ("segment_tokens", "segment_turns")}
    values |= {name: take("turn", name) for name in TURN_DTYPES}
    values |= {name: take("token", name) for name in TOKEN_DTYPES}
    values |= {name: _numbers(columns[name]) for name in TRAJECTORY_DTYPES}
    values |= {name: tuple(columns[name].to_pylist()) for name in ("trajectory_id", "harness")}
    values["reward_parts"] = keyed("reward_parts", lambda key: _numbers(columns[key]))
    values["turn_labels"] = keyed("turn_labels", lambda key: take("turn", key))
    values["prepared"] = keyed("prepared", ragged)
    if groups.routed is not None:
        values["routed"] = take("token", "routed").astype(np.dtype(groups.routed), copy=False)
        values["routed_valid"] = take("token", "routed_valid")
    return TrajectoryBatch(
        **values,
        trajectory_sessions=starts["session"],
        group_id=groups.group_id,
        task_id=groups.task_id,
        group_trajectories=_offsets(np.array(groups.trajectories, dtype=np.int64)),
    )
