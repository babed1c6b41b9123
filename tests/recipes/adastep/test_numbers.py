"""AdaStep: the worked numbers of its specification, and the invariants of ``recipes/adastep/credit.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.credit.conservation import EditReport
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.pipeline import local, open_view
from megatron_ext.credit.protocol import CreditView
from megatron_ext.credit.variance import variance_shares
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from recipes.adastep.credit import StepShrinkage, action_means
from tests.helpers.credit_contract import run_edits
from tests.helpers.records import Traj, build, described_batches, model, random_groups, single, user

STATE = 7
Visits = Mapping[int, Sequence[float]]
TABLE: Sequence[tuple[Visits, float]] = [
    ({1: [1, 1], 2: [0, 0]}, 1.0),
    ({1: [1, 0], 2: [1, 0]}, 0.0),
    ({1: [1, 0.8], 2: [0.2, 0]}, 0.9411765),
    ({1: [1, 1, 0], 2: [0, 0]}, 0.4444444),
    ({1: [1], 2: [0, 0]}, 1.0),
    ({1: [1, 0, 1]}, 1.0),
]


def one_state(visits: Visits) -> TrajectoryBatch:
    """A group of one-turn rollouts that meet in one state; each has one trained token and the return as its reward."""
    return build(
        [
            tuple(
                single([user([0]), model([1], state_key=STATE, action_key=action)], reward=value)
                for action, values in visits.items()
                for value in values
            )
        ]
    )


def added(edit: StepShrinkage, batch: TrajectoryBatch) -> NDArray[np.float64]:
    """What the edit adds to the advantage, on the trained tokens."""
    view = open_view(batch)
    after = edit.apply(view, local(edit.local_stats(view)))
    return (after.advantage - view.advantage)[trained_tokens(batch)]


@pytest.mark.parametrize(("visits", "weight"), TABLE)
def test_weights_of_the_table(visits: Visits, weight: float) -> None:
    batch = one_state(visits)
    returns = np.array([value for values in visits.values() for value in values])
    np.testing.assert_allclose(added(StepShrinkage(), batch), weight * (returns - returns.mean()), atol=1e-7)


def test_the_shrunk_advantage_of_the_table() -> None:
    got = added(StepShrinkage(), one_state({1: [1, 0.8], 2: [0.2, 0]}))
    np.testing.assert_allclose(got, [0.470588, 0.282353, -0.282353, -0.470588], atol=1e-6)


def test_sample_variances_are_cut_off() -> None:
    """1 - (2/4 .02 + 2/4 .02) / (.68 / 3), and below 0 where actions explain nothing."""
    got = added(StepShrinkage(ddof=1), one_state({1: [1, 0.8], 2: [0.2, 0]}))
    np.testing.assert_allclose(got, (1 - 0.02 * 3 / 0.68) * np.array([0.5, 0.3, -0.3, -0.5]), atol=1e-6)
    assert not added(StepShrinkage(ddof=1), one_state({1: [1, 0], 2: [1, 0]})).any()


def test_equal_returns_give_no_step_advantage() -> None:  # invariant 2
    assert not added(StepShrinkage(), one_state({1: [0.5, 0.5], 2: [0.5, 0.5]})).any()


def test_fallbacks() -> None:  # invariant 4
    unsure = {1: [1], 2: [0, 0]}
    centred = np.array([1, 0, 0]) - 1 / 3
    np.testing.assert_allclose(added(StepShrinkage(fallback="one"), one_state(unsure)), centred)
    assert not added(StepShrinkage(fallback="zero"), one_state(unsure)).any()
    sure = one_state({1: [1, 0.8], 2: [0.2, 0]})
    both = build([*(_group(one, STATE) for one in ({1: [1, 0.8], 2: [0.2, 0]}, unsure))])
    np.testing.assert_allclose(added(StepShrinkage(fallback="mean"), both)[4:], 0.9411765 * centred, atol=1e-7)
    np.testing.assert_allclose(added(StepShrinkage(fallback="mean"), both)[:4], added(StepShrinkage(), sure))
    # Nothing to take the mean of: one.
    np.testing.assert_allclose(added(StepShrinkage(fallback="mean"), one_state(unsure)), centred)


def _group(visits: Visits, state: int) -> tuple[Traj, ...]:
    return tuple(
        single([user([0]), model([1], state_key=state, action_key=action)], reward=value)
        for action, values in visits.items()
        for value in values
    )


def test_action_means_of_ecpo() -> None:
    value = np.array([0.9, 0.9, 0.1, 0.1])  # the state's mean is .5
    state, action = np.zeros(4, dtype=np.int64), np.array([1, 1, 2, 2])
    got = action_means(value, state, action, 2.0, np.ones(4, dtype=bool))
    np.testing.assert_allclose(got, [0.7, 0.7, 0.3, 0.3])
    batch = one_state({1: [1, 0.8], 2: [0.2, 0]})
    fixed = StepShrinkage(weight="fixed", estimator="action_means", kappa=2.0)
    np.testing.assert_allclose(added(fixed, batch), [0.2, 0.2, -0.2, -0.2])


def test_noise_leaves_a_bias() -> None:  # invariant 5
    """Two actions, two returns each: (2 - 1) / (4 - 1), over 20,000 draws."""
    draws = 20_000
    value = np.random.default_rng(0).normal(size=4 * draws)
    state, action = np.repeat(np.arange(draws), 4), np.tile([0, 0, 1, 1], draws)
    share = variance_shares(value, state, action).explained(1.0)[::4]
    assert share.mean() == pytest.approx(1 / 3, abs=0.01)


def test_within_and_between_add_up() -> None:
    rng = np.random.default_rng(1)
    shares = variance_shares(rng.normal(5.0, 1.0, 400), rng.integers(0, 9, 400), rng.integers(0, 3, 400))
    np.testing.assert_allclose(shares.within + shares.between, shares.total, rtol=1e-12)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**31), shift=st.floats(-5, 5), scale=st.floats(0.1, 10))
def test_constants_and_scales_leave_the_weight(seed: int, shift: float, scale: float) -> None:  # invariant 1
    rng = np.random.default_rng(seed)
    value, state, action = rng.normal(size=60), rng.integers(0, 5, 60), rng.integers(0, 3, 60)
    one = variance_shares(value, state, action).explained(1.0)
    other = variance_shares(scale * value + shift, state, action).explained(1.0)
    np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9)
    assert np.all((one >= 0) & (one <= 1))


def gigpo(batch: TrajectoryBatch, discount: float) -> NDArray[np.float64]:
    """GiGPO's step advantage of each model turn, turn by turn: [N], 0 where there is none."""
    owner, keys = batch.turn_trajectory(), batch.turn_state_key
    returns: dict[int, float] = {}
    cells: dict[tuple[int, int], list[int]] = {}
    for j in np.flatnonzero(batch.trainable()).tolist():
        mine = [t for t in np.flatnonzero(owner == j).tolist() if batch.turn_role[t] == 3]
        mine.sort(key=lambda t: int(batch.turn_number[t]))
        for place, turn in enumerate(mine):
            returns[turn] = float(batch.reward[j]) * discount ** (len(mine) - 1 - place)
            cells.setdefault((int(batch.trajectory_group()[j]), int(keys[turn])), []).append(turn)
    out = np.zeros(batch.num_turns)
    for turns in cells.values():
        mean = np.mean([returns[t] for t in turns])
        for turn in turns:
            out[turn] = returns[turn] - mean
    return out


