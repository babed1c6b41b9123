"""Invariants 1-5 of ``losses/aggregation.py``."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.losses.aggregation import MODES, StepCounts, counted, step_counts, token_weights, weights
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import Status, TrajectoryBatch
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
    """slime 365 and 2090, miles 1931, Agent Lightning 594: a rollout's weight is not how it was cut."""
    joined = single([model([1, 2, 3]), model([4, 5])])
    in_sessions = Traj(sessions=(((model([1, 2, 3]),),), ((model([4, 5]),),)))
    in_segments = Traj(sessions=(((model([1, 2, 3]),), (model([4, 5]),)),))
    for trajectory in (joined, in_sessions, in_segments):
        for mode in ("token_mean", "trajectory_mean", "prompt_mean", "prompt_trajectory_mean"):
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
    assert loss_of(groups, "prompt_trajectory_mean") == pytest.approx(((1.5 + 4.5) / 2 + 7) / 2)
    # Turns [1, 2, 3] and [5] of one prompt, [9] and one of no tokens of another.
    turns: list[Group] = [(single([model([1, 2, 3]), model([5])]),), (single([model([9]), model([])]),)]
    assert loss_of(turns, "turn_mean") == pytest.approx((2 + 5 + 9) / 3)
    assert loss_of(turns, "prompt_turn_mean") == pytest.approx(((2 + 5) / 2 + 9) / 2)


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
@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("row_mean", "session_mean")])
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
    total = sum((step_counts(share) for share in shares), StepCounts(0, 0, 0, 0, 0, 0, 0.0))
    assert total == step_counts(batch)
    pieces = np.concatenate([weights(share, mode, total) for share in shares])
    np.testing.assert_allclose(pieces, token_weights(concat(shares), mode), rtol=1e-12)


def test_an_unknown_mode_is_named() -> None:
    with pytest.raises(ValueError, match="aggregation 'mean': must be one of token_mean"):
        token_weights(build(random_groups(1)), "mean")
    with pytest.raises(ValueError, match="normalizer 'seats'"):
        token_weights(build(random_groups(1)), "trajectory_mean", normalizer="seats")
    with pytest.raises(ValueError, match="of token_mean"):
        token_weights(build(random_groups(1)), "token_mean", normalizer="rows")


def test_batch_size_is_four_numbers_with_names() -> None:
    """slime 39 and 371: tasks, trajectories, rows and tokens of a step are not one another."""
    two_sessions = Traj(sessions=(((model([1, 2]), model([3])),), ((model([4]),),)))
    silent = single([model([5], mask=False)])
    batch = build([(two_sessions, single([model([6, 7], weight=0.5)]), silent), (silent,)])
    assert step_counts(batch) == StepCounts(tasks=1, trajectories=2, turns=4, rows=3, sessions=3, tokens=6, weight=5.0)
    assert step_counts(select_groups(batch, [])) == StepCounts(0, 0, 0, 0, 0, 0, 0.0)


def test_rows_as_normalizer_change_the_mass_and_rollouts_do_not() -> None:
    """Agent Lightning: rows of 3 and 1 tokens for one rollout, one of 6 for the other; Z counts rows or rollouts."""
    rows = Traj(sessions=(((model([1, 1, 1]),),), ((model([1]),),)))
    batch = build([(rows, single([model([1] * 6)]))])
    owner = batch.token_trajectory()
    official = token_weights(batch, "trajectory_mean", normalizer="rows")
    np.testing.assert_allclose(official, [1 / 12] * 4 + [1 / 18] * 6)
    np.testing.assert_allclose(np.bincount(owner, weights=official), [1 / 3, 1 / 3])
    np.testing.assert_allclose(np.bincount(owner, weights=token_weights(batch, "trajectory_mean")), [0.5, 0.5])
    np.testing.assert_allclose(np.bincount(owner, weights=token_weights(batch, "token_mean")), [0.4, 0.6])
    np.testing.assert_allclose(np.bincount(owner, weights=token_weights(batch, "row_mean")), [2 / 3, 1 / 3])


def forest() -> tuple[TrajectoryBatch, NDArray[np.int64]]:
    """A root turn of two tokens held by three leaves of 1, 2 and 3 tokens, and a chain of its own; and the node ids."""
    root = [model([10, 20])]
    leaves = [single([*root, model(range(1, size + 1))]) for size in (1, 2, 3)]
    batch = build([(*leaves, single([model([40])]))])
    return batch, np.array([7, 0, 7, 1, 7, 2, -1])


def test_a_shared_turn_counts_once_per_node_or_once_per_holder() -> None:  # invariant 5
    batch, nodes = forest()
    once = token_weights(batch, "token_mean", nodes=nodes)
    assert step_counts(batch, nodes) == StepCounts(
        tasks=1, trajectories=4, turns=5, rows=4, sessions=4, tokens=13, weight=9.0
    )
    np.testing.assert_allclose(once @ batch.ids, (10 + 20 + 1 + 3 + 6 + 40) / 9)
    per_holder = token_weights(batch, "token_mean")
    np.testing.assert_allclose(per_holder @ batch.ids, (3 * 30 + 1 + 3 + 6 + 40) / 13)
    by_node = token_weights(batch, "turn_mean", nodes=nodes) @ batch.ids
    np.testing.assert_allclose(by_node, (15 + 1 + 1.5 + 2 + 40) / 5)
    np.testing.assert_allclose(token_weights(batch, "prompt_turn_mean", nodes=nodes) @ batch.ids, by_node)


@every_mode
def test_how_many_hold_a_node_changes_nothing_by_node(mode: str) -> None:  # invariant 5
    """The distinct tokens of a forest weigh the same when each leaf's copies are masked but one."""
    if mode in ("row_mean", "session_mean", "trajectory_mean", "prompt_trajectory_mean"):
        return  # means over holders
    batch, nodes = forest()
    mask = batch.loss_mask.copy()
    mask[[3, 4, 7, 8]] = False  # the second and third copy of the root
    alone = replace(batch, loss_mask=mask)
    one, other = (np.bincount(b.ids, weights=token_weights(b, mode, nodes=nodes)) for b in (batch, alone))
    np.testing.assert_allclose(one, other, rtol=1e-12)


def test_nodes_must_fit() -> None:
    batch, nodes = forest()
    with pytest.raises(ValueError, match=r"nodes \(6,\): one a turn, the batch holds 7"):
        token_weights(batch, "token_mean", nodes=nodes[:-1])
    with pytest.raises(ValueError, match="trains 1 tokens, another copy of its node 3"):
        token_weights(batch, "token_mean", nodes=np.array([7, 0, 7, 0, 7, 0, -1]))


@every_mode
@settings(max_examples=20, deadline=None)
@given(groups=described_batches(), seed=st.integers(0, 1000))
def test_micro_batches_add_up_to_the_step(mode: str, groups: list[Group], seed: int) -> None:
    """A loss is the sum of weight times token loss, so any partition of the tokens gives the same."""
    batch = build(groups)
    weight, loss = token_weights(batch, mode), np.random.default_rng(seed).random(batch.num_tokens)
    piece = np.random.default_rng(seed).integers(0, 4, batch.num_tokens)
    parts = [weight[piece == p] @ loss[piece == p] for p in range(4)]
    assert sum(parts) == pytest.approx(weight @ loss, rel=1e-12)
