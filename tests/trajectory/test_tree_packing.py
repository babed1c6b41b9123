"""The tree packing's numbered invariants."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.trajectory.packing import PackingError, PackPlan, pack, row_cost
from megatron_ext.trajectory.prefix_tree import build_prefix_tree
from megatron_ext.trajectory.tree_packing import pack_tree, tree_cost
from tests.helpers.trees import ROWS, Row, branches, joined, nested, trie_size


def check(plan: PackPlan, rows: list[Row], cap: int, ranks: int) -> None:
    """Invariants 1-3, the trees counted again from the rows."""
    assert len(plan.microbatches) == ranks
    assert {len(rank) for rank in plan.microbatches} == {plan.num_microbatches}
    placed = np.concatenate([members for rank in plan.microbatches for members in rank])
    assert sorted(placed.tolist()) == list(range(len(rows)))
    for r, rank in enumerate(plan.microbatches):
        for m, members in enumerate(rank):
            tree = build_prefix_tree(*joined([rows[i] for i in members.tolist()]))
            assert plan.tokens[r, m] == tree.num_tokens <= cap
            assert plan.costs[r, m] == pytest.approx(float(tree_cost(tree.num_tokens, tree.positions.sum())))


def pack_rows(rows: list[Row], cap: int, ranks: int) -> PackPlan:
    return pack_tree(build_prefix_tree(*joined(rows)), cap=cap, ranks=ranks)


def contents(plan: PackPlan, rows: list[Row]) -> list[list[list[Row]]]:
    return [[sorted(rows[i] for i in members.tolist()) for members in rank] for rank in plan.microbatches]


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(9, 30), st.integers(1, 4))
def test_any_rows_are_packed(rows: list[Row], cap: int, ranks: int) -> None:
    plan = pack_rows(rows, cap, ranks)
    check(plan, rows, cap, ranks)
    # Both are heuristics: sharing must not leave the step clearly dearer than packing the rows apart.
    assert plan.step_cost <= max(pack(list(map(len, rows)), cap=cap, ranks=ranks).step_cost * 1.25, 1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_ragged_trees_over_the_cap(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = [row for _ in range(3) for row in nested(rng, 4, 20, vocabulary=20)][:60]
    longest = max(map(len, rows))
    for cap in (longest, longest + 40, 4 * longest):
        for ranks in (1, 3):
            plan = pack_rows(rows, cap, ranks)
            check(plan, rows, cap, ranks)
            order = rng.permutation(len(rows))
            shuffled = [rows[i] for i in order]
            assert contents(pack_rows(shuffled, cap, ranks), shuffled) == contents(plan, rows)


def test_a_row_costs_what_it_costs_alone() -> None:
    length = np.array([0, 1, 777, 32768])
    assert np.allclose(tree_cost(length, length * (length - 1) // 2), row_cost(length), rtol=1e-12)


def test_trees_stay_together_where_they_fit() -> None:
    """Eight groups of four branches: each group is one micro-batch, though rows of four groups would fit as well."""
    rng = np.random.default_rng(1)
    rows = [row for _ in range(8) for row in branches(rng, 300, [100] * 4)]
    plan = pack_rows(rows, cap=700, ranks=2)
    check(plan, rows, 700, 2)
    assert all(
        members.tolist() == list(range(4 * (i := members[0] // 4), 4 * i + 4))
        for m in plan.microbatches
        for members in m
    )
    assert plan.tokens.sum() == trie_size(rows) and plan.num_microbatches == 4


def test_a_tree_over_the_cap_is_split_at_a_branch() -> None:
    """Two subtrees of one trunk that together pass the cap: the trunk is repeated once, the subtrees stay whole."""
    rng = np.random.default_rng(2)
    trunk = rng.integers(0, 99, 50).tolist()
    rows = [[*trunk, 100 + side, *row] for side in range(2) for row in branches(rng, 60, [20, 30, 10])]
    plan = pack_rows(rows, cap=200, ranks=1)
    check(plan, rows, 200, 1)
    assert sorted(members.tolist() for members in plan.microbatches[0]) == [[0, 1, 2], [3, 4, 5]]
    assert plan.tokens.sum() == trie_size(rows) + 50


def test_a_tree_is_split_where_ranks_would_wait() -> None:
    """One tree of 16 branches for 8 ranks: repeating the trunk on each beats seven idle ranks."""
    rows = branches(np.random.default_rng(3), 300, [100] * 16)
    alone, shared = pack_rows(rows, 4096, 1), pack_rows(rows, 4096, 8)
    check(shared, rows, 4096, 8)
    assert alone.tokens.sum() == trie_size(rows) == 1900
    assert shared.tokens.tolist() == [[500]] * 8 and shared.step_cost < 0.3 * alone.step_cost


def test_a_row_that_is_a_prefix_costs_nothing() -> None:
    rows = [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2], [1, 2, 3]]
    plan = pack_rows(rows, cap=5, ranks=1)
    assert plan.tokens.tolist() == [[5]] and plan.microbatches[0][0].tolist() == [0, 1, 2, 3]


def test_nothing_to_pack_and_rows_over_the_cap() -> None:
    empty = pack_rows([], 8, 2)
    assert empty.num_microbatches == 1 and empty.lockstep == 1.0 and empty.tokens.tolist() == [[0], [0]]
    check(pack_rows([[], []], 8, 2), [[], []], 8, 2)
    with pytest.raises(PackingError, match=r"row 1 has 9 tokens.*batch\.tokens_per_microbatch=8"):
        pack_rows([[1], [2] * 9], 8, 1)
    with pytest.raises(PackingError, match="cap >= 1"):
        pack_rows([[1]], 0, 1)


def test_rows_that_share_nothing_pack_as_rows_do() -> None:
    """512 rollouts without a common token are balanced as well as ``pack`` balances them."""
    lengths = np.clip(np.random.default_rng(0).lognormal(4.6, 0.9, 512), 8, 1024).astype(np.int64)
    rows = [[i, *[1000] * (n - 1)] for i, n in enumerate(lengths.tolist())]
    start = time.perf_counter()
    plan = pack_rows(rows, 1024, 8)
    print(f"{1e3 * (time.perf_counter() - start):.0f} ms, lockstep {plan.lockstep:.4f}")
    check(plan, rows, 1024, 8)
    assert plan.step_cost <= 1.01 * pack(lengths, cap=1024, ranks=8).step_cost


def test_system_prompt_of_all_rows_is_run_once_a_microbatch() -> None:
    """64 groups of 8 rows behind one long system prompt: fewer tokens than the groups' own trees would run."""
    rng = np.random.default_rng(5)
    system = rng.integers(0, 99, 200).tolist()
    rows = [[*system, 100 + g, *row] for g in range(64) for row in branches(rng, 40, [15] * 8)]
    plan = pack_rows(rows, 2000, 4)
    check(plan, rows, 2000, 4)
    apart = 64 * (200 + 1 + 40 + 8 * 15)
    assert plan.tokens.sum() < 0.6 * apart and plan.lockstep < 1.1
