"""Loss term protocol: a pure function from frozen per-token inputs to a weighted sum and its metrics.

Invariants (contract test: ``tests/losses/test_contract.py``):

1. Only tokens with ``weight > 0`` count. ``weight`` already holds mask, token weight and the global denominator, so a
   term returns ``sum(weight * per-token loss)``: invariant to packing, row order, and to every split into micro-batches
   that keeps each of the term's units (``LossTerm.unit``) whole.
2. Finite inputs give finite outputs and gradients, and so do infinite log-probs; log-ratios are clamped before the
   exponent. NaN is not hidden: it makes the loss NaN, and the step is skipped and counted.
3. Metrics are sums that add over micro-batches and ranks: ``name -> (numerator, denominator)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from enum import StrEnum
from typing import Protocol

import torch


class Policy(StrEnum):
    """Whose log-probs of the sampled tokens.

    ``current``: the weights being trained, with the gradient. ``old``: the training engine at the weights that opened
    the batch. ``rollout``: the engine that sampled. ``reference``: the reference model.
    """

    CURRENT = "current"
    OLD = "old"
    ROLLOUT = "rollout"
    REFERENCE = "reference"


class Granularity(StrEnum):
    """The tokens that share one ratio, from the finest: a token, a step or a sequence.

    ``step``: the trained tokens of one turn. ``sequence``: the trained tokens of one segment, that is of one context as
    the policy saw it; a trajectory of several segments has as many sequence ratios, since no forward holds them all.
    """

    TOKEN = "token"
    STEP = "step"
    SEQUENCE = "sequence"


@dataclass(frozen=True)
class LossInputs:
    """Per-token tensors of one micro-batch, all float32 [n] over the positions whose log-prob was computed.

    ``cur_logp`` has the gradient; ``old_logp`` are the training engine's at the weights that opened the batch;
    ``rollout_logp`` are the sampling engine's; ``ref_logp`` the reference model's (None when no term asks for it);
    ``entropy`` of the current policy (with gradient when ``needs_entropy``). ``row`` and ``turn`` int64 [n] are keys
    for sequence and step ratios. All log-probs are natural logarithms at the rollout temperature.

    Raises:
        ValueError: a tensor that is not [n].
    """

    cur_logp: torch.Tensor
    old_logp: torch.Tensor
    rollout_logp: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    entropy: torch.Tensor
    row: torch.Tensor
    turn: torch.Tensor
    ref_logp: torch.Tensor | None = None

    def __post_init__(self) -> None:
        size = self.cur_logp.shape
        for item in fields(self):
            value = getattr(self, item.name)
            if value is not None and (value.ndim != 1 or value.shape != size):
                raise ValueError(f"{item.name} {tuple(value.shape)} and cur_logp {tuple(size)}: both must be [n]")

    def logp(self, policy: str) -> torch.Tensor:
        """Log-probs [n] of a ``Policy``; ``ValueError`` when the reference model was not scored."""
        if policy == Policy.REFERENCE:
            if self.ref_logp is None:
                raise ValueError("the term needs ref_logp: score the reference model before this step")
            return self.ref_logp
        return {Policy.CURRENT: self.cur_logp, Policy.OLD: self.old_logp, Policy.ROLLOUT: self.rollout_logp}[
            Policy(policy)
        ]


@dataclass(frozen=True)
class LossOutput:
    loss: torch.Tensor
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class LossTerm(Protocol):
    """``coefficient`` multiplies the term; ``needs_reference``/``needs_entropy`` tell scoring what to prepare; ``unit``
    is the coarsest ``Granularity`` that the term combines, whose tokens must stand in one row."""

    @property
    def coefficient(self) -> float: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_entropy(self) -> bool: ...

    @property
    def unit(self) -> Granularity: ...

    def __call__(self, inputs: LossInputs) -> LossOutput: ...
