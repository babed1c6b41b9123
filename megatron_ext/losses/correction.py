"""Correction for sampling under another policy than the training engine's old one: a weight on a token's loss.

The ratio is always ``k = old / rollout``: the training engine over the sampling engine, at nominally the same weights
(numerics, quantisation, routing) or at older ones (asynchronous rollouts).

Invariants (``tests/losses/test_correction.py`` asserts each):

1. The weight is a constant: no gradient runs through it. Where ``k`` is 1 it is 1.
2. Truncation keeps the weight inside its bounds and every token; the masks give exactly 0 outside theirs.
3. What was truncated or masked is counted by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch

from megatron_ext.losses.protocol import Granularity, LossInputs, Policy
from megatron_ext.losses.ratio import LIMIT, Metric, Ratio, token_mean


class CorrectionKind(StrEnum):
    """``none``: weight 1. ``truncate``: ``clip(k, low, high)`` (TIS, Yao et al. 2025). ``icepop``: k inside
    [low, high], else 0 (Ling team 2025). ``mask``: 1 inside, else 0."""

    NONE = "none"
    TRUNCATE = "truncate"
    ICEPOP = "icepop"
    MASK = "mask"


# (low, high) that the sources of each kind use, where a configuration names none.
PUBLISHED_BOUNDS = {
    CorrectionKind.TRUNCATE: (0.0, 2.0),
    CorrectionKind.ICEPOP: (0.5, 5.0),
    CorrectionKind.MASK: (0.5, 5.0),
}


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Weight of each token from ``k = old / rollout``, of the token or of its unit; bounds are inclusive.

    Metrics, over the tokens that count: ``offpolicy/correction_mean``, ``offpolicy/correction_low`` and
    ``offpolicy/correction_high`` (share beyond each bound), ``offpolicy/correction_clamped``.
    """

    kind: CorrectionKind
    low: float
    high: float
    granularity: str = Granularity.TOKEN
    reduce: str = "product"
    limit: float = LIMIT

    def __post_init__(self) -> None:
        if self.kind == CorrectionKind.NONE:
            raise ValueError("correction none: has no bounds; leave the correction out")
        if not 0 <= self.low <= 1 <= self.high:
            raise ValueError(
                f"correction_low {self.low}, correction_high {self.high}: must hold 0 <= low <= 1 <= high, so that "
                "an unchanged policy is not corrected"
            )

    def __call__(self, inputs: LossInputs, on: torch.Tensor) -> tuple[torch.Tensor, dict[str, Metric]]:
        """Weights [n], 1 where ``on`` is False, and metrics."""
        ratio = Ratio(
            numerator=Policy.OLD,
            denominator=Policy.ROLLOUT,
            granularity=self.granularity,
            reduce=self.reduce,
            limit=self.limit,
        )
        value = ratio(inputs, on)
        k = value.ratio.detach()
        low, high = k < self.low, k > self.high
        if self.kind == CorrectionKind.TRUNCATE:
            weight = k.clamp(self.low, self.high)
        else:
            inside = torch.ones_like(k) if self.kind == CorrectionKind.MASK else k
            weight = torch.where(low | high, 0.0, inside)
        return weight, {
            "offpolicy/correction_mean": token_mean(weight, on),
            "offpolicy/correction_low": token_mean(low.float(), on),
            "offpolicy/correction_high": token_mean(high.float(), on),
            "offpolicy/correction_clamped": token_mean(value.clamped.float(), on),
        }
