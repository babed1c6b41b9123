"""Invariants 1-3 of ``credit/base.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.trajectory.record import Status
from tests.helpers.records import Group, build, described_batches, model, single, user


def test_numbers_by_hand() -> None:
    turns = [user([1]), model([2, 3], mask=(True, False))]
    groups: list[Group] = [
        (
            single(turns, reward=1.0),
            single(turns, reward=0.0),
            single(turns, reward=9.0, status=Status.ENV_ERROR),
        ),
        (single(turns, reward=1.0),),
    ]
    batch = build(groups)
    assert Baseline(eps=0.0).tokens(batch, batch.reward).tolist() == [0, 1, 0, 0, -1, 0, 0, 0, 0, 0, 0, 0]
    assert Baseline(normalize="mean").tokens(batch, batch.reward).tolist() == [0, 0.5, 0, 0, -0.5, 0, 0, 0, 0, 0, 0, 0]
    assert Baseline(normalize="none").tokens(batch, batch.reward).tolist() == [0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]


@settings(max_examples=40, deadline=None)
@given(described_batches())
def test_masks_votes_and_broadcast(groups: list[Group]) -> None:
    batch = build(groups)
    got = Baseline().tokens(batch, batch.reward)
    trained, owner = trained_tokens(batch), batch.token_trajectory()
    assert got.dtype == np.float64 and not got[~trained].any()  # invariant 1
    assert not got[~batch.trainable()[owner]].any()
    changed = np.where(batch.trainable(), batch.reward, batch.reward + 7)  # invariant 2
    assert np.array_equal(Baseline().tokens(batch, changed), got)
    for j in range(batch.num_trajectories):  # invariant 3
        assert len(set(got[trained & (owner == j)].tolist())) <= 1


def test_bad_settings_are_named() -> None:
    with pytest.raises(ValueError, match=r"credit.normalize 'rank': must be one of std, mean, none"):
        Baseline(normalize="rank")
    with pytest.raises(ValueError, match="std_ddof 3"):
        Baseline(std_ddof=3)


def test_a_reward_beyond_exact_sums_names_its_trajectory() -> None:
    turns = [user([1]), model([2])]
    batch = build([(single(turns, reward=1e14, name="t/9"), single(turns, reward=3e38, status=Status.REWARD_INVALID))])
    for normalize in ("std", "none"):
        with pytest.raises(ValueError, match="reward of 't/9' is 1e.14, beyond 2.43 in size"):
            Baseline(normalize=normalize).trajectory(batch, batch.reward)
