"""Generalised advantage estimation over tokens, action tokens, steps or segments, on ragged flat arrays.

A *chain* is a sequence of *units* that follow one another (usually a trajectory); a unit is what one decision was: a
token that was sampled, a step, a segment. What stands between units never enters: an observation is no state in which
the policy acted. With delta_k = r_k + gamma V_{k+1} - V_k, the advantage is A_k = delta_k + gamma lambda A_{k+1}
(Schulman et al. 2016, eq. 16) and the return A_k + V_k.

Invariants (``tests/credit/test_gae.py`` asserts each):

1. Advantages, returns and the value mask are 0 on untrained tokens, whatever values and rewards stand there.
2. Inserting or changing observation tokens changes no bit of what trained tokens get (unit ``token`` apart).
3. Nor does the company a chain keeps: each chain's numbers are its own, bit for bit.
4. lambda = 1 and V = 0 give the discounted reward to go; lambda = 0 gives delta.
5. A reward between two units belongs to the one before it; one that no unit precedes is past, and counted.
6. A chain ends in a terminal state (value 0) unless the value of the state it was cut at is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.scan import check_offsets, linear_scan_reverse

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Unit(StrEnum):
    TOKEN = "token"  # every token, observations too: the naive estimator, for comparison
    ACTION_TOKEN = "action_token"  # trained tokens alone (skip observation: SAO)
    STEP = "step"  # a turn; its value stands at its first trained token (StepPO)
    SEGMENT = "segment"


@dataclass(frozen=True, eq=False)
class GAEInput:
    """T tokens in C chains.

    ``values`` float [T]: V of the state in which token t was sampled (from the tokens before it). ``rewards`` float
    [T]. ``mask`` bool [T]: trained tokens. ``offsets`` int64 [C+1]: token span of each chain. ``unit``: what is linked.
    ``key`` int64 [T]: for ``step`` and ``segment``, equal on the trained tokens of one unit. ``last_value`` float [C]:
    V of the state after the chain where it was cut off, 0 where it ended; None = every chain ended.
    """

    values: NDArray[Any]
    rewards: NDArray[Any]
    mask: NDArray[np.bool_]
    offsets: NDArray[Any]
    unit: Unit = Unit.ACTION_TOKEN
    key: NDArray[Any] | None = None
    last_value: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        tokens, shapes = len(self.mask), {"values": self.values, "rewards": self.rewards, "key": self.key}
        for name, array in shapes.items():
            if array is not None and array.shape != (tokens,):
                raise ValueError(f"{name} {array.shape}: expected ({tokens},) like mask")
        if self.mask.dtype != np.bool_ or self.mask.ndim != 1:
            raise ValueError(f"mask {self.mask.dtype} {self.mask.shape}: must be bool [T]")
        check_offsets(self.offsets, tokens)
        chains = len(self.offsets) - 1
        if self.last_value is not None and self.last_value.shape != (chains,):
            raise ValueError(f"last_value {self.last_value.shape}: expected ({chains},), one a chain")
        if (self.unit in (Unit.STEP, Unit.SEGMENT)) != (self.key is not None):
            raise ValueError(f"unit {self.unit}: key is for units step and segment, which need it")


@dataclass(frozen=True, eq=False)
class GAEOutput:
    """T tokens, U units in C chains.

    ``advantage`` float64 [T], equal on the tokens of a unit, 0 on untrained tokens. ``returns`` float64 [T] and
    ``value_mask`` bool [T]: the target of the value at the token where the unit's value stands; 0 and False elsewhere.
    ``unit_advantage``, ``unit_return``, ``unit_value`` float64 [U], ``unit_token`` int64 [U] (a unit's first token) and
    ``unit_offsets`` int64 [C+1]: the same, before it is spread. ``unclaimed``: rewards that no unit preceded.
    """

    advantage: Floats
    returns: Floats
    value_mask: NDArray[np.bool_]
    unit_advantage: Floats
    unit_return: Floats
    unit_value: Floats
    unit_token: Ints
    unit_offsets: Ints
    unclaimed: int


@dataclass(frozen=True, eq=False)
class Links:
    """The linked tokens in chain order: ``token`` [M] index, ``offsets`` [C+1] into them, ``unit`` [M] index of each
    one's unit (None: each is one), ``trained`` bool [M] (None: all are)."""

    token: Ints
    offsets: Ints
    unit: Ints | None
    trained: NDArray[np.bool_] | None


def unit_advantages(
    rewards: NDArray[Any],
    values: NDArray[Any],
    offsets: NDArray[Any],
    *,
    gamma: float,
    lam: float | NDArray[Any],
    last_value: NDArray[Any] | None = None,
    return_lam: float | NDArray[Any] | None = None,
) -> tuple[Floats, Floats]:
    """Advantage and return of units that already stand side by side; float64 [U] each.

    Args:
        rewards, values: [U], finite.
        offsets: [C+1], unit span of each chain.
        gamma, lam: in 0..1; ``lam`` one number, or one a chain [C].
        last_value: [C], value of the state after the last unit; None = 0.
        return_lam: lambda of the returns when the critic learns from another one (decoupled GAE, VAPO); None = ``lam``.

    Raises:
        ValueError: shapes that disagree, a gamma or lambda outside 0..1, a value or reward that is not finite.
    """
    reward, value = np.asarray(rewards, dtype=np.float64), np.asarray(values, dtype=np.float64)
    if reward.shape != value.shape:
        raise ValueError(f"rewards {reward.shape} and values {value.shape}: must both be [U]")
    check_offsets(offsets, len(value))
    for name, array in (("reward", reward), ("value", value)):
        if not np.all(np.isfinite(array)):
            at = int(np.argmax(~np.isfinite(array)))
            raise ValueError(f"{name} of unit {at} is {array[at]}: mask its trajectory")
    _check_share("gamma", np.asarray(gamma, dtype=np.float64), ())
    chains = len(offsets) - 1
    used = np.diff(offsets) > 0
    ends = offsets[1:][used] - 1
    delta = np.empty_like(value)
    delta[:-1] = value[1:]
    delta[ends] = 0.0 if last_value is None else np.asarray(last_value, dtype=np.float64)[used]
    if not np.all(np.isfinite(delta[ends])):
        raise ValueError("last_value holds a number that is not finite in a chain that has units")
    delta *= gamma
    delta += reward
    delta -= value

    def scan(share: float | NDArray[Any]) -> Floats:
        per_chain = _check_share("lambda", np.asarray(share, dtype=np.float64), (chains,))
        return linear_scan_reverse(delta, gamma * per_chain, offsets)

    advantage = scan(lam)
    return advantage, (advantage if return_lam is None else scan(return_lam)) + value


def _check_share(name: str, share: Floats, shape: tuple[int, ...]) -> Floats:
    if share.ndim and share.shape != shape:
        raise ValueError(f"{name} {share.shape}: one number, or {shape}, one a chain")
    if share.size and not (share.min() >= 0 and share.max() <= 1):
        raise ValueError(f"{name} spans {share.min()}..{share.max()}: must lie in 0..1")
    return share


def gae(
    inputs: GAEInput, *, gamma: float, lam: float | NDArray[Any], return_lam: float | NDArray[Any] | None = None
) -> GAEOutput:
    """Advantages and returns of masked, ragged chains; ``gamma``, ``lam`` and ``return_lam`` as ``unit_advantages``."""
    offsets = np.asarray(inputs.offsets, dtype=np.int64)
    if inputs.unit is Unit.TOKEN:
        links = Links(np.arange(len(inputs.mask)), offsets, None, inputs.mask)
        starts = offsets
    else:
        token = np.flatnonzero(inputs.mask)
        starts = np.searchsorted(token, offsets)
        unit = None if inputs.key is None else runs(np.asarray(inputs.key)[token], starts, token)
        links = Links(token, starts, unit, None)
    paid = np.flatnonzero(inputs.rewards)
    link = np.searchsorted(links.token, paid, side="right") - 1
    first = starts[np.searchsorted(offsets, paid, side="right") - 1]
    claimed = link >= first
    reward = _sums(link[claimed], inputs.rewards[paid[claimed]], len(links.token))
    return solve(links, inputs.values, reward, int(np.sum(~claimed)), gamma, lam, return_lam, inputs.last_value)


def _sums(index: Ints, values: NDArray[Any], size: int) -> Floats:
    """Sum of the values of each index, float64 [size]."""
    return np.bincount(index, weights=values, minlength=size).astype(np.float64, copy=False)


def runs(key: NDArray[Any], offsets: Ints, token: Ints) -> Ints:
    """Index of the run of equal keys, within one chain, that each link stands in; [M]."""
    first = np.ones(len(key), dtype=bool)
    first[1:] = key[1:] != key[:-1]
    first[offsets[:-1][np.diff(offsets) > 0]] = True
    heads = np.flatnonzero(first)
    pairs = np.stack([np.searchsorted(offsets, heads, side="right"), key[heads]])
    order = np.lexsort(pairs)
    again = np.all(pairs[:, order[1:]] == pairs[:, order[:-1]], axis=0)
    if np.any(again):
        at = order[1:][again][0]
        raise ValueError(
            f"token {token[heads[at]]}: key {key[heads[at]]} comes back after another unit of its chain; give every "
            "unit one key and keep its tokens together"
        )
    return np.cumsum(first, dtype=np.int64) - 1


def solve(
    links: Links,
    values: NDArray[Any],
    reward: Floats,
    unclaimed: int,
    gamma: float,
    lam: float | NDArray[Any],
    return_lam: float | NDArray[Any] | None,
    last_value: NDArray[Any] | None,
) -> GAEOutput:
    """Advantages and returns of the links, whose rewards are ``reward`` float64 [M], spread over the tokens of
    ``values`` [T]; the rest as ``unit_advantages`` and ``GAEOutput`` have it."""
    token, offsets = links.token, links.offsets
    if links.unit is not None:
        heads = np.flatnonzero(np.diff(links.unit, prepend=-1))
        reward = _sums(links.unit, reward, len(heads))
        token, offsets = token[heads], np.searchsorted(heads, offsets)
    unit_value = values[token].astype(np.float64)
    advantage, target = unit_advantages(
        reward, unit_value, offsets, gamma=gamma, lam=lam, last_value=last_value, return_lam=return_lam
    )
    size = len(values)
    spread, returns, at_value = np.zeros(size), np.zeros(size), np.zeros(size, dtype=bool)
    spread[links.token] = advantage if links.unit is None else advantage[links.unit]
    returns[token], at_value[token] = target, True
    if links.trained is not None:
        off = links.token[~links.trained]
        spread[off], returns[off], at_value[off] = 0.0, 0.0, False
    return GAEOutput(spread, returns, at_value, advantage, target, unit_value, token, offsets, unclaimed)


def length_adaptive_lambda(lengths: NDArray[Any], alpha: float) -> Floats:
    """``1 - 1 / (alpha l)`` for chains of l units (VAPO; SAO's policy lambda), 0 for an empty chain; float64."""
    if not alpha >= 1:
        raise ValueError(f"alpha {alpha}: must be 1 or more, a smaller one makes lambda of a single unit negative")
    return np.where(np.asarray(lengths) > 0, 1.0 - 1.0 / (alpha * np.maximum(lengths, 1)), 0.0)
