"""Invariants 1-4 of ``credit/turns.py``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.levels import broadcast, trained_tokens
from megatron_ext.credit.spans import Op
from megatron_ext.credit.turns import (
    in_field,
    in_session,
    in_turns,
    model_turns,
    returns_to_go,
    route,
    turn_broadcast,
    turn_reduce,
)
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import Field, Role, SessionKind, Status, TrajectoryBatch
from tests.helpers.credit_contract import turn_rows
from tests.helpers.records import (
    Group,
    Traj,
    Turn,
    build,
    described_batches,
    model,
    named,
    random_groups,
    shuffled,
    single,
    split,
    user,
)

Statistics = dict[tuple[str, int], tuple[float, ...]]


def statistics(batch: TrajectoryBatch) -> Statistics:
    """Everything a turn's row says, by (trajectory, number): comparable across layouts."""
    turns = model_turns(batch)
    values = batch.ids.astype(np.float32)
    columns = [turn_reduce(values, turns, op) for op in Op]
    columns += [turn_reduce(values, turns, Op.MEAN, where=batch.ids % 2 == 0)]
    columns += [x.astype(np.float64) for x in (turns.tokens, turns.last)]
    columns += [turns.pick(batch.turn_reward), turns.pick(batch.turn_labels["stage"])]
    columns += [returns_to_go(turns, turns.pick(batch.turn_reward), 0.9, terminal=batch.reward)]
    keys = zip(turns.trajectory.tolist(), turns.number.tolist(), strict=True)
    rows = zip(*(np.asarray(c, dtype=np.float64).tolist() for c in columns), strict=True)
    return {(batch.trajectory_id[j], number): row for (j, number), row in zip(keys, rows, strict=True)}


def agree(one: Statistics, other: Statistics) -> None:
    assert one.keys() == other.keys()
    for key, row in one.items():
        np.testing.assert_allclose(row, other[key], rtol=1e-12, err_msg=str(key))


@settings(max_examples=40, deadline=None)
@given(described_batches(), st.integers(0, 999))
def test_the_layout_changes_no_statistics(groups: list[Group], seed: int) -> None:  # invariant 2
    want = statistics(build(named(groups)))
    agree(want, statistics(build(turn_rows(groups))))
    agree(want, statistics(build(shuffled(groups, seed))))
    for into in ("segments", "pieces", "sessions"):
        agree(want, statistics(build(split(named(groups), seed, into=into))))


@settings(max_examples=40, deadline=None)
@given(described_batches(), st.sampled_from(list(Op)))
def test_reduction_and_broadcast_by_hand(groups: list[Group], op: Op) -> None:  # invariant 3
    batch = build(groups)
    turns, trained = model_turns(batch), trained_tokens(batch)
    values = np.where(trained, batch.ids.astype(np.float64), np.nan)
    got = turn_reduce(values, turns, op)
    assert np.all(np.isfinite(got)) and not got[turns.tokens == 0].any()
    for m in range(len(turns)):
        own = values[trained & (batch.turn == turns.entry[m])]
        assert turns.tokens[m] == len(own)
        if len(own) and op in (Op.SUM, Op.MEAN):
            assert got[m] == pytest.approx(own.sum() if op == Op.SUM else own.mean())
    spread = turn_broadcast(np.arange(len(turns)) + 1.0, turns)
    place = np.where(batch.turn >= 0, turns.of_entry[batch.turn], -1)
    assert np.array_equal(spread, np.where(trained, place + 1.0, 0.0))


def interleaved() -> TrajectoryBatch:
    """A parent session of turns 0-1 and 4-5 around a subagent of turns 2-3, and a later row that repeats turn 1."""
    parent = ((user([1]), model([2, 3]), user([6]), model([7])),)
    batch = build([(Traj(sessions=(parent, ((user([4]), model([5, 5, 5])),)), reward=2.0),)])
    return replace(batch, turn_number=np.array([0, 1, 4, 5, 2, 3]))


def test_turns_come_in_the_order_they_happened() -> None:  # invariant 1
    batch = interleaved()
    turns = model_turns(batch)
    assert turns.number.tolist() == [1, 3, 5] and turns.entry.tolist() == [1, 5, 3]
    assert turn_reduce(batch.ids, turns).tolist() == [5.0, 15.0, 7.0]
    assert turn_broadcast(np.array([1.0, 2.0, 3.0]), turns).tolist() == [0, 1, 1, 0, 3, 0, 2, 2, 2]
    assert turns.last.tolist() == [False, False, True]
    assert returns_to_go(turns, np.ones(3), 0.5, terminal=batch.reward).tolist() == [2.25, 2.5, 3.0]


