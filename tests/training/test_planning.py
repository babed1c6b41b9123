"""Invariants of ``megatron_ext/training/planning.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.training.microbatch import build_microbatch
from megatron_ext.training.planning import check_each_once, plan_microbatches
from megatron_ext.trajectory.packing import PackingError, PackPlan
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import make_rows
from tests.helpers.records import Traj, build, model, random_batch, single, user


def forest(groups: int = 4, samples: int = 6, prompt: int = 30, said: int = 10) -> TrajectoryBatch:
    """Groups whose trajectories begin with 30 tokens in common and go on with 10 of their own."""
    rng = np.random.default_rng(0)

    def trajectory(start: list[int]) -> Traj:
        return single([user(start), model(rng.integers(0, 100, said).tolist())])

    starts = [rng.integers(0, 100, prompt).tolist() for _ in range(groups)]
    return build([tuple(trajectory(start) for _ in range(samples)) for start in starts])


@settings(max_examples=40)
@given(st.integers(0, 5000), st.booleans(), st.integers(1, 3), st.sampled_from([0, 40, 400]))
def test_every_row_is_run_once_under_the_cap(seed: int, share: bool, ranks: int, more: int) -> None:  # invariant 1
    batch = random_batch(seed)
    rows = make_rows(batch)
    members = np.random.default_rng(seed).permutation(rows.num_rows)[: max(1, rows.num_rows - 1)]
    cap = int(rows.lengths.max()) + more
    plan = plan_microbatches(batch, rows, members, cap=cap, ranks=ranks, share_prefixes=share)
    assert plan.num_ranks == ranks and {len(parts) for parts in plan.microbatches} == {plan.num_microbatches}
    placed = np.concatenate([part for parts in plan.microbatches for part in parts])
    assert sorted(placed.tolist()) == list(range(len(members)))
    for rank, parts in enumerate(plan.microbatches):
        for number, part in enumerate(parts):
            mb = build_microbatch(batch, rows, members[part], rows.mask, share_prefixes=share)
            assert mb.num_tokens <= cap and mb.num_tokens == plan.tokens[rank, number]


def test_what_rows_share_counts_once() -> None:  # invariant 2
    batch = forest()
    rows = make_rows(batch)
    members = np.random.default_rng(0).permutation(rows.num_rows)
    apart = plan_microbatches(batch, rows, members, cap=100)
    shared = plan_microbatches(batch, rows, members, cap=100, share_prefixes=True)
    assert apart.num_microbatches == 12 and shared.num_microbatches == 4
    assert shared.tokens.tolist() == [[90] * 4]
    group = rows.segment // 6
    assert all(len(set(group[members[part]])) == 1 for part in shared.microbatches[0])


@settings(max_examples=40)
@given(st.integers(0, 5000), st.sampled_from([40, 60, 200]))
def test_sharing_never_runs_more_tokens(seed: int, more: int) -> None:  # invariant 2
    batch = random_batch(seed)
    rows = make_rows(batch)
    members = np.tile(np.arange(rows.num_rows), 2)
    cap = int(rows.lengths.max()) + more
    plans = [plan_microbatches(batch, rows, members, cap=cap, share_prefixes=share) for share in (False, True)]
    assert plans[1].tokens.sum() <= plans[0].tokens.sum()


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ([[0, 1], [1, 2]], "a plan for 3 rows has row 1 in 2 micro-batches"),
        ([[0], [2]], "has row 1 in 0 micro-batches"),
        ([[0, 1], [2, 3]], "has row 3 in 1 micro-batches"),
    ],
)
def test_a_row_twice_or_never_is_an_error(parts: list[list[int]], line: str) -> None:  # invariant 1
    table = tuple((np.array(part, dtype=np.int64),) for part in parts)
    zeros = np.zeros((2, 1))
    with pytest.raises(PackingError, match=line):
        check_each_once(PackPlan(table, zeros.astype(np.int64), zeros), 3)


def test_impossible_plans_are_refused() -> None:
    batch = build([(single([user([1, 2, 3]), model([4, 5])]),) * 2])
    rows = make_rows(batch)
    for share in (False, True):
        with pytest.raises(PackingError, match="tokens_per_microbatch=4"):
            plan_microbatches(batch, rows, np.arange(2), cap=4, share_prefixes=share)
    with pytest.raises(ValueError, match="share_prefixes=true: parallel.context=2"):
        plan_microbatches(batch, rows, np.arange(2), cap=8, share_prefixes=True, context=2)
