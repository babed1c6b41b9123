"""Builds the record of one trajectory while its episode runs.

Invariants (``tests/trajectory/test_builder.py`` asserts each):

1. Ids are stored exactly as given, in the order given; nothing is tokenised here.
2. ``prompt_ids`` is the whole current segment: what the engine must be sent so that its answer continues the record.
3. A model turn that arrives in pieces gives the same record as the same turn given at once, loss mask included.
4. A trajectory whose status is untrainable keeps tokens, log-probs and versions; only its loss mask is zero.
5. Tokens repeated by ``rewrite`` are context: mask 0, turn -1.
6. ``routed`` rows stand at their position in the segment, prompt tokens included; the first row given for a position
   stays, because that forward is the one that sampled the token after it.
7. Segments of one session may grow in turns (``reopen``), as the calls of parallel agents come: turn numbers follow the
   order of adding, the layout keeps every segment together.

A turn is named by the number it got when it was added (its ``turn_number``), a session by the order of opening.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as new
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.record import (
    TURN_DTYPES,
    Array,
    Field,
    Ragged,
    RecordError,
    Role,
    SessionKind,
    Status,
    TrajectoryBatch,
    joined,
)
from megatron_ext.trajectory.version import UNSAMPLED


@dataclass
class _Piece:
    """Sampled tokens of a model turn that arrived together; ``start`` is their position in the segment."""

    start: int
    logp: Array
    versions: Array
    field: Array
    trained: bool


@dataclass
class _Turn:
    number: int
    role: Role
    start: int
    end: int
    state_key: int = 0
    action_key: int = 0
    reward: float = 0.0
    trained: bool = False


class _Segment:
    """A growing buffer of ids with the turns and routing rows that stand on it."""

    def __init__(self) -> None:
        self._buffer: NDArray[np.int32] = np.empty(256, dtype=np.int32)
        self.size = 0
        self.turns: list[_Turn] = []
        self.pieces: list[_Piece] = []
        self.routed: list[tuple[int, Array]] = []

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


@dataclass
class _Session:
    kind: SessionKind
    parent: int
    segments: list[_Segment] = new(default_factory=lambda: [_Segment()])
    current: int = 0
    returned_in: int = -1

    @property
    def segment(self) -> _Segment:
        """The one that is added to."""
        return self.segments[self.current]


@dataclass(frozen=True)
class FinishedTrajectory:
    """One finished trajectory: a batch of one, whose group is not named yet; it is validated with its group."""

    batch: TrajectoryBatch

    @property
    def trajectory_id(self) -> str:
        return self.batch.trajectory_id[0]

    @property
    def sample(self) -> int:
        return int(self.batch.sample[0])

    @property
    def status(self) -> Status:
        return Status(int(self.batch.status[0]))

    @property
    def num_tokens(self) -> int:
        return self.batch.num_tokens


class TrajectoryBuilder:
    """The record of one rollout, added to as the episode goes. Errors are ``RecordError`` and name the trajectory."""

    def __init__(self, trajectory_id: str, sample: int, harness_id: str) -> None:
        self.trajectory_id = trajectory_id
        self.sample = sample
        self.harness_id = harness_id
        self._sessions: list[_Session] = []
        self._turns: list[_Turn] = []
        self._labels: dict[str, dict[int, int]] = {}
        self._prepared: dict[str, NDArray[np.int32]] = {}
        self._finished = False

    # -- reading ---------------------------------------------------------------------------------------------------
    def prompt_ids(self, session: int) -> NDArray[np.int32]:
        """int32 [P]: all ids of the session's current segment. A read-only view, free to ask for every turn."""
        return self._session(session).segment.ids()

    @property
    def num_tokens(self) -> int:
        """Tokens of all sessions and segments."""
        return sum(segment.size for session in self._sessions for segment in session.segments)

    @property
    def num_model_turns(self) -> int:
        return sum(turn.role is Role.MODEL for turn in self._turns)

    # -- adding ----------------------------------------------------------------------------------------------------
    def open_session(self, kind: SessionKind = SessionKind.NORMAL, parent: int | None = None) -> int:
        """Starts a dialogue; ``parent`` is the session that spawned it. Returns its number."""
        self._check_open()
        if parent is not None:
            self._session(parent)
        self._sessions.append(_Session(kind, -1 if parent is None else parent))
        return len(self._sessions) - 1

    def add_context(self, session: int, ids: ArrayLike) -> None:
        """Tokens that belong to no turn: begin-of-text, generation prompt, template closers, repeated history."""
        self._current(session).append(self._as_ids(ids))

    def add_message(self, session: int, role: Role, ids: ArrayLike, *, state_key: int = 0) -> int:
        """A turn that the model did not write. Returns the turn's number."""
        if role is Role.MODEL:
            raise RecordError(f"{self._name()}: add_message got role MODEL; sampled tokens go through add_model_turn")
        segment = self._current(session)
        array = self._as_ids(ids)
        start = segment.append(array)
        return self._new_turn(segment, _Turn(len(self._turns), role, start, start + len(array), state_key))

    def add_model_turn(
        self,
        session: int,
        ids: ArrayLike,
        logp: ArrayLike,
        versions: ArrayLike,
        *,
        state_key: int = 0,
        action_key: int = 0,
        trained: bool = True,
        field: Field | ArrayLike = Field.OTHER,
        routed: Array | None = None,
        routed_from: int | None = None,
    ) -> int:
        """A turn that the model sampled after ``prompt_ids``. Returns the turn's number.

        ``ids`` [n], ``logp`` [n] (nats, <= 0), ``versions`` [n] packed; ``field`` one ``Field`` or [n]. ``routed``
        [m, L, k] are the experts of the tokens ``routed_from .. routed_from + m`` of (prompt + ids), as
        ``GenerateResult`` gives them. ``trained=False`` leaves the turn out of the loss.
        """
        segment = self._current(session)
        if segment.size == 0:
            raise RecordError(f"{self._name()}, session {session}: a model turn needs a prompt; add context first")
        turn = _Turn(
            len(self._turns), Role.MODEL, segment.size, segment.size, state_key, action_key, 0.0, trained=trained
        )
        self._add_piece(session, segment, turn, ids, logp, versions, field, routed, routed_from)
        return self._new_turn(segment, turn)

    def extend_model_turn(
        self,
        session: int,
        ids: ArrayLike,
        logp: ArrayLike,
        versions: ArrayLike,
        *,
        action_key: int | None = None,
        field: Field | ArrayLike = Field.OTHER,
        routed: Array | None = None,
        routed_from: int | None = None,
    ) -> int:
        """More tokens of the session's last model turn (a partial rollout that resumed); in the loss if the turn is."""
        segment = self._current(session)
        last = segment.turns[-1] if segment.turns else None
        if last is None or last.role is not Role.MODEL or last.end != segment.size:
            raise RecordError(f"{self._name()}, session {session}: the segment does not end in a model turn to extend")
        self._add_piece(session, segment, last, ids, logp, versions, field, routed, routed_from)
        if action_key is not None:
            last.action_key = action_key
        return last.number

    def add_routed(self, session: int, routed: Array, routed_from: int) -> None:
        """Experts [m, L, k] of the segment's tokens ``routed_from .. routed_from + m``, which stand there already.
        Where a row was given before, that one stays."""
        self._add_routed(f"{self._name()}, session {session}", self._current(session), routed, routed_from, 0)

    def repeat_routed(self, session: int, other: int) -> None:
        """Experts of the tokens that the session repeats from the beginning of another one, where it lacks its own."""
        self._current(session).routed.extend(self._session(other).segment.routed)

    def rewrite(self, session: int) -> int:
        """Starts a new segment: the history will be told anew, through ``add_context``. Returns its number within the
        session."""
        self._check_open()
        opened = self._session(session)
        opened.segments.append(_Segment())
        opened.current = len(opened.segments) - 1
        return opened.current

    def reopen(self, session: int, segment: int) -> None:
        """Makes an earlier segment of the session the one that is added to."""
        self._check_open()
        opened = self._session(session)
        if not 0 <= segment < len(opened.segments):
            raise RecordError(f"{self._name()}, session {session}: segment {segment} of {len(opened.segments)}")
        opened.current = segment

    def set_turn_reward(self, turn: int, reward: float) -> None:
        if not math.isfinite(reward):
            raise RecordError(f"{self._name()}, turn {turn}: reward is {reward}; finish with status REWARD_INVALID")
        self._turn(turn).reward = reward

    def set_action_key(self, turn: int, key: int) -> None:
        """Key of the canonical action, when it is known only after the turn was parsed."""
        self._turn(turn).action_key = key

    def label_turn(self, turn: int, name: str, value: int) -> None:
        """An int16 label; turns without one read -1."""
        self._turn(turn)
        self._labels.setdefault(name, {})[turn] = value

    def set_prepared(self, name: str, ids: ArrayLike) -> None:
        """Ids made ready for scoring (``TrajectoryBatch.prepared``); they never become part of a dialogue."""
        self._check_open()
        self._prepared[name] = self._as_ids(ids)

    def set_return(self, session: int, turn: int) -> None:
        """Records that the session's result appears in its parent as ``turn``."""
        child = self._session(session)
        target = self._turn(turn)
        if child.parent < 0 or not any(target in s.turns for s in self._sessions[child.parent].segments):
            raise RecordError(f"{self._name()}: turn {turn} is not in the parent of session {session}")
        child.returned_in = turn

    # -- finishing -------------------------------------------------------------------------------------------------
    def finish(
        self,
        reward: float,
        parts: Mapping[str, float],
        success: bool,
        status: Status,
        missing: Collection[str] = (),
    ) -> FinishedTrajectory:
        """Closes the builder. A reward or part that is not finite needs ``REWARD_INVALID`` and is stored as 0, but for
        the parts named ``missing``, which are stored as NaN."""
        self._check_open()
        if not self._sessions:
            raise RecordError(f"{self._name()}: finished without a session")
        named = {"reward": reward, **{name: value for name, value in parts.items() if name not in missing}}
        bad = [f"{name}={value}" for name, value in named.items() if not math.isfinite(value)]
        if bad and status is not Status.REWARD_INVALID:
            raise RecordError(f"{self._name()}: {', '.join(bad)} under status {status.name}; mark it REWARD_INVALID")
        stored = {name: value if math.isfinite(value) else 0.0 for name, value in named.items()}
        stored |= {name: math.nan for name in parts if name in missing}
        batch = TrajectoryBatch.part(
            **self._flat(status.trainable),
            trajectory_sessions=np.array([0, len(self._sessions)]),
            group_trajectories=np.array([0, 1]),
            trajectory_id=(self.trajectory_id,),
            sample=np.array([self.sample]),
            reward=np.array([stored["reward"]]),
            success=np.array([success]),
            status=np.array([int(status)]),
            harness=(self.harness_id,),
            group_id=("",),
            task_id=("",),
            reward_parts={name: np.array([stored[name]]) for name in parts},
            prepared={name: Ragged.of([ids]) for name, ids in self._prepared.items()},
        )
        self._finished = True
        return FinishedTrajectory(batch)

    def _flat(self, trainable: bool) -> dict[str, Any]:
        """All arrays from tokens up to sessions; ``trainable`` False zeroes the loss mask."""
        segments = [segment for session in self._sessions for segment in session.segments]
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
        turns: list[tuple[int, _Turn]] = []
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
            name: np.array(column, dtype=dtype)
            for (name, dtype), column in zip(TURN_DTYPES.items(), columns, strict=True)
        }
        labels = {
            name: np.array([values.get(turn.number, -1) for _, turn in turns], dtype=np.int16)
            for name, values in self._labels.items()
        }
        spans = {turn.number: (base + turn.start, base + turn.end) for base, turn in turns}
        returns = [spans[s.returned_in] if s.returned_in >= 0 else (-1, -1) for s in self._sessions]
        routed, valid = _place_routed(segments, bases, total)
        return {
            **tokens,
            **per_turn,
            "turn_labels": labels,
            "segment_tokens": bases,
            "segment_turns": np.cumsum([0, *(len(segment.turns) for segment in segments)]),
            "session_segments": np.cumsum([0, *(len(session.segments) for session in self._sessions)]),
            "session_kind": np.array([int(session.kind) for session in self._sessions]),
            "session_parent": np.array([session.parent for session in self._sessions]),
            "session_return": np.array(returns, dtype=np.int64).reshape(-1, 2),
            "routed": routed,
            "routed_valid": valid,
        }

    # -- helpers ---------------------------------------------------------------------------------------------------
    def _name(self) -> str:
        return f"trajectory {self.trajectory_id!r}"

    def _check_open(self) -> None:
        if self._finished:
            raise RecordError(f"{self._name()}: already finished")

    def _session(self, session: int) -> _Session:
        if not 0 <= session < len(self._sessions):
            raise RecordError(f"{self._name()}: session {session} of {len(self._sessions)} opened")
        return self._sessions[session]

    def _current(self, session: int) -> _Segment:
        self._check_open()
        return self._session(session).segment

    def _turn(self, turn: int) -> _Turn:
        self._check_open()
        if not 0 <= turn < len(self._turns):
            raise RecordError(f"{self._name()}: turn {turn} of {len(self._turns)} added")
        return self._turns[turn]

    def _as_ids(self, ids: ArrayLike) -> NDArray[np.int32]:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise RecordError(f"{self._name()}: ids must be one-dimensional integers, got {array.dtype} {array.shape}")
        return array.astype(np.int32, copy=False)

    def _new_turn(self, segment: _Segment, turn: _Turn) -> int:
        segment.turns.append(turn)
        self._turns.append(turn)
        return turn.number

    def _add_piece(
        self,
        session: int,
        segment: _Segment,
        turn: _Turn,
        ids: ArrayLike,
        logp: ArrayLike,
        versions: ArrayLike,
        field: Field | ArrayLike,
        routed: Array | None,
        routed_from: int | None,
    ) -> None:
        where = f"{self._name()}, session {session}, turn {turn.number}"
        array = self._as_ids(ids)
        # Copies: the caller may reuse its buffers, the record may not change with them.
        values = np.array(logp, dtype=np.float32)
        stamps = np.array(versions, dtype=np.int64)
        parts = np.array(field, dtype=np.int8)
        parts = np.broadcast_to(parts, array.shape).copy() if parts.ndim == 0 else parts
        for name, given in (("logp", values), ("versions", stamps), ("field", parts)):
            if given.shape != array.shape:
                raise RecordError(f"{where}: {name} has shape {given.shape}, ids {array.shape}")
        if routed is not None:
            if routed_from is None:
                raise RecordError(f"{where}: routed is given without routed_from, its first token position")
            self._add_routed(where, segment, routed, routed_from, len(array))
        start = segment.append(array)
        segment.pieces.append(_Piece(start, values, stamps, parts, turn.trained))
        turn.end = segment.size

    @staticmethod
    def _add_routed(where: str, segment: _Segment, routed: Array, routed_from: int, coming: int) -> None:
        """Checks and keeps rows for a segment that is about to grow by ``coming`` tokens."""
        after = segment.size + coming
        if routed.ndim != 3 or routed.dtype.kind != "u":
            raise RecordError(f"{where}: routed is {routed.dtype} {routed.shape}, expected unsigned [m, L, k]")
        if routed_from < 0 or routed_from + len(routed) > after:
            raise RecordError(
                f"{where}: routed covers tokens {routed_from}..{routed_from + len(routed)}, the segment has {after}"
            )
        segment.routed.append((routed_from, routed.copy()))


