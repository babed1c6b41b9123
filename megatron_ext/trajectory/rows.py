"""Rows: what the trainer sees of a batch.

Invariants (``tests/trajectory/test_rows.py`` asserts each):

1. Every token of the loss mask has mask 1 in exactly one row, and no other token has.
2. A row starts at its segment's first token and is contiguous: each token has its whole true context before it, so
   cutting changes no log-prob.
3. Cuts fall on turn ends. A piece owns at most ``tokens_per_row`` tokens, or one turn when that turn is longer; what
   stands before is repeated at mask 0, so later pieces of a segment are longer rows than ``tokens_per_row``.
4. Segments (and pieces) without a trained token make no row; dropped segments are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.record import RecordError, TrajectoryBatch


@dataclass(frozen=True, eq=False)
class Rows:
    """R rows over M tokens: ``row_offsets`` int64 [R+1]; ``token`` int64 [M], index into the batch's tokens; ``mask``
    bool [M], trained in this row; ``segment`` int64 [R]; ``dropped_segments``, those without a trained token."""

    row_offsets: NDArray[np.int64]
    token: NDArray[np.int64]
    mask: NDArray[np.bool_]
    segment: NDArray[np.int64]
    dropped_segments: int

    def __post_init__(self) -> None:
        for array in (self.row_offsets, self.token, self.mask, self.segment):
            array.flags.writeable = False

    @property
    def num_rows(self) -> int:
        return len(self.segment)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [R]."""
        return np.diff(self.row_offsets)

    def span(self, row: int) -> slice:
        """Where row ``row`` stands in ``token`` and ``mask``."""
        return slice(int(self.row_offsets[row]), int(self.row_offsets[row + 1]))


def make_rows(batch: TrajectoryBatch, tokens_per_row: int = 0) -> Rows:
    """Rows of a batch, in segment order. ``tokens_per_row`` 0 never cuts: a row is a whole segment."""
    if tokens_per_row < 0:
        raise ValueError(f"batch.tokens_per_row must be >= 0, got {tokens_per_row}")
    starts, ends = batch.segment_tokens[:-1], batch.segment_tokens[1:]
    unprompted = (starts < ends) & _at(batch.loss_mask, starts)
    if np.any(unprompted):
        at = int(np.argmax(unprompted))
        name = batch.trajectory_id[int(batch.segment_trajectory()[at])]
        raise RecordError(f"trajectory {name!r}: segment {at} starts with a trained token: it has no context")
    trained = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    kept = np.flatnonzero(trained[ends] > trained[starts])
    if tokens_per_row == 0:
        segment, own, stop = kept, starts[kept], ends[kept]
    else:
        pieces = [piece for s in kept.tolist() for piece in _cut(batch, s, tokens_per_row)]
        table = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        table = table[trained[table[:, 2]] > trained[table[:, 1]]]
        segment, own, stop = table[:, 0], table[:, 1], table[:, 2]
    lengths = stop - starts[segment]
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    token = np.arange(offsets[-1], dtype=np.int64) + np.repeat(starts[segment] - offsets[:-1], lengths)
    mask = batch.loss_mask[token] & (token >= np.repeat(own, lengths))
    return Rows(offsets, token, mask, segment.astype(np.int64), batch.num_segments - len(kept))


def _at(mask: NDArray[np.bool_], index: NDArray[np.int64]) -> NDArray[np.bool_]:
    """``mask[index]``, False for the index past the end that an empty last segment has."""
    return np.concatenate([mask, [False]])[index]


def _cut(batch: TrajectoryBatch, segment: int, limit: int) -> list[tuple[int, int, int]]:
    """(segment, first owned token, end) of each piece of one segment."""
    start, end = int(batch.segment_tokens[segment]), int(batch.segment_tokens[segment + 1])
    first, last = int(batch.segment_turns[segment]), int(batch.segment_turns[segment + 1])
    # The last cut is the segment's end: what follows the last turn stays with it.
    cuts = [*batch.turn_end[first:last].tolist()[:-1], end]
    pieces, own, reached = [], start, start
    for cut in cuts:
        if cut - own > limit and reached > own:
            pieces.append((segment, own, reached))
            own = reached
        reached = cut
    pieces.append((segment, own, reached))
    return pieces
