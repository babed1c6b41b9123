from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_ext.models.packing import SharedTokens, pack, plan_attention
from megatron_ext.trajectory.prefix_tree import build_prefix_tree
from tests.helpers.trees import ROWS, Row, joined


@given(st.lists(st.integers(0, 60), max_size=12))
def test_every_token_has_one_place_and_positions_restart(lengths: list[int]) -> None:
    plan = plan_attention(lengths, torch.device("cpu"))
    total = sum(lengths)
    assert plan.tokens == total == len(plan.flat) == len(plan.positions)
    assert torch.equal(plan.gather[plan.flat], torch.arange(total)), "stacking then unstacking is not the identity"
    assert len(plan.flat.unique()) == total
    assert plan.positions.tolist() == [i for n in lengths for i in range(n)]
    at = 0
    for bucket in plan.buckets:
        assert bucket.start == at
        rows = plan.gather[at : at + bucket.rows * bucket.width].view(bucket.rows, bucket.width)
        at += bucket.rows * bucket.width
        step = rows.diff(dim=1)
        # Within a row: consecutive tokens, then padding that repeats the last one.
        assert bool(((step == 1) | (step == 0)).all())
        assert bool((step.diff(dim=1) <= 0).all())
        if bucket.view >= 0:
            assert torch.equal(rows.flatten(), bucket.view + torch.arange(rows.numel()))
    assert at == len(plan.gather)


def test_buckets_bound_padding_and_number() -> None:
    lengths = [100, 98, 60, 101, 9, 59, 12]
    plan = plan_attention(lengths, torch.device("cpu"))
    assert [(b.rows, b.width) for b in plan.buckets] == [(3, 101), (2, 60), (2, 12)]
    same = plan_attention([50] * 8, torch.device("cpu"))
    assert same.is_view and len(same.buckets) == 1


def test_pack_checks_offsets() -> None:
    batch = pack(torch.tensor([0, 3, 3, 7]))
    assert batch.lengths == (3, 0, 4) and batch.max_seqlen_q == 4 and batch.cu_seqlens_q.dtype is torch.int32
    for bad in ([1, 2], [0, 3, 2], []):
        with pytest.raises(ValueError, match="cu_seqlens"):
            pack(torch.tensor(bad, dtype=torch.int64))


@given(ROWS, st.integers(1, 5))
def test_a_further_sequence_shares_nothing(rows: list[Row], more: int) -> None:  # invariant 4
    """What sequence parallelism fills up with is as if it had been a row of the tree, behind all others."""
    ids, offsets = joined(rows)
    alone = build_prefix_tree([*ids, *range(7, 7 + more)], [*offsets, len(ids) + more])
    found, want = SharedTokens.of(build_prefix_tree(ids, offsets)).extended(more), SharedTokens.of(alone)
    assert torch.equal(found.distinct, want.distinct) and torch.equal(found.positions, want.positions)
    assert found.parent.tolist() == want.parent.tolist() and found.until.tolist() == want.until.tolist()
    assert found.tokens == len(found.positions)
    assert found.positions[found.distinct].tolist() == [p for n in (*map(len, rows), more) for p in range(n)]
