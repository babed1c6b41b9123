"""Batches joined into one, and groups of a batch selected from it.

Invariants (``tests/trajectory/test_joining.py`` asserts each):

1. Selecting what was joined gives the parts back, bit for bit; groups may be selected in any order.
2. Every index points at what it pointed at before; -1 stays -1.
3. What one part lacks and another has (a reward part, a label, prepared ids, routing) reads 0, -1, empty, not valid.
4. No groups are a batch too, and joining it changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from megatron_ext.trajectory.fields import (
    DTYPES,
    OFFSETS,
    TOKEN_DTYPES,
    TRAJECTORY_DTYPES,
    TUPLE_FIELDS,
    TURN_DTYPES,
    Array,
    RecordError,
)
from megatron_ext.trajectory.ragged import Ragged
from megatron_ext.trajectory.record import TrajectoryBatch


def _concat_optional(batches: Sequence[TrajectoryBatch]) -> tuple[Array | None, Array | None]:
    present = [b for b in batches if b.routed is not None]
    if not present:
        return None, None
    first = present[0].routed
    assert first is not None
    shape = first.shape[1:]
    dtype = max((b.routed.dtype for b in present if b.routed is not None), key=lambda d: d.itemsize)
    routed, valid = [], []
    for b in batches:
        if b.routed is None or b.routed_valid is None:
            routed.append(np.zeros((b.num_tokens, *shape), dtype=dtype))
            valid.append(np.zeros(b.num_tokens, dtype=bool))
        elif b.routed.shape[1:] != shape:
            raise RecordError(f"routed: cannot join [*, {b.routed.shape[1:]}] with [*, {shape}]")
        else:
            routed.append(b.routed.astype(dtype, copy=False))
            valid.append(b.routed_valid)
    return np.concatenate(routed), np.concatenate(valid)


def _shift(arrays: Sequence[Array], sizes: Sequence[int]) -> Array:
    """Concatenates index arrays, adding the running total of ``sizes``; -1 stays -1."""
    base, parts = 0, []
    for array, size in zip(arrays, sizes, strict=True):
        parts.append(np.where(array >= 0, array + base, array))
        base += size
    return np.concatenate(parts)


def _join_offsets(arrays: Sequence[Array]) -> Array:
    base, parts = 0, [np.zeros(1, dtype=np.int64)]
    for array in arrays:
        parts.append(array[1:] + base)
        base += int(array[-1])
    return np.concatenate(parts)


def concat(batches: Sequence[TrajectoryBatch]) -> TrajectoryBatch:
    """Joins batches in order; the groups of each stay groups of the result. Where a batch lacks a reward part, a label,
    prepared ids or routing that another has, its own read 0, -1, empty and not valid."""
    if not batches:
        raise RecordError("concat needs at least one batch")
    return batches[0] if len(batches) == 1 else TrajectoryBatch(**joined(batches))


def joined(batches: Sequence[TrajectoryBatch]) -> dict[str, Any]:
    """The fields of ``concat(batches)``."""
    values: dict[str, Any] = {}
    token_sizes, turn_sizes = [b.num_tokens for b in batches], [b.num_turns for b in batches]
    session_sizes = [b.num_sessions for b in batches]
    for name in DTYPES:
        if name == "routed_valid":
            continue
        parts = [getattr(b, name) for b in batches]
        if name in OFFSETS:
            values[name] = _join_offsets(parts)
        elif name == "turn":
            values[name] = _shift(parts, turn_sizes)
        elif name in ("turn_start", "turn_end", "session_return"):
            values[name] = _shift(parts, token_sizes)
        elif name == "session_parent":
            values[name] = _shift(parts, session_sizes)
        else:
            values[name] = np.concatenate(parts)
    for name in TUPLE_FIELDS:
        values[name] = tuple(x for b in batches for x in getattr(b, name))
    for name, fill, size in (("reward_parts", 0.0, "num_trajectories"), ("turn_labels", -1, "num_turns")):
        keys = sorted({k for b in batches for k in getattr(b, name)})
        values[name] = {
            k: np.concatenate([getattr(b, name).get(k, np.full(getattr(b, size), fill)) for b in batches]) for k in keys
        }
    keys = sorted({k for b in batches for k in b.prepared})
    values["prepared"] = {
        k: Ragged.concat([b.prepared.get(k, Ragged.empty(b.num_trajectories)) for b in batches]) for k in keys
    }
    values["routed"], values["routed_valid"] = _concat_optional(batches)
    return values


def select_groups(batch: TrajectoryBatch, groups: Sequence[int]) -> TrajectoryBatch:
    """The batch that holds these groups, in this order; no groups give an empty batch."""
    for g in groups:
        if not 0 <= g < batch.num_groups:
            raise IndexError(f"group {g} of a batch that holds {batch.num_groups}")
    if not len(groups):
        return _slice_groups(batch, 0, 0)
    return concat([_slice_groups(batch, g, g + 1) for g in groups])


def _slice_groups(batch: TrajectoryBatch, first: int, last: int) -> TrajectoryBatch:
    """Groups [first, last) of a batch: every level's slice follows from the offsets above it."""
    j0, j1 = (int(batch.group_trajectories[i]) for i in (first, last))
    q0, q1 = (int(batch.trajectory_sessions[i]) for i in (j0, j1))
    s0, s1 = (int(batch.session_segments[i]) for i in (q0, q1))
    t0, t1 = (int(batch.segment_tokens[i]) for i in (s0, s1))
    n0, n1 = (int(batch.segment_turns[i]) for i in (s0, s1))
    spans = {
        "segment_tokens": (s0, s1 + 1, t0),
        "segment_turns": (s0, s1 + 1, n0),
        "session_segments": (q0, q1 + 1, s0),
        "trajectory_sessions": (j0, j1 + 1, q0),
        "group_trajectories": (first, last + 1, j0),
    }
    values: dict[str, Any] = {name: getattr(batch, name)[a:b] - base for name, (a, b, base) in spans.items()}
    values |= {name: getattr(batch, name)[t0:t1] for name in TOKEN_DTYPES}
    values |= {name: getattr(batch, name)[n0:n1] for name in TURN_DTYPES}
    for name, base in (("turn", n0), ("turn_start", t0), ("turn_end", t0)):
        values[name] = np.where(values[name] >= 0, values[name] - base, values[name])
    values["session_kind"] = batch.session_kind[q0:q1]
    for name, base in (("session_parent", q0), ("session_return", t0)):
        part = getattr(batch, name)[q0:q1]
        values[name] = np.where(part >= 0, part - base, part)
    values |= {name: getattr(batch, name)[j0:j1] for name in TRAJECTORY_DTYPES}
    values |= {name: getattr(batch, name)[j0:j1] for name in ("trajectory_id", "harness")}
    values |= {name: getattr(batch, name)[first:last] for name in ("group_id", "task_id")}
    values["reward_parts"] = {k: v[j0:j1] for k, v in batch.reward_parts.items()}
    values["turn_labels"] = {k: v[n0:n1] for k, v in batch.turn_labels.items()}
    values["prepared"] = {k: v.between(j0, j1) for k, v in batch.prepared.items()}
    values["routed"] = None if batch.routed is None else batch.routed[t0:t1]
    values["routed_valid"] = None if batch.routed_valid is None else batch.routed_valid[t0:t1]
    return TrajectoryBatch(**values)
