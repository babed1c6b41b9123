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

from megatron_ext.trajectory.packing import PackPlan, pack
from megatron_ext.trajectory.prefix_tree import build_prefix_tree
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
) -> PackPlan:
    """Micro-batches of the rows ``members`` int64 [R'] for ``ranks`` data-parallel ranks; the plan's row indices are
    indices into ``members``.

    ``cap`` (``batch.tokens_per_microbatch``), ``context`` and ``groups`` as in ``packing.pack``; a tree keeps rows
    together by what they share, so that it takes no ``groups``. Raises ``PackingError`` on a row longer than the cap,
    ``ValueError`` for shared prefixes under context parallelism.
    """
    if not share_prefixes:
        return pack(rows.lengths[members], cap=cap, ranks=ranks, groups=groups, context=context)
    if context > 1:
        raise ValueError(
            f"batch.share_prefixes=true: parallel.context={context} cuts rows over ranks; turn one of the two off"
        )
    lengths = rows.lengths[members].astype(np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], lengths)
    entry = np.repeat(rows.row_offsets[:-1][members], lengths) + within
    return pack_tree(build_prefix_tree(batch.ids[rows.token[entry]], offsets), cap=cap, ranks=ranks)
