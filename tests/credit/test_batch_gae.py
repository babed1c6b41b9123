"""Invariants of ``credit/batch_gae.py``, against a loop over turns, and the specifications' numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.credit.batch_gae import GAE, Chain, Outcome
from megatron_ext.credit.gae import Unit
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import Role, Status, TrajectoryBatch
from tests.helpers.chains import bits
from tests.helpers.records import (
    Group,
    Traj,
    Turn,
    build,
    described_batches,
    model,
    on_trained,
    random_batch,
    random_groups,
    shuffled,
    single,
    split,
    user,
)

Array = NDArray[Any]


def values_by_token(batch: TrajectoryBatch) -> Array:
    """Values that depend on the token alone, so that they survive a cut or a permutation."""
    return np.sin(batch.ids.astype(np.float64) * 1.7 + 1)


def batch_by_hand(batch: TrajectoryBatch, values: Array, config: GAE) -> Array:
    """Advantages by trajectory, in the order of turn numbers, for chains that are trajectories."""
    advantage, trained = np.zeros(batch.num_tokens), trained_tokens(batch)
    for j in range(batch.num_trajectories):
        turns = sorted(batch.trajectory(j).turns, key=lambda n: int(batch.turn_number[n]))
        happened: dict[int, list[int]] = {}
        for n in turns:
            happened.setdefault(int(batch.turn_segment()[n]) if config.unit is Unit.SEGMENT else n, []).append(n)
        units: list[list[int]] = []
        rewards: list[float] = []
        for together in happened.values():
            tokens = [t for n in together for t in range(batch.turn_start[n], batch.turn_end[n]) if trained[t]]
            if tokens:
                units += [[t] for t in tokens] if config.unit is Unit.ACTION_TOKEN else [tokens]
            rewards += [0.0] * (len(units) - len(rewards))
            if rewards and config.turn_rewards:
                rewards[-1] += float(batch.turn_reward[together].sum(dtype=np.float64))
        if not units:
            continue
        rewards[-1] += float(batch.reward[j])
        running = after = 0.0
        lam = 1 - 1 / (config.lam_alpha * len(units)) if config.lam_alpha else config.lam
        for unit, reward in zip(reversed(units), reversed(rewards), strict=True):
            running = reward + config.gamma * after - values[unit[0]] + config.gamma * lam * running
            after = values[unit[0]]
            advantage[unit] = running
    return advantage


@settings(max_examples=50, deadline=None)
@given(
    described_batches(),
    st.sampled_from([Unit.ACTION_TOKEN, Unit.STEP, Unit.SEGMENT]),
    st.booleans(),
    st.sampled_from([None, 1.5]),
)
def test_a_batch_is_the_loop(groups: list[Group], unit: Unit, turn_rewards: bool, alpha: float | None) -> None:
    batch, config = build(groups), GAE(unit=unit, gamma=0.9, lam=0.8, turn_rewards=turn_rewards, lam_alpha=alpha)
    values = values_by_token(batch)
    out = config(batch, values)
    np.testing.assert_allclose(out.advantage, batch_by_hand(batch, values, config), atol=1e-10)
    trained = trained_tokens(batch)
    assert not out.advantage[~trained].any() and not np.any(out.value_mask & ~trained)  # invariant 1


@settings(max_examples=40, deadline=None)
@given(
    described_batches(),
    st.integers(0, 2**31),
    st.sampled_from([Unit.TOKEN, Unit.ACTION_TOKEN, Unit.STEP]),
    st.sampled_from(["segments", "pieces", "sessions"]),
)
def test_cutting_and_permuting_change_nothing(groups: list[Group], seed: int, unit: Unit, into: str) -> None:
    config = GAE(unit=unit, gamma=0.95, lam=0.9, turn_rewards=True)  # invariants 1 and 2

    def run(of: list[Group]) -> dict[str, bytes]:
        batch = build(of)
        out = config(batch, values_by_token(batch))
        found = on_trained(batch, np.stack([out.advantage, out.returns], axis=1))
        return {name: bits(value) for name, value in found.items()}

    assert run(groups) == run(split(groups, seed, into=into)) == run(shuffled(groups, seed))


def test_ranks_that_split_a_batch_agree() -> None:
    batch, config = random_batch(5, groups=4), GAE(gamma=1.0, lam_alpha=1.5, return_lam=1.0)
    whole = config(batch, values_by_token(batch))
    for ranks in (2, 4):
        parts = [select_groups(batch, range(r, 4, ranks)) for r in range(ranks)]
        joined = concat(parts)
        both = np.concatenate([config(part, values_by_token(part)).advantage for part in parts])
        ours, theirs = on_trained(batch, whole.advantage), on_trained(joined, both)
        assert {k: bits(v) for k, v in ours.items()} == {k: bits(v) for k, v in theirs.items()}


def nested(reward: float = 1.0, **values: Any) -> TrajectoryBatch:
    """A subagent that was asked, and answered, between two turns of its parent: happened as 1, 3, 5."""
    parent = (user([1]), model([2, 3]), Turn(Role.TOOL, (4,)), model([5]))
    child = (user([6]), model([7, 8]))
    batch = build([(Traj(sessions=((parent,), (child,)), reward=reward, **values),)])
    return replace(batch, turn_number=np.array([0, 1, 4, 5, 2, 3]))


def test_a_subagent_is_linked_where_it_happened() -> None:  # invariant 3
    batch = nested()
    values = np.array([9, 0.1, 0.2, 9, 0.5, 9, 0.3, 0.4])
    out = GAE(gamma=0.5, lam=0.0)(batch, values)
    np.testing.assert_allclose(out.advantage, [0, 0, -0.05, 0, 0.5, 0, -0.1, -0.15], atol=1e-12)
    assert out.unit_token.tolist() == [1, 2, 6, 7, 4]
    assert GAE(unit=Unit.STEP, gamma=0.5)(batch, values).unit_token.tolist() == [1, 6, 4]
    # As one unit the parent began first, and its value stands where it began.
    assert GAE(unit=Unit.SEGMENT, gamma=0.5)(batch, values).unit_token.tolist() == [1, 6]
    sessions = GAE(chain=Chain.SESSION, gamma=0.5, lam=1.0)(batch, np.zeros(8))
    np.testing.assert_allclose(sessions.returns, [0, 0.25, 0.5, 0, 1, 0, 0, 0])  # the parent's answer ends it
    paid = GAE(chain=Chain.SESSION, outcome=Outcome.CHAIN_END, gamma=0.5, lam=1.0)(batch, np.zeros(8))
    np.testing.assert_allclose(paid.returns, [0, 0.25, 0.5, 0, 1, 0, 0.5, 1])


def test_step_credit_without_critic_is_the_outcome() -> None:
    batch = random_batch(7, untrainable=0.0)
    out = GAE(unit=Unit.STEP)(batch, np.zeros(batch.num_tokens))
    np.testing.assert_allclose(out.advantage, np.where(batch.loss_mask, batch.reward[batch.token_trajectory()], 0))


def test_steps_of_one_token_are_tokens() -> None:
    batch = random_batch(8, tokens=(1, 1))
    values = values_by_token(batch)
    step, token = (GAE(unit=u, gamma=0.9, lam=0.7)(batch, values) for u in (Unit.STEP, Unit.ACTION_TOKEN))
    assert bits(step.advantage, step.returns) == bits(token.advantage, token.returns)


def test_trajectories_are_cut_where_their_status_says() -> None:
    turns = [user([1]), model([2, 3])]
    groups = [
        tuple(single(turns, status=s) for s in (Status.DONE, Status.MAX_TURNS, Status.MAX_CONTEXT, Status.ABORTED))
    ]
    batch, last = build(groups), np.array([0.1, 0.2, 0.4, np.nan])
    out = GAE(gamma=0.5, bootstrap=(Status.MAX_TURNS,))(batch, np.zeros(12), last_value=last)
    np.testing.assert_allclose(out.returns, [0, 0, 0, 0, 0.05, 0.1, 0, 0, 0, 0, 0, 0])
    with pytest.raises(ValueError, match="give both or neither"):
        GAE(bootstrap=(Status.MAX_TURNS,))(batch, np.zeros(12))
    with pytest.raises(ValueError, match="give both or neither"):
        GAE()(batch, np.zeros(12), last_value=last)
    assert GAE(bootstrap=["MAX_TURNS"]) == GAE(bootstrap=(Status.MAX_TURNS,))  # names, as a configuration gives them
    for bad in (Status.ABORTED, "TIRED"):
        with pytest.raises(ValueError, match="bootstrap .*: must be ends of trained trajectories, DONE, MAX_TURNS"):
            GAE(bootstrap=(bad,))


def test_one_lambda_a_trajectory() -> None:
    batch = random_batch(9, untrainable=0.0)
    values, lam = values_by_token(batch), np.linspace(0, 1, batch.num_trajectories)
    out = GAE()(batch, values, lam=lam)
    for j in range(batch.num_trajectories):
        span = batch.trajectory(j).tokens
        assert bits(GAE(lam=float(lam[j]))(batch, values).advantage[span]) == bits(out.advantage[span])


def test_rewards_given_instead_of_the_batch_s_own() -> None:
    batch = random_batch(10)
    out = GAE()(batch, np.zeros(batch.num_tokens), reward=batch.reward * 2.0)
    own = GAE()(batch, np.zeros(batch.num_tokens))
    np.testing.assert_allclose(out.advantage, 2 * own.advantage)


def test_batches_in_which_nothing_is_trained() -> None:
    masked = single([user([1, 2]), model([3], mask=False), model([])], reward=1.0)
    batch = build(
        [(masked, single([user([4])], reward=0.0), single([model([5, 6], reward=2.0)], status=Status.ENV_ERROR))]
    )
    for unit in Unit:
        out = GAE(unit=unit, turn_rewards=True, lam_alpha=1.5)(batch, np.ones(batch.num_tokens))
        assert not out.advantage.any() and not out.value_mask.any()
        assert out.unclaimed == (0 if unit is Unit.TOKEN else 1)  # the reward that no trained token earned
    empty = select_groups(batch, [])
    assert GAE()(empty, np.zeros(0)).advantage.shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"unit": "word"}, "unit 'word': must be one of token, action_token, step, segment"),
        ({"chain": "group"}, "chain 'group'"),
        ({"outcome": "start"}, "outcome 'start'"),
        ({"unit": "segment", "chain": "segment"}, "both segment"),
    ],
)
def test_settings_that_cannot_be_are_named(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GAE(**values)


def test_arrays_that_do_not_fit_a_batch_are_named() -> None:
    batch = build(random_groups(0))
    with pytest.raises(ValueError, match=r"values \(1,\)"):
        GAE()(batch, np.zeros(1))
    with pytest.raises(ValueError, match=r"lam \(1,\)"):
        GAE()(batch, np.zeros(batch.num_tokens), lam=np.zeros(1))


def test_numbers_of_steppo_through_a_batch() -> None:
    steps = [
        [user([1, 2]), model([3, 4, 5]), user([6]), model([7]), model([8, 9])],
        [model([1]), user([2]), model([3, 4])],
    ]
    batch = build([(single(steps[0], reward=1.0), single(steps[1]))])
    values = np.full(batch.num_tokens, 99.0)
    starts = [2, 6, 7, 9, 11]
    values[starts] = [0.2, 0.4, 0.7, 0.3, 0.2]
    out = GAE(unit=Unit.STEP, gamma=0.9, lam=0.95)(batch, values)
    a, b, c, d, e = 0.575958, 0.4865, 0.3, -0.291, -0.2
    np.testing.assert_allclose(out.advantage, [0, 0, a, a, a, 0, b, c, c, d, 0, e, e], atol=5e-7)
    assert np.flatnonzero(out.value_mask).tolist() == starts == out.unit_token.tolist()
    np.testing.assert_allclose(out.returns[starts], [0.775958, 0.8865, 1, 0.009, 0], atol=5e-7)
    assert not out.returns[~out.value_mask].any()
