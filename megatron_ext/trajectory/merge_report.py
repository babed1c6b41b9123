"""What a merge reports beside the record: where each call went and why, what its prompt contradicted, and counts.

Invariants (``tests/trajectory/test_merge_report.py`` asserts each):

1. Every kept call has one placement, and one reason (``Start``) for it; the counts are those of the reasons.
2. A departure names the token at which a prompt left the recorded history, and the call and offset that hold it.
3. Sampled tokens kept and dropped add up to those that were handed over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from megatron_ext.trajectory.builder import FinishedTrajectory
from megatron_ext.trajectory.calls import Call
from megatron_ext.trajectory.record import TrajectoryBatch


class Start(StrEnum):
    """Why a call stands where it stands."""

    OPENS = "opens"  # first of its session
    CONTINUES = "continues"  # the first to extend its parent
    RESUMES = "resumes"  # goes on with its parent's unfinished answer
    FORK = "fork"  # shares a prefix with calls that went on otherwise (another sample, another observation)
    REWRITE = "rewrite"  # tells the first prompt in another way, or replaces an answer altogether
    CUT = "cut"  # keeps the first tokens of an answer and goes on with other text
    DRIFT = "drift"  # has other tokens inside an answer: the same text tokenised again, or text unknown


@dataclass(frozen=True)
class Placement:
    """Where a call went. ``session`` and ``segment`` (within it) as in the record; ``turn`` is the turn's number."""

    request_id: str
    order: int
    start: Start
    session: int
    segment: int
    turn: int


@dataclass(frozen=True)
class Departure:
    """A prompt that leaves the recorded history at token ``position``: ``recorded_id`` stands there, the prompt has
    ``given_id``. ``against`` is the ``order`` of the call that holds the recorded token, ``offset`` its place in that
    call's answer (-1: it was not sampled)."""

    request_id: str
    order: int
    start: Start
    position: int
    recorded_id: int
    given_id: int
    against: int
    offset: int


@dataclass(frozen=True)
class MergeStats:
    """Counts of one rollout. ``merged`` calls continue a segment (``resumed`` ones not counted); ``prompt_tokens`` as
    sent, ``row_tokens`` in the record; ``unrouted``: tokens without a routing row though a later one was sampled, where
    routing was recorded."""

    calls: int
    merged: int
    resumed: int
    forks: int
    rewrites: int
    cut: int
    drifted: int
    retries_dropped: int
    sampled_tokens: int
    dropped_tokens: int
    prompt_tokens: int
    row_tokens: int
    unrouted: int


@dataclass(frozen=True)
class Merged:
    """The record of the rollout, a batch of one; where its calls went, by ``order``; and what was found on the way."""

    finished: FinishedTrajectory
    placements: tuple[Placement, ...]
    departures: tuple[Departure, ...]
    stats: MergeStats


def counted(
    kept: Sequence[Call],
    dropped: Sequence[Call],
    placements: Sequence[Placement],
    batch: TrajectoryBatch,
    merging: bool,
) -> MergeStats:
    """The counts of one rollout; ``merging``: whether calls that continue others went into their segments."""
    count = {start: sum(p.start is start for p in placements) for start in Start}
    return MergeStats(
        calls=len(kept),
        merged=count[Start.CONTINUES] if merging else 0,
        resumed=count[Start.RESUMES],
        forks=count[Start.FORK],
        rewrites=count[Start.REWRITE],
        cut=count[Start.CUT],
        drifted=count[Start.DRIFT],
        retries_dropped=len(dropped),
        sampled_tokens=sum(len(call.ids) for call in kept),
        dropped_tokens=sum(len(call.ids) for call in dropped),
        prompt_tokens=sum(len(call.prompt_ids) for call in kept),
        row_tokens=batch.num_tokens,
        unrouted=_unrouted(batch),
    )


def _unrouted(batch: TrajectoryBatch) -> int:
    """Tokens without a routing row; the last of a segment needs none."""
    if batch.routed_valid is None:
        return 0
    missing = ~batch.routed_valid
    ends = batch.segment_tokens[1:][np.diff(batch.segment_tokens) > 0]
    return int(np.count_nonzero(missing) - np.count_nonzero(missing[ends - 1]))
