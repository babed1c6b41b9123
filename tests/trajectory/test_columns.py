"""The numbered invariants of ``trajectory/columns.py``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.trajectory.columns import Groups, from_arrow, to_arrow
from megatron_ext.trajectory.fields import ARRAY_FIELDS
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import RecordError, TrajectoryBatch, equal
from tests.helpers.records import Group, Traj, build, described_batches, random_batch

Maker = Callable[..., TrajectoryBatch]


@settings(max_examples=40, deadline=None)
@given(described_batches(), st.booleans())
def test_there_and_back_is_the_same_batch(groups: list[Group], routed: bool) -> None:  # invariant 1
    batch = build(groups, routed=(3, 2) if routed else None)
    rows, about = to_arrow(batch)
    again = from_arrow(rows, Groups.from_json(about.to_json()))
    assert equal(batch, again)
    assert [getattr(again, name) is None for name in ARRAY_FIELDS] == [
        getattr(batch, name) is None for name in ARRAY_FIELDS
    ]


def test_empty_levels_come_back(random_batch: Maker) -> None:  # invariant 1
    batch = random_batch(3, routed=True)
    empty = select_groups(batch, [])
    hollow = replace(
        concat([batch, build([(Traj(sessions=((),), name="hollow"),)])]),
        group_trajectories=np.append(np.insert(batch.group_trajectories, 1, 0), [batch.num_trajectories + 1] * 2),
        group_id=("none yet", *batch.group_id, "hollow", "none at all"),
        task_id=("t",) * (batch.num_groups + 3),
    )
    assert hollow.num_groups == batch.num_groups + 3
    for given_batch in (empty, hollow):
        assert equal(given_batch, from_arrow(*to_arrow(given_batch)))


def test_a_row_stands_alone(random_batch: Maker) -> None:  # invariant 2
    batch = random_batch(7, groups=3, turns=9)
    rows, _ = to_arrow(batch)
    table = rows.to_pylist()
    assert len(table) == batch.num_trajectories
    for j, row in enumerate(table):
        tokens, turns = batch.trajectory(j).tokens, batch.trajectory(j).turns
        assert row["ids"] == batch.ids[tokens].tolist()
        assert row["loss_mask"] == batch.loss_mask[tokens].tolist()
        assert sum(row["segment_tokens"]) == len(row["ids"]) and sum(row["segment_turns"]) == len(turns)
        assert len(row["segment_tokens"]) == sum(row["session_segments"])
        for n, (start, end) in enumerate(zip(row["turn_start"], row["turn_end"], strict=True)):
            assert all(turn == n for turn in row["turn"][start:end])
        assert all(parent < index for index, parent in enumerate(row["session_parent"]))
        group = int(batch.trajectory_group()[j])
        assert (row["group_id"], row["task_id"]) == (batch.group_id[group], batch.task_id[group])
        alone = select_groups(batch, [group])
        assert row["trajectory_id"] in alone.trajectory_id


def test_arrays_are_shared_not_copied(random_batch: Maker) -> None:  # invariant 3
    batch = random_batch(5, routed=True)
    again = from_arrow(*to_arrow(batch))
    moved = {"turn", "turn_start", "turn_end", "session_parent", "session_return"}
    counted = {"segment_tokens", "segment_turns", "session_segments", "group_trajectories", "success"}
    for name in set(ARRAY_FIELDS) - moved - counted:
        assert np.shares_memory(getattr(batch, name), getattr(again, name)), name
    assert np.shares_memory(batch.reward_parts["é part"], again.reward_parts["é part"])
    assert np.shares_memory(batch.turn_labels["a/b"], again.turn_labels["a/b"])


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize(
    ("top", "stored"),
    [(255, pa.uint8()), (256, pa.uint16()), (65535, pa.uint16()), (65536, pa.uint32())],
)
def test_routing_takes_the_smallest_type_and_keeps_its_own(
    dtype: type[Any], top: int, stored: pa.DataType
) -> None:  # inv. 4
    if top > np.iinfo(dtype).max:
        return
    batch = random_batch(1, routed=(3, 2))
    assert batch.routed is not None
    routed: NDArray[Any] = batch.routed.astype(dtype)
    routed[-1, -1, -1] = top
    batch = replace(batch, routed=routed)
    rows, about = to_arrow(batch)
    assert rows.schema.field("routed").type == pa.large_list(pa.list_(pa.list_(stored, 2), 3))
    again = from_arrow(rows, about)
    assert again.routed is not None and again.routed.dtype == dtype and equal(batch, again)


def test_text_that_is_none_is_named(random_batch: Maker) -> None:
    batch = random_batch(1)
    with pytest.raises(RecordError, match="group_id: 'g.udc80' is no valid text"):
        to_arrow(replace(batch, group_id=("g\udc80", "h")))
    with pytest.raises(RecordError, match="'reward_parts/.udc80' is no valid text"):
        to_arrow(replace(batch, reward_parts={"\udc80": batch.reward}))
