"""The numbered invariants of ``trajectory/joining.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import RecordError, equal
from tests.helpers.records import Group, build, described_batches, random_batch, random_groups


@settings(max_examples=40, deadline=None)
@given(described_batches(), st.integers(0, 2**31), st.booleans())
def test_select_undoes_concat(groups: list[Group], seed: int, routed: bool) -> None:
    shape = (2, 2) if routed else None
    a, b = build(groups, routed=shape), build(random_groups(seed + 2**32), routed=shape)
    both = concat([a, b])
    assert equal(select_groups(both, range(a.num_groups)), a)
    assert equal(select_groups(both, range(a.num_groups, both.num_groups)), b)
    order = np.random.default_rng(seed).permutation(both.num_groups).tolist()
    back = select_groups(select_groups(both, order), np.argsort(order).tolist())
    assert equal(back, both)


def test_concat_fills_what_only_some_batches_carry() -> None:
    a, b = random_batch(1, routed=(2, 2)), random_batch(2)
    both = concat([a, b])
    assert both.routed is not None and both.routed_valid is not None and a.routed is not None
    assert np.array_equal(both.routed[: a.num_tokens], a.routed)
    assert not both.routed_valid[a.num_tokens :].any()
    with pytest.raises(RecordError, match="routed: cannot join"):
        concat([a, random_batch(2, routed=(3, 2))])
    with pytest.raises(RecordError, match="at least one"):
        concat([])


def test_no_groups_select_an_empty_batch() -> None:
    batch = random_batch(4, routed=(2, 2))
    empty = select_groups(batch, [])
    assert (empty.num_groups, empty.num_trajectories, empty.num_tokens) == (0, 0, 0)
    assert equal(concat([empty, batch]), batch)
    for group in (-1, batch.num_groups):
        with pytest.raises(IndexError, match=f"group {group} of a batch"):
            select_groups(batch, [group])
