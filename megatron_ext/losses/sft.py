"""Negative log-likelihood of the recorded tokens: the supervised warm start runs through the step that RL uses.

Invariant: the loss is ``-sum(weight * log pi)``; advantages and old log-probs play no part.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_ext.losses.protocol import Granularity, LossInputs, LossOutput
from megatron_ext.losses.ratio import active, token_mean, weighted_sum


@dataclass(frozen=True, kw_only=True)
class NegativeLogLikelihood:
    """Minus the log-prob of each recorded token. Metrics ``policy/nll`` (nats a token) and ``policy/entropy``."""

    coefficient: float = 1.0

    @property
    def needs_reference(self) -> bool:
        return False

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def unit(self) -> Granularity:
        return Granularity.TOKEN

    def __call__(self, inputs: LossInputs) -> LossOutput:
        on = active(inputs)
        metrics = {"policy/nll": token_mean(-inputs.cur_logp, on), "policy/entropy": token_mean(inputs.entropy, on)}
        return LossOutput(-weighted_sum(inputs, inputs.cur_logp), metrics)
