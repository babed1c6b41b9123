"""Clipped policy-gradient loss: PPO's pessimistic minimum with separate bounds and an optional dual clip.

Invariants:

1. At ratio 1 the gradient is that of ``-A log pi``; a token beyond the bound on its advantage's side has gradient 0.
2. ``clip_fraction_low``/``high`` count exactly the tokens whose gradient the bound removed.
3. With ``dual_clip`` = c the loss of a negative advantage is at most ``c |A|``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.losses.protocol import LossInputs, LossOutput
from megatron_ext.losses.ratio import LIMIT, active, k3, log_ratio, token_mean, weighted_sum


@dataclass(frozen=True, kw_only=True)
class ClipLoss:
    """``-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)`` with r = pi_current / pi_old per token.

    PPO (Schulman et al. 2017, eq. 7) with DAPO's decoupled bounds ("clip higher", Yu et al. 2025, eq. 10).
    ``dual_clip`` c > 1 bounds the loss of tokens with a negative advantage at ``c |A|`` (Ye et al. 2020, eq. 5).
    None = off.

    Metrics: ``policy/ratio_mean``, ``policy/clip_fraction_low``, ``policy/clip_fraction_high``,
    ``policy/clip_fraction_dual`` (when on), ``policy/log_ratio_clamped``, ``policy/kl_old`` (k3 of old || current),
    ``policy/entropy``; all means over the tokens that count.
    """

    clip_low: float = 0.2
    clip_high: float = 0.28
    dual_clip: float | None = None
    coefficient: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.clip_low <= 1:
            raise ValueError(f"clip_low {self.clip_low}: must lie in 0..1 (the ratio is kept above 1 - clip_low)")
        if self.clip_high < 0:
            raise ValueError(f"clip_high {self.clip_high}: must be 0 or more (the ratio is kept below 1 + clip_high)")
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise ValueError(f"dual_clip {self.dual_clip}: must be above 1, or null to switch it off")

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        on = active(inputs)
        log_r = log_ratio(inputs.cur_logp, inputs.old_logp, on)
        ratio, advantage = log_r.exp(), torch.where(on, inputs.advantage, 0.0)
        gain = torch.minimum(ratio * advantage, ratio.clamp(1 - self.clip_low, 1 + self.clip_high) * advantage)
        low = (advantage < 0) & (ratio < 1 - self.clip_low)
        high = (advantage > 0) & (ratio > 1 + self.clip_high)
        metrics = {
            "policy/ratio_mean": token_mean(ratio, on),
            "policy/clip_fraction_low": token_mean(low.float(), on),
            "policy/clip_fraction_high": token_mean(high.float(), on),
            "policy/log_ratio_clamped": token_mean((log_r.abs() >= LIMIT).float(), on),
            "policy/kl_old": token_mean(k3(log_r), on),
            "policy/entropy": token_mean(inputs.entropy, on),
        }
        if self.dual_clip is not None:
            bound = self.dual_clip * advantage
            dual = (advantage < 0) & (gain < bound)
            gain = torch.where(dual, bound, gain)
            metrics["policy/clip_fraction_dual"] = token_mean(dual.float(), on)
        return LossOutput(-weighted_sum(inputs, gain), metrics)
