"""Invariants 1-3 of ``credit/levels.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.credit.levels import Level, broadcast, reduce_tokens, token_offsets, trained_counts, trained_tokens
from megatron_ext.credit.spans import Op
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import Group, build, described_batches, random_batch, split

every_level = pytest.mark.parametrize("level", list(Level))


def owner(batch: TrajectoryBatch, level: Level) -> np.ndarray:
    """The member of a level that holds each token, by the record's own keys."""
    segment = batch.token_segment()
    if level == Level.SEGMENT:
        return segment
    if level == Level.SESSION:
        return batch.segment_session()[segment]
    trajectory = batch.token_trajectory()
    return trajectory if level == Level.TRAJECTORY else batch.trajectory_group()[trajectory]


@every_level
@settings(max_examples=30, deadline=None)
@given(groups=described_batches(), seed=st.integers(0, 99))
def test_reduced_and_spread_over_trained_tokens(level: Level, groups: list[Group], seed: int) -> None:  # 1, 2
    batch = build(groups)
    trained = trained_tokens(batch)
    assert np.array_equal(trained, batch.loss_mask & batch.trainable()[batch.token_trajectory()])
    holder, size = owner(batch, level), len(token_offsets(batch, level)) - 1
    assert np.array_equal(trained_counts(batch, level), np.bincount(holder[trained], minlength=size))
    values = np.random.default_rng(seed).normal(size=batch.num_tokens)
    where = values < 0.5
    values[~trained] = np.nan
    want = np.bincount(holder[trained], weights=values[trained], minlength=size)
    np.testing.assert_allclose(reduce_tokens(batch, values, level), want, atol=1e-12)
    kept = trained & where
    want = np.bincount(holder[kept], weights=values[kept], minlength=size)
    np.testing.assert_allclose(reduce_tokens(batch, values, level, where=where), want, atol=1e-12)
    spread = broadcast(batch, np.arange(size) + 1.0, level)
    assert np.array_equal(spread, np.where(trained, holder + 1.0, 0.0))


@settings(max_examples=20, deadline=None)
@given(groups=described_batches(), seed=st.integers(0, 99))
def test_cutting_segments_changes_no_level_above(groups: list[Group], seed: int) -> None:  # invariant 3
    whole, cut = build(groups), build(split(groups, seed, into="segments"))
    for level in (Level.SESSION, Level.TRAJECTORY, Level.GROUP):
        one, other = (reduce_tokens(b, b.ids.astype(np.float64), level, Op.MEAN) for b in (whole, cut))
        np.testing.assert_allclose(one, other, rtol=1e-12)


def test_values_of_another_level_are_named() -> None:
    batch = random_batch(1)
    with pytest.raises(ValueError, match=r"values \(2,\): one a session"):
        broadcast(batch, np.zeros(2), Level.SESSION)
