"""Invariants of packed micro-batches (numbers refer to ``megatron_ext/training/microbatch.py``)."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.trajectory.packing import pack
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows
from tests.helpers.records import build, model, random_batch, single, user


def packed(batch: TrajectoryBatch, tokens_per_row: int, cap: int, order_seed: int) -> tuple[Rows, list[MicroBatch]]:
    rows = make_rows(batch, tokens_per_row)
    order = np.random.default_rng(order_seed).permutation(rows.num_rows)
    plan = pack(rows.lengths[order], cap=max(cap, int(rows.lengths.max(initial=1))))
    return rows, [build_microbatch(batch, rows, order[part].tolist(), rows.mask) for part in plan.microbatches[0]]


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.sampled_from([0, 6]), st.sampled_from([8, 40, 4096]), st.integers(0, 5))
def test_every_trained_token_is_predicted_once_from_its_own_row(
    seed: int, tokens_per_row: int, cap: int, order_seed: int
) -> None:
    batch = random_batch(seed)
    rows, micro = packed(batch, tokens_per_row, cap, order_seed)
    seen: list[int] = []
    for mb in micro:
        cu = mb.cu_seqlens.tolist()
        assert cu[0] == 0 and cu[-1] == mb.num_tokens == len(mb.positions)
        for start, end in zip(cu, cu[1:], strict=False):  # invariant 3
            assert mb.positions[start:end].tolist() == list(range(end - start))
        row_starts = np.repeat(cu[:-1], np.diff(cu))
        for at, target, token, row, turn in zip(
            mb.logit_index.tolist(),
            mb.target.tolist(),
            mb.token.tolist(),
            mb.row.tolist(),
            mb.turn.tolist(),
            strict=True,
        ):
            # invariant 2: the target stands right after its logits, in the same row, with its whole prefix before it
            assert target == batch.ids[token] == mb.ids[at + 1]
            assert row_starts[at] == row_starts[at + 1]
            first = int(row_starts[at])
            span = rows.span(row)
            assert mb.ids[first : at + 2].tolist() == batch.ids[rows.token[span]][: at + 2 - first].tolist()
            assert turn == batch.turn[token]
            seen.append(token)
    assert sorted(seen) == np.flatnonzero(batch.loss_mask).tolist()  # invariant 1
    for mb in micro:
        assert mb.ids.tolist() == batch.ids[mb.source.numpy()].tolist()
        assert mb.source[mb.logit_index + 1].tolist() == mb.token.tolist()


def test_a_rows_first_token_is_never_a_target() -> None:  # invariant 4
    batch = build([(single([user([1, 2]), model([3, 4])]), single([user([5]), model([6])]))])
    rows = make_rows(batch)
    mb = build_microbatch(batch, rows, [0, 1], np.ones(len(rows.token), dtype=bool))
    assert mb.target.tolist() == [2, 3, 4, 6]
    assert mb.logit_index.tolist() == [0, 1, 2, 4]


def test_rows_come_in_the_order_asked_for() -> None:
    batch = build([(single([user([1]), model([2, 3])]), single([user([4]), model([5])]))])
    rows = make_rows(batch)
    mb = build_microbatch(batch, rows, [1, 0], rows.mask)
    assert mb.ids.tolist() == [4, 5, 1, 2, 3]
    assert mb.row.tolist() == [1, 0, 0]
    assert mb.cu_seqlens.tolist() == [0, 2, 5] and mb.cu_seqlens.dtype == torch.int32


def test_without_members_the_microbatch_is_empty_and_typed() -> None:
    batch = random_batch(1)
    rows = make_rows(batch)
    mb = build_microbatch(batch, rows, [], rows.mask)
    assert mb.num_tokens == 0 and mb.cu_seqlens.tolist() == [0]
    for name in ("ids", "positions", "source", "logit_index", "target", "token", "row", "turn"):
        column: torch.Tensor = vars(mb)[name]
        assert column.shape == (0,) and column.dtype == torch.int64


@settings(max_examples=40)
@given(st.integers(0, 10_000))
def test_sharing_keeps_what_is_predicted_and_from_what(seed: int) -> None:  # invariant 5
    batch = random_batch(seed)
    rows = make_rows(batch)
    twice = np.tile(np.arange(rows.num_rows), 2)  # so that something is shared
    members = np.random.default_rng(seed).permutation(twice)
    plain = build_microbatch(batch, rows, members, rows.mask)
    mb = build_microbatch(batch, rows, members, rows.mask, share_prefixes=True)
    assert mb.shared is not None and mb.num_tokens <= plain.num_tokens // 2
    assert torch.equal(mb.ids[mb.shared.distinct], plain.ids)
    assert torch.equal(mb.positions[mb.shared.distinct], plain.positions)
    assert torch.equal(mb.shared.distinct[plain.logit_index], mb.logit_index)
    for name in ("source", "cu_seqlens", "target", "token", "row", "turn"):
        assert torch.equal(getattr(mb, name), getattr(plain, name))


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(2, 3))
def test_context_parallel_ranks_share_places_and_predictions(seed: int, size: int) -> None:  # invariant 6
    batch = random_batch(seed)
    rows = make_rows(batch)
    members = np.random.default_rng(seed).permutation(rows.num_rows)
    plain = build_microbatch(batch, rows, members, rows.mask)
    ranks = [
        build_microbatch(batch, rows, members, rows.mask, context_size=size, context_rank=rank) for rank in range(size)
    ]
    for name in ("token", "row", "turn"):
        assert all(torch.equal(getattr(mb, name), getattr(plain, name)) for mb in ranks)
    assert all(torch.equal(mb.source, ranks[0].source) for mb in ranks)
    assert ranks[0].source[ranks[0].source >= 0].tolist() == plain.source.tolist()
    held = torch.cat([mb.held for mb in ranks if mb.held is not None])
    assert sorted(held.tolist()) == list(range(len(plain.token)))
    assert sorted(torch.cat([mb.place for mb in ranks]).tolist()) == list(range(len(ranks[0].source)))
    for mb in ranks:
        assert mb.held is not None and len({other.num_tokens for other in ranks}) == 1
        real = mb.source[mb.place] >= 0
        assert torch.equal(mb.ids[real], torch.from_numpy(batch.ids.astype(np.int64))[mb.source[mb.place][real]])
        # The place after the logits holds the token that they predict.
        assert torch.equal(mb.source[mb.place[mb.logit_index] + 1], mb.token[mb.held])
        assert torch.equal(mb.target, plain.target[mb.held])
        starts = mb.cu_seqlens[:-1].long().repeat_interleave(mb.cu_seqlens.diff().long())
        assert torch.equal(mb.positions, mb.place - starts[mb.place])


def test_shared_prefixes_under_context_parallelism_are_refused() -> None:
    batch = random_batch(1)
    rows = make_rows(batch)
    with pytest.raises(ValueError, match="share_prefixes=true does not go with parallel.context > 1"):
        build_microbatch(batch, rows, [], rows.mask, share_prefixes=True, context_size=2)
