"""Entropy bonus: a term whose minimisation raises the policy's entropy.

Invariant: the loss is ``-sum(weight * entropy)``; a positive coefficient rewards entropy.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.losses.protocol import Granularity, LossInputs, LossOutput
from megatron_ext.losses.ratio import active, token_mean, weighted_sum


@dataclass(frozen=True, kw_only=True)
class EntropyBonus:
    """Minus the full-vocabulary entropy (nats) of each token's distribution. Metric ``policy/entropy``."""

    coefficient: float = 0.001

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def needs_entropy(self) -> bool:
        return True

    @property
    def unit(self) -> Granularity:
        return Granularity.TOKEN

    def __call__(self, inputs: LossInputs) -> LossOutput:
        metrics = {"policy/entropy": token_mean(inputs.entropy, active(inputs))}
        return LossOutput(-weighted_sum(inputs, inputs.entropy), metrics)