def test_a_turn_that_later_rows_repeat_is_listed_once() -> None:  # invariant 1
    again = (Turn(None, (1, 2, 3)), user([4]), model([5]))
    batch = build([(Traj(sessions=(((user([1]), model([2, 3])), again),)), single([model([9])]))])
    turns = model_turns(batch)
    assert turns.number.tolist() == [1, 3, 0] and turns.tokens.tolist() == [2, 1, 1]
    assert turns.of_entry.tolist() == [-1, 0, -1, 1, 2] and turns.offsets.tolist() == [0, 2, 3]
    assert turn_broadcast(np.array([1.0, 2.0, 3.0]), turns).tolist() == [0, 1, 1, 0, 0, 0, 0, 2, 3]


def test_degenerate_batches() -> None:  # invariant 3
    empty = model_turns(select_groups(build(random_groups(1)), []))
    assert len(empty) == 0 and empty.offsets.tolist() == [0] and len(turn_reduce(np.zeros(0), empty)) == 0
    silent = Traj(sessions=(((user([1]),),),))
    lost = single([user([1]), model([2])], status=Status.ENV_ERROR)
    batch = build([(silent, single([user([1]), model([]), model([2], mask=False)]), lost)])
    turns = model_turns(batch)
    assert turns.offsets.tolist() == [0, 0, 2, 3] and not turns.tokens.any() and not turns.last.any()
    for op in Op:
        assert not turn_reduce(np.full(batch.num_tokens, np.inf), turns, op).any()
    assert not turn_broadcast(np.ones(3), turns).any()
    assert returns_to_go(turns, np.zeros(3), 1.0, terminal=np.array([1.0, 2.0, 3.0])).tolist() == [2.0, 2.0, 3.0]


def test_wrong_sizes_are_named() -> None:
    batch = build(random_groups(1))
    turns = model_turns(batch)
    with pytest.raises(ValueError, match="token values"):
        turn_reduce(np.zeros(1), turns)
    with pytest.raises(ValueError, match="turn values"):
        turn_broadcast(np.zeros(1), turns)
    with pytest.raises(ValueError, match="turn values"):
        turns.pick(np.zeros(1))


def routed_batch() -> TrajectoryBatch:
    batch = build([(single([user([1]), model([2, 3]), Turn(Role.TOOL, (4,)), model([5, 6])], reward=1.0),)])
    field = np.array([0, Field.THINKING, Field.TOOL_USE, 0, Field.TEXT, Field.TEXT])
    return replace(batch, field=field)


def test_routes() -> None:  # invariant 4
    batch = routed_batch()
    turns = model_turns(batch)
    tool, reply = in_field(batch, Field.TOOL_USE), in_turns(turns, turns.last)
    seven, nine = (broadcast(batch, np.array([x])) for x in (7.0, 9.0))
    assert route(batch, {"tool": (tool, seven), "reply": (reply, nine)}).tolist() == [0, 0, 7, 0, 9, 9]
    rest = route(batch, {"tool": (tool, seven)}, default=turn_broadcast(np.array([1.0, 2.0]), turns))
    assert rest.tolist() == [0, 1, 7, 0, 2, 2]
    everything = np.ones(batch.num_tokens, dtype=bool)
    assert route(batch, {"all": (everything, np.full(6, 3.0))}).tolist() == [0, 3, 3, 0, 3, 3]
    assert in_session(batch, SessionKind.NORMAL).all() and not in_session(batch, SessionKind.SUBAGENT).any()
    with pytest.raises(ValueError, match="route 'text': token 4 also belongs to reply"):
        route(batch, {"reply": (reply, nine), "text": (in_field(batch, Field.TEXT), seven)})
    with pytest.raises(ValueError, match=r"route 'tool': mask and values \(6,\), \(1,\)"):
        route(batch, {"tool": (tool, np.array([7.0]))})


@settings(max_examples=25, deadline=None)
@given(described_batches(), st.integers(0, 99))
def test_a_route_reads_no_other_reward(groups: list[Group], seed: int) -> None:  # invariant 4
    """SLCA-GRPO: changing the reward of the last turns leaves the advantage of earlier turns bit-identical."""
    batch = build(groups)
    turns, rng = model_turns(batch), np.random.default_rng(seed)
    last = in_turns(turns, turns.last)
    process, summary, other = (broadcast(batch, rng.normal(size=batch.num_trajectories)) for _ in range(3))
    one = route(batch, {"process": (~last, process), "summary": (last, summary)})
    two = route(batch, {"process": (~last, process), "summary": (last, other)})
    assert np.array_equal(one[~last], two[~last]) and not one[~trained_tokens(batch)].any()
