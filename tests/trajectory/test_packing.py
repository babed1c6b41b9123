"""The packing's numbered invariants, and its balance on the reference workload."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.trajectory import packing
from megatron_ext.trajectory.packing import PackingError, PackPlan, pack, row_cost, split_optimizer_steps
from megatron_ext.trajectory.record import TrajectoryBatch


def check(plan: PackPlan, lengths: list[int], cap: int, ranks: int, context: int = 1) -> None:
    """Invariants 1 and 2, and the plan's own figures, counted again from the rows alone."""
    multiple = 2 * context if context > 1 else 1
    padded = -(-np.array(lengths, dtype=np.int64) // multiple) * multiple
    assert len(plan.microbatches) == ranks
    assert {len(rank) for rank in plan.microbatches} == {plan.num_microbatches}
    rows = np.concatenate([rows for rank in plan.microbatches for rows in rank])
    assert sorted(rows.tolist()) == list(range(len(lengths)))
    for r, rank in enumerate(plan.microbatches):
        for m, members in enumerate(rank):
            assert plan.tokens[r, m] == padded[members].sum() <= cap * context
            assert plan.tokens[r, m] % context == 0
            assert np.isclose(plan.costs[r, m], row_cost(padded[members]).sum())


def same(a: PackPlan, b: PackPlan) -> bool:
    return [[m.tolist() for m in rank] for rank in a.microbatches] == [[m.tolist() for m in r] for r in b.microbatches]


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 50), max_size=60), st.integers(50, 120), st.integers(1, 5), st.integers(1, 20))
def test_any_rows_are_packed(lengths: list[int], cap: int, ranks: int, keys: int) -> None:
    plan = pack(lengths, cap=cap, ranks=ranks)
    check(plan, lengths, cap, ranks)
    assert same(plan, pack(np.array(lengths, dtype=np.int32), cap=cap, ranks=ranks))
    groups = [(7 * i) % keys for i in range(len(lengths))]
    grouped = pack(lengths, cap=cap, ranks=ranks, groups=groups)
    check(grouped, lengths, cap, ranks)
    homes: dict[int, set[tuple[int, int]]] = {}
    for r, rank in enumerate(grouped.microbatches):
        for m, members in enumerate(rank):
            for row in members.tolist():
                homes.setdefault(groups[row], set()).add((r, m))
    for group, places in homes.items():
        if sum(n for n, g in zip(lengths, groups, strict=True) if g == group) <= cap:
            assert len(places) == 1


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 80), max_size=40), st.integers(44, 90), st.integers(1, 3), st.integers(2, 4))
def test_context_parallel_ranks_hold_equal_shares(lengths: list[int], cap: int, ranks: int, context: int) -> None:
    """A row longer than one rank's cap fits when its ranks together hold it, padded to two pieces a rank."""
    check(pack(lengths, cap=cap, ranks=ranks, context=context), lengths, cap, ranks, context)


def test_padding_of_context_parallelism_counts() -> None:
    plan = pack([7, 8, 9], cap=8, context=2)
    assert plan.tokens.tolist() == [[16, 12]]  # 8 + 8 and 12, of 16 that the two ranks hold together
    with pytest.raises(PackingError, match=r"row 1 has 20 tokens.*=8 x context-parallel size 2"):
        pack([1, 17], cap=8, context=2)


def test_the_cost_model_is_an_argument() -> None:
    """Where attention costs nothing, four short rows weigh as much as one long row; else the long row stands alone."""
    lengths = [400, 100, 100, 100, 100, 200, 200]
    linear = pack(lengths, cap=800, ranks=2, quadratic_tokens=1e12)
    assert linear.lockstep == pytest.approx(1.0) and linear.tokens.tolist() == [[600], [600]]
    quadratic = pack(lengths, cap=800, ranks=2, quadratic_tokens=100.0)
    assert quadratic.microbatches[0][0].tolist() == [0] and quadratic.tokens.tolist() == [[400], [800]]


def test_the_plan_cannot_be_written() -> None:
    plan = pack([1, 2], cap=4)
    for array in (plan.tokens, plan.costs, plan.microbatches[0][0]):
        with pytest.raises(ValueError, match="read-only"):
            array[...] = 0


def test_short_ranks_get_empty_microbatches() -> None:
    plan = pack([10], cap=10, ranks=4)
    assert plan.num_microbatches == 1 and [len(rank[0]) for rank in plan.microbatches].count(1) == 1
    nothing = pack([], cap=10, ranks=2)
    assert nothing.num_microbatches == 1 and nothing.lockstep == 1.0
    assert all(rows.dtype == np.int64 for rank in nothing.microbatches for rows in rank)


