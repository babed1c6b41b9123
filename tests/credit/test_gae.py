"""Invariants of ``credit/gae.py``, against the estimator as a loop, and the specifications' numbers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.credit.gae import GAEInput, GAEOutput, Unit, gae, length_adaptive_lambda, unit_advantages
from megatron_ext.credit.scan import linear_scan_reverse
from tests.helpers.chains import bits, offsets_of

Array = NDArray[Any]
shares = st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0, 1))


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


def test_numbers_of_steppo() -> None:
    advantage, returns = unit_advantages(
        np.array([0, 0, 1.0, 0, 0]), np.array([0.2, 0.4, 0.7, 0.3, 0.2]), np.array([0, 3, 5]), gamma=0.9, lam=0.95
    )
    np.testing.assert_allclose(advantage, [0.575958, 0.4865, 0.3, -0.291, -0.2], atol=5e-7)
    np.testing.assert_allclose(returns, [0.775958, 0.8865, 1, 0.009, 0], atol=5e-7)
    whitened = (advantage - advantage.mean()) / (advantage.std(ddof=1) + 1e-8)
    np.testing.assert_allclose(whitened, [1.011139, 0.785942, 0.316454, -1.171307, -0.942227], atol=5e-7)


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


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), shares)
def test_the_ends_of_lambda(seed: int, gamma: float) -> None:  # invariant 4
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


def test_rewards_between_units_belong_to_the_one_before() -> None:  # invariant 5
    mask = np.array([False, True, False, True, True, False])
    rewards = np.array([7.0, 0, 0.25, 0, 1, 0.5])
    out = gae(GAEInput(np.zeros(6), rewards, mask, np.array([0, 6])), gamma=1.0, lam=0.0)
    assert out.advantage.tolist() == [0, 0.25, 0, 0, 1.5, 0]
    assert out.unclaimed == 1  # the 7 came before anything was decided
    chains = gae(GAEInput(np.zeros(6), rewards, mask, np.array([0, 2, 6])), gamma=1.0, lam=0.0)
    assert chains.advantage.tolist() == [0, 0, 0, 0, 1.5, 0] and chains.unclaimed == 2  # never across chains


def test_cut_chains_go_on_with_the_value_they_were_cut_at() -> None:  # invariant 6
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


def test_output_is_whole() -> None:
    out: GAEOutput = gae(random_input(11, Unit.STEP, [20, 10], 0.5), gamma=1.0, lam=0.5)
    assert out.unit_offsets[-1] == len(out.unit_token) == len(out.unit_value)
    np.testing.assert_array_equal(out.advantage[out.unit_token], out.unit_advantage)
    np.testing.assert_array_equal(out.returns[out.unit_token], out.unit_return)
