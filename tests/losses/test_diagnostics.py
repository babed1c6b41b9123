"""Invariants 1-2 of ``losses/diagnostics.py``."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.losses.diagnostics import MeanMax, lag_stats, train_rollout_difference
from megatron_ext.trajectory.version import pack


def test_difference_reads_the_mask_alone_and_parts_add() -> None:
    old = np.array([-1.0, -2.0, np.nan, -4.0], dtype=np.float32)
    new = np.array([-1.5, -2.0, -9.0, -3.0], dtype=np.float32)
    mask = np.array([True, True, False, True])
    whole = train_rollout_difference(old, new, mask)
    assert (whole.mean, whole.maximum, whole.count) == (0.5, 1.0, 3)
    assert (
        train_rollout_difference(old[:2], new[:2], mask[:2]) + train_rollout_difference(old[2:], new[2:], mask[2:])
        == whole
    )
    nothing = train_rollout_difference(old, new, np.zeros(4, dtype=bool))
    assert (nothing.mean, nothing.maximum, nothing.count) == (0.0, 0.0, 0)
    assert np.isnan(train_rollout_difference(old, new, np.ones(4, dtype=bool)).mean), "shown, not hidden"
    with pytest.raises(ValueError, match="all must be"):
        train_rollout_difference(old, new[:2], mask)


def test_lag_counts_optimizer_steps() -> None:
    version = np.array([pack(0, 5), -1, pack(0, 3), pack(0, 5)])
    assert lag_stats(version, version >= 0, pack(0, 6)) == MeanMax(total=5.0, count=3, maximum=3.0)
    # Incarnation 1 resumed from step 4: a token of step 5 was one ahead of it, and two steps have passed since.
    assert lag_stats(np.array([pack(0, 5)]), np.array([True]), pack(1, 6), {1: 4}).maximum == 3
    with pytest.raises(ValueError, match="newer than the current weights"):
        lag_stats(version, version >= 0, pack(0, 4))
