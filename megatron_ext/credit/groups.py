"""Keyed group statistics: scores of the members of a group, centred, scaled, ranked (specs, P3).

Invariants (``tests/credit/test_groups.py`` asserts each):

1. A group whose scores agree within ``tolerance`` gives exactly 0, not the quotient of two rounding errors.
2. A group of one gives 0 (``singleton='zero'``); the raw score only when asked for.
3. Members that are not present do not vote on mean, spread, rank or size, and get exactly 0.
4. Members of a group need not be neighbours and groups need not be equal in size. Order changes no bit of a result, nor
   does the way in which ranks share the members out when they gather them (``gathered``).
5. With ``rollout`` given, each rollout votes once, in however many rows it stands; its rows get the same value.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.exact import exact_sum
from megatron_ext.credit.protocol import Reduce, Stat

SINGLETON = ("zero", "raw")
BASELINE = ("mean", "leave_one_out")
Keys = NDArray[Any] | Sequence[NDArray[Any]]


def numbered(key: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """The sorted distinct keys [K], and each member's number among them, int64 [J]."""
    if key.dtype.kind == "i" and len(key):
        low, high = int(key.min()), int(key.max())
        if high - low < 4 * len(key):  # a table instead of a sort
            shifted = key.astype(np.int64) - low
            there = np.zeros(high - low + 1, dtype=bool)
            there[shifted] = True
            return np.flatnonzero(there) + low, (np.cumsum(there) - 1)[shifted]
    keys, member = np.unique(key, return_inverse=True)
    return keys, member.astype(np.int64)


def compose_keys(*keys: NDArray[Any]) -> NDArray[np.int64]:
    """One int64 key [J] for the tuple of the given keys (prompt and role, uid and kind, ...); equal tuples of this call
    get equal numbers, which mean nothing elsewhere."""
    combined = numbered(np.asarray(keys[0]))[1]
    for key in keys[1:]:
        values, index = numbered(np.asarray(key))
        combined = numbered(combined * len(values) + index)[1]
    return combined


def single_key(key: Keys) -> NDArray[Any]:
    """A key as one array: a sequence of arrays is a composite key."""
    return key if isinstance(key, np.ndarray) else compose_keys(*key)


def members(scores: NDArray[Any], key: NDArray[Any], present: NDArray[np.bool_] | None) -> NDArray[np.bool_]:
    """Who is present, bool [J]. Raises ``ValueError`` on shapes that differ and on scores that are not finite."""
    here = np.ones(len(scores), dtype=bool) if present is None else np.asarray(present, dtype=bool)
    if np.ndim(scores) != 1 or not np.shape(scores) == np.shape(key) == here.shape:
        raise ValueError(f"scores {np.shape(scores)}, key {np.shape(key)}, present {here.shape}: all must be [J]")
    bad = here & ~np.isfinite(scores)
    if bad.any():
        at = int(np.argmax(bad))
        raise ValueError(f"score {at} is {scores[at]}: mask members without a valid score through `present`")
    return here


@dataclass(frozen=True, eq=False)
class GroupStats:
    """Statistics of K groups, by their sorted ``keys`` [K].

    ``count`` int64 [K]; ``total`` sum; ``squares`` sum of squared distances from the mean; ``low``, ``high``; float64
    [K]. Every group has a member. ``member`` int64 [J]: the group of each of those that it was made of, -1 absent.
    """

    keys: NDArray[Any]
    count: NDArray[np.int64]
    total: NDArray[np.float64]
    squares: NDArray[np.float64]
    low: NDArray[np.float64]
    high: NDArray[np.float64]
    member: NDArray[np.int64]

    @property
    def mean(self) -> NDArray[np.float64]:
        return self.total / self.count

    def variance(self, ddof: int = 0) -> NDArray[np.float64]:
        return self.squares / np.maximum(self.count - ddof, 1)

    def std(self, ddof: int = 0) -> NDArray[np.float64]:
        return np.sqrt(self.variance(ddof))

    @property
    def sumsq(self) -> NDArray[np.float64]:
        """Sum of the squared scores."""
        return self.squares + self.total * self.mean

    def constant(self, tolerance: float = 0.0) -> NDArray[np.bool_]:
        """bool [K]: highest and lowest score differ by no more than ``tolerance``."""
        result: NDArray[np.bool_] = self.high - self.low <= tolerance
        return result

    def index(self, key: NDArray[Any]) -> NDArray[np.int64]:
        """Where each key [J] stands in ``keys``, -1 if it does not."""
        if not len(self.keys):
            return np.full(len(key), -1, dtype=np.int64)
        at = np.minimum(np.searchsorted(self.keys, key), len(self.keys) - 1)
        return np.where(self.keys[at] == key, at, -1)


