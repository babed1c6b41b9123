"""A trajectory that still grows: segments of ids with the turns and routing rows on them, at last laid out as arrays.

Invariants (``tests/trajectory/test_growing.py`` asserts each):

1. A view of a segment's ids stays valid while the segment grows: written places never change.
2. Log-probs, versions, fields and routing rows are copies: what the giver does to its buffers later changes nothing.
3. Turns are laid out segment by segment, whatever the order in which they were added; their numbers keep that order.
4. Of several routing rows for one position the first given stands, but for rows that came before any token was
   sampled: those of the first call that samples replace them. Positions without a row are not valid.
5. ``reruns`` counts the positions whose experts were recorded again and differently, ``displaced`` the sampled tokens
   that stand on rows of another forward than the one that sampled them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as new
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.fields import TURN_DTYPES, Array, Field, RecordError, Role, SessionKind
from megatron_ext.trajectory.routed_rows import RoutedRows
from megatron_ext.trajectory.version import UNSAMPLED


@dataclass
class Piece:
    """Sampled tokens of a model turn that arrived together; ``start`` is their position in the segment."""

    start: int
    logp: Array
    versions: Array
    field: Array
    trained: bool


@dataclass
class Turn:
    number: int
    role: Role
    start: int
    end: int
    state_key: int = 0
    action_key: int = 0
    reward: float = 0.0
    trained: bool = False


class Segment:
    """A growing buffer of ids with the turns and routing rows that stand on it."""

    def __init__(self) -> None:
        self._buffer: NDArray[np.int32] = np.empty(256, dtype=np.int32)
        self.size = 0
        self.turns: list[Turn] = []
        self.pieces: list[Piece] = []
        self.rows = RoutedRows()
        self.reruns = self.displaced = 0

    def append(self, ids: NDArray[np.int32]) -> int:
        """Adds ids and returns their position. Views handed out before stay valid: written places never change."""
        start, end = self.size, self.size + len(ids)
        if end > len(self._buffer):
            grown = np.empty(max(end, 2 * len(self._buffer)), dtype=np.int32)
            grown[:start] = self._buffer[:start]
            self._buffer = grown
        self._buffer[start:end] = ids
        self.size = end
        return start

    def ids(self) -> NDArray[np.int32]:
        view = self._buffer[: self.size]
        view.flags.writeable = False
        return view

    def add_sampled(
        self,
        where: str,
        turn: Turn,
        ids: NDArray[np.int32],
        logp: ArrayLike,
        versions: ArrayLike,
        field: Field | ArrayLike,
        routed: Array | None,
        routed_from: int | None,
        rerun: int = 0,
    ) -> None:
        """Adds tokens of a model turn, the segment's last; the arguments as ``TrajectoryBuilder.add_model_turn``."""
        # Copies: the caller may reuse its buffers, the record may not change with them.
        values = np.array(logp, dtype=np.float32)
        stamps = np.array(versions, dtype=np.int64)
        parts = np.array(field, dtype=np.int8)
        parts = np.broadcast_to(parts, ids.shape).copy() if parts.ndim == 0 else parts
        for name, given in (("logp", values), ("versions", stamps), ("field", parts)):
            if given.shape != ids.shape:
                raise RecordError(f"{where}: {name} has shape {given.shape}, ids {ids.shape}")
        if routed is not None:
            if routed_from is None:
                raise RecordError(f"{where}: routed is given without routed_from, its first token position")
            self._check_routed(where, routed, routed_from, len(ids))
            self.reruns += self.rows.add(where, routed_from, routed, replace=not self.sampled)
        start = self.append(ids)
        self.displaced += len(ids) if self.rows.moved else rerun
        self.pieces.append(Piece(start, values, stamps, parts, turn.trained))
        turn.end = self.size

    @property
    def sampled(self) -> bool:
        """Whether it holds a token that an engine sampled."""
        return any(len(piece.logp) for piece in self.pieces)

    def add_routed(self, where: str, routed: Array, routed_from: int) -> None:
        """Routing rows of tokens that stand here."""
        self._check_routed(where, routed, routed_from, 0)
        self.reruns += self.rows.add(where, routed_from, routed)

    def _check_routed(self, where: str, routed: Array, routed_from: int, coming: int) -> None:
        """Raises ``RecordError`` for rows that are none, or leave the segment, which grows by ``coming`` tokens."""
        after = self.size + coming
        if routed.ndim != 3 or routed.dtype.kind != "u":
            raise RecordError(f"{where}: routed is {routed.dtype} {routed.shape}, expected unsigned [m, L, k]")
        if routed_from < 0 or routed_from + len(routed) > after:
            raise RecordError(
                f"{where}: routed covers tokens {routed_from}..{routed_from + len(routed)}, the segment has {after}"
            )

    def run_again(self, where: str, routed: Array | None, routed_from: int | None, coming: int) -> Segment | None:
        """The segment that a call with these rows goes on in when its prompt, this segment, ran on other experts than
        those that stand: the same tokens as context, with the rows of their last forward (the call brings those from
        ``routed_from`` on). None where it goes on in this one."""
        if routed is None or routed_from is None or not self.sampled:
            return None
        self._check_routed(where, routed, routed_from, coming)
        others = self.rows.differing(routed_from, routed)
        if not others and not (self.rows.moved and routed_from):
            return None
        again = Segment()
        again.append(self.ids())
        again.rows.inherit(self.rows, routed_from)
        again.reruns = others
        return again


