"""Divergence from the reference model, estimated on the sampled tokens.

Invariants:

1. Equal log-probs give exactly 0, and k2 and k3 are never negative.
2. The log-ratio is clamped before any exponent, so a reference that gives a token almost no mass cannot overflow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.losses.protocol import LossInputs, LossOutput
from megatron_ext.losses.ratio import active, k3, log_ratio, token_mean, weighted_sum

ESTIMATORS = ("k1", "k2", "k3")


@dataclass(frozen=True, kw_only=True)
class KLToReference:
    """KL(current || reference) per token, x = log pi_current - log pi_reference (estimators after Schulman 2020).

    ``k1`` = x (unbiased value; its gradient has expectation 0 on policy), ``k2`` = x^2 / 2 (its gradient is the
    divergence's own on policy), ``k3`` = exp(-x) - 1 + x (unbiased, never negative). Metric ``policy/kl_ref`` is the
    mean of the chosen estimate over the tokens that count.
    """

    coefficient: float = 0.01
    estimator: str = "k3"

    def __post_init__(self) -> None:
        if self.estimator not in ESTIMATORS:
            raise ValueError(f"estimator {self.estimator!r}: must be one of {', '.join(ESTIMATORS)}")

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def needs_entropy(self) -> bool:
        return False

    def __call__(self, inputs: LossInputs) -> LossOutput:
        if inputs.ref_logp is None:
            raise ValueError("KLToReference needs ref_logp: score the reference model before this step")
        on = active(inputs)
        x = log_ratio(inputs.cur_logp, inputs.ref_logp, on)
        value = self._estimate(x)
        return LossOutput(weighted_sum(inputs, value), {"policy/kl_ref": token_mean(value, on)})

    def _estimate(self, x: torch.Tensor) -> torch.Tensor:
        if self.estimator == "k1":
            return x
        return 0.5 * x.square() if self.estimator == "k2" else k3(-x)