def group_stats(scores: NDArray[Any], key: Keys, present: NDArray[np.bool_] | None = None) -> GroupStats:
    """Of ``scores`` [J] by ``key`` [J] (any sortable dtype, or a sequence of keys), where ``present`` (None = all)."""
    names = single_key(key)
    here = members(scores, names, present)
    keys, member = numbered(names[here])
    score = np.asarray(scores)[here].astype(np.float64)
    size = len(keys)
    count = np.bincount(member, minlength=size)
    low, high = np.full(size, np.inf), np.full(size, -np.inf)
    np.minimum.at(low, member, score)
    np.maximum.at(high, member, score)
    total = exact_sum(score, member, size)
    squares = exact_sum((score - (total / np.maximum(count, 1))[member]) ** 2, member, size)
    everyone = np.full(len(here), -1, dtype=np.int64)
    everyone[here] = member
    return GroupStats(keys, count, total, squares, low, high, everyone)


def gathered(
    name: str, scores: NDArray[Any], key: NDArray[Any], present: NDArray[np.bool_] | None = None
) -> dict[str, Stat]:
    """Members to be gathered from all ranks, for groups that no rank holds whole (a skill, a stage, a task type).

    ``key`` must mean the same on every rank. ``group_stats(reduced[f"{name}/score"], reduced[f"{name}/key"])`` is then
    the same on all of them, and ``group_normalize(..., stats=...)`` applies it to a rank's own members.
    """
    here = members(scores, key, present)
    return {
        f"{name}/key": Stat(Reduce.GATHER, np.asarray(key)[here]),
        f"{name}/score": Stat(Reduce.GATHER, np.asarray(scores, dtype=np.float64)[here]),
    }


