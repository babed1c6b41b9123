"""The base advantage: a trajectory's reward against its group, broadcast to the tokens it trains.

Invariants (``tests/credit/test_base.py`` asserts each):

1. Tokens with mask 0 and all tokens of untrainable trajectories have advantage exactly 0.
2. Untrainable trajectories (environment errors, invalid rewards) do not vote in the baseline.
3. Every trained token of a trajectory has the same advantage, in whatever segment or session it stands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.groups import group_normalize
from megatron_ext.credit.levels import broadcast
from megatron_ext.trajectory.record import TrajectoryBatch

NORMALIZE = ("std", "mean", "none")
LARGEST = 2.0**43  # squared differences of two such rewards still have an exact sum (``credit/exact.py``)


@dataclass(frozen=True, kw_only=True)
class Baseline:
    """GRPO's normaliser; the fields are those of the configuration's ``credit`` section.

    ``normalize``: ``std`` (R - mean) / (std + eps), ``mean`` R - mean, ``none`` R itself (constant groups and groups of
    one then keep their reward). ``tolerance``: rewards closer than this are equal.
    """

    normalize: str = "std"
    std_ddof: int = 0
    eps: float = 1e-6
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        if self.normalize not in NORMALIZE:
            raise ValueError(f"credit.normalize {self.normalize!r}: must be one of {', '.join(NORMALIZE)}")
        if self.std_ddof not in (0, 1):
            raise ValueError(f"credit.std_ddof {self.std_ddof}: must be 0 (population) or 1 (sample)")

    def trajectory(self, batch: TrajectoryBatch, reward: NDArray[Any]) -> NDArray[np.float64]:
        """Advantage of each trajectory, float64 [J], from ``reward`` [J]."""
        present = batch.trainable()
        beyond = present & (np.abs(reward) > LARGEST)
        if np.any(beyond):
            at = int(np.argmax(beyond))
            raise ValueError(
                f"reward of {batch.trajectory_id[at]!r} is {reward[at]:g}, beyond 2^43 in size: scale it, or mark its "
                "trajectory REWARD_INVALID"
            )
        if self.normalize == "none":
            return np.where(present, np.asarray(reward, dtype=np.float64), 0.0)
        return group_normalize(
            reward,
            batch.trajectory_group(),
            present=present,
            std=self.normalize == "std",
            ddof=self.std_ddof,
            eps=self.eps,
            tolerance=self.tolerance,
        )

    def tokens(self, batch: TrajectoryBatch, reward: NDArray[Any]) -> NDArray[np.float64]:
        """Advantage of each token, float64 [T]."""
        return broadcast(batch, self.trajectory(batch, reward))
