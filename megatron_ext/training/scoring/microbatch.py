"""Micro-batches of a score plan: the packed rows of a group as the trainer's forward takes them.

Invariants (``tests/integration/test_score_execution.py``, ``tests/moe/test_replay.py``):

1. Every item of the rows' requests is read by exactly one context-parallel rank.
2. Rows that ask for ``replay_routing`` carry the experts of the record, the others none; what was not recorded is an
   error.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.credit.score_plan import ScoreGroup
from megatron_ext.credit.score_run import PackedScores, pack_rows
from megatron_ext.credit.scoring import ScoreError
from megatron_ext.moe.replay_tokens import ReplayError, ReplayRule, ReplayTokens, due_tokens, replay_tokens
from megatron_ext.training.context_share import ContextShare, context_share
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.trajectory.record import TrajectoryBatch


@dataclass(frozen=True, eq=False)
class Recorded:
    """Where replayed rows find their experts: the batch that the requests are about, and what its record must be."""

    batch: TrajectoryBatch
    rule: ReplayRule


@dataclass(frozen=True, eq=False)
class _Reads:
    """What this rank reads from a micro-batch: where, and which of the group's items each is; int64.

    ``scored_item`` [m] goes with the micro-batch's ``logit_index``; ``topk``, ``given`` index into those m;
    ``hidden`` indexes into the tokens that this rank runs.
    """

    scored_item: torch.Tensor
    topk: torch.Tensor
    topk_item: torch.Tensor
    given: torch.Tensor
    given_id: torch.Tensor
    given_item: torch.Tensor
    hidden: torch.Tensor
    hidden_item: torch.Tensor

    def to(self, device: torch.device) -> _Reads:
        return _Reads(**{name: index.to(device) for name, index in vars(self).items()})


@dataclass(frozen=True)
class ScoreMicroBatch(MicroBatch):
    """A packed piece of a group as the trainer's forward takes it; ``token`` are the group's scored items."""

    reads: _Reads = field(kw_only=True)


def pack_and_replay(
    group: ScoreGroup,
    members: Sequence[int] | NDArray[np.int64],
    recorded: Recorded | None,
    share: ContextShare | None = None,
) -> tuple[PackedScores, ReplayTokens | None]:
    """The rows ``members`` packed, and the experts that the places of ``share`` (None: all) replay; None where none of
    the group's rows asks for it."""
    piece = pack_rows(group, members)
    if recorded is None or not np.any(group.source >= 0):
        return piece, None
    lengths = np.diff(piece.cu_seqlens).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    last = np.full(len(lengths), -1)
    np.maximum.at(last, row[piece.logit_index], piece.positions[piece.logit_index])
    # A hidden state at the last sampled token needs experts that nobody could record.
    np.maximum.at(last, row[piece.hidden_index], piece.positions[piece.hidden_index] - 1)
    due = due_tokens(piece.positions, row, last)
    run = np.arange(len(piece.ids)) if share is None else share.entry[share.place]
    try:
        return piece, replay_tokens(recorded.batch, recorded.rule, piece.source, due, run)
    except ReplayError as error:
        raise ScoreError(str(error)) from error


def score_microbatch(
    group: ScoreGroup,
    members: Sequence[int] | NDArray[np.int64],
    *,
    context_size: int = 1,
    context_rank: int = 0,
    recorded: Recorded | None = None,
) -> ScoreMicroBatch:
    """The rows ``members`` of a group as the forward takes them: this context-parallel rank's share, on the CPU."""
    rows = np.asarray(members, dtype=np.int64)
    share = context_share(group.lengths[rows], context_size, context_rank)
    piece, replay = pack_and_replay(group, rows, recorded, share)
    lengths = np.diff(piece.cu_seqlens).astype(np.int64)
    real = share.entry >= 0
    ids, source = np.zeros(len(real), dtype=np.int64), np.full(len(real), -1, dtype=np.int64)
    ids[real], source[real] = piece.ids, np.arange(len(piece.ids))
    position = np.arange(len(real)) - np.repeat(share.offsets[:-1], np.diff(share.offsets))
    stands = share.local[real]  # where each token of the piece is on this rank, -1 for elsewhere

    at = stands[piece.logit_index]
    mine = np.flatnonzero(at >= 0)
    among = np.full(len(at), -1, dtype=np.int64)
    among[mine] = np.arange(len(mine))
    topk, given, hidden = among[piece.topk_index], among[piece.given_index], stands[piece.hidden_index]
    row = np.repeat(piece.rows, lengths)[piece.logit_index]

    def held(values: NDArray[np.int64], where: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values[where >= 0].astype(np.int64))

    reads = _Reads(
        scored_item=held(piece.scored_item, at),
        topk=held(topk, topk),
        topk_item=held(piece.topk_item, topk),
        given=held(given, given),
        given_id=held(piece.given_id, given),
        given_item=held(piece.given_item, given),
        hidden=held(hidden, hidden),
        hidden_item=held(piece.hidden_item, hidden),
    )
    return ScoreMicroBatch(
        ids=torch.from_numpy(ids[share.place]),
        positions=torch.from_numpy(position[share.place]),
        place=torch.from_numpy(share.place),
        source=torch.from_numpy(source),
        cu_seqlens=torch.from_numpy(share.offsets.astype(np.int32)),
        logit_index=held(at, at),
        target=held(piece.target, at),
        token=torch.from_numpy(piece.scored_item),
        row=torch.from_numpy(row),
        turn=torch.full((len(at),), -1, dtype=torch.int64),
        held=torch.from_numpy(mine) if context_size > 1 else None,
        replay=replay,
        reads=reads,
    )
