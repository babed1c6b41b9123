"""Loss term protocol: a pure function from frozen per-token inputs to a weighted sum and its metrics.

Invariants (contract test: ``tests/losses/test_contract.py``):

1. Only tokens with ``weight > 0`` count. ``weight`` already holds mask, token weight and the global denominator, so a
   term returns ``sum(weight * per-token loss)``: invariant to micro-batching, packing and row order.
2. Finite inputs give finite outputs and gradients; log-ratios are clamped before the exponent.
3. Metrics are sums that add over micro-batches and ranks: ``name -> (numerator, denominator)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch


@dataclass(frozen=True)
class LossInputs:
    """Per-token tensors of one micro-batch, all float32 [n] over the positions whose log-prob was computed.

    ``cur_logp`` has the gradient; ``old_logp`` are the training engine's at the weights that opened the batch;
    ``rollout_logp`` are the sampling engine's; ``ref_logp`` the reference model's (None when no term asks for it);
    ``entropy`` of the current policy (with gradient when ``needs_entropy``). ``row`` and ``turn`` int64 [n] are keys
    for sequence and step ratios. All log-probs are natural logarithms at the rollout temperature.
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


@dataclass(frozen=True)
class LossOutput:
    loss: torch.Tensor
    metrics: Mapping[str, tuple[torch.Tensor, torch.Tensor]]


class LossTerm(Protocol):
    """``coefficient`` multiplies the term; ``needs_reference``/``needs_entropy`` tell scoring what to prepare."""

    @property
    def coefficient(self) -> float: ...

    @property
    def needs_reference(self) -> bool: ...

    @property
    def needs_entropy(self) -> bool: ...

    def __call__(self, inputs: LossInputs) -> LossOutput: ...
