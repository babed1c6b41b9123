"""Statistics of an evaluation: pass@k, intervals over tasks, and the paired gain. Pure; no model, no environment.

Invariants (``tests/training/test_evaluation.py`` asserts each):

1. The unit of every interval is the task: the samples of one task are not independent tries.
2. ``pass_at_k`` is unbiased for each k up to the number of samples, and rises with k.
3. Intervals contain their mean, narrow with more tasks, and are the same for the same seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A mean over ``n`` tasks and its two-sided confidence interval."""

    mean: float
    low: float
    high: float
    n: int


def pass_at_k(successes: NDArray[Any], k: int) -> NDArray[np.float64]:
    """Probability that one of k samples solves the task: float64 [n_tasks], whose mean is pass@k.

    ``successes`` is bool [n_tasks, n_samples]. Unbiased: ``1 - C(n - c, k) / C(n, k)`` with c successes among n samples
    (Chen et al. 2021, eq. 1).
    """
    values = np.asarray(successes, dtype=bool)
    if values.ndim != 2 or not 1 <= k <= values.shape[1]:
        raise ValueError(f"successes {values.shape}, k = {k}: expected [n_tasks, n_samples] with 1 <= k <= n_samples")
    n = values.shape[1]
    table = np.array([1.0 - math.comb(n - c, k) / math.comb(n, k) for c in range(n + 1)])
    result: NDArray[np.float64] = table[values.sum(axis=1)]
    return result


def _tasks(values: NDArray[Any]) -> NDArray[np.float64]:
    array = np.asarray(values, dtype=np.float64)
    if array.ndim != 1 or not len(array) or not np.all(np.isfinite(array)):
        raise ValueError(f"an interval needs a finite value for each of one or more tasks, got shape {array.shape}")
    return array


def _bootstrap(values: NDArray[np.float64], confidence: float, seed: int) -> Interval:
    """Percentile bootstrap over tasks, in blocks that keep the index array small."""
    rng, n = np.random.default_rng(seed), len(values)
    block = max(1, 2_000_000 // n)
    sizes = [min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block)]
    means = np.concatenate([values[rng.integers(0, n, (size, n))].mean(axis=1) for size in sizes])
    low, high = (float(x) for x in np.quantile(means, [(1 - confidence) / 2, (1 + confidence) / 2]))
    mean = float(values.mean())
    return Interval(mean, min(low, mean), max(high, mean), n)


def mean_interval(values: NDArray[Any], *, confidence: float = 0.95, method: str = "auto", seed: int = 0) -> Interval:
    """Mean over tasks ([n], one value a task) with its interval.

    ``wilson`` is the score interval of a proportion, for values that are all 0 or 1; ``bootstrap`` resamples tasks;
    ``auto`` takes the first where it applies. A bootstrap of values that are all equal has no width.
    """
    array = _tasks(values)
    binary = bool(np.all((array == 0) | (array == 1)))
    if method not in ("auto", "wilson", "bootstrap"):
        raise ValueError(f"method {method!r}: must be auto, wilson or bootstrap")
    if method == "wilson" and not binary:
        raise ValueError("the Wilson interval is for values that are all 0 or 1; use bootstrap")
    if method == "bootstrap" or not binary:
        return _bootstrap(array, confidence, seed)
    n, p = len(array), float(array.mean())
    z2 = NormalDist().inv_cdf((1 + confidence) / 2) ** 2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    return Interval(p, min(max(0.0, centre - half), p), max(min(1.0, centre + half), p), n)


def paired_interval(before: NDArray[Any], after: NDArray[Any], *, confidence: float = 0.95, seed: int = 0) -> Interval:
    """Mean of ``after - before`` over the same tasks in the same order ([n] each), by bootstrap over tasks."""
    first, second = _tasks(before), _tasks(after)
    if first.shape != second.shape:
        raise ValueError(f"before has {len(first)} tasks, after {len(second)}: a paired interval needs the same tasks")
    return _bootstrap(second - first, confidence, seed)


@dataclass(frozen=True, eq=False)
class EvalResult:
    """One evaluation of a task set.

    ``name`` of the set; ``tasks`` ids [n]; ``greedy`` bool [n]: solved by the greedy trajectory; ``sampled`` bool
    [n, s]: solved by each sampled one (s may be 0); ``turns`` [n]: model turns of the greedy trajectory; ``reward`` [n]
    of the greedy trajectory. Trajectories lost to environment errors count as failures; ``lost`` says how many, greedy
    and sampled.
    """

    name: str
    tasks: tuple[str, ...]
    greedy: NDArray[np.bool_]
    sampled: NDArray[np.bool_]
    turns: NDArray[np.float64]
    reward: NDArray[np.float64]
    lost: int = 0

    def __post_init__(self) -> None:
        n = len(self.tasks)
        if not n:
            raise ValueError(f"evaluation {self.name!r} has no tasks")
        if len(set(self.tasks)) != n:
            raise ValueError(f"evaluation {self.name!r}: task ids repeat")
        for field, shape in (
            ("greedy", (n,)),
            ("turns", (n,)),
            ("reward", (n,)),
            ("sampled", (n, *self.sampled.shape[1:])),
        ):
            got = getattr(self, field).shape
            if got != shape or (field == "sampled" and len(got) != 2):
                raise ValueError(f"evaluation {self.name!r}: {field} has shape {got} for {n} tasks")

    def greedy_interval(self) -> Interval:
        return mean_interval(self.greedy)

    def sampled_interval(self) -> Interval:
        """Interval of sampled pass@1 over tasks, each task's value being the share of its samples that succeed."""
        return mean_interval(self.sampled.mean(axis=1), method="bootstrap")

    def summary(self) -> dict[str, float]:
        """Metrics ``eval/<name>/...``; the sampled ones are there when there are samples."""
        greedy = self.greedy_interval()
        values: dict[str, float] = {
            "tasks": len(self.tasks),
            "greedy_pass1": greedy.mean,
            "greedy_ci_low": greedy.low,
            "greedy_ci_high": greedy.high,
            "turns_median": float(np.median(self.turns)),
            "reward_mean": float(self.reward.mean()),
            "untrainable": self.lost,
        }
        samples = self.sampled.shape[1]
        if samples:
            sampled = self.sampled_interval()
            values |= {
                "sampled_pass1": sampled.mean,
                "sampled_ci_low": sampled.low,
                "sampled_ci_high": sampled.high,
            }
            values |= {f"pass_at_{k}": float(pass_at_k(self.sampled, k).mean()) for k in range(1, samples + 1)}
        return {f"eval/{self.name}/{key}": value for key, value in values.items()}


def gain(before: EvalResult, after: EvalResult) -> dict[str, float]:
    """Metrics of the paired greedy gain between two evaluations of the same tasks."""
    if before.tasks != after.tasks:
        raise ValueError(f"evaluations {before.name!r} and {after.name!r} are of different tasks")
    change = paired_interval(before.greedy, after.greedy)
    values = {"gain": change.mean, "gain_ci_low": change.low, "gain_ci_high": change.high}
    return {f"eval/{after.name}/{key}": value for key, value in values.items()}
