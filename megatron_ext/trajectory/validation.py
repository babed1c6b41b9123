"""Checks a batch against the invariants of the record: every fault is one ``RecordError`` that names where it stands.

Everything is whole-array work: linear in tokens and turns, without a Python loop over either.
"""

from __future__ import annotations

from collections import Counter
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.trajectory.fields import (
    ROUTED_DTYPES,
    SESSION_DTYPES,
    TOKEN_DTYPES,
    TRAJECTORY_DTYPES,
    TURN_DTYPES,
    Array,
    Field,
    RecordError,
    Role,
    SessionKind,
    Status,
)
from megatron_ext.trajectory.version import UNSAMPLED

if TYPE_CHECKING:
    from megatron_ext.trajectory.record import TrajectoryBatch


def validate(batch: TrajectoryBatch) -> None:
    """Checks invariants 1-6 of ``record.py``. Raises ``RecordError``."""
    _partitions(batch)
    _sizes(batch)
    _trajectories(batch)
    _sessions(batch)
    _turns(batch)
    _tokens(batch)
    _routing(batch)


# -- where ----------------------------------------------------------------------------------------------------------
def _owner(offsets: Array, index: int) -> int:
    return int(np.searchsorted(offsets, index, side="right")) - 1


def _segment(batch: TrajectoryBatch, segment: int) -> str:
    session = _owner(batch.session_segments, segment)
    return f"{_session(batch, session)}, segment {segment - int(batch.session_segments[session])}"


def _session(batch: TrajectoryBatch, session: int) -> str:
    trajectory = _owner(batch.trajectory_sessions, session)
    local = session - int(batch.trajectory_sessions[trajectory])
    return f"trajectory {batch.trajectory_id[trajectory]!r}, session {local}"


def _token(batch: TrajectoryBatch, token: int) -> str:
    segment = _owner(batch.segment_tokens, token)
    return f"{_segment(batch, segment)}, position {token - int(batch.segment_tokens[segment])}"


def _turn(batch: TrajectoryBatch, turn: int) -> str:
    segment = _owner(batch.segment_turns, turn)
    position = int(batch.turn_start[turn]) - int(batch.segment_tokens[segment])
    return f"{_segment(batch, segment)}, position {position}: turn {turn}"


def _first(bad: Array) -> int | None:
    """Index of the first True."""
    return int(np.argmax(bad)) if np.any(bad) else None


def _refuse_tokens(batch: TrajectoryBatch, bad: Array, message: str) -> None:
    if (at := _first(bad)) is not None:
        raise RecordError(f"{_token(batch, at)}: {message}")


def _refuse_turns(batch: TrajectoryBatch, bad: Array, message: str) -> None:
    if (at := _first(bad)) is not None:
        raise RecordError(f"{_turn(batch, at)} {message}")


def _outside(values: Array, words: type[IntEnum]) -> Array:
    return (values < 0) | (values >= len(words))


# -- levels ---------------------------------------------------------------------------------------------------------
def _partition(name: str, offsets: Array, size: int, below: str) -> None:
    if offsets.ndim != 1 or len(offsets) < 1 or offsets[0] != 0:
        raise RecordError(f"{name}: offsets must be one-dimensional and start at 0, got {offsets[:3]!r}")
    if (at := _first(np.diff(offsets) < 0)) is not None:
        raise RecordError(f"{name}: offsets fall from {offsets[at]} to {offsets[at + 1]} at {at}")
    if offsets[-1] != size:
        raise RecordError(f"{name}: offsets end at {offsets[-1]}, the batch holds {size} {below}")


def _partitions(batch: TrajectoryBatch) -> None:
    _partition("segment_tokens", batch.segment_tokens, len(batch.ids), "tokens")
    _partition("segment_turns", batch.segment_turns, len(batch.turn_role), "turns")
    if len(batch.segment_turns) != len(batch.segment_tokens):
        raise RecordError(
            f"segment_turns has {len(batch.segment_turns)} offsets, segment_tokens {len(batch.segment_tokens)}"
        )
    _partition("session_segments", batch.session_segments, batch.num_segments, "segments")
    _partition("trajectory_sessions", batch.trajectory_sessions, batch.num_sessions, "sessions")
    _partition("group_trajectories", batch.group_trajectories, batch.num_trajectories, "trajectories")


