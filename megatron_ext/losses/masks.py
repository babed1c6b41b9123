"""Policy losses that drop tokens whose ratio left an interval; inside, the ratio is a constant weight on the log-prob.

    loss_t = -sg(r_t) [r_t inside] A_t log pi_t

Invariants (``tests/losses/test_policy.py``):

1. A token outside its interval has loss and gradient exactly 0; it still counts in the denominator.
2. Inside, the gradient is that of ``-r A log pi`` with r constant.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.losses.ratio import RatioValue
from megatron_ext.losses.surrogate import PolicyTerm, Surrogate


def _masked(
    r: torch.Tensor, low: torch.Tensor, high: torch.Tensor, advantage: torch.Tensor, logp: torch.Tensor
) -> Surrogate:
    outside = low | high
    gain = torch.where(outside, 0.0, r) * advantage * logp
    return Surrogate(gain, low, high, outside)


@dataclass(frozen=True, kw_only=True)
class IntervalMask(PolicyTerm):
    """An interval for each sign of the advantage, bounds inclusive: the base objective of MiMo-V2.6 (its eq. 1).

    ``A >= 0`` keeps ``positive_low <= r <= positive_high``, ``A < 0`` keeps ``negative_low <= r <= negative_high``.
    The denominator is the policy that sampled.
    """

    denominator: str = "rollout"
    positive_low: float = 0.2
    positive_high: float = 5.0
    negative_low: float = 0.2
    negative_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for sign, low, high in (
            ("positive", self.positive_low, self.positive_high),
            ("negative", self.negative_low, self.negative_high),
        ):
            if not 0 <= low <= high:
                raise ValueError(f"{sign}_low {low}, {sign}_high {high}: must hold 0 <= low <= high")

    def surrogate(self, ratio: RatioValue, logp: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
        r = ratio.ratio.detach()
        positive = advantage >= 0
        low = torch.where(positive, r < self.positive_low, r < self.negative_low)
        high = torch.where(positive, r > self.positive_high, r > self.negative_high)
        return _masked(r, low, high, advantage, logp)


@dataclass(frozen=True, kw_only=True)
class TwoSidedMask(PolicyTerm):
    """One open interval ``1 - mask_low < r < 1 + mask_high`` whatever the advantage (SAO, arXiv 2607.07508).

    The denominator is the sampling engine's own log-probs. Its settings: 0.3 and 5.0 for tool use and mathematics, 0.8
    and 3.0 for coding. A ratio exactly at a bound is masked.
    """

    denominator: str = "rollout"
    mask_low: float = 0.3
    mask_high: float = 5.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.mask_low > 0 and self.mask_high > 0):
            raise ValueError(
                f"mask_low {self.mask_low}, mask_high {self.mask_high}: must be above 0 (a ratio of 1 is masked at 0)"
            )

    def surrogate(self, ratio: RatioValue, logp: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
        r = ratio.ratio.detach()
        return _masked(r, r <= 1 - self.mask_low, r >= 1 + self.mask_high, advantage, logp)