@settings(max_examples=15)
@given(groups=described_batches())
def test_weight_one_is_gigpo(groups: list[tuple[Traj, ...]]) -> None:  # invariant 3
    batch = build(groups)
    step = gigpo(batch, 0.9)
    trained = trained_tokens(batch)
    got = added(StepShrinkage(weight="fixed", discount=0.9), batch)
    np.testing.assert_allclose(got, step[batch.turn[trained]], atol=1e-6)
    assert not added(StepShrinkage(weight="fixed", coefficient=0.0), batch).any()


@pytest.mark.parametrize("seed", range(4))
def test_step_advantages_of_a_state_sum_to_zero(seed: int) -> None:  # invariant 2
    """One token a turn, so that tokens are visits."""
    batch = build(random_groups(seed, tokens=(1, 1), untrainable=0.0))
    whole = replace(batch, loss_mask=batch.version >= 0)
    got = added(StepShrinkage(), whole)
    turn = whole.turn[trained_tokens(whole)]
    group = whole.trajectory_group()[whole.turn_trajectory()[turn]]
    _, cell = np.unique(np.stack([group, whole.turn_state_key[turn]]), axis=1, return_inverse=True)
    np.testing.assert_allclose(np.bincount(cell.reshape(-1), weights=got), 0.0, atol=1e-9)