def _sizes(batch: TrajectoryBatch) -> None:
    tokens, turns, sessions = batch.num_tokens, batch.num_turns, batch.num_sessions
    trajectories, groups = batch.num_trajectories, batch.num_groups
    expected: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(TOKEN_DTYPES, (tokens,)),
        **dict.fromkeys(TURN_DTYPES, (turns,)),
        **dict.fromkeys(SESSION_DTYPES, (sessions,)),
        "session_return": (sessions, 2),
        **dict.fromkeys(TRAJECTORY_DTYPES, (trajectories,)),
    }
    for name, shape in expected.items():
        if getattr(batch, name).shape != shape:
            raise RecordError(f"{name}: shape {getattr(batch, name).shape}, expected {shape}")
    counts = {"trajectory_id": trajectories, "harness": trajectories, "group_id": groups, "task_id": groups}
    for name, count in counts.items():
        if len(getattr(batch, name)) != count:
            raise RecordError(f"{name}: {len(getattr(batch, name))} entries, expected {count}")
    for parts, count in ((batch.reward_parts, trajectories), (batch.turn_labels, turns)):
        for key, value in parts.items():
            if value.shape != (count,):
                raise RecordError(f"{key!r}: shape {value.shape}, expected ({count},)")
    for key, ragged in batch.prepared.items():
        if len(ragged) != trajectories:
            raise RecordError(f"prepared {key!r}: {len(ragged)} rows, expected {trajectories}, one a trajectory")


def _trajectories(batch: TrajectoryBatch) -> None:
    names = batch.trajectory_id
    if len(set(names)) != len(names):
        name, count = Counter(names).most_common(1)[0]
        raise RecordError(f"trajectory_id: ids repeat, {name!r} stands there {count} times")
    if (at := _first(~np.isfinite(batch.reward))) is not None:
        raise RecordError(f"trajectory {names[at]!r}: reward is {batch.reward[at]}; mark it REWARD_INVALID")
    for key, part in batch.reward_parts.items():  # NaN: the trajectory has no value of this part
        if (at := _first(np.isinf(part))) is not None:
            raise RecordError(f"trajectory {names[at]!r}: reward part {key!r} is {part[at]}; mark it REWARD_INVALID")
    if (at := _first(_outside(batch.status, Status))) is not None:
        raise RecordError(f"trajectory {names[at]!r}: status {batch.status[at]} is unknown")


def _sessions(batch: TrajectoryBatch) -> None:
    parent, spans = batch.session_parent, batch.session_return
    if (at := _first(_outside(batch.session_kind, SessionKind))) is not None:
        raise RecordError(f"{_session(batch, at)}: kind {batch.session_kind[at]} is unknown")
    spawned = parent >= 0
    first = batch.trajectory_sessions[batch.session_trajectory()]
    bad = (parent < -1) | (spawned & ((parent < first) | (parent >= np.arange(len(parent)))))
    if (at := _first(bad)) is not None:
        raise RecordError(f"{_session(batch, at)}: parent {parent[at]} is no earlier session of the trajectory")
    returned = np.any(spans != -1, axis=1)
    bounds = batch.segment_tokens[batch.session_segments]
    inside = np.zeros(len(parent), dtype=bool)
    of = parent[spawned]
    start, end = spans[spawned, 0], spans[spawned, 1]
    inside[spawned] = (bounds[of] <= start) & (start <= end) & (end <= bounds[of + 1])
    if (at := _first(returned & ~inside)) is not None:
        raise RecordError(f"{_session(batch, at)}: returned span {spans[at].tolist()} is not in its parent's tokens")


# -- turns ----------------------------------------------------------------------------------------------------------
def _turns(batch: TrajectoryBatch) -> None:
    start, end, owner = batch.turn_start, batch.turn_end, batch.turn_segment()
    _refuse_turns(batch, _outside(batch.turn_role, Role), "has an unknown role")
    if (at := _first((start > end) | (start < 0) | (end > batch.num_tokens))) is not None:
        raise RecordError(
            f"{_turn(batch, at)} has the span [{start[at]}, {end[at]}) in a batch of {batch.num_tokens} tokens"
        )
    if (at := _first((start < batch.segment_tokens[owner]) | (end > batch.segment_tokens[owner + 1]))) is not None:
        raise RecordError(f"{_turn(batch, at)} leaves its segment, span [{start[at]}, {end[at]})")
    _refuse_turns(batch, np.append(False, start[1:] < end[:-1])[: len(start)], "overlaps the one before it")
    _refuse_turns(batch, ~np.isfinite(batch.turn_reward), "has a reward that is not finite")
    for key, labels in batch.turn_labels.items():
        _refuse_turns(batch, labels < -1, f"has a label {key!r} below -1")
    _turn_numbers(batch, owner)


