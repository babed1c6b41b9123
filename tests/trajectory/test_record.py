"""The numbered invariants of ``trajectory/record.py``."""

from __future__ import annotations

import pickle
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_ext.trajectory.fields import ARRAY_FIELDS, OFFSETS
from megatron_ext.trajectory.record import Ragged, RecordError, Role, Status, TrajectoryBatch, equal
from tests.helpers.records import (
    Group,
    Traj,
    Turn,
    build,
    described_batches,
    model,
    random_batch,
    single,
    user,
)


def values_of(batch: TrajectoryBatch) -> dict[str, Any]:
    """The fields as fresh, writeable copies."""
    out: dict[str, Any] = {}
    for item in fields(batch):
        value = getattr(batch, item.name)
        out[item.name] = value.copy() if isinstance(value, (np.ndarray, dict)) else value
    return out


def two_sessions() -> TrajectoryBatch:
    """Trajectory "a" (one session), then "b": session 0 of 3 tokens, session 1 with two segments of 4 and 3 tokens."""
    first = single([user([1, 2]), model([3, 4])], name="a")
    second = Traj(
        sessions=(
            ((user([5]), model([6, 7])),),
            ((user([8]), model([9, 10, 11], version=(1, 1, 2))), (Turn(None, (8, 9)), model([12]))),
        ),
        name="b",
    )
    return build([(first,), (second,)], routed=(2, 2))


def broken(message: str, **changes: Any) -> None:
    """Writing ``changes`` (name -> [(index, value)]) into a valid batch is refused with ``message``."""
    values = values_of(two_sessions())
    for name, writes in changes.items():
        for index, value in writes:
            values[name][index] = value
    with pytest.raises(RecordError, match=message):
        TrajectoryBatch(**values)


@settings(max_examples=40, deadline=None)
@given(described_batches())
def test_every_level_partitions_the_one_below(groups: list[Group]) -> None:  # invariant 1
    batch = build(groups)
    for name in OFFSETS:
        offsets = getattr(batch, name)
        assert offsets[0] == 0 and np.all(np.diff(offsets) >= 0)
    assert len(batch.token_segment()) == batch.num_tokens == batch.trajectory_tokens()[-1]
    assert sum(len(t.turns) for t in batch.trajectories()) == batch.num_turns


@pytest.mark.parametrize("name", OFFSETS)
def test_offsets_that_do_not_partition_are_refused(name: str) -> None:  # invariant 1
    offsets = getattr(two_sessions(), name)
    broken(f"{name}: offsets must be one-dimensional and start at 0", **{name: [(0, 1)]})
    broken(f"{name}: offsets end at", **{name: [(-1, offsets[-1] + 1)]})
    if len(offsets) > 2:
        broken(f"{name}: offsets fall", **{name: [(1, offsets[-1] + 1)]})


def test_offsets_of_tokens_and_turns_describe_the_same_segments() -> None:  # invariant 1
    values = values_of(two_sessions())
    values["segment_turns"] = np.append(values["segment_turns"], values["segment_turns"][-1])
    with pytest.raises(RecordError, match="segment_turns has 6 offsets, segment_tokens 5"):
        TrajectoryBatch(**values)


def test_turns_are_spans_inside_a_segment() -> None:  # invariant 2
    b = two_sessions()
    for n in range(b.num_turns):
        assert np.array_equal(np.flatnonzero(b.turn == n), np.arange(b.turn_start[n], b.turn_end[n]))
    where = "trajectory 'b', session 1, segment 0, position 1"
    broken(f"{where}: token's turn index disagrees", turn=[(8, -1)])
    broken(f"{where}: turn index outside", turn=[(8, 99)])
    broken("trajectory 'b', session 1, segment 0, position 1: turn 5 leaves its segment", turn_end=[(5, 12)])
    broken("turn 5 overlaps the one before it", turn_start=[(5, 7)])
    broken(r"turn 5 has the span \[8, 7\)", turn_end=[(5, 7)])
    broken("span", turn_end=[(6, 99)])


def test_turns_are_numbered_over_the_trajectory() -> None:  # invariant 2
    where = "trajectory 'b', session 1, segment 0, position 1: turn 5"
    broken(f"{where} has a number that does not rise within the segment", turn_number=[(5, 2)])
    broken("trajectory 'b', session 0, segment 0, position 0: turn 2 has a negative turn number", turn_number=[(2, -1)])
    broken("turn 6 has the number 3, which is taken in this trajectory", turn_number=[(6, 3)])
    values = values_of(two_sessions())
    values["turn_number"] = np.array([7, 9, 5, 6, 0, 2, 1])  # sessions take turns, a number may be left out
    assert TrajectoryBatch(**values).num_turns == 7


