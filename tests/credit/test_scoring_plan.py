"""The score plan (``credit/score_plan.py``): sequences, merging, groups of weights, and what it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.score_plan import ScoreWeights, plan_scores, score_rows
from megatron_ext.credit.scoring import ScoreError, ScoreOutputs, ScoreRequest
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import build, model, random_batch, single, user
from tests.helpers.tiny_scorer import ask, hint, random_requests, table


def two_rows() -> TrajectoryBatch:
    """Segments [10..16] and [10, 11, 12, 20, 21], prompts of two ids."""
    one = single([user([10, 11]), model([12, 13]), user([14]), model([15, 16])])
    return build([(one, single([user([10, 11]), model([12, 20, 21])]))])


def ids(request: ScoreRequest, batch: TrajectoryBatch | None = None) -> tuple[list[int], list[int]]:
    row = score_rows([request], two_rows() if batch is None else batch, table())[0]
    return row.ids.tolist(), row.place.tolist()


def test_the_sequence_of_each_kind_of_request() -> None:
    assert ids(ask(0, None, [2, 3])) == ([10, 11, 12, 13], [2, 3])
    assert ids(ask(1, None, [8, 11])) == ([10, 11, 12, 20, 21], [1, 4])
    # A privileged prompt changes what is before the response and nothing else.
    assert ids(ask(0, [1, 2, 3], [2, 3, 5])) == ([1, 2, 3, 12, 13, 14, 15], [3, 4, 6])
    assert ids(ask(0, [1, 2, 3], [5], start=4)) == ([1, 2, 3, 14, 15], [4])
    assert ids(ask(0, [], [3], start=2)) == ([12, 13], [1])
    hints = (hint(2, [1]), hint(2, [2]), hint(5, [3, 4]))
    assert ids(ask(0, None, [2, 5], inserts=hints)) == ([10, 11, 1, 2, 12, 13, 14, 3, 4, 15], [4, 9])
    # An appended answer: after the record up to `cut`, or after a context alone.
    assert ids(ScoreRequest.likelihood(0, [7, 8], cut=4)) == ([10, 11, 12, 13, 7, 8], [4, 5])
    assert ids(ScoreRequest.likelihood(1, [7])) == ([10, 11, 12, 20, 21, 7], [5])
    assert ids(ScoreRequest.likelihood(0, [7, 8], context_ids=np.array([1, 2]))) == ([1, 2, 7, 8], [2, 3])
    answer = ask(0, [1], [1], start=2, cut=4, answer_ids=[7, 8, 9], inserts=(hint(4, [5]),))
    assert ids(answer) == ([1, 12, 13, 5, 7, 8], [5])
    assert ids(ask(0, None, [])) == ([], [])


def test_requests_that_share_a_beginning_run_once() -> None:
    requests = [
        ask(0, None, [2]),
        ask(0, None, [3, 5], outputs=ScoreOutputs(entropy=True, topk=3)),
        ask(0, [10, 11], [2, 3, 5, 6], outputs=ScoreOutputs(logp=False, hidden=(1,))),
        ask(1, None, [9]),  # 10, 11, 12 begins the first row as well
        ask(1, None, [9, 10]),
        ask(0, None, []),
    ]
    plan = plan_scores(requests, two_rows(), table())
    group = plan.groups[0]
    assert [group.ids[a:b].tolist() for a, b in zip(group.row_offsets, group.row_offsets[1:], strict=False)] == [
        [10, 11, 12, 13, 14, 15, 16],
        [10, 11, 12, 20],
    ]
    # 10, 11, 12 begins both rows; the one that follows it in order holds it.
    assert (plan.asked_tokens, plan.num_tokens, plan.num_rows) == (3 + 6 + 7 + 3 + 4, 11, 2)
    assert group.scored.tolist() == [2, 3, 5, 9, 10] and group.topk.tolist() == [3, 5]
    assert group.hidden.tolist() == [2, 3, 5, 6]
    assert group.outputs == ScoreOutputs(entropy=True, topk=3, hidden=(1,))
    assert plan.aims[0].scored.tolist() == plan.aims[3].scored.tolist() == [0]
    assert plan.aims[1].topk.tolist() == [0, 1] and not len(plan.aims[5].scored)


def test_an_empty_skill_runs_nothing_of_its_own() -> None:
    """skill_scaffold: N + M N sequences, and none for a skill without words, whose gap is therefore exactly 0."""
    batch = two_rows()
    free = [ask(0, None, [2, 3, 5, 6]), ask(1, None, [9, 10, 11])]
    skilled = [ask(r.segment, [10, 11, *skill], r.positions) for skill in ([], [1], [2, 3]) for r in free]
    plan = plan_scores([*free, *skilled], batch, table())
    assert plan.num_rows == 2 + 2 * 2


def test_weights_are_swapped_once_and_groups_depend_on_the_table_alone() -> None:
    weights = table(alias={"model": "policy", "version": 1}, far={"model": "far", "version": 3})
    requests = [ask(0, None, [2], ref) for ref in ("teacher", "current", "snapshot", "alias", "current")]
    plan = plan_scores(requests, two_rows(), weights)
    assert [g.names for g in plan.groups] == [("current", "alias"), ("far",), ("snapshot",), ("teacher",)]
    assert plan.tokens_by_weights() == {"current": 3, "far": 0, "snapshot": 3, "teacher": 3}
    empty = plan_scores([], two_rows(), weights)
    assert [g.names for g in empty.groups] == [g.names for g in plan.groups] and empty.num_tokens == 0


def test_replayed_routing_stays_with_its_row() -> None:
    """A row that replays the experts of one record is not run with those of another (verl 4562)."""
    twin = single([user([10, 11]), model([12, 13])])
    batch = build([(twin, replace(twin, name="other"))], routed=(2, 1))
    requests = [
        ask(0, None, [2, 3], replay_routing=True),
        ask(0, None, [2], replay_routing=True),
        ask(1, None, [6, 7], replay_routing=True),
        ask(0, None, [2, 3]),
        ask(1, None, [6, 7]),
    ]
    group = plan_scores(requests, batch, table()).groups[0]
    assert group.source.reshape(3, 4).tolist() == [[-1] * 4, [0, 1, 2, 3], [4, 5, 6, 7]]
    with pytest.raises(ScoreError, match="no recorded experts"):
        plan_scores(requests, build([(twin, replace(twin, name="other"))]), table())


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(0, None, [2], "judge"), "weights 'judge' are not among current, "),
        (ask(0, None, [2], "frontier"), "'frontier' read 'other-bpe', the ids are of 'bpe'"),
        (ask(0, [1] * 6, [2, 3, 5], "short"), "10 tokens of context and response, 'short' takes 9"),
        (ask(0, [100], [2]), "id 100 in a vocabulary of 100"),
        (ask(0, None, [2], given_ids=[[100]]), "given id 100 in a vocabulary of 100"),
        (ask(0, None, [2], outputs=ScoreOutputs(topk=101)), "top-101 of a vocabulary of 100"),
        (ask(0, None, [2], outputs=ScoreOutputs(hidden=(3,))), "hidden layer 3, weights 'current' have 2"),
        (ask(0, None, [2], "short", ScoreOutputs(value=True)), "'short' have no value head"),
        (ask(0, None, [0]), "position 0 has nothing before it"),
        (ask(0, [], [2]), "position 2 has nothing before it"),
        (ScoreRequest.likelihood(0, [1], context_ids=np.empty(0, dtype=np.int32)), "position 0 has nothing before it"),
        (ask(0, None, [7]), r"the record's part \[0, 8\) leaves its segment \[0, 7\)"),
        (ask(1, None, [3, 9]), r"position 3 is before the record's part \[7, 10\)"),
        (ask(0, [1], [2, 3], start=3), r"position 2 is before the record's part \[3, 4\)"),
        (ask(1, [1], [9], start=3), r"part \[3, 10\) leaves its segment \[7, 12\)"),
        (ScoreRequest.likelihood(0, [1], cut=8), r"part \[0, 8\) leaves its segment"),
        (
            ask(0, None, [2], inserts=(hint(3, [1]),)),
            r"inserts before \[3\] leave the record's part \[0, 3",
        ),
    ],
)
def test_what_cannot_be_scored_is_one_line(request_: ScoreRequest, message: str) -> None:
    weights = table(
        frontier={"model": "frontier", "version": 0, "vocabulary": "other-bpe"},
        short={"model": "short", "version": 0, "max_tokens": 9, "value_head": False},
    )
    fine = ask(1, None, [9])
    with pytest.raises(ScoreError, match=message) as error:
        plan_scores([fine, request_], two_rows(), weights)
    where = f"score request 1 (trajectory 'g0/s{request_.segment}', segment {request_.segment}): "
    assert str(error.value).startswith(where) and "\n" not in str(error.value)


def test_a_segment_that_is_not_there() -> None:
    with pytest.raises(ScoreError, match="score request 0: segment 2 of a batch that holds 2"):
        plan_scores([ask(2, None, [2])], two_rows(), table())


def test_tables_that_do_not_fit() -> None:
    with pytest.raises(ScoreError, match="'current' is missing"):
        plan_scores([], two_rows(), {})
    twice: dict[str, ScoreWeights] = table()
    twice["copy"] = replace(twice["current"], layers=7)
    with pytest.raises(ScoreError, match="'current' and 'copy': one model and version, described differently"):
        plan_scores([], two_rows(), twice)


def described(plan: Any) -> list[Any]:
    names = ("row_offsets", "ids", "source", "scored", "topk", "given", "given_id", "hidden")
    return [(g.names, g.outputs, *(getattr(g, n).tolist() for n in names)) for g in plan.groups]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 12))
def test_the_plan_does_not_depend_on_the_order_of_requests(seed: int, count: int) -> None:
    batch = random_batch(seed % 100)
    requests = random_requests(batch, seed, count)
    order = np.random.default_rng(seed).permutation(len(requests))
    whole = plan_scores(requests, batch, table())
    assert described(whole) == described(plan_scores([requests[i] for i in order], batch, table()))
    mine = [r for r in requests if r.weights_ref == "teacher"]
    assert described(plan_scores(mine, batch, table()))[-1] == described(whole)[-1]
    assert described(plan_scores([*requests, *requests], batch, table())) == described(whole)
    rows = {tuple(r.ids) for r in score_rows(requests, batch, table()) if r.weights.model == "teacher"}
    longest = {r for r in rows if r and not any(o != r and o[: len(r)] == r for o in rows)}
    assert whole.groups[-1].num_rows == len(longest)
