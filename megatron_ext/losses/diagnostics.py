"""How far what trains has moved from what sampled: log-prob differences between the engines, and policy lag.

Invariants:

1. Only tokens under the mask are read. An empty mask gives mean and maximum 0 over a count of 0.
2. Parts add: joining the statistics of the pieces of a batch gives those of the batch.
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
