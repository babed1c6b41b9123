"""TRIAGE: the worked numbers of its specification, and the invariants of ``recipes/triage/credit.py``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.conservation import EditReport
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.pipeline import open_view
from megatron_ext.credit.protocol import CreditError, CreditView, Scale
from megatron_ext.credit.turns import model_turns, turn_broadcast
from megatron_ext.trajectory.record import Status
from recipes.triage.credit import RoleCredit, held_out_advantage, role_fit
from tests.helpers.credit_contract import run_edits
from tests.helpers.credit_methods import CONSTANTS, ROLES
from tests.helpers.records import Group, Traj, build, described_batches, model, random_groups, single, user

V3 = {"D": 1.0, "E": 0.5, "N": -0.1, "R": -0.5}
D, E, N, R = (ROLES[name] for name in "DENR")
TWO = ((1.0, (D, N, R)), (0.0, (E, R, N)))  # a success and a failure, by the roles of their turns


def credit(constants: Mapping[str, float], weight: float = 1.0, **values: Any) -> RoleCredit:
    return RoleCredit(constants=constants, labels=ROLES, weight=weight, **values)


def rollout(reward: float, roles: Sequence[int], **values: Any) -> Traj:
    turns = [turn for role in roles for turn in (user([0]), model([1], label=role))]
    return single(turns, reward=reward, success=reward > 0, **values)


def run(edit: RoleCredit | Whiten, group: Group) -> tuple[CreditView, EditReport]:
    view, reports = run_edits([("triage", edit)], build([group]), baseline=Baseline(eps=0.0))
    return view, reports[0]


def per_turn(edit: RoleCredit | Whiten, group: Group) -> NDArray[np.float64]:
    view, _ = run(edit, group)
    return view.advantage[trained_tokens(view.batch)]


def raw(edit: RoleCredit, group: Group) -> NDArray[np.float64]:
    """The advantage with constants, before whitening."""
    batch = build([group])
    added = turn_broadcast(edit._constant(open_view(batch)), model_turns(batch))
    return (added + Baseline(eps=0.0).tokens(batch, batch.reward))[trained_tokens(batch)]


GROUP: Group = tuple(rollout(reward, roles) for reward, roles in TWO)


@pytest.mark.parametrize(
    ("constants", "weight", "want", "whitened"),
    [
        (
            V3,
            1.0,
            [2, 0.9, 0.5, -0.5, -1.5, -1.1],
            [1.614292, 0.703666, 0.372529, -0.455313, -1.283155, -0.952018],
        ),
        (
            CONSTANTS,
            1.0,
            [2, 0.9, 0.5, -0.8, -1.5, -1.1],
            [1.618668, 0.728401, 0.404667, -0.647467, -1.214001, -0.890268],
        ),
        (V3, 0.3, [1.3, 0.97, 0.85, -0.85, -1.15, -1.03], None),
    ],
)
def test_two_rollouts_of_the_table(
    constants: Mapping[str, float], weight: float, want: list[float], whitened: list[float] | None
) -> None:
    np.testing.assert_allclose(raw(credit(constants, weight), GROUP), want, atol=1e-6)
    if whitened is not None:
        np.testing.assert_allclose(per_turn(credit(constants, weight), GROUP), whitened, atol=1e-6)


def test_the_diagnostic_of_the_table() -> None:
    fit = role_fit(np.array([V3[r] for r in "DNRERN"]), np.array([0.4, 0.5, -0.6, 0.3, -0.2, -0.1]))
    assert fit.covariance == pytest.approx(0.149167, abs=1e-6)
    assert [fit.error(w) for w in (0.0, 0.5, 1.0, 1.1)] == pytest.approx(
        [0.151667, 0.07375, 0.143333, 0.174950], abs=1e-6
    )
    assert fit.best == pytest.approx(0.514124, abs=1e-6)


@settings(max_examples=30)
@given(seed=st.integers(0, 2**31))
def test_any_weight_below_twice_the_best_helps(seed: int) -> None:
    rng = np.random.default_rng(seed)
    constant = rng.choice(list(V3.values()), 20)
    fit = role_fit(constant, 0.7 * constant + 0.3 * rng.normal(size=20))
    if fit.best > 0:
        assert fit.error(fit.best) <= fit.error(1.9 * fit.best) <= fit.error(0.0) <= fit.error(2.1 * fit.best)
    assert fit.error(2 * fit.best) == pytest.approx(fit.error(0.0))


def test_a_fit_without_constants_or_turns() -> None:
    assert role_fit(np.zeros(3), np.ones(3)).best == 0.0
    with pytest.raises(ValueError, match="both must be"):
        role_fit(np.zeros(0), np.zeros(0))


def test_held_out_returns_estimate_the_advantage() -> None:
    value = np.array([0.0, 1.0, 1.0, 0.0, 5.0])
    state, action = np.array([1, 1, 1, 1, 2]), np.array([1, 1, 1, 2, 1])
    held = np.array([False, True, True, True, False])
    got, there = held_out_advantage(value, state, action, held)
    # Q(1, 1) = 1, V(1) = 2/3 of the three held-out turns; nothing held out was in state 2.
    np.testing.assert_allclose(got[0], 1 / 3)
    assert there.tolist() == [True, False, False, False, False] and not got[1:].any()


@settings(max_examples=15)
@given(groups=described_batches())
def test_weight_zero_is_whitening_alone(groups: list[Group]) -> None:  # invariants 1 and 4
    batch = build(groups)
    none, report = run_edits([("triage", credit(CONSTANTS, 0.0))], batch)
    alone, _ = run_edits([("white", Whiten(over="turns", center=True))], batch)
    np.testing.assert_array_equal(none.advantage, alone.advantage)
    assert report[0].changed_fraction == 0.0  # although whitening changed nearly all


@settings(max_examples=15)
@given(groups=described_batches())
def test_the_order_of_labels_changes_nothing(groups: list[Group]) -> None:  # invariant 1
    batch = build(groups)
    turned = RoleCredit(constants=dict(reversed(CONSTANTS.items())), labels=dict(reversed(ROLES.items())))
    one, other = (run_edits([("triage", edit)], batch)[0] for edit in (credit(CONSTANTS), turned))
    np.testing.assert_array_equal(one.advantage, other.advantage)


def test_roles_inside_outcomes() -> None:  # invariant 2
    success, failure = rollout(1.0, (D, R)), rollout(0.0, (E, N))
    for constants in (CONSTANTS, V3):
        got = raw(credit(constants), (success, failure))
        plain = Baseline(eps=0.0).trajectory(build([(success, failure)]), np.array([1.0, 0.0]))
        assert got[2] > plain[1]  # exploration in a failure
        assert got[1] < plain[0]  # regression in a success


def test_a_turn_without_a_label_has_no_constant_and_is_counted() -> None:  # invariant 3
    group = (rollout(1.0, (D, -1)), rollout(0.0, (-1, -1)))
    np.testing.assert_allclose(raw(credit(CONSTANTS), group), [2, 1, -1, -1], atol=1e-6)
    _, report = run(credit(CONSTANTS), group)
    assert report.counters["share/unlabelled"] == 0.75
    _, report = run(credit(CONSTANTS, label="other"), group)  # no label of that name in the record
    assert report.counters["share/unlabelled"] == 1.0 and report.changed == 0


def test_masked_trajectories_are_not_counted() -> None:
    group = (*GROUP, rollout(1.0, (R, R), status=Status.ENV_ERROR))
    np.testing.assert_array_equal(per_turn(credit(CONSTANTS), group), per_turn(credit(CONSTANTS), GROUP))
    assert run(credit(CONSTANTS), group)[1].counters == run(credit(CONSTANTS), GROUP)[1].counters


def test_changed_tokens_are_against_whitening_alone() -> None:  # invariant 4
    view, report = run(credit(CONSTANTS), GROUP)
    alone = per_turn(Whiten(over="turns", center=True), GROUP)
    got = view.advantage[trained_tokens(view.batch)]
    assert report.changed == int(np.count_nonzero(np.abs(got - alone) > 1e-9 * np.abs(got)))
    # One constant for all is no change: whitening takes it out again, and it is not the edit's doing that it whitened.
    same = dict.fromkeys(ROLES, 0.5)
    _, flat = run(credit(same), GROUP)
    assert flat.changed == 0 and flat.counters["mean/shift"] == pytest.approx(0.0, abs=1e-9)
    assert run(Whiten(over="turns", center=True), ((rollout(1.0, (D,)), rollout(0.5, (E,)), rollout(0.0, (R,)))))[
        1
    ].changed


def test_counters_show_the_constants_by_role() -> None:
    view, report = run(credit(CONSTANTS), GROUP)
    seen = report.counters
    assert [seen[f"count/turns_{role}"] for role in "DENR"] == [1, 1, 2, 2]
    shift = view.advantage[trained_tokens(view.batch)] - per_turn(Whiten(over="turns", center=True), GROUP)
    assert seen["mean/shift_D"] == pytest.approx(shift[0]) and seen["mean/shift_E"] == pytest.approx(shift[3])
    assert seen["mean/shift_R"] == pytest.approx((shift[2] + shift[4]) / 2)
    assert seen["share/in_success_R"] == pytest.approx(1 / 3)
    assert seen["mean/turns_per_success"] == 3.0
    assert seen["share/flipped"] == 0.0


def test_it_sets_the_scale() -> None:
    assert credit(CONSTANTS).traits.scale is Scale.SETS
    batch = build(random_groups(3, groups=6))
    values = run_edits([("triage", credit(CONSTANTS))], batch)[0]
    means = np.array(
        [
            values.advantage[a:b][values.trained[a:b]].mean()
            for a, b, role in zip(batch.turn_start, batch.turn_end, batch.turn_role, strict=True)
            if role == 3 and values.trained[a:b].any()
        ]
    )
    assert (means.mean(), means.std()) == (pytest.approx(0.0, abs=1e-9), pytest.approx(1.0))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"weight": 1.5}, "weight 1.5: must be within 0 and 1"),
        ({"constants": {"X": 1.0}}, "constants name X, labels have D, E, N, R"),
        ({"labels": {"D": 0, "E": 0, "N": 1, "R": 2}}, "each role needs a number of its own"),
        ({"labels": {"D": -1, "E": 0, "N": 1, "R": 2}}, "0 or more"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoleCredit(**{"constants": CONSTANTS, "labels": ROLES, **arguments})


def test_a_label_that_no_role_has() -> None:
    with pytest.raises(CreditError, match="turn 1 of 'g0/s0' has role 9, which is none of"):
        run(credit(CONSTANTS), (rollout(1.0, (9,)), rollout(0.0, (E,))))
