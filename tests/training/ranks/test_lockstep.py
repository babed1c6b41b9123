"""Invariants of equal counts (numbers refer to ``megatron_ext/training/ranks/lockstep.py``); what needs several
ranks stands in ``tests/integration/test_layouts.py``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.microbatch import build_microbatch
from megatron_ext.training.ranks.lockstep import agreed_count, check_count, filled, rank_microbatches, rounded
from megatron_ext.trajectory.packing import pack
from tests.helpers.records import random_batch
from tests.helpers.training import rows_of


@pytest.mark.parametrize(
    ("count", "parallel", "want"),
    [
        (3, ParallelConfig(), 3),
        (0, ParallelConfig(), 1),
        (3, ParallelConfig(pipeline=4), 3),
        (3, ParallelConfig(pipeline=2, virtual_pipeline=2), 4),
        (4, ParallelConfig(pipeline=4, virtual_pipeline=2), 4),
        (0, ParallelConfig(pipeline=4, virtual_pipeline=2), 4),
    ],
)
def test_interleaved_pipelines_take_multiples_of_their_length(count: int, parallel: ParallelConfig, want: int) -> None:
    assert rounded(count, parallel) == want


@pytest.mark.parametrize("parallel", [ParallelConfig(), ParallelConfig(pipeline=2, virtual_pipeline=2)])
@pytest.mark.parametrize("ranks", [1, 3, 40])
def test_every_row_is_on_one_rank_in_equally_many_microbatches(
    rank: ParallelContext, ranks: int, parallel: ParallelConfig
) -> None:  # invariants 1 and 2
    batch = random_batch(3, groups=4)
    rows = rows_of(batch)
    seen: list[int] = []
    counts = set()
    for number in range(ranks):
        context = replace(rank, config=parallel, data_parallel_size=ranks, data_parallel_rank=number)
        micro = rank_microbatches(batch, rows, context, cap=60)
        counts.add(len(micro))
        seen += [row for mb in micro for row in sorted(set(mb.row.tolist()))]
    assert sorted(seen) == list(range(rows.num_rows))
    (count,) = counts
    assert count % (2 if parallel.virtual_pipeline > 1 else 1) == 0


def test_members_and_selection_are_kept(rank: ParallelContext) -> None:
    batch = random_batch(3, groups=4)
    rows = rows_of(batch)
    members = np.array([4, 1, 2])
    (mb,) = rank_microbatches(batch, rows, rank, cap=4096, members=members, select=np.ones(len(rows.token), dtype=bool))
    assert set(mb.row.tolist()) == {1, 2, 4}
    assert len(mb.token) == int((rows.lengths[members] - 1).sum())


def test_a_plan_for_another_layout_is_refused(rank: ParallelContext) -> None:
    batch = random_batch(3)
    rows = rows_of(batch)
    with pytest.raises(ValueError, match="a plan for 2 data-parallel ranks, the layout has 1"):
        rank_microbatches(batch, rows, rank, cap=4096, plan=pack(rows.lengths, cap=4096, ranks=2))


def test_filling_up(rank: ParallelContext) -> None:
    batch = random_batch(3)
    rows = rows_of(batch)
    micro = rank_microbatches(batch, rows, rank, cap=4096)
    empty = build_microbatch(batch, rows, [], rows.mask)
    assert agreed_count(len(micro), rank) == 1
    assert [mb.num_tokens for mb in filled(micro, empty, 3)] == [micro[0].num_tokens, 0, 0]
    with pytest.raises(ValueError, match="cannot be filled"):
        filled([*micro, *micro], empty, 1)
    with pytest.raises(ValueError, match="cannot be filled"):
        filled(micro, micro[0], 3)
    check_count(1, rank)  # alone there is nobody to disagree with