def test_a_row_over_the_cap_is_named() -> None:
    with pytest.raises(PackingError, match=r"row 1 has 33 tokens.*batch\.tokens_per_microbatch=32"):
        pack([1, 33], cap=32)
    with pytest.raises(PackingError, match="groups has shape"):
        pack([1, 2], cap=32, groups=[0])
    for bad in ({"cap": 0}, {"cap": 4, "ranks": 0}, {"cap": 4, "context": 0}):
        with pytest.raises(PackingError, match="pack needs cap, ranks and context"):
            pack([1], **bad)
    with pytest.raises(PackingError, match="pack needs cap"):
        pack([3, -1], cap=4)


def test_tight_caps_take_no_more_microbatches_than_needed() -> None:
    # Cost alone strands tokens here (7 | 6 3, then 2 and 2 do not fit); best fit finds the two full bins.
    plan = pack([3, 7, 6, 2, 2], cap=10)
    assert sorted(m.tolist() for m in plan.microbatches[0]) == [[0, 1], [2, 3, 4]]


@pytest.mark.parametrize(("size", "together"), [(17000, 1), (11000, 2)])
def test_rows_that_share_no_microbatch_are_not_tried_count_by_count(
    size: int, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[int] = []
    fit = packing._fit

    def counted(*args: Any, **options: Any) -> Any:
        tries.append(0)
        return fit(*args, **options)

    monkeypatch.setattr(packing, "_fit", counted)
    plan = pack(np.full(600, size), cap=32768, ranks=1)
    check(plan, [size] * 600, 32768, 1)
    assert plan.num_microbatches == 600 // together
    assert len(tries) < 12  # a third to a half more micro-batches than the tokens alone would need


def test_balance_on_the_reference_workload() -> None:
    """512 rollouts, log-normal(8.6, 0.9) clipped to 200-32,768, cap 32,768, 8 ranks: median <= 1.03, worst <= 1.045."""
    ratios, seconds = [], []
    for seed in range(10):
        lengths = np.clip(np.random.default_rng(seed).lognormal(8.6, 0.9, 512), 200, 32768).astype(np.int64)
        start = time.process_time()  # a busy machine does not lengthen it
        plan = pack(lengths, cap=32768, ranks=8)
        seconds.append(time.process_time() - start)
        check(plan, lengths.tolist(), 32768, 8)
        fewest = -(-int(lengths.sum()) // 32768)
        assert plan.num_microbatches <= -(-fewest // 8) + 1
        # Counted again from the rows alone.
        cost = np.array([[row_cost(lengths[m]).sum() for m in rank] for rank in plan.microbatches])
        ratios.append(cost.max(axis=0).sum() / (row_cost(lengths).sum() / 8))
        assert np.isclose(ratios[-1], plan.lockstep)
    print(f"lockstep median {np.median(ratios):.4f}, worst {max(ratios):.4f}; {1e3 * np.median(seconds):.1f} ms")
    assert np.median(ratios) <= 1.03 and max(ratios) <= 1.045
    assert min(seconds) < 0.1  # about 4 ms on an idle core


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("seed", range(5))
def test_whole_trajectories_are_split_into_even_steps(
    random_batch: Callable[..., TrajectoryBatch], seed: int, steps: int
) -> None:
    """ROLL 409: a trajectory takes part in one optimizer step, however many rows it has."""
    batch = random_batch(seed, groups=4, samples=6)
    parts = split_optimizer_steps(batch, steps, seed)
    assert sorted(np.concatenate(parts).tolist()) == list(range(batch.num_trajectories))
    counts = [len(part) for part in parts]
    assert max(counts) - min(counts) <= 1
    trained = np.bincount(batch.token_trajectory()[batch.loss_mask], minlength=batch.num_trajectories)
    assert all(trained[part].sum() > 0 for part in parts)
    again = split_optimizer_steps(batch, steps, seed)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))
    other = split_optimizer_steps(batch, steps, seed + 100)
    assert steps == 1 or any(not np.array_equal(a, b) for a, b in zip(parts, other, strict=True))


def test_steps_are_even_in_tokens(random_batch: Callable[..., TrajectoryBatch]) -> None:
    batch = random_batch(3, groups=8, samples=8, turns=20)
    tokens = np.diff(batch.trajectory_tokens())
    for seed in range(5):
        loads = [tokens[part].sum() for part in split_optimizer_steps(batch, 4, seed)]
        assert max(loads) <= 1.05 * np.mean(loads)


def test_a_step_with_nothing_to_train_is_refused(random_batch: Callable[..., TrajectoryBatch]) -> None:
    batch = random_batch(1, groups=1, samples=2)
    with pytest.raises(PackingError, match="optimizer_steps_per_batch=9"):
        split_optimizer_steps(batch, 9, 0)
