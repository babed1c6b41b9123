"""Where the record is cut to ask for the right answer, and what the replies make of it (``recipes/mosaic/gain.py``)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.scoring import ScoreReply
from megatron_ext.harness import answers
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import Role, SessionKind, Status, TrajectoryBatch
from recipes.mosaic.gain import ANSWER, PREFIX, gains, likelihood_requests, places
from tests.helpers.credit_contract import canned
from tests.helpers.records import (
    Group,
    Traj,
    Turn,
    build,
    described_batches,
    model,
    single,
    split,
    user,
    with_answers,
)

NORMAL, COMPRESS, SUBAGENT = SessionKind.NORMAL, SessionKind.COMPRESS, SessionKind.SUBAGENT
ASSISTANT = 50  # a generation prompt: part of no turn


def said(ids: Sequence[int]) -> tuple[Turn, Turn]:
    return Turn(None, (ASSISTANT,)), model(ids)


def searched(answer: tuple[int, ...] = (7, 8)) -> Traj:
    """A question that spawns a sub-agent (session 1), is compressed (2) and goes on from the summary (3)."""
    parent = (user([1]), *said([2]), Turn(Role.TOOL, (3, 4), returns=1), *said([5]))
    agent = (user([11]), *said([12]))
    summary = (user([1, 2, 3, 4, 5, 21]), *said([22]))
    after = (user([1]), user([22, 23]), *said([31]))
    return Traj(((parent,), (agent,), (summary,), (after,)), kinds=(NORMAL, SUBAGENT, COMPRESS, NORMAL), answer=answer)


def contexts(batch: TrajectoryBatch) -> list[list[int]]:
    """The ids before the answer of each request, in order."""
    return [
        batch.ids[batch.segment_tokens[r.segment] : r.cut].tolist() for r in likelihood_requests(batch, places(batch))
    ]


def test_the_two_places_of_each_kind_of_session() -> None:
    batch = build([(searched(),)])
    at = places(batch)
    asked = contexts(batch)
    pairs = [(asked[b], asked[a]) for b, a in zip(at.before, at.after, strict=True)]
    whole = [1, ASSISTANT, 2, 3, 4, ASSISTANT, 5]
    assert pairs == [
        ([1], whole),  # normal: after its messages, at its end
        ([1, ASSISTANT, 2], [1, ASSISTANT, 2, 3, 4]),  # sub-agent: its parent without and with the result
        (whole, [1, 22, 23]),  # compression: what it compresses, what goes on from the summary
        ([1, 22, 23], [1, 22, 23, ASSISTANT, 31]),
    ]
    assert len(asked) == 6  # the ends that two sessions share are asked for once
    assert at.inside.tolist() == [-1, 0, -1, -1]


def test_requests_ask_for_the_answer_behind_the_prefix() -> None:
    batch = build([(searched((7, 8, 9)),)])
    for request in likelihood_requests(batch, places(batch)):
        assert request.answer_ids is not None and request.answer_ids.tolist() == [90, 91, 7, 8, 9]
        assert request.positions.tolist() == [2, 3, 4] and request.weights_ref == "current"
    assert (PREFIX, ANSWER) == (answers.ANSWER_PREFIX, answers.ANSWER)


def replies(values: Sequence[float]) -> list[ScoreReply]:
    """Replies whose mean log-prob is each value."""
    return [ScoreReply(logp=np.array([v - 0.25, v + 0.25], dtype=np.float32)) for v in values]


@pytest.mark.parametrize(("space", "want"), [("log", [0.5, -0.1, 0.9]), ("prob", [0.087795, -0.021234, 0.294689])])
def test_gains_of_the_table(space: str, want: list[float]) -> None:
    """l = (-2, -1.5, -1.6, -.7): a session, its compression, and the one that goes on from it."""
    sessions = (((user([1]), model([2])),), ((user([1, 2, 3]), model([4])),), ((user([5]), model([6])),))
    batch = build([(Traj(sessions, kinds=(NORMAL, COMPRESS, NORMAL), answer=(7, 8)),)])
    at = places(batch)
    order = np.argsort([at.before[0], at.after[0], at.before[2], at.after[2]])
    said = replies(np.array([-2.0, -1.5, -1.6, -0.7])[order].tolist())
    got = gains(at, said, space)
    np.testing.assert_allclose(got, want, atol=1e-6)
    if space == "log":
        assert got.sum() == pytest.approx(1.3)


def test_what_sub_agents_add_is_theirs() -> None:  # invariant 1
    batch = build([(searched(),)])
    at = places(batch)
    value = {tuple(c): -0.1 * i for i, c in enumerate(contexts(batch))}
    said = replies([value[tuple(c)] for c in contexts(batch)])
    got = gains(at, said, "log")
    opening, end = value[(1,)], value[(1, 22, 23, ASSISTANT, 31)]
    assert got.sum() == pytest.approx(end - opening)
    before, after = value[(1, ASSISTANT, 2)], value[(1, ASSISTANT, 2, 3, 4)]
    assert got[1] == pytest.approx(after - before)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**31), counts=st.lists(st.integers(1, 4), min_size=1, max_size=4))
def test_gains_add_up(seed: int, counts: list[int]) -> None:  # invariant 1
    """Chains of compressions: whatever the model says, the sum is the last end less the first opening."""
    rng = np.random.default_rng(seed)

    def session() -> tuple[tuple[Turn, ...]]:
        ids = [int(x) for x in rng.integers(0, 99, 4)]
        return ((user(ids[:2]), model(ids[2:])),)

    made = [
        Traj(
            tuple(session() for _ in range(2 * n - 1)),
            kinds=tuple(COMPRESS if i % 2 else NORMAL for i in range(2 * n - 1)),
            answer=(5,),
        )
        for n in counts
    ]
    batch = build([tuple(made)])
    at = places(batch)
    said = canned(likelihood_requests(batch, at), batch)
    value = np.array([float(reply.logp[0]) for reply in said if reply.logp is not None])
    total = np.bincount(batch.session_trajectory(), weights=gains(at, said, "log"))
    first, last = batch.trajectory_sessions[:-1], batch.trajectory_sessions[1:] - 1
    np.testing.assert_allclose(total, value[at.after[last]] - value[at.before[first]], atol=1e-6)


@settings(max_examples=25)
@given(groups=described_batches(), seed=st.integers(0, 1000))
def test_segments_ask_the_same(groups: list[Group], seed: int) -> None:  # invariant 2
    one = with_answers(groups, seed)
    whole, cut = build(one), build(split(one, seed, into="segments"))
    for batch in (whole, cut):
        assert len({(r.segment, r.cut) for r in likelihood_requests(batch, places(batch))}) == len(contexts(batch))
    assert sorted(contexts(whole)) == sorted(contexts(cut))


def test_nothing_is_asked_without_an_answer() -> None:  # invariant 3
    lost = replace(searched(), status=Status.ENV_ERROR)
    for group in ((searched(()), searched(())), (lost, searched(()))):
        batch = build([group])
        assert not contexts(batch) and not places(batch).measured.any()
        assert not gains(places(batch), [], "log").any()
    both = build([(searched(()), searched(), lost)])
    assert places(both).measured.tolist() == [False] * 4 + [True] * 4 + [False] * 4


def test_a_session_of_which_a_place_is_missing_has_no_gain() -> None:  # invariant 4
    parent = ((user([1]), model([2])),)
    silent = ((user([1]),),)
    cases = {
        (NORMAL, SUBAGENT): ((parent, parent), [True, False]),  # its result never came
        (NORMAL, COMPRESS): ((parent, parent), [True, False]),  # nothing goes on from it
        (NORMAL, NORMAL): ((parent, silent), [True, False]),  # the model never spoke
    }
    for kinds, (sessions, measured) in cases.items():
        other = single([user([1]), model([2])], answer=(3,))  # what follows is another trajectory's
        batch = build([(Traj(sessions, kinds=kinds, answer=(7,)), other)])
        assert places(batch).measured.tolist() == [*measured, True], kinds


def test_what_is_too_long_has_no_gain() -> None:
    batch = build([(searched(),)])
    assert places(batch, max_tokens=7 + 4).measured.all()
    assert places(batch, max_tokens=7 + 3).measured.tolist() == [False, True, False, True]
    # A parent that has no gain of its own owes its sub-agent nothing.
    assert places(batch, max_tokens=7 + 3).inside.tolist() == [-1, -1, -1, -1]


def test_places_do_not_depend_on_who_else_is_there() -> None:
    batch = build([(searched(),), (searched((4,)), searched((6, 6, 6)))])
    parts = [select_groups(batch, [0]), select_groups(batch, [1])]
    joined = [c for part in parts for c in contexts(part)]
    assert sorted(joined) == sorted(contexts(batch)) and concat(parts).num_tokens == batch.num_tokens
