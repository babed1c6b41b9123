"""Builds the record of one trajectory while its episode runs.

Invariants (``tests/trajectory/test_builder.py`` asserts each):

1. Ids are stored exactly as given, in the order given; nothing is tokenised here.
2. ``prompt_ids`` is the whole current segment: what the engine must be sent so that its answer continues the record.
3. A model turn that arrives in pieces gives the same record as the same turn given at once, loss mask included.
4. A trajectory whose status is untrainable keeps tokens, log-probs and versions; only its loss mask is zero.
5. Tokens repeated by ``rewrite`` are context: mask 0, turn -1.
6. ``routed`` rows stand at their position in the segment, prompt tokens included; the first row given for a position
   stays, because that forward is the one that sampled the token after it. Where an engine ran the prompt of a model
   turn again on other experts (it lost its cache, or the weights changed), the turn stands on those:
   ``Rerun.SEGMENT`` puts it into a new segment, whose repeated prompt is context, and every token replays the forward
   that sampled it; ``Rerun.FIRST`` keeps one segment and the first rows. A turn is never cut: what resumes one keeps
   the first rows. Both count (``FinishedTrajectory.reruns``); experts that are the same change nothing.
7. Segments of one session may grow in turns (``reopen``), as the calls of parallel agents come: turn numbers follow the
   order of adding, the layout keeps every segment together.

A turn is named by the number it got when it was added (its ``turn_number``), a session by the order of opening.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.growing import Segment, Session, Turn, flat
from megatron_ext.trajectory.joining import joined
from megatron_ext.trajectory.record import Array, Field, Ragged, RecordError, Role, SessionKind, Status, TrajectoryBatch
from megatron_ext.trajectory.routed_rows import Rerun, RerunCounts


@dataclass(frozen=True)
class FinishedTrajectory:
    """One finished trajectory: a batch of one, whose group is not named yet; it is validated with its group.
    ``reruns``: routing that was recorded again, and differently."""

    batch: TrajectoryBatch
    reruns: RerunCounts = RerunCounts()

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

    def __init__(self, trajectory_id: str, sample: int, harness_id: str, rerun: Rerun = Rerun.FIRST) -> None:
        self.trajectory_id = trajectory_id
        self.sample = sample
        self.harness_id = harness_id
        self.rerun = rerun
        self._sessions: list[Session] = []
        self._turns: list[Turn] = []
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
        self._sessions.append(Session(kind, -1 if parent is None else parent))
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
        return self._new_turn(segment, Turn(len(self._turns), role, start, start + len(array), state_key))

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
        rerun: int = 0,
    ) -> int:
        """A turn that the model sampled after ``prompt_ids``. Returns the turn's number.

        ``ids`` [n], ``logp`` [n] (nats, <= 0), ``versions`` [n] packed; ``field`` one ``Field`` or [n]. ``routed``
        [m, L, k] are the experts of the tokens ``routed_from .. routed_from + m`` of (prompt + ids), as
        ``GenerateResult`` gives them; ``rerun`` too, the ids sampled by an earlier forward than that of their rows.
        ``trained=False`` leaves the turn out of the loss.
        """
        segment = self._current(session)
        if segment.size == 0:
            raise RecordError(f"{self._name()}, session {session}: a model turn needs a prompt; add context first")
        turn = Turn(
            len(self._turns), Role.MODEL, segment.size, segment.size, state_key, action_key, 0.0, trained=trained
        )
        where, array = f"{self._name()}, session {session}, turn {turn.number}", self._as_ids(ids)
        again = self._run_again(where, segment, routed, routed_from, len(array))
        (again or segment).add_sampled(where, turn, array, logp, versions, field, routed, routed_from, rerun)
        if again is not None:
            self._session(session).go_on_in(again)
        return self._new_turn(again or segment, turn)

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
        rerun: int = 0,
    ) -> int:
        """More tokens of the session's last model turn (a partial rollout that resumed); in the loss if the turn is."""
        segment = self._current(session)
        last = segment.turns[-1] if segment.turns else None
        if last is None or last.role is not Role.MODEL or last.end != segment.size:
            raise RecordError(f"{self._name()}, session {session}: the segment does not end in a model turn to extend")
        where, array = f"{self._name()}, session {session}, turn {last.number}", self._as_ids(ids)
        # A turn without a token yet is cut nowhere, wherever it goes on.
        again = None
        if last.start == last.end:
            again = self._run_again(where, segment, routed, routed_from, len(array))
        (again or segment).add_sampled(where, last, array, logp, versions, field, routed, routed_from, rerun)
        if again is not None:
            again.turns.append(segment.turns.pop())
            self._session(session).go_on_in(again)
        if action_key is not None:
            last.action_key = action_key
        return last.number

    def add_routed(self, session: int, routed: Array, routed_from: int) -> None:
        """Experts [m, L, k] of the segment's tokens ``routed_from .. routed_from + m``, which stand there already.
        Where a row was given before, that one stays."""
        self._current(session).add_routed(f"{self._name()}, session {session}", routed, routed_from)

    def repeat_routed(self, session: int, other: int) -> None:
        """Experts of the tokens that the session repeats from the beginning of another one, where it lacks its own:
        those of their last forward, which is what the engine's cache holds."""
        self.inherit_routed(session, other, self._session(other).current, self._session(other).segment.size)

    def inherit_routed(self, session: int, other: int, segment: int, end: int) -> None:
        """As ``repeat_routed``, from segment number ``segment`` of the session ``other`` and for tokens before ``end``
        only."""
        self._current(session).rows.inherit(self._session(other).segments[segment].rows, end)

    def rewrite(self, session: int) -> int:
        """Starts a new segment: the history will be told anew, through ``add_context``. Returns its number within the
        session."""
        self._check_open()
        opened = self._session(session)
        opened.go_on_in(Segment())
        return opened.current

    def current(self, session: int) -> int:
        """Number, within the session, of the segment that is added to."""
        return self._session(session).current

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
            **flat(self._sessions, self._labels, status.trainable),
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
        segments = [segment for session in self._sessions for segment in session.segments]
        counts = (RerunCounts(segment.reruns, segment.displaced) for segment in segments)
        return FinishedTrajectory(batch, sum(counts, RerunCounts()))

    # -- helpers ---------------------------------------------------------------------------------------------------
    def _name(self) -> str:
        return f"trajectory {self.trajectory_id!r}"

    def _check_open(self) -> None:
        if self._finished:
            raise RecordError(f"{self._name()}: already finished")

    def _session(self, session: int) -> Session:
        if not 0 <= session < len(self._sessions):
            raise RecordError(f"{self._name()}: session {session} of {len(self._sessions)} opened")
        return self._sessions[session]

    def _current(self, session: int) -> Segment:
        self._check_open()
        return self._session(session).segment

    def _turn(self, turn: int) -> Turn:
        self._check_open()
        if not 0 <= turn < len(self._turns):
            raise RecordError(f"{self._name()}: turn {turn} of {len(self._turns)} added")
        return self._turns[turn]

    def _run_again(
        self, where: str, segment: Segment, routed: Array | None, routed_from: int | None, coming: int
    ) -> Segment | None:
        """The segment that a model turn goes on in, where it is not ``segment``."""
        return segment.run_again(where, routed, routed_from, coming) if self.rerun is Rerun.SEGMENT else None

    def _as_ids(self, ids: ArrayLike) -> NDArray[np.int32]:
        array = np.asarray(ids)
        if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
            raise RecordError(f"{self._name()}: ids must be one-dimensional integers, got {array.dtype} {array.shape}")
        return array.astype(np.int32, copy=False)

    def _new_turn(self, segment: Segment, turn: Turn) -> int:
        segment.turns.append(turn)
        self._turns.append(turn)
        return turn.number


def build_group(group_id: str, task_id: str, finished: Sequence[FinishedTrajectory]) -> TrajectoryBatch:
    """The trajectories of one task as one group, in order of ``sample``."""
    if not finished:
        raise RecordError(f"group {group_id!r}: no trajectories")
    ordered = sorted(finished, key=lambda item: item.sample)
    values = joined([item.batch for item in ordered])
    values |= {"group_trajectories": np.array([0, len(ordered)]), "group_id": (group_id,), "task_id": (task_id,)}
    return TrajectoryBatch(**values)
