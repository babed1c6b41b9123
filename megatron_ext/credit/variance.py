"""What a group's spread consists of, and how far to trust an estimate: variance shares, shrinkage, contrast counts.

Invariants (``tests/credit/test_variance.py`` asserts each):

1. Variance within sub-groups and between them add up to the variance of the group, to 1e-12 of it.
2. Adding a constant to all scores, or scaling them, changes no share; shares lie in [0, 1].
3. A shrunk estimate lies between the estimate and the mean of its type; its factor lies in [0, 1].
4. A contrast counts each rollout once, however many of its turns match.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.exact import exact_sum
from megatron_ext.credit.groups import Keys, compose_keys, group_stats, members, numbered, single_key


@dataclass(frozen=True, eq=False)
class VarianceShares:
    """Variances of K groups and of their sub-groups; ``index`` int64 [J] is each member's group, -1 absent.

    ``total``, which is ``within`` + ``between`` where they are of the population, float64 [K]; ``count`` int64 [K]
    members; ``parts`` int64 [K] sub-groups; ``smallest`` int64 [K] members of the smallest of them.
    """

    index: NDArray[np.int64]
    total: NDArray[np.float64]
    within: NDArray[np.float64]
    between: NDArray[np.float64]
    count: NDArray[np.int64]
    parts: NDArray[np.int64]
    smallest: NDArray[np.int64]

    def estimable(self, *, min_parts: int = 2, min_members: int = 2) -> NDArray[np.bool_]:
        """bool [K]: groups with a spread and ``min_parts`` sub-groups or more, none of fewer than ``min_members``."""
        result: NDArray[np.bool_] = (self.parts >= min_parts) & (self.smallest >= min_members) & (self.total > 0)
        return result

    @property
    def share(self) -> NDArray[np.float64]:
        """``1 - within / total`` of each group, float64 [K]: what the sub-group explains; 0 without spread."""
        ratio = np.divide(self.within, self.total, out=np.ones(len(self.total)), where=self.total > 0)
        return np.clip(1.0 - ratio, 0.0, 1.0)

    def of_member(self, values: NDArray[Any], absent: Any) -> NDArray[Any]:
        """A value of each group [K], as that of each member [J]; ``absent`` for those who are."""
        return np.append(values, absent)[self.index]  # index -1 is what was appended

    def explained(self, fallback: float, *, min_parts: int = 2, min_members: int = 2) -> NDArray[np.float64]:
        """``share`` of each member's group, float64 [J]; ``fallback`` where it is not ``estimable``, and for absent
        members (AdaStep, eq. 17)."""
        usable = self.estimable(min_parts=min_parts, min_members=min_members)
        return self.of_member(np.where(usable, self.share, fallback), fallback)


def variance_shares(
    scores: NDArray[Any], key: Keys, part: NDArray[Any], present: NDArray[np.bool_] | None = None, *, ddof: int = 0
) -> VarianceShares:
    """Law of total variance: ``scores`` [J] of the groups ``key`` [J] and their sub-groups ``part`` [J] (actions).

    ``ddof`` 1 takes sample variances, ``within`` their mean weighed by members: what they do not add up to by then is
    left out of ``between``, and shares are cut off at 0 and 1.
    """
    if ddof not in (0, 1):
        raise ValueError(f"ddof {ddof}: must be 0 (population) or 1 (sample)")
    names = single_key(key)
    here = members(scores, names, present)
    score = np.asarray(scores, dtype=np.float64)[here]
    groups = group_stats(score, names[here])
    at = groups.member
    sub = compose_keys(at, np.asarray(part)[here])
    parts = group_stats(score, sub)
    size = len(groups.keys)
    owner = np.zeros(len(parts.keys), dtype=np.int64)
    owner[parts.member] = at
    within = exact_sum(parts.squares * (parts.count / np.maximum(parts.count - ddof, 1)), owner, size)
    between = exact_sum(parts.count * (parts.mean - groups.mean[owner]) ** 2, owner, size)
    smallest = np.full(size, np.iinfo(np.int64).max)
    np.minimum.at(smallest, owner, parts.count)
    index = np.full(len(names), -1, dtype=np.int64)
    index[here] = at
    total = groups.variance(ddof)
    constant = groups.constant()
    return VarianceShares(
        index,
        np.where(constant, 0.0, total),
        np.where(constant, 0.0, within / groups.count),
        np.where(constant, 0.0, between / groups.count),
        groups.count,
        np.bincount(owner, minlength=size),
        smallest,
    )


@dataclass(frozen=True, eq=False)
class Shrunk:
    """Estimates drawn towards the mean of their type, float64 [J] each (0 where absent).

    ``mean``, what they are drawn to; ``prior`` variance of the true values; ``factor`` B, the weight of the estimate
    itself; ``value`` = mean + B (estimate - mean).
    """

    mean: NDArray[np.float64]
    prior: NDArray[np.float64]
    factor: NDArray[np.float64]
    value: NDArray[np.float64]


def shrink(
    estimate: NDArray[Any], variance: NDArray[Any], key: Keys, present: NDArray[np.bool_] | None = None
) -> Shrunk:
    """Empirical-Bayes shrinkage by type, method of moments: ``B = t^2 / (t^2 + v)``, ``t^2 = max(0, var - mean v)``.

    ``estimate`` and its ``variance`` [J] by type ``key`` [J]; var is the sample variance of the type's estimates. A
    type of one is drawn wholly to the mean of all types (B = 0). Where t^2 + v = 0, B is 0 too.
    """
    names = single_key(key)
    here = members(estimate, names, present)
    noise = np.asarray(variance, dtype=np.float64)
    if noise.shape != here.shape or not np.all(np.isfinite(noise[here]) & (noise[here] >= 0)):
        raise ValueError(f"variance {noise.shape}: need {here.shape} values, finite and not negative where present")
    mean, prior, factor, value = (np.zeros(len(names)) for _ in range(4))
    if not here.any():
        return Shrunk(mean, prior, factor, value)
    own = np.asarray(estimate, dtype=np.float64)
    types, noises = group_stats(own, names, here), group_stats(noise, names, here)
    at = types.member[here]
    alone = types.count[at] == 1
    centre = np.where(alone, group_stats(own[here], np.zeros(int(here.sum()))).mean[0], types.mean[at])
    spread = np.where(alone, 0.0, np.maximum(types.variance(ddof=1) - noises.mean, 0.0)[at])
    both = spread + noise[here]
    weight = np.divide(spread, both, out=np.zeros_like(spread), where=both > 0)
    mean[here], prior[here], factor[here] = centre, spread, weight
    value[here] = centre + weight * (own[here] - centre)
    return Shrunk(mean, prior, factor, value)


def contrast_counts(
    pairs: NDArray[Any], rollout: NDArray[Any], success: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct rollouts, successful and failed, among each item and its direct matches; int64 [M] each.

    ``pairs`` int [E, 2]: items (turns) that match, in either order; matching is not transitive. ``rollout`` [M] that
    the item belongs to; ``success`` bool [M] its rollout's outcome.
    """
    edges = np.asarray(pairs, dtype=np.int64).reshape(-1, 2)
    size = len(rollout)
    if np.shape(success) != (size,) or (len(edges) and not 0 <= edges.min() <= edges.max() < size):
        raise ValueError(f"pairs must name items 0..{size - 1}, success {np.shape(success)} must be one an item")
    own = np.arange(size, dtype=np.int64)
    item = np.concatenate([own, edges[:, 0], edges[:, 1]])
    other = np.concatenate([own, edges[:, 1], edges[:, 0]])
    owner = numbered(np.asarray(rollout))[1]
    _, once = np.unique(compose_keys(item, owner[other]), return_index=True)
    item, other = item[once], other[once]
    won = np.asarray(success, dtype=bool)[other]
    return np.bincount(item[won], minlength=size), np.bincount(item[~won], minlength=size)
