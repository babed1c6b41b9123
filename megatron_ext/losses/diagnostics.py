"""How far what trains has moved from what sampled: log-prob differences between the engines, ratios, and policy lag.

Invariants (``tests/losses/test_diagnostics.py`` asserts each):

1. Only tokens under the mask are read. An empty mask gives 0 over a count of 0.
2. Parts add: joining the statistics of the pieces of a batch gives those of the batch (quantiles too: they come from
   fixed bins).
3. One log-prob that is NaN makes the statistics NaN: shown, not hidden. An infinite one is clamped and counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.version import lag


@dataclass(frozen=True)
class MeanMax:
    """Sum, count and maximum of a non-negative quantity, so that ranks can add theirs."""

    total: float
    count: int
    maximum: float

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def __add__(self, other: MeanMax) -> MeanMax:
        return MeanMax(self.total + other.total, self.count + other.count, max(self.maximum, other.maximum))


def _summarise(values: NDArray[np.float64]) -> MeanMax:
    return MeanMax(float(values.sum()), len(values), float(values.max(initial=0.0)))


def train_rollout_difference(old_logp: NDArray[Any], rollout_logp: NDArray[Any], mask: NDArray[np.bool_]) -> MeanMax:
    """``|old_logp - rollout_logp|`` over the mask, in nats; all [T]. Metrics ``offpolicy/logp_diff_mean`` and ``_max``.

    ``old_logp`` are the training engine's, ``rollout_logp`` the sampling engine's, of the same tokens at nominally the
    same weights: what remains is numerics, routing flips or a stale engine. One that is not finite makes the statistics
    not finite: the update that follows is skipped and counted.
    """
    if not old_logp.shape == rollout_logp.shape == mask.shape:
        raise ValueError(f"shapes {old_logp.shape}, {rollout_logp.shape}, {mask.shape}: all must be [T]")
    difference = np.abs(old_logp[mask].astype(np.float64) - rollout_logp[mask].astype(np.float64))
    return _summarise(difference)


def lag_stats(
    version: NDArray[np.int64], mask: NDArray[np.bool_], now: int, undone: Mapping[int, int] | None = None
) -> MeanMax:
    """Optimizer steps between the weights that sampled each masked token and the current ones ([T], packed versions).

    ``undone`` as in ``trajectory.version.lag``. Metrics ``offpolicy/lag_mean`` and ``offpolicy/lag_max``.
    """
    distinct, where = np.unique(version[mask], return_inverse=True)
    lags = np.array([lag(now, int(v), dict(undone or {})) for v in distinct], dtype=np.float64)
    if np.any(lags < 0):
        at = int(distinct[np.argmax(lags < 0)])
        raise ValueError(f"version {at} is newer than the current weights ({now}): the engine and the trainer disagree")
    return _summarise(lags[where])


# Bins of |log ratio| grow with it: _ZERO / _PER_NAT wide at 0, 1 / _PER_NAT of it far out. Ranks add counts bin by bin.
_ZERO = 1e-4
_PER_NAT = 100
_EDGE = int(np.ceil(_PER_NAT * np.arcsinh(20.0 / _ZERO)))
_HIGHEST = 20.0


@dataclass(frozen=True, eq=False)
class RatioStats:
    """Sums over tokens of the ratio w = exp(x), so that ranks and micro-batches can add theirs.

    ``count`` tokens; ``total`` and ``square`` sums of w and w^2; ``k3`` sum of w - 1 - x; ``clamped`` tokens whose x
    left +-20; ``histogram`` int64 [bins] of x over fixed bins.
    """

    count: int
    total: float
    square: float
    k3: float
    clamped: int
    histogram: NDArray[np.int64]

    def __add__(self, other: RatioStats) -> RatioStats:
        return RatioStats(
            self.count + other.count,
            self.total + other.total,
            self.square + other.square,
            self.k3 + other.k3,
            self.clamped + other.clamped,
            self.histogram + other.histogram,
        )

    @property
    def ess(self) -> float:
        """Effective sample size as a share, ``(sum w)^2 / (n sum w^2)`` (Kish 1965): 1 for equal policies."""
        return self.total**2 / (self.count * self.square) if self.count else 0.0

    @property
    def kl(self) -> float:
        """KL(denominator || numerator) in nats a token, from the denominator's samples (k3)."""
        return self.k3 / self.count if self.count else 0.0

    def quantile(self, share: float) -> float:
        """The smallest ratio that at least ``share`` of the tokens do not exceed, to 0.5 % of its logarithm (5e-7 near
        ratio 1); 0 for no tokens."""
        if not 0 <= share <= 1:
            raise ValueError(f"quantile {share}: is a share, 0 to 1")
        if not self.count:
            return 0.0
        if np.isnan(self.total):
            return float("nan")
        reached = np.cumsum(self.histogram)
        index = int(np.searchsorted(reached, max(1, int(np.ceil(share * self.count - 1e-9)))))
        return float(np.exp(_ZERO * np.sinh((index - _EDGE) / _PER_NAT)))

    def metrics(self, percentiles: tuple[int, ...] = (1, 50, 99)) -> dict[str, float]:
        """``offpolicy/ess``, ``kl_rollout``, ``ratio_clamped`` and ``ratio_p<k>``, for ratios of old over rollout."""
        return {
            "offpolicy/ess": self.ess,
            "offpolicy/kl_rollout": self.kl,
            "offpolicy/ratio_clamped": self.clamped / self.count if self.count else 0.0,
            **{f"offpolicy/ratio_p{k}": self.quantile(k / 100) for k in percentiles},
        }


def ratio_stats(numerator: NDArray[Any], denominator: NDArray[Any], mask: NDArray[np.bool_]) -> RatioStats:
    """Statistics of ``exp(numerator - denominator)`` over the mask; log-probs, all [T].

    Log-ratios are clamped to +-20. Two infinite log-probs of one sign have no ratio: theirs is 1, counted as clamped.
    """
    if not numerator.shape == denominator.shape == mask.shape:
        raise ValueError(f"shapes {numerator.shape}, {denominator.shape}, {mask.shape}: all must be [T]")
    above, below = numerator[mask].astype(np.float64), denominator[mask].astype(np.float64)
    neither = np.isinf(above) & (above == below)
    raw = np.subtract(above, below, out=np.zeros_like(above), where=~neither)
    x = raw.clip(-_HIGHEST, _HIGHEST)
    w = np.exp(x)
    known = x[~np.isnan(x)]
    bins = np.rint(_PER_NAT * np.arcsinh(known / _ZERO)).astype(np.int64) + _EDGE
    return RatioStats(
        count=len(x),
        total=float(w.sum()),
        square=float(np.square(w).sum()),
        k3=float((np.expm1(x) - x).sum()),
        clamped=int(np.count_nonzero((np.abs(raw) >= _HIGHEST) | neither)),
        histogram=np.bincount(bins, minlength=2 * _EDGE + 1).astype(np.int64),
    )
