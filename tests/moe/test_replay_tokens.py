"""Invariants of what a micro-batch replays (``megatron_ext/moe/replay_tokens.py``). No model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.moe.replay_tokens import OnMissing, ReplayCounts, ReplayError, ReplayRule, ReplayTokens
from megatron_ext.tracking.names import check
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.trajectory.record import Role, TrajectoryBatch
from megatron_ext.trajectory.rows import make_rows
from tests.helpers.records import Traj, Turn, build, random_batch
from tests.helpers.replaying import random_experts, randomly_routed, recorded_by_engine, with_routing
from tests.helpers.training import TINY

RULE = ReplayRule.of(TINY)
LIVE = replace(RULE, on_missing=OnMissing.LIVE)


def micro(batch: TrajectoryBatch, rule: ReplayRule = RULE, cut: int = 0, **options: Any) -> list[MicroBatch]:
    """Micro-batches of two rows each, in reverse order."""
    rows = make_rows(batch, cut)
    order = np.arange(rows.num_rows)[::-1]
    parts = [order[i : i + 2] for i in range(0, len(order), 2)]
    return [build_microbatch(batch, rows, part, rows.mask, replay=rule, **options) for part in parts]


def tokens_of(mb: MicroBatch) -> ReplayTokens:
    assert mb.replay is not None
    return mb.replay


def dialogue(*sizes: int, prompt: tuple[int, ...] = (1, 2, 3), tail: int = 0) -> tuple[Turn, ...]:
    """A prompt, then turns: the model's and the environment's, in turn; ``tail`` tokens of the environment behind."""
    turns = [Turn(Role.USER, prompt)]
    for at, size in enumerate(sizes):
        ids = tuple(10 + 7 * at + i for i in range(size))
        turns.append(Turn(Role.USER if at % 2 else Role.MODEL, ids))
    if tail:
        turns.append(Turn(Role.USER, tuple(range(90, 90 + tail))))
    return tuple(turns)


def single(*segments: tuple[Turn, ...], name: str = "") -> Traj:
    return Traj(tuple((segment,) for segment in segments), name=name)


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), cut=st.sampled_from([0, 6]), context=st.sampled_from([1, 2, 3]))
def test_every_token_replays_its_own_record(seed: int, cut: int, context: int) -> None:
    """Invariants 1 and 5: whatever is packed, cut at turns or shared out over context-parallel ranks."""
    batch = randomly_routed(random_batch(seed), seed)
    assert batch.routed is not None and batch.routed_valid is not None
    for rank in range(context):
        for mb in micro(batch, cut=cut, context_size=context, context_rank=rank):
            replayed, source = tokens_of(mb), mb.source[mb.place].numpy()
            real = source >= 0
            assert replayed.experts.dtype is torch.uint8
            assert (replayed.valid.numpy()[real] == batch.routed_valid[source[real]]).all()
            assert not replayed.valid.numpy()[~real].any()
            at = replayed.valid.numpy()
            assert (replayed.experts.numpy()[at] == batch.routed[source[at]]).all()
            assert replayed.due(0, mb.num_tokens) == int(at.sum()) * RULE.top_k
            assert replayed.due(1, 0) == 0


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), share=st.booleans(), cut=st.sampled_from([0, 6]))
def test_counts_are_of_the_whole_micro_batch(seed: int, share: bool, cut: int) -> None:
    batch = randomly_routed(random_batch(seed), seed)
    assert batch.routed_valid is not None
    for mb in micro(batch, cut=cut, share_prefixes=share):
        counts, source = tokens_of(mb).counts, mb.source.numpy()
        assert counts.missing == 0, "an engine records all that training needs"
        assert counts.tokens == mb.num_tokens and counts.due <= counts.replayed
        if not share:
            assert counts.replayed == int(batch.routed_valid[source].sum())
            parts = [tokens_of(m).counts for m in micro(batch, cut=cut, context_size=2, context_rank=1)]
            assert counts in parts


def test_the_last_sampled_token_and_what_follows_need_no_record() -> None:
    """Prompt + completion - 1: nothing was generated from the last sampled token, nor from what follows it."""
    batch = build([(single(dialogue(3, 2, 2, tail=4)),)])
    batch = with_routing(batch, random_experts(np.random.default_rng(0), batch.num_tokens, TINY))
    assert batch.routed_valid is not None and batch.routed_valid.tolist() == [True] * 9 + [False] * 5
    (mb,) = micro(batch)
    assert tokens_of(mb).counts == ReplayCounts(tokens=14, replayed=9, due=9, missing=0)
    assert tokens_of(mb).valid.tolist() == [True] * 9 + [False] * 5


def test_a_missing_recording_names_trajectory_and_position() -> None:
    """Invariant 2, in the second segment of a trajectory with several sessions."""
    batch = build([(single(dialogue(3)), single(dialogue(2), dialogue(4, 2, 3, prompt=(5, 6)), name="it"))])
    routed = with_routing(batch, random_experts(np.random.default_rng(0), batch.num_tokens, TINY))
    assert routed.routed is not None and routed.routed_valid is not None
    valid = routed.routed_valid.copy()
    first = int(batch.segment_tokens[2])
    valid[[first + 3, first + 6]] = False
    short = with_routing(batch, routed.routed, valid)
    line = (
        r"trajectory 'it', segment 1, position 3 of 11: no experts were recorded.*\(and 1 more\).*replay_missing=live"
    )
    with pytest.raises(ReplayError, match=line):
        micro(short)
    total = sum((tokens_of(mb).counts for mb in micro(short, LIVE)), ReplayCounts())
    assert total.missing == 2 and total.due - total.missing == total.replayed
    metrics = total.metrics()
    check(metrics)
    assert metrics["moe/replay_missing"] == 2 / total.due
    assert metrics["moe/replayed_share"] == total.replayed / batch.num_tokens

    gone = with_routing(batch, routed.routed, np.zeros(batch.num_tokens, dtype=bool))
    with pytest.raises(ReplayError, match="trajectory 'it', segment 1, position 0 of 11"):
        micro(gone)
    with pytest.raises(ReplayError, match="position 0 of 11: no experts.*generate it with rollout.record_routing=true"):
        micro(batch)
    with pytest.raises(ReplayError, match="position 0 of 5: no experts were recorded"):
        micro(batch, share_prefixes=True)


def test_trajectories_of_a_batch_that_were_recorded_and_that_were_not() -> None:
    """Records joined from two sources: where one lacks routing, its tokens are not valid and so missing."""
    from megatron_ext.trajectory.joining import concat

    a, b = randomly_routed(build([(single(dialogue(3), name="a"),)])), build([(single(dialogue(3), name="b"),)])
    both = concat([a, b])
    with pytest.raises(ReplayError, match="trajectory 'b', segment 0, position 0"):
        micro(both)
    total = sum((tokens_of(mb).counts for mb in micro(both, LIVE)), ReplayCounts())
    assert (total.due, total.missing) == (10, 5)


def test_rows_share_a_token_where_they_recorded_the_same() -> None:
    """Invariant 3. Rows share the prompt and the first two sampled tokens; one row ends there."""
    turns = [dialogue(3), dialogue(4), dialogue(2)]
    batch = build([tuple(single(segment) for segment in turns)])
    experts = random_experts(np.random.default_rng(0), batch.num_tokens, TINY)
    starts = batch.segment_tokens[:-1]
    for start in starts[1:]:
        experts[start : start + 5] = experts[:5]
    valid = recorded_by_engine(batch)
    rows = make_rows(batch)

    def shared(batch: TrajectoryBatch, order: list[int]) -> ReplayTokens:
        return tokens_of(build_microbatch(batch, rows, order, rows.mask, share_prefixes=True, replay=RULE))

    agreed = shared(with_routing(batch, experts, valid), [2, 0, 1])
    # No row has a recording of its last token, which is run for it alone.
    assert agreed.counts == ReplayCounts(tokens=6 + 3, replayed=6, due=6)
    assert (agreed.experts.numpy()[agreed.valid.numpy()] == experts[starts[1] : starts[1] + 6]).all()

    other = experts.copy()
    at = int(starts[1]) + 2
    other[at, 1] = [e for e in range(TINY.num_experts) if e not in experts[at, 1]][: TINY.top_k]
    for order in [0, 1, 2], [1, 0, 2]:
        again = with_routing(batch, other, valid)
        found = tokens_of(build_microbatch(again, rows, order, rows.mask, share_prefixes=True, replay=RULE))
        # All share two tokens, then the second row is alone with four; the others share two more, the longer has one.
        assert found.counts == ReplayCounts(tokens=2 + 4 + 2 + 1 + 3, replayed=9, due=9)
        ran = np.sort(found.experts.numpy()[found.valid.numpy()], axis=-1).tolist()
        assert np.sort(experts[2]).tolist() in ran and np.sort(other[at]).tolist() in ran


@pytest.mark.parametrize(
    ("experts", "line"),
    [
        (np.zeros((0, 3, 2), np.uint8), r"3 layers with 2 experts a token, the model has 2 MoE layers with 2"),
        (np.zeros((0, 2, 1), np.uint8), r"2 layers with 1 experts a token"),
    ],
)
def test_a_record_of_another_model_is_refused(experts: np.ndarray, line: str) -> None:
    """Invariant 4: a leading dense layer that was recorded too would shift every layer (verl 5037)."""
    batch = build([(single(dialogue(3)),)])
    wrong = with_routing(batch, np.zeros((batch.num_tokens, *experts.shape[1:]), np.uint8))
    with pytest.raises(ReplayError, match=line):
        micro(wrong)


def test_ids_that_are_no_experts_are_refused() -> None:
    batch = build([(single(dialogue(3), name="x"),)])
    good = random_experts(np.random.default_rng(0), batch.num_tokens, TINY)
    beyond, twice = good.copy(), good.copy()
    beyond[3, 1, 0] = TINY.num_experts
    twice[2, 1] = 3
    with pytest.raises(ReplayError, match="trajectory 'x', segment 0, position 3 of 6: expert 4 of 4"):
        micro(with_routing(batch, beyond))
    with pytest.raises(ReplayError, match=r"position 2 of 6: MoE layer 1 names an expert twice: \[3, 3\]"):
        micro(with_routing(batch, twice))
    beyond[3, 1, 0], beyond[5, 0, 0] = good[3, 1, 0], 9
    micro(with_routing(batch, beyond))  # not read: it is not valid


def test_a_dense_model_has_nothing_to_replay() -> None:
    with pytest.raises(ReplayError, match="needs a Mixture-of-Experts model"):
        ReplayRule.of(replace(TINY, family="qwen3", num_experts=0, top_k=0))
    with pytest.raises(ValueError, match="'sometimes'"):
        ReplayRule.of(TINY, "sometimes")


def test_groups_that_failed_before_anything_was_generated_need_no_record() -> None:
    batch = build([(single(dialogue()), single(dialogue()))])
    rows = make_rows(batch)
    assert batch.routed is None and rows.num_rows == 0
    for share in (False, True):
        found = build_microbatch(batch, rows, [], rows.mask, replay=RULE, share_prefixes=share)
        assert tokens_of(found).counts == ReplayCounts()


def test_an_empty_micro_batch_replays_nothing() -> None:
    batch = randomly_routed(random_batch(1))
    rows = make_rows(batch)
    empty = build_microbatch(batch, rows, [], rows.mask, replay=RULE)
    assert tokens_of(empty).counts == ReplayCounts() and tokens_of(empty).due(0, 0) == 0
    assert ReplayCounts().metrics() == dict.fromkeys(ReplayCounts().metrics(), 0.0)


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_the_records_own_integers_travel(kind: type) -> None:
    batch = randomly_routed(random_batch(1))
    assert batch.routed is not None
    (mb, *_) = micro(replace(batch, routed=batch.routed.astype(kind)))
    found = tokens_of(mb.to(torch.device("cpu")))
    assert found.experts.dtype is getattr(torch, np.dtype(kind).name)
    wide = found.experts[0:2, 1].to(torch.int64)
    assert wide.tolist() == batch.routed[mb.source[mb.place][:2].numpy(), 1].tolist()
