"""Levels above the token (segment, session, trajectory, group): their tokens, sums over them, values spread over them.

Invariants (``tests/credit/test_levels.py`` asserts each):

1. A token is trained when its mask is 1 and its trajectory's end says something about the policy.
2. What is reduced is taken over trained tokens alone; what is spread is exactly 0 on all others.
3. Cutting a session into segments changes no value of a session, trajectory or group.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.spans import Op, count_spans, reduce_spans, zero_unless
from megatron_ext.trajectory.record import TrajectoryBatch


class Level(StrEnum):
    SEGMENT = "segment"
    SESSION = "session"
    TRAJECTORY = "trajectory"
    GROUP = "group"


def token_offsets(batch: TrajectoryBatch, level: Level) -> NDArray[np.int64]:
    """Token offsets of a level's members, int64 [members + 1]."""
    offsets: NDArray[np.int64] = batch.segment_tokens
    if level == Level.SEGMENT:
        return offsets
    offsets = offsets[batch.session_segments]
    if level == Level.SESSION:
        return offsets
    offsets = offsets[batch.trajectory_sessions]
    return offsets if level == Level.TRAJECTORY else offsets[batch.group_trajectories]


def trained_tokens(batch: TrajectoryBatch) -> NDArray[np.bool_]:
    """bool [T]: mask 1, in a trajectory whose end says something about the policy. May be the batch's own mask."""
    mask: NDArray[np.bool_] = batch.loss_mask
    trainable = batch.trainable()
    if trainable.all():
        return mask
    return mask & np.repeat(trainable, np.diff(batch.trajectory_tokens()))


def trained_counts(batch: TrajectoryBatch, level: Level) -> NDArray[np.int64]:
    """Trained tokens of each member of a level, int64 [members]."""
    offsets = token_offsets(batch, level)
    return count_spans(trained_tokens(batch), offsets[:-1], offsets[1:])


def reduce_tokens(
    batch: TrajectoryBatch,
    values: NDArray[Any],
    level: Level,
    op: Op = Op.SUM,
    where: NDArray[np.bool_] | None = None,
) -> NDArray[np.float64]:
    """One number for each member of a level, float64, from ``values`` [T] on its trained tokens (of ``where`` [T])."""
    mask = trained_tokens(batch) if where is None else trained_tokens(batch) & where
    offsets = token_offsets(batch, level)
    return reduce_spans(values, offsets[:-1], offsets[1:], op, mask)


def broadcast(batch: TrajectoryBatch, values: NDArray[Any], level: Level = Level.TRAJECTORY) -> NDArray[np.float64]:
    """A value for each member of a level, on each of its trained tokens and 0 elsewhere; float64 [T]."""
    offsets = token_offsets(batch, level)
    if np.shape(values) != (len(offsets) - 1,):
        raise ValueError(f"values {np.shape(values)}: one a {level.value}, {len(offsets) - 1} in all")
    spread = np.repeat(np.asarray(values, dtype=np.float64), np.diff(offsets))
    zero_unless(spread, trained_tokens(batch))
    return spread