def test_sessions_hang_together() -> None:  # invariant 1
    where = "trajectory 'b', session 1"
    for parent in (2, 3, 0, -2):  # itself, none, of another trajectory, no index
        broken(f"{where}: parent {parent} is no earlier session of the trajectory", session_parent=[(2, parent)])
    for span in ((4, -1), (-1, 5), (3, 5), (6, 5), (6, 8), (0, 0)):  # session 0 of "b" holds tokens [4, 7)
        message = rf"{where}: returned span \[{span[0]}, {span[1]}\] is not in its parent's tokens"
        broken(message, session_return=[((2, 0), span[0]), ((2, 1), span[1])])
    broken("trajectory 'b', session 0: returned span", session_return=[((1, 0), 4), ((1, 1), 5)])  # has no parent
    values = values_of(two_sessions())
    for span in ((4, 7), (5, 5), (-1, -1)):
        values["session_return"] = np.array([[-1, -1], [-1, -1], span])
        assert TrajectoryBatch(**values).session_return[2].tolist() == list(span)


def test_words_are_known() -> None:
    broken("trajectory 'b', session 1: kind 3 is unknown", session_kind=[(2, 3)])
    broken("trajectory 'b': status 7 is unknown", status=[(1, 7)])
    broken("trajectory 'a', session 0, segment 0, position 2: turn 1 has an unknown role", turn_role=[(1, 4)])
    broken("trajectory 'a', session 0, segment 0, position 2: unknown field", field=[(2, -1)])
    broken("turn 3 has a reward that is not finite", turn_reward=[(3, np.nan)])
    with pytest.raises(RecordError, match="turn 4 has a label 'x' below -1"):
        replace(two_sessions(), turn_labels={"x": np.array([0, 1, -1, 5, -2, 0, 0])})


def test_values_that_do_not_fit_are_refused() -> None:  # invariant 8
    batch = two_sessions()
    changes: list[tuple[str, Any, str]] = [
        ("ids", batch.ids + np.int64(2**31), "ids: 2147483649 at 0 is no int32 value"),
        ("ids", batch.ids + 0.5, "ids: 1.5 at 0 is no int32 value"),
        ("loss_mask", batch.loss_mask * 0.5, "loss_mask: 0.5 at 2 is no bool value"),
        ("field", np.full(batch.num_tokens, 256), "field: 256 at 0 is no int8 value"),
        ("session_return", np.full((3, 2), [-1, 0.25]), "session_return: 0.25 at 0, 1 is no int64 value"),
        ("turn_labels", {"x": np.full(7, 1 << 15)}, "turn_labels/x: 32768 at 0 is no int16 value"),
    ]
    for name, value, message in changes:
        with pytest.raises(RecordError, match=message):
            TrajectoryBatch(**{**values_of(batch), name: value})
    values = values_of(batch)
    same = {**values, "ids": batch.ids.tolist(), "loss_mask": batch.loss_mask.astype(np.float64)}
    assert equal(batch, TrajectoryBatch(**same))


def test_trained_tokens_were_sampled_in_model_turns() -> None:  # invariant 3
    broken(
        "trajectory 'b', session 1, segment 1, position 0: loss mask 1 on a token that was not sampled",
        loss_mask=[(11, True)],
    )
    broken("trajectory 'a', session 0, segment 0, position 1: sampled token outside a model turn", version=[(1, 0)])
    broken("session 1, segment 1, position 1: sampled token outside a model turn", version=[(12, 0)])
    broken("position 2: sampled token outside a model turn", turn_role=[(1, int(Role.TOOL))])
    broken("version below -1", version=[(0, -2)])


def test_versions_never_fall_inside_a_turn() -> None:  # invariant 4
    broken("trajectory 'b', session 1, segment 0, position 2: policy version falls inside a turn", version=[(8, 5)])
    put_in = model([2, 3, 4], version=(3, -1, 2), logp=(-1.0, 0.0, -1.0), mask=(True, False, True))
    with pytest.raises(RecordError, match="session 0, segment 0, position 3: policy version falls inside a turn"):
        build([(single([user([1]), put_in]),)])  # also across a token that was put in, not sampled
    falling = single([user([1]), model([2], version=3), user([3]), model([4], version=1)])
    assert build([(falling,)]).num_turns == 4  # between turns they may (another engine served the next turn)


def test_rollout_logp_exists_exactly_where_sampled() -> None:  # invariant 5
    where = "trajectory 'b', session 1, segment 0, position 2"
    broken(f"{where}: rollout log-prob is not finite", rollout_logp=[(9, np.nan)])
    broken(f"{where}: rollout log-prob is not finite", rollout_logp=[(9, -np.inf)])
    broken(f"{where}: rollout log-prob above 0", rollout_logp=[(9, 0.5)])
    broken("position 0: rollout log-prob on a token that was not sampled", rollout_logp=[(0, -1.0)])