def _one_vote(
    values: NDArray[np.float64], key: NDArray[Any], rollout: NDArray[Any], here: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """bool [J]: the first present row of each rollout in each group."""
    rows = np.flatnonzero(here)
    member = compose_keys(key[here], np.asarray(rollout)[here])
    first = np.unique(member, return_index=True)[1]
    odd = values[rows] != values[rows[first]][member]
    if odd.any():
        at = int(rows[np.argmax(odd)])
        other = int(rows[first[member[np.argmax(odd)]]])
        raise ValueError(
            f"rollout {np.asarray(rollout)[at]!s}: rows {other} and {at} score {values[other]} and {values[at]}; rows "
            "of one rollout must agree, or vote as rows"
        )
    vote = np.zeros(len(values), dtype=bool)
    vote[rows[first]] = True
    return vote


def group_normalize(
    scores: NDArray[Any],
    key: Keys,
    *,
    rollout: NDArray[Any] | None = None,
    present: NDArray[np.bool_] | None = None,
    std: bool = True,
    ddof: int = 0,
    eps: float = 1e-6,
    std_floor: float | NDArray[Any] = 0.0,
    singleton: str = "zero",
    baseline: str | NDArray[Any] = "mean",
    tolerance: float = 1e-6,
    stats: GroupStats | None = None,
) -> NDArray[np.float64]:
    """``(score - baseline) / (max(std, std_floor) + eps)`` within each group, or ``score - baseline`` (GRPO).

    Args:
        scores: [J], finite where present.
        key: [J], equal for members of one group; any sortable dtype, or a sequence of such keys (a composite key).
        rollout: [J]: rows with equal rollout and key are one member, and must have one score; None: each row votes.
        present: bool [J]; None = all.
        std: divide by the group's standard deviation.
        ddof: 0 population, 1 sample standard deviation.
        eps: added to the standard deviation.
        std_floor: the least standard deviation to divide by, a number or one a member [J] (CARE, eq. 9).
        singleton: what a group of one present member gets: ``zero``, or its ``raw`` score.
        baseline: ``mean``; ``leave_one_out``, the mean of the others (RLOO); or values [J] that come from elsewhere (a
            window, a value model), which then stand for constant groups and groups of one too unless ``std`` divides.
        tolerance: a group whose highest and lowest score differ by no more than this is constant.
        stats: of members elsewhere as well (see ``gathered``); None: of these members. Needs a plain key.

    Returns:
        float64 [J].
    """
    if singleton not in SINGLETON:
        raise ValueError(f"singleton {singleton!r}: must be one of {', '.join(SINGLETON)}")
    if isinstance(baseline, str) and baseline not in BASELINE:
        raise ValueError(f"baseline {baseline!r}: must be one of {', '.join(BASELINE)}, or values")
    if ddof not in (0, 1):
        raise ValueError(f"ddof {ddof}: must be 0 (population) or 1 (sample)")
    if stats is not None and not isinstance(key, np.ndarray):
        raise ValueError("statistics from elsewhere need one key that means the same there, not a composite")
    names = single_key(key)
    here = members(scores, names, present)
    values = np.asarray(scores, dtype=np.float64)
    out = np.zeros(len(values))
    if not here.any():
        return out
    if stats is None and rollout is None:
        stats = group_stats(values, names, here)
        at = stats.member[here]
    else:
        if stats is None:
            assert rollout is not None
            stats = group_stats(values, names, _one_vote(values, names, rollout, here))
        at = stats.index(names[here])
    if np.any(at < 0):
        raise ValueError(f"key {names[here][int(np.argmax(at < 0))]!s}: the given statistics have no such group")
    score, count = values[here], stats.count[at]
    if isinstance(baseline, str):
        result = score - stats.mean[at]
        if baseline == "leave_one_out":
            result *= count / np.maximum(count - 1, 1)
    else:
        result = score - np.asarray(baseline, dtype=np.float64)[here]
    if std:
        floor = np.broadcast_to(np.asarray(std_floor, dtype=np.float64), values.shape)[here]
        spread = np.maximum(stats.std(ddof)[at], floor) + eps
        result = np.divide(result, spread, out=np.zeros_like(result), where=spread > 0)
    if std or isinstance(baseline, str):
        result[stats.constant(tolerance)[at]] = 0.0
        if singleton == "raw":
            result = np.where(count == 1, score, result)
    out[here] = result
    return out


def weighted_z_sum(
    parts: Mapping[str, NDArray[Any]],
    weights: Mapping[str, float],
    key: Keys,
    *,
    present: Mapping[str, NDArray[np.bool_]] | None = None,
    ddof: int = 0,
    eps: float = 1e-6,
    tolerance: float = 1e-6,
) -> NDArray[np.float64]:
    """``sum_k weight_k z(part_k)``, each reward standardised within its group first (GDPO's first stage); float64 [J].

    A part that is constant in a group says nothing there. ``present`` name -> bool [J] where some lack a part.
    """
    if set(parts) != set(weights):
        raise ValueError(f"rewards {sorted(parts)} and weights {sorted(weights)} must have the same names")
    total: NDArray[np.float64] = np.zeros(len(single_key(key)))
    for name in sorted(parts):
        here = None if present is None else present.get(name)
        z = group_normalize(parts[name], key, present=here, ddof=ddof, eps=eps, tolerance=tolerance)
        total = total + weights[name] * z
    return total


# -- order statistics --------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Sorted:
    """Present members by group and score: ``order`` [n] into the members; ``start``, ``size``, ``keys`` by group."""

    order: NDArray[np.int64]
    score: NDArray[np.float64]
    start: NDArray[np.int64]
    size: NDArray[np.int64]
    keys: NDArray[Any]


def _sorted(scores: NDArray[Any], names: NDArray[Any], here: NDArray[np.bool_]) -> _Sorted:
    keys, member = numbered(names[here])
    score = np.asarray(scores, dtype=np.float64)[here]
    order = np.lexsort((score, member))
    count = np.bincount(member, minlength=len(keys))
    return _Sorted(np.flatnonzero(here)[order], score[order], np.cumsum(count) - count, count, keys)


def group_rank(scores: NDArray[Any], key: Keys, present: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """Place of each member in its group by rising score, 0 .. m - 1, ties sharing their mean place; float64 [J]."""
    names = single_key(key)
    here = members(scores, names, present)
    by = _sorted(scores, names, here)
    place = np.arange(len(by.order))
    starts = np.repeat(by.start, by.size)
    new = np.ones(len(place), dtype=bool)
    new[1:] = (by.score[1:] != by.score[:-1]) | (starts[1:] != starts[:-1])
    run = np.cumsum(new) - 1
    first = np.flatnonzero(new)
    mean = (first + np.append(first[1:], len(place)) - 1) / 2
    out = np.zeros(len(names))
    out[by.order] = mean[run] - starts if len(place) else 0.0
    return out


def centred_rank(scores: NDArray[Any], key: Keys, present: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
    """``(rank - (m - 1) / 2) / (m - 1)`` in [-1/2, 1/2], summing to 0 in each group; 0 in a group of one."""
    names = single_key(key)
    here = members(scores, names, present)
    size = group_size(names, here)
    rank = group_rank(scores, names, here)
    return np.where(here & (size > 1), (rank - (size - 1) / 2) / np.maximum(size - 1, 1), 0.0)


def group_size(key: Keys, present: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
    """Present members of each one's group, int64 [J] (also for those that are not present themselves)."""
    names = single_key(key)
    member = numbered(names)[1]
    return np.bincount(member, weights=present)[member].astype(np.int64)


def group_quantile(
    scores: NDArray[Any], key: Keys, q: float, present: NDArray[np.bool_] | None = None, *, empty: float = 0.0
) -> NDArray[np.float64]:
    """The ``q``-quantile (0..1, linear between neighbours) of the present scores of each one's group, float64 [J];
    ``empty`` for members of a group in which nobody is present."""
    if not 0.0 <= q <= 1.0:
        raise ValueError(f"quantile {q}: must be within 0 and 1")
    names = single_key(key)
    here = members(scores, names, present)
    by = _sorted(scores, names, here)
    place = q * (by.size - 1)
    below = np.floor(place).astype(np.int64)
    above = np.minimum(below + 1, by.size - 1)
    low, high = by.score[by.start + below], by.score[by.start + above]
    value = low + (place - below) * (high - low)
    if not len(by.keys):
        return np.full(len(names), empty)
    at = np.minimum(np.searchsorted(by.keys, names), len(by.keys) - 1)
    return np.where(by.keys[at] == names, value[at], empty)
