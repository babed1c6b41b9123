"""Clipped policy-gradient losses: PPO's pessimistic minimum with separate bounds and a dual clip, on the ratio of a
token (PPO, GRPO, DAPO), of a sequence (GSPO) or of a step (StepPO).

Invariants (``tests/losses/test_policy.py`` and ``test_contract.py``):

1. At ratio 1 the gradient is that of ``-A log pi``; a token beyond the bound on its advantage's side has gradient 0.
2. ``clip_fraction_low``/``high`` count exactly the tokens whose gradient the bound removed.
3. With ``dual_clip`` = c the loss of a negative advantage is at most ``c |A|``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.losses.ratio import RatioValue
from megatron_ext.losses.surrogate import PolicyTerm, Surrogate


@dataclass(frozen=True, kw_only=True)
class ClipLoss(PolicyTerm):
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)``.

    PPO (Schulman et al. 2017, eq. 7) with DAPO's decoupled bounds ("clip higher", Yu et al. 2025, eq. 10).
    ``dual_clip`` c > 1 bounds the loss of tokens with a negative advantage at ``c |A|`` (Ye et al. 2020, eq. 5).
    None = off. One more metric when it is on: ``policy/clip_fraction_dual``.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low {self.clip_low}: must lie in 0..1 (the ratio is kept above 1 - clip_low)")
        if not self.clip_high >= 0:
            raise ValueError(f"clip_high {self.clip_high}: must be 0 or more (the ratio is kept below 1 + clip_high)")
        if self.dual_clip is not None and not self.dual_clip > 1:
            raise ValueError(f"dual_clip {self.dual_clip}: must be above 1, or null to switch it off")

    def surrogate(self, ratio: RatioValue, logp: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
        r = ratio.ratio
        gain = torch.minimum(r * advantage, r.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage)
        low = (advantage < 0) & (r < 1 - self.clip_low)
        high = (advantage > 0) & (r > 1 + self.clip_high)
        if self.dual_clip is None:
            return Surrogate(gain, low, high, low | high)
        bound = self.dual_clip * advantage
        dual = (advantage < 0) & (gain < bound)
        gain = torch.where(dual, bound, gain)
        return Surrogate(gain, low, high, low | high | dual, {"policy/clip_fraction_dual": dual.float()})


@dataclass(frozen=True, kw_only=True)
class GSPO(ClipLoss):
    """``ClipLoss`` on the sequence ratio ``exp(mean over the segment's trained tokens of log r_t)``.

    GSPO (Zheng et al. 2025, eq. 5-7) with its paper's bounds; ``gradient`` token is its GSPO-token variant (eq. 13-14),
    for advantages that differ inside a sequence, and agrees with ``unit`` when they do not and the weights are even.
    A length-normalised ratio moves far less than a token's: bounds of ordinary PPO would never bind.
    """

    granularity: str = "sequence"
    clip_low: float = 3e-4
    clip_high: float = 4e-4


@dataclass(frozen=True, kw_only=True)
class StepClip(ClipLoss):
    """``ClipLoss`` on the step ratio, the geometric mean over a turn's trained tokens (StepPO, arXiv 2604.18401).

    Its code bounds the log-ratio at 10 and the loss at 10 |A|; the clip is that of its ALFWorld, WebShop and
    PaperSearch scripts (0.2 and 0.2 in HotpotQA). ``reduce: product`` is its control, the plain product of the ratios.
    """

    granularity: str = "step"
    clip_low: float = 3e-4
    clip_high: float = 4e-4
    dual_clip: float | None = 10.0
    log_ratio_limit: float = 10.0
