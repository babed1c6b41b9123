"""The micro-batches of a rank: as many on every rank, since every collective of training is entered by all together.

Expert and pipeline groups span data-parallel ranks, so a rank with fewer rows runs empty micro-batches at the end.

Invariants (``tests/training/ranks/test_lockstep.py``, over ranks ``tests/integration/test_layouts.py``):

1. All ranks get equally many micro-batches; interleaved pipelines get a multiple of their length, as they need.
2. A row is in exactly one micro-batch of exactly one data-parallel rank; ranks of one replica get the same rows.
3. A rank that disagrees is an error on every rank before anything is run, not a hang.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import ArrayLike, NDArray

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.planning import check_each_once, plan_microbatches
from megatron_ext.trajectory.packing import PackPlan
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows


def rounded(count: int, parallel: ParallelConfig) -> int:
    """The least number of micro-batches from ``count`` on that the pipeline's schedule takes."""
    multiple = parallel.pipeline if parallel.virtual_pipeline > 1 else 1
    return -(-max(count, 1) // multiple) * multiple


def rank_microbatches(
    batch: TrajectoryBatch,
    rows: Rows,
    context: ParallelContext,
    *,
    cap: int,
    members: NDArray[np.int64] | None = None,
    select: NDArray[np.bool_] | None = None,
    groups: ArrayLike | None = None,
    share_prefixes: bool = False,
    plan: PackPlan | None = None,
    replay: ReplayRule | None = None,
) -> list[MicroBatch]:
    """This rank's micro-batches of a batch that every rank knows, on its device. No communication.

    ``members`` int64 [R'] are the rows to run (None: all), ``select`` bool [M] the tokens to predict (None: the trained
    ones), ``cap`` the tokens of a micro-batch on one rank; ``groups`` as in ``packing.pack``. ``plan`` over the members
    replaces the one that ``plan_microbatches`` would make; it must have a rank for each data-parallel rank. ``replay``
    as in ``build_microbatch``.
    """
    chosen = np.arange(rows.num_rows) if members is None else np.asarray(members, dtype=np.int64)
    size, parallel = context.data_parallel_size, context.config
    if plan is None:
        plan = plan_microbatches(
            batch,
            rows,
            chosen,
            cap=cap,
            ranks=size,
            share_prefixes=share_prefixes,
            context=parallel.context,
            groups=groups,
            replay=replay,
        )
    else:
        check_each_once(plan, len(chosen))
    if plan.num_ranks != size:
        raise ValueError(f"a plan for {plan.num_ranks} data-parallel ranks, the layout has {size}")
    mine = plan.microbatches[context.data_parallel_rank]
    empty = [chosen[:0]] * (rounded(len(mine), parallel) - len(mine))
    return [
        build_microbatch(
            batch,
            rows,
            part,
            rows.mask if select is None else select,
            share_prefixes=share_prefixes,
            context_size=parallel.context,
            context_rank=context.context_rank,
            replay=replay,
        ).to(context.device)
        for part in [*(chosen[part] for part in mine), *empty]
    ]


def agreed_count(count: int, context: ParallelContext) -> int:
    """How many micro-batches every rank runs when each planned ``count`` for rows that only it knows.

    One reduction over the data-parallel ranks; every rank calls it.
    """
    most = torch.tensor([count], dtype=torch.int64, device=context.device)
    if context.data_parallel_size > 1:
        dist.all_reduce(most, op=dist.ReduceOp.MAX, group=context.groups.dp)
    return rounded(int(most), context.config)


def filled(micro: Sequence[MicroBatch], empty: MicroBatch, count: int) -> list[MicroBatch]:
    """``micro`` with ``empty`` micro-batches behind it, ``count`` in all."""
    if len(micro) > count or empty.num_tokens:
        raise ValueError(
            f"{len(micro)} micro-batches cannot be filled up to {count} with one of {empty.num_tokens} tokens"
        )
    return [*micro, *[empty] * (count - len(micro))]


def check_count(count: int, context: ParallelContext) -> None:
    """Raises ``ValueError`` on every rank when the layout's ranks do not all run ``count`` micro-batches."""
    if context.world_size == 1:
        return
    ends = torch.tensor([count, -count], dtype=torch.int64, device=context.device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX)
    most, fewest = int(ends[0]), -int(ends[1])
    if most != fewest:
        raise ValueError(
            f"ranks run {fewest} to {most} micro-batches (rank {context.rank}: {count}); every rank must run as many: "
            "plan with lockstep.rank_microbatches, or fill up to lockstep.agreed_count"
        )
