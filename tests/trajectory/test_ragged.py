"""The numbered invariants of ``trajectory/ragged.py``, and of ``TrajectoryBatch.prepared``."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.trajectory.columns import from_arrow, to_arrow
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import Ragged, RecordError, equal
from tests.helpers.records import random_batch

Rows = list[list[int]]
rows_of_ids = st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=5), max_size=6)


@given(rows_of_ids, rows_of_ids, st.data())
def test_rows_keep_their_ids_through_joining_and_slicing(a: Rows, b: Rows, data: st.DataObject) -> None:  # 1, 2
    both = Ragged.concat([Ragged.of(a), Ragged.empty(1), Ragged.of(b)])
    expected = [*a, [], *b]
    assert [row.tolist() for row in both] == expected and len(both) == len(expected)
    assert both.lengths.tolist() == [len(row) for row in expected]
    first = data.draw(st.integers(0, len(expected)))
    last = data.draw(st.integers(first, len(expected)))
    part = pickle.loads(pickle.dumps(both.between(first, last)))
    assert [row.tolist() for row in part] == expected[first:last]
    assert part.same(Ragged.of(expected[first:last])) and both.same(Ragged.of([*expected, [1]])) is False
    with pytest.raises(ValueError, match="read-only"):
        part.offsets[...] = 0
    with pytest.raises(IndexError, match="row -1 of"):
        part.row(-1)


@pytest.mark.parametrize(
    ("offsets", "ids", "message"),
    [
        ([1, 2], [5, 6], "must be one-dimensional and start at 0"),
        ([], [], "must be one-dimensional and start at 0"),
        ([0, 2, 1], [5], "must rise to 1"),
        ([0, 1], [5, 6], "must rise to 2"),
        ([0, 1], [-5], "negative token id"),
        ([0, 1], [1 << 40], "is no int32 value"),
    ],
)
def test_what_is_no_partition_is_refused(offsets: list[int], ids: list[int], message: str) -> None:  # invariant 1
    with pytest.raises(RecordError, match=message):
        Ragged(np.array(offsets), np.array(ids))


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 99), st.booleans())
def test_prepared_ids_go_where_their_trajectory_goes(seed: int, second_has: bool) -> None:
    batch = random_batch(seed, groups=3)
    other = random_batch(seed + 1, groups=2)
    names = tuple(f"other {name}" for name in other.trajectory_id)
    other = replace(other, trajectory_id=names, prepared=other.prepared if second_has else {})
    both = concat([batch, other])
    expected = [row.tolist() for row in batch.prepared["ready"]]
    expected += [row.tolist() for row in other.prepared["ready"]] if second_has else [[]] * other.num_trajectories
    assert [row.tolist() for row in both.prepared["ready"]] == expected
    order = [4, 0, 2]
    picked = select_groups(both, order)
    members = [j for g in order for j in range(*both.group_trajectories[g : g + 2])]
    assert [row.tolist() for row in picked.prepared["ready"]] == [expected[j] for j in members]
    for one in (both, picked, select_groups(both, [])):
        assert equal(one, from_arrow(*to_arrow(one)))
        assert equal(one, pickle.loads(pickle.dumps(one)))
    changed = replace(both, prepared={"ready": Ragged.of([*expected[:-1], [*expected[-1], 7]])})
    assert not equal(both, changed) and not equal(both, replace(both, prepared={}))
