"""What a session adds to the likelihood of the right answer: the two places in the record that say it, the requests.

    IG_j = l_j - l_{j-1},   l = (1 / L) sum_l log pi(a*_l | context, a*_<l)

A place is a segment and where it is cut; what the harness puts before an answer and the answer's own ids (the record's
``prepared``) follow it there.

=============================  ==============================  ================================================
session                        before                          after
=============================  ==============================  ================================================
normal                         its opening messages            its end, less what its sub-agents added
compress (of a normal one)     the end of what it compresses   the opening of the session that goes on from it
sub-agent                      its parent, before the message  its parent, after that message
                               that brings its result
=============================  ==============================  ================================================

Invariants (``tests/recipes/mosaic/test_gain.py`` asserts each):

1. The gains of a trajectory add up to l at the end of its last normal session, less l at its opening.
2. Cutting sessions into segments, which repeat what came before, asks the same questions.
3. Nothing is asked of a trajectory without an answer, or whose end says nothing about the policy; and no place twice.
4. A session of which one place is missing (nothing goes on from its summary, its result never came) has no gain, nor
   has the compression of a sub-agent's dialogue: what the sub-agent brought is in its result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.scoring import ScoreReply, ScoreRequest, answer_likelihood
from megatron_ext.trajectory.record import Role, SessionKind, TrajectoryBatch

PREFIX, ANSWER = "answer_prefix", "answer"


@dataclass(frozen=True, eq=False)
class Places:
    """The P places of a batch at which the answer's likelihood is asked for, and the two of each of its Q sessions.

    ``segment``, ``cut``, ``trajectory`` int64 [P]; ``before``, ``after`` int64 [Q], indices into them, -1 where a
    session has no gain; ``inside`` int64 [Q], the session whose gain holds this one's too, or -1.
    """

    segment: NDArray[np.int64]
    cut: NDArray[np.int64]
    trajectory: NDArray[np.int64]
    before: NDArray[np.int64]
    after: NDArray[np.int64]
    inside: NDArray[np.int64]

    @property
    def measured(self) -> NDArray[np.bool_]:
        """bool [Q]: sessions that have a gain."""
        result: NDArray[np.bool_] = self.before >= 0
        return result


def places(batch: TrajectoryBatch, max_tokens: int = 0) -> Places:
    """The places of a batch. One whose context and answer are longer than ``max_tokens`` (0: no limit) is missing."""
    count = batch.num_sessions
    owner = batch.session_trajectory()
    kind, parent = batch.session_kind, batch.session_parent.astype(np.int64)
    every = np.arange(count)

    # Four places a session: its opening, its end, and its parent before and after its result.
    opening_segment, opening = _openings(batch)
    last = batch.session_segments[1:] - 1
    result = batch.session_return
    in_parent = np.searchsorted(batch.segment_tokens, result[:, 0], side="right") - 1
    segment = np.concatenate([opening_segment, last, in_parent, in_parent])
    cut = np.concatenate([opening, batch.segment_tokens[last + 1], result[:, 0], result[:, 1]])
    trajectory = np.tile(owner, 4)

    before, after = every.copy(), every + count
    of_normal = (parent >= 0) & (kind[parent] == SessionKind.NORMAL)
    compress, agent = kind == SessionKind.COMPRESS, kind == SessionKind.SUBAGENT
    goes_on = np.append(owner[1:], -1) == owner  # in the session opened next
    before = np.where(compress, parent + count, before)
    after = np.where(compress, every + 1, after)
    before, after = np.where(agent, every + 2 * count, before), np.where(agent, every + 3 * count, after)
    missing = (compress & ~(of_normal & goes_on)) | (agent & (result[:, 0] < 0))
    before[missing] = after[missing] = 0

    asked = _askable(batch, segment, cut, trajectory, max_tokens)
    gain = ~missing & asked[before] & asked[after]
    used, index = np.unique(np.concatenate([before[gain], after[gain]]), return_inverse=True)
    ends = np.full((2, count), -1, dtype=np.int64)
    ends[:, gain] = index.reshape(2, -1)
    nested = agent & gain & of_normal & gain[parent]
    inside = np.where(nested, parent, -1)
    return Places(segment[used], cut[used], trajectory[used], ends[0], ends[1], inside)


def _openings(batch: TrajectoryBatch) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each session's opening messages end, before its first model turn: segment and cut, int64 [Q]; cut -1 for a
    session in which the model never spoke."""
    session = batch.segment_session()[batch.turn_segment()]
    spoke = np.flatnonzero(batch.turn_role == Role.MODEL)
    owner, first = np.unique(session[spoke], return_index=True)
    turn = spoke[first]
    message = np.maximum(turn - 1, 0)
    # The last message before it; without one, what stands before the turn itself.
    there = (turn > 0) & (session[message] == owner)
    at = np.where(there, message, turn)
    segment = np.zeros(batch.num_sessions, dtype=np.int64)
    cut = np.full(batch.num_sessions, -1, dtype=np.int64)
    segment[owner] = batch.turn_segment()[at]
    cut[owner] = np.where(there, batch.turn_end[at], batch.turn_start[at])
    return segment, cut


def _askable(
    batch: TrajectoryBatch,
    segment: NDArray[np.int64],
    cut: NDArray[np.int64],
    trajectory: NDArray[np.int64],
    max_tokens: int,
) -> NDArray[np.bool_]:
    """bool: places that are there, in a trajectory that is asked about, and fit with the answer."""
    if not {PREFIX, ANSWER} <= set(batch.prepared):
        return np.zeros(len(cut), dtype=bool)
    prefix, answer = batch.prepared[PREFIX].lengths, batch.prepared[ANSWER].lengths
    context = cut - batch.segment_tokens[segment] + prefix[trajectory]
    total = context + answer[trajectory]
    asked = (batch.trainable() & (answer > 0))[trajectory] & (cut >= 0) & (context > 0)
    return asked & (total <= max_tokens) if max_tokens else asked


def likelihood_requests(batch: TrajectoryBatch, at: Places) -> list[ScoreRequest]:
    """One request a place: the log-prob of every id of the answer there, under the weights that open the batch."""
    asked = {}
    for trajectory in np.unique(at.trajectory).tolist():
        prefix, answer = batch.prepared[PREFIX].row(trajectory), batch.prepared[ANSWER].row(trajectory)
        ids, positions = np.concatenate([prefix, answer]), np.arange(len(prefix), len(prefix) + len(answer))
        ids.flags.writeable = positions.flags.writeable = False  # so that its requests share them
        asked[trajectory] = ids, positions
    return [
        ScoreRequest(segment, None, asked[trajectory][1], answer_ids=asked[trajectory][0], cut=cut)
        for segment, cut, trajectory in zip(at.segment.tolist(), at.cut.tolist(), at.trajectory.tolist(), strict=True)
    ]


def gains(at: Places, replies: Sequence[ScoreReply], space: str) -> NDArray[np.float64]:
    """IG of each session, float64 [Q], 0 where it has none; ``space`` as in ``answer_likelihood``."""
    value = np.append(answer_likelihood(replies, space=space), 0.0)
    whole = np.where(at.measured, value[at.after] - value[at.before], 0.0)
    nested = at.inside >= 0
    return whole - np.bincount(at.inside[nested], weights=whole[nested], minlength=len(whole))
