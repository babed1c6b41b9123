"""Score plans run on a tiny model (``credit/score_run.py``), against one naive forward a request."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.score_plan import plan_scores
from megatron_ext.credit.score_run import ForwardOutputs, PackedScores, assemble, execute, pack_rows, scatter
from megatron_ext.credit.scoring import (
    ScoreError,
    ScoreOutputs,
    ScoreReply,
    ScoreRequest,
    answer_likelihood,
    gap,
)
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.packing import PackingError
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import build, described_batches, model, random_batch, single, user
from tests.helpers.tiny_scorer import TinyModel, ask, assert_same, hint, random_requests, shifted, table

seeds = st.integers(0, 2**31)


def run(requests: list[ScoreRequest], batch: TrajectoryBatch, cap: int = 64) -> tuple[ScoreReply, ...]:
    return execute(plan_scores(requests, batch, table()), TinyModel(), tokens_per_microbatch=cap)


@settings(max_examples=40, deadline=None)
@given(described_batches(), seeds)
def test_every_score_is_that_of_the_request_alone(groups: list, seed: int) -> None:
    """Alignment, merging and packing change no value: each reply equals the naive forward of its own sequence."""
    batch, tiny = build(groups), TinyModel()
    requests = random_requests(batch, seed, 12)
    plan = plan_scores(requests, batch, table())
    replies = execute(plan, tiny, tokens_per_microbatch=48)
    assert tiny.tokens == plan.num_tokens <= plan.asked_tokens
    assert len(tiny.swaps) == len(set(tiny.swaps))  # each set of weights is entered once
    for request, reply in zip(requests, replies, strict=True):
        if len(request.positions):
            assert_same(reply, tiny.naive(request, batch, table()))


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_permuted_requests_get_permuted_replies(seed: int) -> None:
    batch = random_batch(seed % 50)
    requests = random_requests(batch, seed, 10)
    order = np.random.default_rng(seed).permutation(len(requests))
    replies, other = run(requests, batch), run([requests[i] for i in order], batch)
    for at, i in enumerate(order):
        assert_same(other[at], replies[i].arrays())


@settings(max_examples=20, deadline=None)
@given(seeds, st.integers(1, 3))
def test_ranks_answer_what_one_rank_answers(seed: int, cut: int) -> None:
    batch = random_batch(seed % 50, groups=4)
    requests = random_requests(batch, seed, 12)
    whole = run(requests, batch)
    edge = int(batch.session_segments[batch.trajectory_sessions[batch.group_trajectories[cut]]])
    first = [i for i, r in enumerate(requests) if r.segment < edge]
    second = [i for i, r in enumerate(requests) if r.segment >= edge]
    left = run([requests[i] for i in first], select_groups(batch, range(cut)))
    moved = shifted([requests[i] for i in second], edge, int(batch.segment_tokens[edge]))
    right = run(moved, select_groups(batch, range(cut, 4)))
    for i, reply in [*zip(first, left, strict=True), *zip(second, right, strict=True)]:
        assert_same(reply, whole[i].arrays())


@settings(max_examples=20, deadline=None)
@given(seeds)
def test_one_by_one_is_what_together_gives(seed: int) -> None:
    """Sharing forwards and the size of micro-batches change no reply (verl 2996)."""
    batch = random_batch(seed % 50)
    requests = random_requests(batch, seed, 8)
    together = run(requests, batch, cap=4000)
    for request, reply, packed in zip(requests, together, run(requests, batch, cap=40), strict=True):
        assert_same(packed, reply.arrays())
        assert_same(run([request], batch)[0], reply.arrays())


def row() -> TrajectoryBatch:
    return build([(single([user([10, 11]), model([12, 13]), user([14]), model([15, 16])]),)])


def test_a_privileged_prompt_changes_the_context_alone() -> None:
    plain, same, hint = run([ask(0, context, [2, 3, 5, 6]) for context in (None, [10, 11], [10, 50, 51, 11])], row())
    assert not gap(same, plain).any()
    assert np.all(gap(hint, plain) != 0)


def test_a_hint_changes_what_comes_after_it() -> None:
    plain, hinted = (run([ask(0, None, [2, 3, 5, 6], inserts=inserts)], row())[0] for inserts in ((), (hint(5, [50]),)))
    assert gap(hinted, plain)[:2].tolist() == [0, 0] and np.all(gap(hinted, plain)[2:] != 0)


def test_an_appended_answer_is_scored_after_its_cut() -> None:
    asked = [ScoreRequest.likelihood(0, [70, 71, 72], cut=cut) for cut in (2, 4, 7)]
    before = build([(single([user([10, 11, 12, 13]), model([70, 71, 72])]),)])
    replies = run(asked, row())
    assert len(set(answer_likelihood(replies).tolist())) == 3
    assert_same(replies[1], run([ask(0, None, [4, 5, 6])], before)[0].arrays())


def test_a_snapshot_is_not_current_and_a_teacher_is_another_model() -> None:
    current, snapshot, teacher = run([ask(0, None, [2, 3], name) for name in ("current", "snapshot", "teacher")], row())
    assert np.all(gap(snapshot, current) != 0) and np.all(gap(teacher, current) != 0)


def test_requests_without_positions_are_answered_empty() -> None:
    """A segment with no model token, and a batch of which nothing is asked."""
    outputs = ScoreOutputs(entropy=True, value=True, topk=2, hidden=(1,))
    nothing = ask(0, None, [], "teacher", outputs, given_ids=np.empty((0, 3), dtype=np.int32))
    for requests in ([nothing], [nothing, ask(0, None, [2], "teacher")]):
        arrays = run(requests, row())[0].arrays()
        assert {len(a) for a in arrays.values()} == {0} and len(arrays) == 7
    assert run([], row()) == ()


def test_packed_rows() -> None:
    """Positions restart, logits stand one before their target, hidden states on the token itself."""
    requests = [
        ask(0, None, [2, 6], outputs=ScoreOutputs(topk=1)),
        ask(0, [1], [3], given_ids=[[4, 9]], outputs=ScoreOutputs(hidden=(1,))),
    ]
    group = plan_scores(requests, row(), table()).groups[0]
    piece = pack_rows(group, [1, 0])
    assert piece.ids.tolist() == [10, 11, 12, 13, 14, 15, 16, 1, 13]
    assert piece.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]
    assert piece.cu_seqlens.tolist() == [0, 7, 9] and piece.source.tolist() == [-1] * 9
    assert piece.logit_index.tolist() == [1, 5, 7] and piece.target.tolist() == [12, 16, 13]
    assert piece.topk_index.tolist() == [0, 1] and piece.hidden_index.tolist() == [8]
    assert piece.given_index.tolist() == [2, 2] and piece.given_id.tolist() == [4, 9]
    assert piece.scored_item.tolist() == [1, 2, 0]
    empty = pack_rows(group, [])
    assert empty.num_tokens == 0 and empty.cu_seqlens.tolist() == [0] and not len(empty.logit_index)


def test_a_row_over_the_cap_is_refused() -> None:
    with pytest.raises(PackingError, match="row 0 has 7 tokens"):
        run([ask(0, None, [6])], row(), cap=6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda out: ForwardOutputs(entropy=out.entropy), "weights 'current': the forward returned no logp"),
        (lambda out: ForwardOutputs(logp=out.logp[1:]), r"the forward's logp is \(1,\), expected \(2,\)"),
        (lambda out: ForwardOutputs(logp=out.logp * np.inf), "the forward's logp is not finite"),
        (lambda out: ForwardOutputs(logp=-out.logp), "logp reaches"),
    ],
)
def test_a_forward_that_returns_something_else(
    change: Callable[[ForwardOutputs], ForwardOutputs], message: str
) -> None:
    plan, tiny = plan_scores([ask(0, None, [2, 3])], row(), table()), TinyModel()

    def wrong(piece: PackedScores) -> ForwardOutputs:
        return change(tiny(piece))

    with pytest.raises(ScoreError, match=message):
        execute(plan, wrong, tokens_per_microbatch=64)


def test_every_row_runs_once() -> None:
    plan, tiny = plan_scores([ask(0, None, [2]), ask(0, [1], [2])], row(), table()), TinyModel()
    group = plan.groups[0]
    pieces = [(piece, tiny(piece)) for piece in (pack_rows(group, [1]), pack_rows(group, [0]))]
    whole = [assemble(group, pieces), *(ForwardOutputs() for _ in plan.groups[1:])]
    assert len(scatter(plan, whole)) == 2
    with pytest.raises(ScoreError, match="row 0 ran 0 times"):
        assemble(group, pieces[:1])
    with pytest.raises(ScoreError, match="row 1 ran 2 times"):
        assemble(group, [*pieces, pieces[0]])
    with pytest.raises(ScoreError, match="outputs of 1 groups for a plan of 3"):
        scatter(plan, whole[:1])
