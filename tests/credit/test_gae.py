"""Invariants of ``credit/scan.py`` (1-3) and of ``credit/gae.py`` (1-8), and the specifications' numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.credit.gae import (
    GAE,
    Chain,
    GAEInput,
    GAEOutput,
    Outcome,
    Unit,
    explained_variance,
    gae,
    length_adaptive_lambda,
    unit_advantages,
    value_moments,
)
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.scan import linear_scan_reverse
from megatron_ext.trajectory.record import Role, Status, TrajectoryBatch, concat, select_groups
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
shares = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


def offsets_of(lengths: Array | list[int]) -> Array:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def scan_by_hand(x: Array, share: Array, offsets: Array, factor: Array, carry: Array) -> Array:
    y = np.zeros(len(x))
    for c in range(len(offsets) - 1):
        last = carry[c]
        for i in range(offsets[c + 1] - 1, offsets[c] - 1, -1):
            last = y[i] = x[i] + share[c] * factor[i] * last
    return y


def gae_by_hand(
    inputs: GAEInput, gamma: float, lam: Array, return_lam: Array | None = None
) -> tuple[Array, Array, Array]:
    """Advantage, return and value mask, token by token."""
    advantage, returns = np.zeros(len(inputs.mask)), np.zeros(len(inputs.mask))
    at_value = np.zeros(len(inputs.mask), dtype=bool)
    for c in range(len(inputs.offsets) - 1):
        units: list[list[int]] = []
        rewards: list[float] = []
        for t in range(inputs.offsets[c], inputs.offsets[c + 1]):
            if inputs.mask[t] or inputs.unit is Unit.TOKEN:
                key = None if inputs.key is None else inputs.key[t]
                if key is not None and units and inputs.key is not None and inputs.key[units[-1][0]] == key:
                    units[-1].append(t)
                else:
                    units.append([t])
                    rewards.append(0.0)
            if rewards:
                rewards[-1] += float(inputs.rewards[t])
        after = 0.0 if inputs.last_value is None else float(inputs.last_value[c])
        running = critic = 0.0
        for unit, reward in zip(reversed(units), reversed(rewards), strict=True):
            value = float(inputs.values[unit[0]])
            delta = reward + gamma * after - value
            running = delta + gamma * lam[c] * running
            critic = delta + gamma * (lam if return_lam is None else return_lam)[c] * critic
            after = value
            kept = [t for t in unit if inputs.mask[t]]
            advantage[kept] = running
            if inputs.mask[unit[0]]:
                returns[unit[0]], at_value[unit[0]] = critic + value, True
    return advantage, returns, at_value


def random_input(seed: int, unit: Unit, lengths: list[int], share: float) -> GAEInput:
    rng, offsets = np.random.default_rng(seed), offsets_of(lengths)
    size = int(offsets[-1])
    run = np.cumsum(rng.random(size) < 0.4)
    return GAEInput(
        values=rng.normal(size=size).astype(np.float32),
        rewards=rng.normal(size=size) * (rng.random(size) < 0.3),
        mask=rng.random(size) < share,
        offsets=offsets,
        unit=unit,
        key=run if unit in (Unit.STEP, Unit.SEGMENT) else None,
        last_value=rng.normal(size=len(lengths)) * (rng.random(len(lengths)) < 0.5),
    )


def bits(*arrays: Array) -> bytes:
    return b"".join(np.ascontiguousarray(a).tobytes() for a in arrays)


# ---- the scan ------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(st.one_of(st.integers(0, 9), st.integers(0, 90)), max_size=12),
    st.lists(shares, min_size=12, max_size=12),
    st.sampled_from([1, 2, 3, 7, 16, 256]),
    st.booleans(),
)
def test_scan_is_the_recurrence(seed: int, lengths: list[int], share: list[float], block: int, scaled: bool) -> None:
    rng, offsets = np.random.default_rng(seed), offsets_of(lengths)
    size, coefficient = int(offsets[-1]), np.array(share)[: len(lengths)]
    x, carry = rng.normal(size=size), rng.normal(size=len(lengths))
    factor = rng.uniform(-1, 1, size) * (rng.random(size) < 0.9) if scaled else np.ones(size)
    got = linear_scan_reverse(x, coefficient, offsets, factor=factor if scaled else None, carry=carry, block=block)
    expected = scan_by_hand(x, coefficient, offsets, factor, carry)
    np.testing.assert_allclose(got, expected, rtol=1e-12, atol=1e-12)


def test_scan_of_a_chain_is_its_own_bit_for_bit() -> None:  # scan invariant 2
    rng = np.random.default_rng(0)
    lengths = [1, 700, 0, 3, 64, 65, 1000, 256, 257, 5]
    offsets, share = offsets_of(lengths), rng.random(len(lengths))
    x = rng.normal(size=int(offsets[-1]))
    together = linear_scan_reverse(x, share, offsets)
    for c, length in enumerate(lengths):
        span = slice(offsets[c], offsets[c + 1])
        alone = linear_scan_reverse(x[span], share[c], np.array([0, length]))
        assert bits(alone) == bits(together[span])


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99999, 1.0])
def test_scan_of_a_very_long_chain(share: float) -> None:  # scan invariant 3
    size = 1_000_003
    got = linear_scan_reverse(np.ones(size), share, np.array([0, size]))
    left = np.arange(size, 0, -1, dtype=np.float64)
    expected = left if share == 1 else -np.expm1(left * np.log(share)) / (1 - share) if share else np.ones(size)
    np.testing.assert_allclose(got, expected, rtol=1e-9)


def test_scan_without_elements() -> None:
    assert linear_scan_reverse(np.zeros(0), 1.0, np.array([0])).shape == (0,)
    assert linear_scan_reverse(np.zeros(0), 1.0, np.array([0, 0, 0]), carry=np.ones(2)).shape == (0,)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"coefficient": 1.1}, "coefficient spans 1.1..1.1: must lie within -1..1"),
        ({"coefficient": np.array([np.nan, 0.0])}, "coefficient spans nan"),
        ({"coefficient": np.zeros(3)}, r"coefficient \(3,\)"),
        ({"factor": np.full(5, 2.0)}, "factor spans 2.0"),
        ({"factor": np.zeros(4)}, r"factor \(4,\)"),
        ({"carry": np.zeros(3)}, r"carry \(3,\)"),
        ({"offsets": np.array([0, 3, 4])}, "offsets .* end at 5"),
        ({"offsets": np.array([0, 6, 5])}, "never fall"),
        ({"block": 0}, "block 0"),
    ],
)
def test_a_scan_that_cannot_be_is_named(values: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {"coefficient": 1.0, "offsets": np.array([0, 3, 5]), **values}
    with pytest.raises(ValueError, match=message):
        linear_scan_reverse(np.zeros(5), **arguments)


# ---- the specifications' numbers -----------------------------------------------------------------------------------


def sao(mask: list[bool], unit: Unit = Unit.ACTION_TOKEN) -> GAEInput:
    values, rewards = np.array([0.2, 0.3, 0.9, 0.9, 0.6]), np.array([0, 0, 0, 0, 1.0])
    return GAEInput(values, rewards, np.array(mask), np.array([0, 5]), unit)


def test_numbers_of_sao() -> None:
    mask = [True, True, False, False, True]
    lam = length_adaptive_lambda(np.array([3]), alpha=1.5)
    np.testing.assert_allclose(lam, [0.777778], atol=5e-7)
    skip = gae(sao(mask), gamma=1.0, lam=lam, return_lam=1.0)
    np.testing.assert_allclose(skip.advantage, [0.575309, 0.611111, 0, 0, 0.4], atol=5e-7)
    np.testing.assert_allclose(skip.returns, [1, 1, 0, 0, 1], atol=1e-12)
    assert skip.value_mask.tolist() == mask
    naive = gae(sao(mask, Unit.TOKEN), gamma=1.0, lam=lam, return_lam=1.0)
    np.testing.assert_allclose(naive.advantage, [0.571895, 0.606722, 0, 0, 0.4], atol=5e-7)
    np.testing.assert_allclose(naive.unit_advantage, [0.571895, 0.606722, 0.008642, 0.011111, 0.4], atol=5e-7)
    np.testing.assert_allclose(naive.returns, skip.returns, atol=1e-12)  # lambda 1: observations change no return
    np.testing.assert_allclose(
        length_adaptive_lambda(np.array([1, 2, 10, 1000, 0]), 1.5),
        [0.333333, 0.666667, 0.933333, 0.999333, 0],
        atol=5e-7,
    )
    with pytest.raises(ValueError, match="alpha 0.5"):
        length_adaptive_lambda(np.array([1]), 0.5)


def test_numbers_of_explained_variance() -> None:
    returns, values = np.array([1, 1, 1, 0, 0, 0.0]), np.array([0.8, 0.7, 0.9, 0.2, 0.1, 0.3])
    on = np.ones(6, dtype=bool)
    assert explained_variance(value_moments(returns, values, on)) == pytest.approx(0.813333, abs=5e-7)
    parts = value_moments(returns, values, np.arange(6) < 2) + value_moments(returns, values, np.arange(6) >= 2)
    assert explained_variance(parts) == pytest.approx(0.813333, abs=5e-7)  # adds over ranks
    assert explained_variance(value_moments(returns, returns, on)) == 1.0
    assert explained_variance(value_moments(returns, values, ~on)) == 0.0
    assert explained_variance(value_moments(np.full(7, 0.1), np.zeros(7), np.ones(7, dtype=bool))) == 0.0


def test_numbers_of_steppo() -> None:
    advantage, returns = unit_advantages(
        np.array([0, 0, 1.0, 0, 0]), np.array([0.2, 0.4, 0.7, 0.3, 0.2]), np.array([0, 3, 5]), gamma=0.9, lam=0.95
    )
    np.testing.assert_allclose(advantage, [0.575958, 0.4865, 0.3, -0.291, -0.2], atol=5e-7)
    np.testing.assert_allclose(returns, [0.775958, 0.8865, 1, 0.009, 0], atol=5e-7)
    whitened = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(whitened, [1.011139, 0.785942, 0.316454, -1.171307, -0.942227], atol=5e-7)


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


def test_numbers_of_appo() -> None:
    future = linear_scan_reverse(np.array([0.1, -0.2, 0.3, 0.0]), 0.5, np.array([0, 4]))
    np.testing.assert_allclose(future, [0.075, -0.05, 0.3, 0.0], atol=1e-12)


# ---- the estimator -------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(Unit),
    st.lists(st.integers(0, 40), max_size=6),
    st.sampled_from([0.0, 0.3, 0.7, 1.0]),
    shares,
    st.lists(shares, min_size=6, max_size=6),
    st.one_of(st.none(), shares),
)
def test_gae_is_the_loop(
    seed: int, unit: Unit, lengths: list[int], share: float, gamma: float, lam: list[float], critic: float | None
) -> None:
    inputs, per_chain = random_input(seed, unit, lengths, share), np.array(lam)[: len(lengths)]
    got = gae(inputs, gamma=gamma, lam=per_chain, return_lam=critic)
    other = None if critic is None else np.full(len(lengths), critic)
    advantage, returns, at_value = gae_by_hand(inputs, gamma, per_chain, other)
    np.testing.assert_allclose(got.advantage, advantage, rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(got.returns, returns, rtol=1e-10, atol=1e-10)
    assert got.value_mask.tolist() == at_value.tolist()
    assert not got.advantage[~inputs.mask].any() and not got.returns[~inputs.mask].any()  # invariant 1


def scattered(inputs: GAEInput, seed: int) -> tuple[GAEInput, Array]:
    """The same chains with observations put in everywhere, and where the old tokens stand now."""
    rng = np.random.default_rng(seed)
    extra = rng.integers(0, 4, len(inputs.mask))  # in front of each token
    place = np.arange(len(extra)) + np.cumsum(extra)
    size = int(len(extra) + extra.sum())

    def spread(values: Array, fill: Array) -> Array:
        out = fill.astype(values.dtype)
        out[place] = values
        return out

    offsets = np.concatenate([[0], np.cumsum(extra + 1)])[inputs.offsets]
    return (
        replace(
            inputs,
            values=spread(inputs.values, rng.normal(size=size) * 1e6),
            rewards=spread(inputs.rewards, np.zeros(size)),
            mask=spread(inputs.mask, np.zeros(size)),
            offsets=offsets,
            key=None if inputs.key is None else spread(inputs.key, rng.integers(1000, 1005, size)),
        ),
        place,
    )


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([Unit.ACTION_TOKEN, Unit.STEP, Unit.SEGMENT]), shares, shares)
def test_observations_change_no_bit_verl_2337_verl_7278_miles_1827(
    seed: int, unit: Unit, gamma: float, lam: float
) -> None:  # invariant 2
    inputs = random_input(seed, unit, [30, 0, 7, 300], 0.6)
    before = gae(inputs, gamma=gamma, lam=lam)
    more, place = scattered(inputs, seed)
    after = gae(more, gamma=gamma, lam=lam)
    assert bits(after.advantage[place], after.returns[place]) == bits(before.advantage, before.returns)
    assert np.count_nonzero(after.advantage) == np.count_nonzero(before.advantage)
    values = inputs.values.copy()
    values[~inputs.mask] = np.nan  # what stands on an observation is not read at all
    other = gae(replace(inputs, values=values), gamma=gamma, lam=lam)
    assert bits(other.advantage, other.returns) == bits(before.advantage, before.returns)


def test_the_naive_unit_does_see_observations() -> None:  # so that the test above can fail
    inputs = random_input(0, Unit.TOKEN, [30], 0.6)
    before = gae(inputs, gamma=1.0, lam=0.9)
    more, place = scattered(inputs, 0)
    assert np.abs(gae(more, gamma=1.0, lam=0.9).advantage[place] - before.advantage).max() > 1


@pytest.mark.parametrize("unit", list(Unit))
def test_a_chain_is_its_own_bit_for_bit(unit: Unit) -> None:  # invariant 3
    inputs = random_input(1, unit, [400, 3, 0, 1500], 0.7)
    whole = gae(inputs, gamma=0.99, lam=0.95)
    assert inputs.last_value is not None
    for c in range(4):
        span = slice(inputs.offsets[c], inputs.offsets[c + 1])
        part = GAEInput(
            *(inputs.values[span], inputs.rewards[span], inputs.mask[span]),
            offsets=np.array([0, span.stop - span.start]),
            unit=unit,
            key=None if inputs.key is None else inputs.key[span],
            last_value=inputs.last_value[c : c + 1],
        )
        alone = gae(part, gamma=0.99, lam=0.95)
        assert bits(alone.advantage, alone.returns) == bits(whole.advantage[span], whole.returns[span])


def test_chunks_change_the_last_digits_alone() -> None:  # invariant 4
    rng = np.random.default_rng(2)
    lengths, share = [5000, 17, 900], np.array([1.0, 0.9, 0.999])
    x, offsets = rng.normal(size=sum(lengths)), offsets_of(lengths)
    expected = scan_by_hand(x, share, offsets, np.ones(len(x)), np.zeros(3))
    for block in (1, 2, 37, 128, 256, 10_000):
        np.testing.assert_allclose(linear_scan_reverse(x, share, offsets, block=block), expected, rtol=1e-9, atol=1e-11)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), shares)
def test_the_ends_of_lambda(seed: int, gamma: float) -> None:  # invariant 5
    inputs = replace(random_input(seed, Unit.ACTION_TOKEN, [25, 4], 1.0), last_value=None)
    to_go = linear_scan_reverse(inputs.rewards, gamma, inputs.offsets)
    zero = replace(inputs, values=np.zeros(29))
    np.testing.assert_allclose(gae(zero, gamma=gamma, lam=1.0).advantage, to_go, atol=1e-10)
    np.testing.assert_allclose(gae(inputs, gamma=gamma, lam=1.0).returns, to_go, atol=1e-6)
    following = np.append(inputs.values[1:], 0).astype(np.float64)
    following[24] = 0
    np.testing.assert_allclose(
        gae(inputs, gamma=gamma, lam=0.0).advantage, inputs.rewards + gamma * following - inputs.values, atol=1e-12
    )


def test_rewards_between_units_belong_to_the_one_before() -> None:  # invariant 6
    mask = np.array([False, True, False, True, True, False])
    rewards = np.array([7.0, 0, 0.25, 0, 1, 0.5])
    out = gae(GAEInput(np.zeros(6), rewards, mask, np.array([0, 6])), gamma=1.0, lam=0.0)
    assert out.advantage.tolist() == [0, 0.25, 0, 0, 1.5, 0]
    assert out.unclaimed == 1  # the 7 came before anything was decided
    chains = gae(GAEInput(np.zeros(6), rewards, mask, np.array([0, 2, 6])), gamma=1.0, lam=0.0)
    assert chains.advantage.tolist() == [0, 0, 0, 0, 1.5, 0] and chains.unclaimed == 2  # never across chains


def test_cut_chains_go_on_with_the_value_they_were_cut_at() -> None:  # invariant 7
    inputs = GAEInput(np.array([0.5, 0.25, 0.5]), np.zeros(3), np.ones(3, dtype=bool), np.array([0, 2, 3]))
    ended = gae(inputs, gamma=0.5, lam=1.0)
    cut = gae(replace(inputs, last_value=np.array([0.8, 0.0])), gamma=0.5, lam=1.0)
    assert ended.returns.tolist() == [0.0, 0.0, 0.0]
    np.testing.assert_allclose(cut.returns, [0.2, 0.4, 0.0])


def test_degenerate_inputs_are_zero_and_finite() -> None:
    nothing = gae(GAEInput(np.zeros(0), np.zeros(0), np.zeros(0, dtype=bool), np.array([0])), gamma=1.0, lam=1.0)
    assert nothing.advantage.shape == (0,) and nothing.unclaimed == 0
    for unit in Unit:
        inputs = random_input(3, unit, [5, 0, 5], 0.0)
        out = gae(inputs, gamma=1.0, lam=1.0)
        assert not out.advantage.any() and not out.returns.any() and not out.value_mask.any()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"values": np.zeros(4)}, r"values \(4,\): expected \(5,\)"),
        ({"mask": np.ones(5)}, "mask float64"),
        ({"offsets": np.array([0, 4])}, "end at 5"),
        ({"last_value": np.zeros(2)}, "one a chain"),
        ({"unit": Unit.STEP}, "unit step: key"),
        ({"key": np.zeros(5)}, "unit action_token: key"),
        ({"unit": Unit.STEP, "key": np.array([1, 1, 2, 1, 1])}, "token 3: key 1 comes back"),
        ({"values": np.array([0, 0, np.nan, 0, 0])}, "value of unit 2 is nan"),
        ({"rewards": np.array([0, np.inf, 0, 0, 0])}, "reward of unit 1 is inf"),
        ({"last_value": np.array([np.nan])}, "last_value"),
    ],
)
def test_inputs_that_cannot_be_are_named(values: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "values": np.zeros(5),
        "rewards": np.zeros(5),
        "mask": np.ones(5, dtype=bool),
        "offsets": np.array([0, 5]),
    }
    with pytest.raises(ValueError, match=message):
        gae(GAEInput(**{**arguments, **values}), gamma=1.0, lam=1.0)


def test_shares_that_cannot_be_are_named() -> None:
    inputs = sao([True] * 5)
    with pytest.raises(ValueError, match="gamma spans 1.5"):
        gae(inputs, gamma=1.5, lam=1.0)
    with pytest.raises(ValueError, match="lambda spans -0.1"):
        gae(inputs, gamma=1.0, lam=-0.1)
    with pytest.raises(ValueError, match=r"lambda \(2,\)"):
        gae(inputs, gamma=1.0, lam=np.ones(2))


# ---- batches -------------------------------------------------------------------------------------------------------


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
    config = GAE(unit=unit, gamma=0.95, lam=0.9, turn_rewards=True)  # invariants 3 and 8

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


def test_a_subagent_is_linked_where_it_happened() -> None:  # invariant 8
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


def test_output_is_whole() -> None:
    out: GAEOutput = gae(random_input(11, Unit.STEP, [20, 10], 0.5), gamma=1.0, lam=0.5)
    assert out.unit_offsets[-1] == len(out.unit_token) == len(out.unit_value)
    np.testing.assert_array_equal(out.advantage[out.unit_token], out.unit_advantage)
    np.testing.assert_array_equal(out.returns[out.unit_token], out.unit_return)
