"""Invariants 1-4 of ``losses/aggregation.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.losses.aggregation import MODES, counted, denominators, token_weights, weights
from megatron_ext.trajectory.record import Status, concat, select_groups
from tests.helpers.records import (
    Group,
    Traj,
    build,
    described_batches,
    model,
    on_trained,
    random_groups,
    shuffled,
    single,
    split,
)

every_mode = pytest.mark.parametrize("mode", MODES)


def loss_of(groups: list[Group], mode: str) -> float:
    """The loss when each token's own loss is its id."""
    batch = build(groups)
    return float(token_weights(batch, mode) @ batch.ids)


def test_the_mean_does_not_depend_on_how_sessions_are_cut() -> None:  # invariant 3
    joined = single([model([1, 2, 3]), model([4, 5])])
    in_sessions = Traj(sessions=(((model([1, 2, 3]),),), ((model([4, 5]),),)))
    in_segments = Traj(sessions=(((model([1, 2, 3]),), (model([4, 5]),)),))
    for trajectory in (joined, in_sessions, in_segments):
        for mode in ("token_mean", "trajectory_mean", "prompt_mean"):
            assert loss_of([(trajectory,)], mode) == pytest.approx(3.0)
    assert loss_of([(joined,)], "row_mean") == pytest.approx(3.0)
    # A mean over rows is the one that a cut changes: (2 + 4.5) / 2.
    assert loss_of([(in_segments,)], "row_mean") == pytest.approx(3.25)


def test_modes_weigh_by_hand() -> None:
    # Prompt 0: trajectories [1, 2] and [3, 4, 5, 6]; prompt 1: [7], and one with an environment error.
    groups: list[Group] = [
        (single([model([1, 2])]), single([model([3, 4, 5, 6])])),
        (single([model([7])]), single([model([100])], status=Status.ENV_ERROR)),
    ]
    assert loss_of(groups, "token_mean") == pytest.approx(28 / 7)
    assert loss_of(groups, "trajectory_mean") == pytest.approx((1.5 + 4.5 + 7) / 3)
    assert loss_of(groups, "row_mean") == pytest.approx((1.5 + 4.5 + 7) / 3)
    assert loss_of(groups, "prompt_mean") == pytest.approx((21 / 6 + 7) / 2)


def test_masks_and_token_weights_enter_the_denominator() -> None:  # invariant 2
    weighted = single([model([1, 2, 3, 9], mask=(True, True, True, False), weight=(1.0, 3.0, 0.0, 1.0))])
    assert loss_of([(weighted,)], "token_mean") == pytest.approx((1 + 6) / 4)
    silent = single([model([50], mask=False)])
    for mode in MODES:
        assert loss_of([(weighted, silent), (silent,)], mode) == pytest.approx(7 / 4)


@every_mode
@settings(max_examples=30, deadline=None)
@given(groups=described_batches())
def test_weights_sum_to_one_and_are_zero_where_nothing_is_trained(mode: str, groups: list[Group]) -> None:  # 1, 2
    batch = build(groups)
    weight, count = token_weights(batch, mode), counted(batch)
    assert weight.dtype == np.float64 and np.all(np.isfinite(weight))
    assert np.array_equal(weight > 0, count > 0)
    assert not weight[~batch.loss_mask].any() and not weight[~batch.trainable()[batch.token_trajectory()]].any()
    assert weight.sum() == pytest.approx(1.0 if count.any() else 0.0)


@every_mode
def test_nothing_to_train_gives_zeros(mode: str) -> None:  # invariant 1
    batch = build([(single([model([1, 2], mask=False)]), single([model([3])], status=Status.ABORTED))])
    assert not token_weights(batch, mode).any()
    assert not token_weights(select_groups(batch, []), mode).any()


@pytest.mark.parametrize("into", ["segments", "pieces", "sessions"])
@pytest.mark.parametrize("mode", ["token_mean", "trajectory_mean", "prompt_mean"])
@settings(max_examples=15, deadline=None)
@given(groups=described_batches(), seed=st.integers(0, 1000))
def test_cutting_changes_no_weight(into: str, mode: str, groups: list[Group], seed: int) -> None:  # invariant 3
    whole, cut = build(groups), build(split(groups, seed, into=into))
    a, b = (on_trained(x, token_weights(x, mode)) for x in (whole, cut))
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-12)


@every_mode
@settings(max_examples=15, deadline=None)
@given(groups=described_batches(), seed=st.integers(0, 1000))
def test_order_changes_no_weight(mode: str, groups: list[Group], seed: int) -> None:
    one, other = build(groups), build(shuffled(groups, seed))
    a, b = (on_trained(x, token_weights(x, mode)) for x in (one, other))
    for name in a:
        np.testing.assert_allclose(a[name], b[name], rtol=1e-12)


@every_mode
@pytest.mark.parametrize("ranks", [2, 4])
def test_parts_over_ranks_give_the_weights_of_the_whole(mode: str, ranks: int) -> None:  # invariant 4
    batch = build(random_groups(5, groups=6))
    shares = [select_groups(batch, part.tolist()) for part in np.array_split(np.arange(6), ranks)]
    total = sum(denominators(share, mode) for share in shares)
    pieces = np.concatenate([weights(share, mode, total) for share in shares])
    np.testing.assert_allclose(pieces, token_weights(concat(shares), mode), rtol=1e-12)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="aggregation 'mean': must be one of token_mean"):
        token_weights(build(random_groups(1)), "mean")
