"""Credit methods of published systems, each put together from the shared primitives in a few lines, against the
contract of credit edits (invariants a-g, ranks) on random batches and against worked numbers.

The edits here are no implementation of a system: they show that the primitives carry its structure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.exact import LIMBS, exact_parts, exact_value
from megatron_ext.credit.groups import centred_rank, group_normalize, group_stats
from megatron_ext.credit.levels import Level, broadcast, reduce_tokens, trained_tokens
from megatron_ext.credit.pipeline import Pipeline, local, open_view
from megatron_ext.credit.protocol import CreditEdit, CreditView, EditTraits, Reduce, Scale, ScoreRequest, Stat
from megatron_ext.credit.spans import Op, prefix_sum, previous
from megatron_ext.credit.turns import in_turns, returns_to_go, route, turn_broadcast, turn_reduce
from megatron_ext.credit.variance import variance_shares
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.credit_contract import check_contract, check_ranks
from tests.helpers.records import Group, Traj, Turn, build, described_batches, model, random_groups, single, user

Local = Callable[[CreditView], Mapping[str, Stat]]


@dataclass(frozen=True)
class Made:
    """An edit made of the function that changes the advantage, and of the statistics it needs from all ranks."""

    change: Callable[[CreditView, Mapping[str, NDArray[Any]]], NDArray[np.float64]]
    traits: EditTraits = EditTraits()
    stats: Local = lambda view: {}

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return self.stats(view)

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        return replace(view, advantage=self.change(view, reduced))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


Nothing = Mapping[str, NDArray[Any]]


def sigmoid(x: NDArray[np.float64]) -> NDArray[np.float64]:
    return 1.0 / (1.0 + np.exp(-x))


# -- AdaStep: step advantages by anchor state, weighed by what the action explains of the state's spread -------------
def adastep(view: CreditView, reduced: Nothing) -> NDArray[np.float64]:
    turns, batch = view.turns, view.batch
    value = returns_to_go(turns, turns.pick(batch.turn_reward), 0.95)
    state = (batch.trajectory_group()[turns.trajectory], turns.pick(batch.turn_state_key))
    step = group_normalize(value, state, present=turns.trainable, std=False)
    share = variance_shares(value, state, turns.pick(batch.turn_action_key), turns.trainable).explained(1.0)
    return view.advantage + turn_broadcast(share * step, turns)


# -- Lean4AgenticRL: returns of each workflow stage, normalised over the rollouts that reached it --------------------
def stages(view: CreditView, reduced: Nothing) -> NDArray[np.float64]:
    turns, batch = view.turns, view.batch
    stage = turns.pick(batch.turn_labels["stage"])
    reached = turns.trainable & (stage >= 0)
    own = group_stats(turns.pick(batch.turn_reward), (turns.trajectory, stage))
    value = batch.reward[turns.trajectory] + 0.5 * own.total[own.member]
    key = (batch.trajectory_group()[turns.trajectory], stage)
    by_stage = group_normalize(value, key, rollout=turns.trajectory, present=reached, eps=0.0)
    chosen = in_turns(turns, reached)
    return np.where(chosen, turn_broadcast(by_stage, turns), view.advantage)


# -- AgentOPSD: the gap to a privileged teacher as evidence, turn by turn --------------------------------------------
def belief(view: CreditView, reduced: Nothing, *, discount: float = 0.95, mix: float = 0.5, width: float = 0.2) -> Any:
    turns, batch = view.turns, view.batch
    group = batch.trajectory_group()
    present = batch.trainable()
    won = group_stats(batch.success.astype(np.float64), group, present)
    prior = np.clip(np.append(won.mean, 0.5)[won.member], 1e-4, 1 - 1e-4)
    evidence = prefix_sum(turn_reduce(view.scores["gap"], turns), turns.offsets, discount)
    now = sigmoid(np.log(prior / (1 - prior))[turns.trajectory] + evidence)
    advantage = reduce_tokens(batch, view.advantage, Level.TRAJECTORY, Op.MEAN)[turns.trajectory]
    moved = np.sign(advantage) * (now - previous(now, turns.offsets, prior))
    z = group_normalize(moved, turns.trajectory, tolerance=0.0)
    weight = np.clip(1 + width * z, 1 - width, 1 + width)
    return view.advantage * turn_broadcast((1 - mix) + mix * weight, turns)


# -- MOSAIC: sessions ranked within each outcome, information gain by session type -----------------------------------
def sessions(view: CreditView, reduced: Nothing) -> NDArray[np.float64]:
    batch = view.batch
    group, present = batch.trajectory_group(), batch.trainable()
    many = np.diff(batch.trajectory_sessions)
    factor = 1 - 0.5 * centred_rank(many, (group, view.reward), present)
    owner = batch.session_trajectory()
    gain = reduce_tokens(batch, view.scores["gap"], Level.SESSION, Op.MEAN)
    z = group_normalize(gain, (group[owner], batch.session_kind), present=present[owner])
    return view.advantage * broadcast(batch, factor) + 0.2 * broadcast(batch, z, Level.SESSION)


# -- SLCA-GRPO: the last model turn by one reward, the turns before it by another ------------------------------------
def segments(view: CreditView, reduced: Nothing) -> NDArray[np.float64]:
    turns, batch = view.turns, view.batch
    group = batch.trajectory_group()
    trained = np.bincount(turns.trajectory[turns.tokens > 0], minlength=batch.num_trajectories)
    process = group_normalize(batch.reward_parts["half"], group, present=trained > 1, ddof=1)
    summary = group_normalize(view.reward, group, present=trained > 0, ddof=1)
    last = in_turns(turns, turns.last)
    targets = {"process": (~last, broadcast(batch, process)), "summary": (last, broadcast(batch, summary))}
    return route(batch, targets)


# -- MiMo: flagged turns of either sign, the mass of each sign conserved over the whole step -------------------------
def flagged(view: CreditView) -> NDArray[np.bool_]:
    return in_turns(view.turns, view.turns.pick(view.batch.turn_labels["stage"]) == 0)


def sign_masses(view: CreditView) -> Mapping[str, Stat]:
    bad = flagged(view)
    parts = [
        reduce_tokens(view.batch, np.maximum(sign * view.advantage, 0.0), Level.TRAJECTORY, where=where)
        for sign in (1, -1)
        for where in (bad, ~bad)
    ]
    return {"masses": Stat(Reduce.SUM, np.concatenate([exact_parts(part) for part in parts]))}


def segment_penalty(view: CreditView, reduced: Nothing, *, kappa: float = 2.0) -> NDArray[np.float64]:
    bad_plus, clean_plus, bad_minus, clean_minus = (float(x) for x in exact_value(reduced["masses"]))
    up = 1 + bad_plus / clean_plus if clean_plus else 1.0
    drop = 0.0 if clean_plus else 1.0  # nothing clean to carry the mass: leave it where it is
    worse = min(kappa, 1 + clean_minus / bad_minus) if bad_minus else 1.0  # no more than the clean can give
    down = 1 - (worse - 1) * bad_minus / clean_minus if clean_minus else 1.0
    bad, a = flagged(view), view.advantage
    return np.where(bad, np.where(a > 0, drop * a, worse * a), np.where(a > 0, up * a, down * a))


# -- TRIAGE: a constant for each role of a turn ----------------------------------------------------------------------
def roles(view: CreditView, reduced: Nothing) -> NDArray[np.float64]:
    turns = view.turns
    constant = np.array([1.0, 0.2, -0.5, 0.0])[turns.pick(view.batch.turn_labels["stage"])]
    return view.advantage + turn_broadcast(constant, turns)


def gap_of(batch: TrajectoryBatch) -> Mapping[str, NDArray[Any]]:
    """A score of each token that depends on the token alone."""
    return {"gap": np.cos(batch.ids).astype(np.float32)}


MASSES = EditTraits(conserves=frozenset({"positive_mass", "negative_mass", "sum"}))
EDITS: Mapping[str, Made] = {
    "adastep": Made(adastep, EditTraits(breaks=frozenset("ef"), own_signal=True)),
    "stages": Made(stages, EditTraits(breaks=frozenset("ef"), scale=Scale.SETS, own_signal=True)),
    "belief": Made(belief),
    "sessions": Made(sessions, EditTraits(breaks=frozenset("bef"), own_signal=True)),
    "segments": Made(segments, EditTraits(scale=Scale.SETS)),
    "segment_penalty": Made(segment_penalty, MASSES, sign_masses),
    "roles": Made(roles, EditTraits(breaks=frozenset("ef"), own_signal=True)),
}
every_edit = pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS.keys())


@every_edit
@settings(max_examples=6, deadline=None)
@given(groups=described_batches())
def test_the_contract(edit: Made, groups: list[Group]) -> None:
    check_contract(lambda: edit, groups, gap_of)


@every_edit
@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks(edit: Made, ranks: int) -> None:
    check_ranks(lambda: edit, random_groups(5, groups=6), ranks, gap_of, exact=True)


@settings(max_examples=25, deadline=None)
@given(groups=described_batches())
def test_the_base_advantage_keeps_every_invariant(groups: list[Group]) -> None:
    check_contract(lambda: Made(lambda view, reduced: view.advantage), groups)


# -- worked numbers --------------------------------------------------------------------------------------------------
def turns_of(count: int, reward: float = 0.0, **columns: Sequence[int]) -> Traj:
    """``count`` model turns of one token each; columns hold one value a turn."""
    made = [model([i], **{name: values[i] for name, values in columns.items()}) for i in range(count)]
    return single([user([0]), *made], reward=reward, success=reward > 0)


def per_turn(batch: TrajectoryBatch, values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values[trained_tokens(batch)]


def test_adastep_weighs_step_advantages() -> None:
    returns = [1.0, 0.8, 0.2, 0.0]
    rewarded = [
        single([user([0]), replace(model([1], state_key=7, action_key=action), reward=value)])
        for value, action in zip(returns, (1, 1, 2, 2), strict=True)
    ]
    batch = build([tuple(rewarded)])
    view, _ = Pipeline([("step", EDITS["adastep"])]).run(open_view(batch))
    np.testing.assert_allclose(per_turn(batch, view.advantage), [0.470588, 0.282353, -0.282353, -0.470588], atol=1e-6)


def test_stages_are_normalised_over_those_that_reached_them() -> None:
    def rollout(reward: float, *stage_rewards: float) -> Traj:
        made = [replace(model([i]), label=i, reward=2 * (r - reward)) for i, r in enumerate(stage_rewards)]
        return single([user([0]), *made], reward=reward, success=reward > 0)

    batch = build(
        [(rollout(1, 1.5, 1.5, 1.5), rollout(0, 0.5, -0.2), rollout(1, 1.3, 1.5, 1.5), rollout(0, 0, -0.2, 0))]
    )
    view, _ = Pipeline([("stages", EDITS["stages"])]).run(open_view(batch))
    want = [1.114409, 1, 0.707107, -0.536567, -1, 0.784214, 1, 0.707107, -1.362056, -1, -1.414214]
    np.testing.assert_allclose(per_turn(batch, view.advantage), want, atol=1e-6)


@pytest.mark.parametrize(
    ("reward", "want"),
    [(1.0, [1.009532, 0.9, 1.1, 0.937188]), (0.0, [-0.990468, -1.1, -0.9, -1.062812])],
)
def test_belief_credit(reward: float, want: list[float]) -> None:
    batch = build([(turns_of(4, reward), turns_of(4, 1.0 - reward))])
    gap = np.tile([0.0, 0.4, -0.2, 1.5, 0.1], 2)
    view, _ = Pipeline([("belief", EDITS["belief"])], baseline=Baseline(eps=0.0)).run(open_view(batch, {"gap": gap}))
    np.testing.assert_allclose(per_turn(batch, view.advantage)[:4], want, atol=1e-5)


def test_segments_have_rewards_of_their_own() -> None:
    def rollout(summary: float, turns: int) -> Traj:
        return turns_of(turns, summary)

    batch = build([(rollout(0.25, 2), rollout(1.0, 2), rollout(0.5, 2), rollout(-0.5, 1))])
    process = np.array([0.9, 0.5, 0.7, 0.0], dtype=np.float32)
    batch = replace(batch, reward_parts={"half": process})
    view, _ = Pipeline([("segments", EDITS["segments"])]).run(open_view(batch))
    want = [0.999995, -0.1, -0.999995, 1.099998, 0, 0.3, -1.299998]
    np.testing.assert_allclose(per_turn(batch, view.advantage), want, atol=2e-6)


def test_the_segment_penalty_conserves_each_sign() -> None:
    def rollout(reward: float, clean: int, bad: int) -> Traj:
        made: list[Turn] = [user([0]), replace(model(range(clean)), label=1)]
        return single([*made, replace(model(range(bad)), label=0)], reward=reward)

    batch = build([(rollout(1, 10, 0), rollout(1, 18, 2), rollout(0, 12, 0), rollout(0, 12, 4))])
    view = replace(open_view(batch), advantage=Baseline(normalize="mean").tokens(batch, batch.reward))
    edited = EDITS["segment_penalty"].apply(view, local(sign_masses(view))).advantage
    np.testing.assert_allclose(edited[edited > 0].sum(), 15.0)
    np.testing.assert_allclose(edited[edited < 0].sum(), -14.0)
    np.testing.assert_allclose(np.unique(edited.round(6)), [-1.0, -0.416667, 0.0, 0.535714])


def test_roles_then_whitening() -> None:
    batch = build([(turns_of(3, 1.0, label=[0, 3, 2]), turns_of(3, 0.0, label=[1, 2, 3]))])
    edits: list[tuple[str, CreditEdit]] = [("roles", EDITS["roles"]), ("white", Whiten(over="turns", center=True))]
    view, _ = Pipeline(edits, baseline=Baseline(eps=0.0)).run(open_view(batch))
    raw = np.array([2, 1.0, 0.5, -0.8, -1.5, -1.0])
    np.testing.assert_allclose(per_turn(batch, view.advantage), (raw - raw.mean()) / raw.std(), atol=1e-6)


def test_step_advantages_are_whitened_over_steps() -> None:
    """StepPO: five steps of two trajectories, sample standard deviation."""
    batch = build([(turns_of(3), turns_of(2))])
    advantage = np.zeros(batch.num_tokens)
    advantage[trained_tokens(batch)] = [0.575958, 0.4865, 0.3, -0.291, -0.2]
    view = replace(open_view(batch), advantage=advantage)
    edit = Whiten(over="turns", center=True, ddof=1)
    got = edit.apply(view, local(edit.local_stats(view))).advantage
    np.testing.assert_allclose(per_turn(batch, got), [1.011139, 0.785942, 0.316454, -1.171307, -0.942227], atol=2e-5)


def test_limbs_are_whole_numbers() -> None:
    """What ranks add holds whole numbers only, so that their order of adding cannot matter."""
    stats = sign_masses(open_view(build(random_groups(3))))["masses"].value
    assert stats.shape == (4, LIMBS) and np.array_equal(stats, np.rint(stats))
