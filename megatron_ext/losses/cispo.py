"""CISPO: the clipped ratio as a constant weight on the log-prob, so that every token keeps a gradient.

Invariant (``tests/losses/test_policy.py``): a bound changes the size of a token's gradient, never to 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.losses.ratio import RatioValue
from megatron_ext.losses.surrogate import PolicyTerm, Surrogate


@dataclass(frozen=True, kw_only=True)
class CISPO(PolicyTerm):
    """``-sg(clip(r, 1 - clip_low, 1 + clip_high)) A log pi`` (MiniMax-M1 2025, eq. 4-5; MiniMax-M2, eq. 2-3).

    ``clip_low`` 1 is no lower bound, as in the papers, which do not disclose ``clip_high``: 4 is ours.
    ``policy/clip_fraction_low`` and ``_high`` count weights held by a bound; none is stopped.
    """

    clip_low: float = 1.0
    clip_high: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low {self.clip_low}: must lie in 0..1 (1 is no lower bound)")
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high {self.clip_high}: must be 0 or more (the weight is kept below 1 + clip_high)")

    def surrogate(self, ratio: RatioValue, logp: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
        r = ratio.ratio.detach()
        weight = r.clamp(1 - self.clip_low, 1 + self.clip_high)
        low, high = r < 1 - self.clip_low, r > 1 + self.clip_high
        return Surrogate(weight * advantage * logp, low, high, torch.zeros_like(low))
