"""Divergence from the reference model, estimated on the sampled tokens: as a loss here, as a penalty on the reward in
``losses/kl_penalty.py``.

Invariants (``tests/losses/test_kl.py`` asserts each):

1. Equal log-probs give exactly 0, and k2 and k3 are never negative.
2. The log-ratio is clamped before any exponent, so a reference that gives a token almost no mass (or none) cannot
   overflow; clamped tokens have no gradient and are counted.
3. Loss and penalty are the same estimate of the same numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.losses.kl_penalty import ESTIMATORS
from megatron_ext.losses.protocol import Granularity, LossInputs, LossOutput, Policy
from megatron_ext.losses.ratio import LIMIT, active, check_limit, k3, log_ratio, one_of, token_mean, weighted_sum


def estimate(x: torch.Tensor, estimator: str) -> torch.Tensor:
    """k1, k2 or k3 of each token, ``x = log pi_current - log pi_reference``, clamped already."""
    if estimator == "k1":
        return x
    return 0.5 * x.square() if estimator == "k2" else k3(-x)


@dataclass(frozen=True, kw_only=True)
class KLToReference:
    """KL(current || reference) per token, x = log pi_current - log pi_reference (estimators after Schulman 2020).

    ``k1`` = x (unbiased value; its gradient has expectation 0 on policy), ``k2`` = x^2 / 2 (its gradient is the
    divergence's own on policy), ``k3`` = exp(-x) - 1 + x (unbiased, never negative). ``gradient`` own differentiates
    the estimate; k2 keeps its value and takes k2's gradient instead. ``log_ratio_limit`` bounds |x|.

    Metrics: ``policy/kl_ref``, the mean of the chosen estimate over the tokens that count, and
    ``policy/kl_ref_clamped``.
    """

    coefficient: float = 0.01
    estimator: str = "k3"
    gradient: str = "own"
    log_ratio_limit: float = LIMIT

    def __post_init__(self) -> None:
        one_of("estimator", self.estimator, ESTIMATORS)
        one_of("gradient", self.gradient, ("own", "k2"))
        check_limit("log_ratio_limit", self.log_ratio_limit)

    @property
    def needs_reference(self) -> bool:
        return True

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def unit(self) -> Granularity:
        return Granularity.TOKEN

    def __call__(self, inputs: LossInputs) -> LossOutput:
        on = active(inputs)
        x, clamped = log_ratio(inputs.cur_logp, inputs.logp(Policy.REFERENCE), on, self.log_ratio_limit)
        value = estimate(x, self.estimator)
        if self.gradient == "k2":
            slope = estimate(x, "k2")
            value = value.detach() + (slope - slope.detach())
        metrics = {
            "policy/kl_ref": token_mean(value, on),
            "policy/kl_ref_clamped": token_mean(clamped.float(), on),
        }
        return LossOutput(weighted_sum(inputs, value), metrics)
