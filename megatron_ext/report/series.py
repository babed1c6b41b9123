"""Series made fit to draw: thinned, smoothed, joined over seeds. Pure numpy.

Invariants (``tests/report/test_series.py`` asserts each):

1. ``thin`` gives at most the points that were asked for; each keeps the lowest and highest value of what it stands for,
   so that a spike of one step in ten thousand stays visible. Values that are not finite are counted, never drawn.
2. ``over_seeds`` is the mean at each step that all runs have, with a 95 % t interval over them (their range for two).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.training.evaluation import Interval

Floats = NDArray[np.float64]

# 97.5 % quantiles of Student's t for 1 to 30 degrees of freedom.
_T975 = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


def t975(freedom: int) -> float:
    """97.5 % quantile of Student's t: tabled up to 30 degrees of freedom, then 1.96 + 2.4 / freedom (within 0.002)."""
    if freedom < 1:
        raise ValueError(f"a t interval needs at least two values, got {freedom + 1}")
    return _T975[freedom - 1] if freedom <= len(_T975) else 1.96 + 2.4 / freedom


def t_interval(values: Sequence[float] | Floats) -> Interval:
    """Mean of n >= 2 independent values, such as one a seed, with its 95 % t interval."""
    array = np.asarray(values, dtype=np.float64)
    half = t975(len(array) - 1) * float(array.std(ddof=1)) / math.sqrt(len(array))
    mean = float(array.mean())
    return Interval(mean, mean - half, mean + half, len(array))


@dataclass(frozen=True, eq=False)
class Series:
    """One metric over the steps that logged it: ``steps`` int64 [n], rising; ``values`` float64 [n], NaN where it was
    not finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Curve:
    """What is drawn, [n] each: ``mid`` at ``steps`` between ``low`` and ``high``. ``bad`` are the steps whose value was
    not finite."""

    steps: Floats
    mid: Floats
    low: Floats
    high: Floats
    bad: NDArray[np.int64]


def thin(series: Series, points: int) -> Curve:
    """The series in at most ``points`` points: the mean of each stretch of steps, between its lowest and highest."""
    finite = np.isfinite(series.values)
    steps, values = series.steps[finite].astype(np.float64), series.values[finite]
    bad = series.steps[~finite]
    if len(steps) <= points:
        return Curve(steps, values, values, values, bad)
    starts = np.linspace(0, len(steps), points + 1)[:-1].astype(np.int64)
    size = np.diff(np.append(starts, len(steps)))
    return Curve(
        np.add.reduceat(steps, starts) / size,
        np.add.reduceat(values, starts) / size,
        np.minimum.reduceat(values, starts),
        np.maximum.reduceat(values, starts),
        bad,
    )


def running_mean(values: Floats, width: int) -> Floats:
    """Mean of each value with those up to ``width - 1`` before it."""
    sums = np.cumsum(np.concatenate([[0.0], values]))
    last = np.arange(1, len(values) + 1)
    first = np.maximum(last - width, 0)
    return (sums[last] - sums[first]) / (last - first)


def smooth(series: Series, width: int) -> Series:
    """The series with each finite value replaced by the running mean of the finite ones."""
    finite = np.isfinite(series.values)
    values = series.values.copy()
    values[finite] = running_mean(series.values[finite], width)
    return Series(series.steps, values)


def over_seeds(runs: Sequence[Series]) -> tuple[Series, Floats, Floats]:
    """Mean over runs at the steps that all of them have a finite value for, and the band around it."""
    common = runs[0].steps[np.isfinite(runs[0].values)]
    for series in runs[1:]:
        common = np.intersect1d(common, series.steps[np.isfinite(series.values)])
    table = np.stack([series.values[np.isin(series.steps, common)] for series in runs])
    mean = table.mean(axis=0)
    if len(runs) < 3:
        return Series(common, mean), table.min(axis=0), table.max(axis=0)
    half = t975(len(runs) - 1) * table.std(axis=0, ddof=1) / math.sqrt(len(runs))
    return Series(common, mean), mean - half, mean + half


def band(runs: Sequence[Series], points: int) -> Curve:
    """``over_seeds`` as a curve of at most ``points`` points; its band is the mean of theirs."""
    mean, low, high = over_seeds(runs)
    drawn = thin(mean, points)
    below, above = (thin(Series(mean.steps, end), points).mid for end in (low, high))
    bad = np.unique(np.concatenate([run.steps[~np.isfinite(run.values)] for run in runs]))
    return Curve(drawn.steps, drawn.mid, below, above, bad)