def _turn_numbers(batch: TrajectoryBatch, owner: Array) -> None:
    number, trajectory = batch.turn_number, batch.turn_trajectory()
    _refuse_turns(batch, number < 0, "has a negative turn number")
    falls = (number[1:] <= number[:-1]) & (owner[1:] == owner[:-1])
    _refuse_turns(batch, np.append(False, falls)[: len(number)], "has a number that does not rise within the segment")
    order = np.lexsort((number, trajectory))
    again = (number[order][1:] == number[order][:-1]) & (trajectory[order][1:] == trajectory[order][:-1])
    if (at := _first(again)) is not None:
        turn = int(order[at + 1])
        raise RecordError(f"{_turn(batch, turn)} has the number {number[turn]}, which is taken in this trajectory")


# -- tokens ---------------------------------------------------------------------------------------------------------
def _tokens(batch: TrajectoryBatch) -> None:
    version, logp, weight = batch.version, batch.rollout_logp, batch.weight
    _refuse_tokens(batch, batch.ids < 0, "negative token id")
    _refuse_tokens(
        batch,
        (batch.turn < -1) | (batch.turn >= batch.num_turns),
        f"turn index outside -1..{batch.num_turns - 1}",
    )
    _refuse_tokens(batch, _outside(batch.field, Field), "unknown field")
    # gap, turn, gap, turn, ..., gap: turns are in order and apart by now
    runs = np.diff(np.stack([batch.turn_start, batch.turn_end], axis=1).ravel(), prepend=0, append=batch.num_tokens)
    marks = np.full(len(runs), -1, dtype=np.int32)
    marks[1::2] = np.arange(batch.num_turns)
    _refuse_tokens(batch, np.repeat(marks, runs) != batch.turn, "token's turn index disagrees with the turn's span")
    models = np.zeros(len(runs), dtype=bool)
    models[1::2] = batch.turn_role == Role.MODEL
    on_model = np.repeat(models, runs)
    sampled = version >= 0
    _refuse_tokens(batch, version < UNSAMPLED, "version below -1")
    _refuse_tokens(batch, sampled & ~on_model, "sampled token outside a model turn")
    _refuse_tokens(batch, batch.loss_mask & ~sampled, "loss mask 1 on a token that was not sampled")
    _refuse_tokens(batch, sampled & ~np.isfinite(logp), "rollout log-prob is not finite")
    _refuse_tokens(batch, sampled & (logp > 0), "rollout log-prob above 0")
    _refuse_tokens(batch, ~sampled & (logp != 0), "rollout log-prob on a token that was not sampled")
    _refuse_tokens(batch, ~((weight >= 0) & np.isfinite(weight)), "weight is negative or not finite")
    falls = (version[1:] < version[:-1]) & sampled[1:] & (batch.turn[1:] == batch.turn[:-1])
    if (at := _first(falls)) is None and np.any(on_model & ~sampled):
        # a token that was put in, not sampled, may stand between two sampled ones
        drawn = np.flatnonzero(sampled)
        before, after = drawn[:-1], drawn[1:]
        falls = (version[after] < version[before]) & (batch.turn[after] == batch.turn[before])
        at = None if (hit := _first(falls)) is None else int(after[hit]) - 1
    if at is not None:
        raise RecordError(f"{_token(batch, at + 1)}: policy version falls inside a turn")


def _routing(batch: TrajectoryBatch) -> None:
    routed, valid, tokens = batch.routed, batch.routed_valid, batch.num_tokens
    if routed is None and valid is None:
        return
    if valid is None:
        raise RecordError("routed is given without routed_valid")
    if routed is None:
        raise RecordError("routed_valid is given without routed")
    if routed.ndim != 3 or len(routed) != tokens or 0 in routed.shape[1:] or routed.dtype not in ROUTED_DTYPES:
        raise RecordError(f"routed: {routed.dtype} {routed.shape}, expected unsigned [{tokens}, L, k]")
    if valid.shape != (tokens,):
        raise RecordError(f"routed_valid: shape {valid.shape}, expected ({tokens},)")