def _place_routed(segments: Sequence[_Segment], bases: Array, total: int) -> tuple[Array | None, Array | None]:
    """Routing rows at their token positions, [T, L, k] in the widest type given, and where they are valid."""
    given = [rows for segment in segments for _, rows in segment.routed]
    if not given:
        return None, None
    shapes = {rows.shape[1:] for rows in given}
    if len(shapes) > 1:
        raise RecordError(f"routed: rows of different shape {sorted(shapes)} (layers, experts a token)")
    routed = np.zeros((total, *shapes.pop()), dtype=np.result_type(*(rows.dtype for rows in given)))
    valid = np.zeros(total, dtype=np.bool_)
    for segment, base in zip(segments, bases[:-1].tolist(), strict=True):
        for start, rows in segment.routed:
            span = slice(base + start, base + start + len(rows))
            free = ~valid[span]
            routed[span][free] = rows[free]
            valid[span] = True
    return routed, valid


def build_group(group_id: str, task_id: str, finished: Sequence[FinishedTrajectory]) -> TrajectoryBatch:
    """The trajectories of one task as one group, in order of ``sample``."""
    if not finished:
        raise RecordError(f"group {group_id!r}: no trajectories")
    ordered = sorted(finished, key=lambda item: item.sample)
    values = joined([item.batch for item in ordered])
    values |= {"group_trajectories": np.array([0, len(ordered)]), "group_id": (group_id,), "task_id": (task_id,)}
    return TrajectoryBatch(**values)
