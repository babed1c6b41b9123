"""Which rows make a micro-batch: by their lengths, or by their prefix tree where shared tokens run once.

Invariants (``tests/training/test_planning.py``):

1. Every row is in exactly one micro-batch, all ranks have equally many, and none runs more than ``cap`` tokens a
   context-parallel rank; with ``share_prefixes`` what rows of a micro-batch share counts once.
2. With ``share_prefixes`` rows that share a prefix stay together where that is not dearer, and a plan never has more
   tokens to run than one by lengths has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.trajectory.packing import PackingError, PackPlan, pack
from megatron_ext.trajectory.prefix_tree import PrefixTree, build_prefix_tree
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows
from megatron_ext.trajectory.tree_packing import pack_tree


def plan_microbatches(
    batch: TrajectoryBatch,
    rows: Rows,
    members: NDArray[np.int64],
    *,
    cap: int,
    ranks: int = 1,
    share_prefixes: bool = False,
    context: int = 1,
    groups: ArrayLike | None = None,
    replay: ReplayRule | None = None,
) -> PackPlan:
    """Micro-batches of the rows ``members`` int64 [R'] for ``ranks`` data-parallel ranks; the plan's row indices are
    indices into ``members``.

    ``cap`` (``batch.tokens_per_microbatch``), ``context`` and ``groups`` as in ``packing.pack``; a tree keeps rows
    together by what they share, so that it takes no ``groups``. Raises ``PackingError`` on a row longer than the cap,
    ``ValueError`` for shared prefixes under context parallelism.
    """
    if not share_prefixes:
        plan = pack(rows.lengths[members], cap=cap, ranks=ranks, groups=groups, context=context)
        check_each_once(plan, len(members))
        return plan
    if context > 1:
        raise ValueError(
            f"batch.share_prefixes=true: parallel.context={context} cuts rows over ranks; turn one of the two off"
        )
    lengths = rows.lengths[members].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    entry = np.repeat(rows.row_offsets[:-1][members], lengths) + within
    plan = pack_tree(prefix_tree(batch, rows.token[entry], offsets, replay), cap=cap, ranks=ranks)
    check_each_once(plan, len(members))
    return plan


def check_each_once(plan: PackPlan, rows: int) -> None:
    """Raises ``PackingError`` unless each of ``rows`` rows is in one micro-batch of one rank: what a row's tokens are
    trained on, and the experts that they replay, are then used exactly once."""
    placed = [part for rank in plan.microbatches for part in rank]
    counts = np.bincount(np.concatenate([np.zeros(0, dtype=np.int64), *placed]), minlength=rows)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong) or len(counts) != rows:
        row = int(wrong[0]) if len(wrong) else rows
        raise PackingError(f"a plan for {rows} rows has row {row} in {counts[row]} micro-batches; expected one")


def prefix_tree(
    batch: TrajectoryBatch, token: NDArray[np.int64], offsets: NDArray[np.int64], replay: ReplayRule | None
) -> PrefixTree:
    """The tree of R rows: tokens int64 [M] of the batch, row r being ``token[offsets[r] : offsets[r + 1]]``.

    Under replay rows share a token only where they recorded the same experts (an engine that computes a prefix again
    may choose others): a shared one would run one row's experts in the forward of another.
    """
    ids = batch.ids[token]
    if replay is None:
        return build_prefix_tree(ids, offsets)
    routed, valid = replay.check(batch)
    return build_prefix_tree(ids, offsets, routed=routed[token], routed_valid=valid[token], separate_routing=True)