@dataclass
class Session:
    kind: SessionKind
    parent: int
    segments: list[Segment] = new(default_factory=lambda: [Segment()])
    current: int = 0
    returned_in: int = -1

    @property
    def segment(self) -> Segment:
        """The one that is added to."""
        return self.segments[self.current]

    def go_on_in(self, segment: Segment) -> None:
        """Makes a new segment the one that is added to."""
        self.current = len(self.segments)
        self.segments.append(segment)


def flat(sessions: Sequence[Session], turn_labels: Mapping[str, Mapping[int, int]], trainable: bool) -> dict[str, Any]:
    """The fields of a batch from tokens up to sessions; ``turn_labels``: name -> turn number -> value, ``trainable``
    False zeroes the loss mask."""
    segments = [segment for session in sessions for segment in session.segments]
    sizes = np.array([segment.size for segment in segments], dtype=np.int64)
    bases = np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes)])
    total = int(bases[-1])
    tokens = {
        "ids": np.concatenate([segment.ids() for segment in segments]),
        "loss_mask": np.zeros(total, dtype=np.bool_),
        "turn": np.full(total, -1, dtype=np.int32),
        "field": np.zeros(total, dtype=np.int8),
        "rollout_logp": np.zeros(total, dtype=np.float32),
        "version": np.full(total, UNSAMPLED, dtype=np.int64),
        "weight": np.ones(total, dtype=np.float32),
    }
    turns: list[tuple[int, Turn]] = []
    for segment, base in zip(segments, bases[:-1].tolist(), strict=True):
        for turn in segment.turns:
            tokens["turn"][base + turn.start : base + turn.end] = len(turns)
            turns.append((base, turn))
        for piece in segment.pieces:
            span = slice(base + piece.start, base + piece.start + len(piece.logp))
            tokens["loss_mask"][span] = piece.trained and trainable
            tokens["rollout_logp"][span] = piece.logp
            tokens["version"][span] = piece.versions
            tokens["field"][span] = piece.field
    columns = (
        [int(turn.role) for _, turn in turns],
        [base + turn.start for base, turn in turns],
        [base + turn.end for base, turn in turns],
        [turn.number for _, turn in turns],
        [turn.state_key for _, turn in turns],
        [turn.action_key for _, turn in turns],
        [turn.reward for _, turn in turns],
    )
    per_turn = {
        name: np.array(column, dtype=dtype) for (name, dtype), column in zip(TURN_DTYPES.items(), columns, strict=True)
    }
    labels = {
        name: np.array([values.get(turn.number, -1) for _, turn in turns], dtype=np.int16)
        for name, values in turn_labels.items()
    }
    spans = {turn.number: (base + turn.start, base + turn.end) for base, turn in turns}
    returns = [spans[s.returned_in] if s.returned_in >= 0 else (-1, -1) for s in sessions]
    routed, valid = _place_routed(segments, bases, total)
    return {
        **tokens,
        **per_turn,
        "turn_labels": labels,
        "segment_tokens": bases,
        "segment_turns": np.cumsum([0, *(len(segment.turns) for segment in segments)]),
        "session_segments": np.cumsum([0, *(len(session.segments) for session in sessions)]),
        "session_kind": np.array([int(session.kind) for session in sessions]),
        "session_parent": np.array([session.parent for session in sessions]),
        "session_return": np.array(returns, dtype=np.int64).reshape(-1, 2),
        "routed": routed,
        "routed_valid": valid,
    }


def _place_routed(segments: Sequence[Segment], bases: Array, total: int) -> tuple[Array | None, Array | None]:
    """Routing rows at their token positions, [T, L, k] in the widest type given, and where they are valid."""
    given = [placed for segment in segments if (placed := segment.rows.placed(segment.size)) is not None]
    if not given:
        return None, None
    shapes = {rows.shape[1:] for rows, _ in given}
    if len(shapes) > 1:
        raise RecordError(f"routed: rows of different shape {sorted(shapes)} (layers, experts a token)")
    routed = np.zeros((total, *shapes.pop()), dtype=np.result_type(*(rows.dtype for rows, _ in given)))
    valid = np.zeros(total, dtype=np.bool_)
    for segment, base in zip(segments, bases[:-1].tolist(), strict=True):
        if (placed := segment.rows.placed(segment.size)) is not None:
            rows, known = placed
            routed[base : base + len(rows)] = rows
            valid[base : base + len(rows)] = known
    return routed, valid