def test_routing_is_unsigned_and_aligned_to_tokens() -> None:  # invariant 6
    values = values_of(two_sessions())
    for name, value, message in (
        ("routed_valid", None, "routed is given without routed_valid"),
        ("routed", None, "routed_valid is given without routed"),
        ("routed", values["routed"][:, :0], "expected unsigned"),
        ("routed", values["routed"].astype(np.int64), "expected unsigned"),
        ("routed", values["routed"][:-1], "expected unsigned"),
        ("routed_valid", values["routed_valid"][:-1], "routed_valid: shape"),
    ):
        with pytest.raises(RecordError, match=message):
            TrajectoryBatch(**{**values, name: value})


def test_ids_are_kept_as_given() -> None:  # invariant 7
    assert two_sessions().ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 8, 9, 12]


def test_a_batch_is_read_only_also_after_pickling() -> None:  # invariant 8
    batch = random_batch(3, routed=(2, 2))
    for copy in (batch, pickle.loads(pickle.dumps(batch))):
        assert equal(batch, copy)
        arrays = [getattr(copy, name) for name in ARRAY_FIELDS] + [copy.reward_parts["half"], copy.turn_labels["stage"]]
        arrays += [copy.prepared["ready"].ids, copy.prepared["ready"].offsets]
        for array in arrays:
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 0


def test_the_giver_cannot_change_a_batch_afterwards() -> None:  # invariant 8
    values = values_of(two_sessions())
    buffer = np.concatenate([values["weight"], values["weight"]])
    values["weight"] = buffer[: len(values["weight"])]
    batch = TrajectoryBatch(**values)
    with pytest.raises(ValueError, match="read-only"):
        values["version"][0] = 7
    buffer[0] = 7.0
    assert batch.weight[0] == 1.0
    ids = values["ids"].copy()
    shown = ids[:]
    shown.flags.writeable = False  # a read-only view of what the giver can still write
    batch = TrajectoryBatch(**{**values, "ids": shown})
    ids[0] = 7
    assert batch.ids[0] == values["ids"][0] != 7


def test_sizes_names_and_values_are_checked() -> None:
    values = values_of(two_sessions())
    for name, value, message in (
        ("field", values["field"][:-1], "field: shape"),
        ("turn_reward", values["turn_reward"][:-1], "turn_reward: shape"),
        ("session_return", values["session_return"][:, 0], "session_return: shape"),
        ("harness", ("text",), "harness: 1 entries, expected 2"),
        ("trajectory_id", ("a", "a"), "ids repeat, 'a' stands there 2 times"),
        ("reward_parts", {"x": np.zeros(5)}, "'x': shape"),
        ("prepared", {"x": Ragged.empty(5)}, "prepared 'x': 5 rows, expected 2"),
        ("reward", np.array([0.0, np.nan]), "trajectory 'b': reward is nan; mark it REWARD_INVALID"),
        ("reward_parts", {"x": np.array([np.nan, np.inf])}, "trajectory 'b': reward part 'x' is inf"),
    ):
        with pytest.raises(RecordError, match=message):
            TrajectoryBatch(**{**values, name: value})
    broken("position 1: negative token id", ids=[(1, -3)])
    broken("position 1: weight is negative", weight=[(1, -0.5)])
    broken("position 1: weight is negative or not finite", weight=[(1, np.inf)])


def test_keys_name_the_owner_at_each_level() -> None:
    b = two_sessions()
    assert b.token_trajectory().tolist() == [0] * 4 + [1] * 10
    assert b.token_segment().tolist() == [0] * 4 + [1] * 3 + [2] * 4 + [3] * 3
    assert b.turn_trajectory().tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert b.turn_number.tolist() == [0, 1, 0, 1, 2, 3, 4]
    view = b.trajectory(1)
    assert (view.tokens, view.segments, view.turns, view.num_model_turns) == (slice(4, 14), range(1, 4), range(2, 7), 3)
    with pytest.raises(IndexError, match="trajectory 2 of a batch that holds 2"):
        b.trajectory(2)


def test_trainable_is_decided_by_the_status() -> None:
    group = tuple(single([model([1])], status=status) for status in Status)
    assert build([group]).trainable().tolist() == [status < Status.ENV_ERROR for status in Status]


def test_equal_sees_every_bit() -> None:
    a = two_sessions()
    values = values_of(a)
    assert equal(a, TrajectoryBatch(**values))
    values = values_of(a)
    values["turn_reward"][0] = -0.0
    assert not equal(a, TrajectoryBatch(**values))
    assert not equal(a, a.with_rewards(np.array([1.0, 0.0])))
