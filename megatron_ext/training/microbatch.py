"""Packed micro-batches: what one forward of a training rank sees.

Invariants (``tests/training/test_microbatch.py``):

1. Every selected token of the batch is predicted exactly once over all micro-batches; ``token`` says which it is.
2. The logits at ``logit_index`` predict ``target``: they stand one position before it, in the same row.
3. Positions restart at 0 in every row; no attention crosses a row.
4. A row's first token is never a target: nothing in the row predicts it.
5. With ``share_prefixes`` tokens that rows have in common (equal ids behind equal prefixes) enter the forward once;
   which tokens are predicted, and from what, stays the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.models.packing import SharedTokens
from megatron_ext.trajectory.shared_prefix import distinct_tokens
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows


@dataclass(frozen=True)
class MicroBatch:
    """T places of R rows, n of them predicted, with U distinct tokens to run (U = T unless prefixes are shared).

    ``ids`` and ``positions`` int64 [U]; ``source`` int64 [T], the batch's token at each place; ``cu_seqlens`` int32
    [R+1] over the places; ``logit_index`` int64 [n] into the U tokens; ``target``, ``token``, ``row``, ``turn`` int64
    [n]; ``shared`` says which places hold which token (None: each its own). An empty micro-batch (T = 0) keeps a rank
    in step with the others.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    source: torch.Tensor
    cu_seqlens: torch.Tensor
    logit_index: torch.Tensor
    target: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    turn: torch.Tensor
    shared: SharedTokens | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that go through the forward."""
        return len(self.ids)

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch on another device."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return MicroBatch(**{name: None if value is None else value.to(device) for name, value in values.items()})


def build_microbatch(
    batch: TrajectoryBatch,
    rows: Rows,
    members: Sequence[int] | NDArray[np.int64],
    select: NDArray[np.bool_],
    *,
    share_prefixes: bool = False,
) -> MicroBatch:
    """Packs the rows ``members``; ``select`` bool [M] marks the entries of ``rows.token`` to predict."""
    starts = rows.row_offsets[:-1][list(members)]
    ends = rows.row_offsets[1:][list(members)]
    lengths = (ends - starts).astype(np.int64)
    cu = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(cu[-1]) - np.repeat(cu[:-1], lengths)
    entry = np.repeat(starts, lengths) + within
    token = rows.token[entry]
    predicted = select[entry] & (within > 0)
    at = np.flatnonzero(predicted)
    ids = batch.ids[token].astype(np.int64)
    row_of = np.repeat(np.asarray(members, dtype=np.int64), lengths)
    run = np.arange(len(ids))  # the places that go through the forward
    logit_index = at - 1
    shared = None
    if share_prefixes:
        distinct, run = distinct_tokens(ids, cu)
        logit_index = distinct[logit_index]
        shared = SharedTokens.of(torch.from_numpy(distinct), torch.from_numpy(run))
    return MicroBatch(
        ids=torch.from_numpy(ids[run]),
        positions=torch.from_numpy(within[run].astype(np.int64)),
        source=torch.from_numpy(token.astype(np.int64)),
        cu_seqlens=torch.from_numpy(cu.astype(np.int32)),
        logit_index=torch.from_numpy(logit_index.astype(np.int64)),
        target=torch.from_numpy(ids[at]),
        token=torch.from_numpy(token[at].astype(np.int64)),
        row=torch.from_numpy(row_of[at]),
        turn=torch.from_numpy(batch.turn[token[at]].astype(np.int64)),
        shared=shared,
    )