def test_returns() -> None:
    steps = [user([0]), model([1], state_key=1, reward=0.5), user([0]), model([2], state_key=2, reward=0.25)]
    other = single([user([0]), model([1], state_key=1), user([0]), model([1], state_key=2)])
    batch = build([(single(steps, reward=1.0), other)])

    def first(returns: str) -> list[float]:
        edit = StepShrinkage(returns=returns, discount=0.5, weight="fixed")
        return [2 * x for x in added(edit, batch)[:2].tolist()]  # against a rollout of returns 0

    assert first("steps") == pytest.approx([0.5 + 0.125, 0.25])
    assert first("outcome") == pytest.approx([0.5, 1.0])
    assert first("both") == pytest.approx([0.5 + 0.625, 1.25])


def test_turns_without_a_state_and_masked_trajectories_stay_out() -> None:  # invariant 4
    def rollout(state: int, reward: float, status: Status = Status.DONE) -> Traj:
        return single([user([0]), model([1], state_key=state, action_key=1)], reward=reward, status=status)

    group = (rollout(STATE, 1), rollout(STATE, 0), rollout(0, 1), rollout(STATE, 1, Status.ENV_ERROR))
    np.testing.assert_allclose(added(StepShrinkage(), build([group])), [0.5, -0.5, 0.0])
    assert counters(group)["share/unkeyed_turns"] == pytest.approx(1 / 3)


def counters(group: tuple[Traj, ...]) -> Mapping[str, float]:
    report: EditReport = run_edits([("adastep", StepShrinkage())], build([group]))[1][0]
    return report.counters


def test_counters_show_the_shrinkage_by_visits() -> None:
    visits = {1: [1.0, 0.8], 2: [0.2, 0.0]}
    lone = {1: [1.0], 2: [0.0]}
    seen = counters((*_group(visits, 7), *_group(lone, 8)))
    assert seen["count/states"] == 2 and seen["share/estimable"] == 0.5
    assert seen["share/estimable_turns"] == pytest.approx(4 / 6)
    assert seen["mean/weight_visits_4_7"] == pytest.approx(0.9411765)
    assert seen["mean/weight_visits_2_3"] == 1.0 and seen["share/estimable_visits_2_3"] == 0.0
    assert seen["mean/weight_estimable"] == pytest.approx(0.9411765)
    assert seen["mean/weight_if_noise"] == pytest.approx(1 / 3)
    assert "mean/weight_visits_32_up" not in seen  # a mean of nothing


def test_changed_tokens_are_counted() -> None:
    report = run_edits([("adastep", StepShrinkage())], one_state({1: [1, 0.8], 2: [0.2, 0]}))[1][0]
    assert report.changed_fraction == 1.0
    report = run_edits([("adastep", StepShrinkage())], one_state({1: [1, 0], 2: [1, 0]}))[1][0]
    assert report.changed_fraction == 0.0  # w = 0: the actions explain nothing


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": "learned"}, "weight 'learned': must be one of adaptive, fixed"),
        ({"fallback": "half"}, "fallback 'half': must be one of one, zero, mean"),
        ({"returns": "all"}, "returns 'all'"),
        ({"estimator": "median"}, "estimator 'median'"),
        ({"discount": 1.5}, "discount 1.5: must be within 0 and 1"),
        ({"kappa": -1.0}, "kappa -1.0: must be >= 0"),
        ({"ddof": 2}, "ddof 2: must be 0"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StepShrinkage(**arguments)


def test_a_view_without_turns() -> None:
    empty: CreditView = open_view(build([(single([user([1])]),)]))
    assert not StepShrinkage().apply(empty, {}).advantage.any()
