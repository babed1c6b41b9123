"""The loss of a step: the terms of the configuration, each times its coefficient, and their metrics.

Invariants:

1. ``total = sum(coefficient * term)``; a coefficient of 0 keeps a term as a metric, without a gradient.
2. A metric has one owner. ``policy/entropy`` is defined once for all terms and may come from several; any other name
   reported twice is an error.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from megatron_ext.losses.protocol import LossInputs, LossOutput, LossTerm
from megatron_ext.losses.ratio import Metric

SHARED_METRICS = frozenset({"policy/entropy"})


def needs_reference(terms: Mapping[str, LossTerm]) -> bool:
    """Whether scoring has to prepare ``ref_logp``."""
    return any(term.needs_reference for term in terms.values())


def needs_entropy_grad(terms: Mapping[str, LossTerm]) -> bool:
    """Whether the entropy has to carry a gradient (it is a metric otherwise)."""
    return any(term.needs_entropy and term.coefficient != 0 for term in terms.values())


def total_loss(terms: Mapping[str, LossTerm], inputs: LossInputs) -> LossOutput:
    """Sum of the terms times their coefficients, with the metrics of all and ``train/loss/<term>`` for each.

    ``train/loss/<term>`` is the term before its coefficient. Its denominator is the sum of the weights, which is 1 over
    a whole optimizer step, so that the reduced value is the term's part of that step's loss.
    """
    total = inputs.cur_logp.new_zeros(())
    metrics: dict[str, Metric] = {}
    owner: dict[str, str] = {}
    for name, term in terms.items():
        with torch.set_grad_enabled(torch.is_grad_enabled() and term.coefficient != 0):
            output = term(inputs)
        if term.coefficient != 0:
            total = total + term.coefficient * output.loss
        for key, value in output.metrics.items():
            if key in owner and key not in SHARED_METRICS:
                raise ValueError(f"loss terms {owner[key]!r} and {name!r} both report {key}")
            owner.setdefault(key, name)
            metrics.setdefault(key, value)
        metrics[f"train/loss/{name}"] = (output.loss.detach().double(), inputs.weight.detach().double().sum())
    return LossOutput(total, metrics)
