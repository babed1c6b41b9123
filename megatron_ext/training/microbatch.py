"""Packed micro-batches: what one forward of a training rank sees.

Invariants (``tests/training/test_microbatch.py``):

1. Every selected token of the batch is predicted exactly once over all micro-batches; ``token`` says which it is.
2. The logits at ``logit_index`` predict ``target``: they stand one position before it, in the same row.
3. Positions restart at 0 in every row; no attention crosses a row.
4. A row's first token is never a target: nothing in the row predicts it.
5. With ``share_prefixes`` tokens that rows have in common (equal ids behind equal prefixes, under replay with equal
   recorded experts) enter the forward once; which tokens are predicted, and from what, stays the same.
6. Context-parallel ranks have the same micro-batch but for what each runs: every place is run by one of them, every
   token is predicted by one of them, and what a rank predicts may stand on another (its share ends at a cut).
7. With a ``replay`` rule each token that a rank runs carries the experts recorded for it (``moe.replay_tokens``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.models.packing import SharedTokens
from megatron_ext.moe.replay_tokens import ReplayRule, ReplayTokens, due_tokens, replay_tokens
from megatron_ext.training.context_share import context_share
from megatron_ext.training.planning import prefix_tree
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows


@dataclass(frozen=True)
class MicroBatch:
    """P places of R rows, n of them predicted. This rank runs U tokens and predicts m of the n.

    ``ids`` and ``positions`` int64 [U], the tokens that this rank runs, and ``place`` int64 [U], where they stand;
    ``source`` int64 [P], the batch's token at each place, -1 for padding; ``cu_seqlens`` int32 [R+1] over the places;
    ``token``, ``row``, ``turn`` int64 [n]; ``logit_index`` into the U tokens and ``target`` int64 [m]; ``held`` int64
    [m], which of the n this rank predicts (None: all, m = n); ``shared`` says which places hold which token (None: each
    its own); ``replay``, the experts that the U tokens replay (None: routers choose); ``predicted`` int64 [n], the
    place of each predicted token (None: not told). Without context parallelism and shared prefixes U = P. An empty
    micro-batch (P = 0) keeps a rank in step with the others.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    place: torch.Tensor
    source: torch.Tensor
    cu_seqlens: torch.Tensor
    logit_index: torch.Tensor
    target: torch.Tensor
    token: torch.Tensor
    row: torch.Tensor
    turn: torch.Tensor
    held: torch.Tensor | None = None
    shared: SharedTokens | None = None
    replay: ReplayTokens | None = None
    predicted: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens that this rank runs."""
        return len(self.ids)

    def to(self, device: torch.device) -> Self:
        """The same micro-batch on another device."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return type(self)(**{name: None if value is None else value.to(device) for name, value in values.items()})


def build_microbatch(
    batch: TrajectoryBatch,
    rows: Rows,
    members: Sequence[int] | NDArray[np.int64],
    select: NDArray[np.bool_],
    *,
    share_prefixes: bool = False,
    context_size: int = 1,
    context_rank: int = 0,
    replay: ReplayRule | None = None,
) -> MicroBatch:
    """Packs the rows ``members``; ``select`` bool [M] marks the entries of ``rows.token`` to predict.

    ``context_rank`` of ``context_size`` gives that context-parallel rank's share. ``replay`` takes the recorded experts
    along. Raises ``ValueError`` for shared prefixes under context parallelism, ``ReplayError`` for a record that is
    missing or not this model's.
    """
    if share_prefixes and context_size > 1:
        raise ValueError(
            "batch.share_prefixes=true does not go with parallel.context > 1: rows are cut over ranks; set one of them"
        )
    starts = rows.row_offsets[:-1][list(members)]
    ends = rows.row_offsets[1:][list(members)]
    lengths = (ends - starts).astype(np.int64)
    whole = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(whole[-1]) - np.repeat(whole[:-1], lengths)
    entry = np.repeat(starts, lengths) + within
    token = rows.token[entry].astype(np.int64)
    at = np.flatnonzero(select[entry] & (within > 0))  # predicted tokens, in the rows without padding
    ids = batch.ids[token].astype(np.int64)
    row_of = np.repeat(np.asarray(members, dtype=np.int64), lengths)

    share = context_share(lengths, context_size, context_rank)
    real = share.entry >= 0
    padded_ids, source = np.zeros(len(real), dtype=np.int64), np.full(len(real), -1, dtype=np.int64)
    padded_ids[real], source[real] = ids, token
    position = np.arange(len(real)) - np.repeat(share.offsets[:-1], np.diff(share.offsets))
    run, logit_index, held, shared, flat = share.place, at - 1, None, None, None
    if context_size > 1:
        stands = share.local[np.flatnonzero(real)[at - 1]]  # where the logits before each predicted token are
        mine = np.flatnonzero(stands >= 0)
        logit_index, held = stands[mine], torch.from_numpy(mine)
    elif share_prefixes:
        tree = prefix_tree(batch, token, whole, replay)
        run, logit_index, shared, flat = tree.source.copy(), tree.flat[at - 1], SharedTokens.of(tree), tree.flat
    replayed = None
    if replay is not None:
        row = np.repeat(np.arange(len(lengths)), lengths)
        last = np.full(len(lengths), -1)
        np.maximum.at(last, row[at], within[at] - 1)
        entry_run = run if flat is not None else share.entry[run]
        replayed = replay_tokens(batch, replay, token, due_tokens(within, row, last), entry_run, flat)
    target = ids[at] if held is None else ids[at][mine]
    return MicroBatch(
        ids=torch.from_numpy(padded_ids[run]),
        positions=torch.from_numpy(position[run]),
        place=torch.from_numpy(run),
        source=torch.from_numpy(source),
        cu_seqlens=torch.from_numpy(share.offsets.astype(np.int32)),
        logit_index=torch.from_numpy(logit_index.astype(np.int64)),
        target=torch.from_numpy(target),
        token=torch.from_numpy(token[at]),
        row=torch.from_numpy(row_of[at]),
        turn=torch.from_numpy(batch.turn[token[at]].astype(np.int64)),
        held=held,
        shared=shared,
        replay=replayed,
        predicted=torch.from_numpy(np.flatnonzero(real)[at]),
    )
