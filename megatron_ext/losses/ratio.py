"""Probability ratios between two sets of log-probs: clamped before the exponent, and counted when they were.

Invariants:

1. ``log_ratio`` is finite for finite log-probs and within +-``LIMIT``; where it was clamped its gradient is 0.
2. Tokens of weight 0 get a log-ratio of exactly 0, whatever their log-probs hold.
"""

from __future__ import annotations

import torch

from megatron_ext.losses.protocol import LossInputs

LIMIT = 20.0  # exp(20) = 4.9e8: its square is finite in fp32, and no ratio that large carries information
Metric = tuple[torch.Tensor, torch.Tensor]


def active(inputs: LossInputs) -> torch.Tensor:
    """bool [n]: the tokens that count."""
    return inputs.weight > 0


def log_ratio(numerator: torch.Tensor, denominator: torch.Tensor, on: torch.Tensor) -> torch.Tensor:
    """``log(numerator / denominator)`` per token, clamped to +-``LIMIT``; 0 where ``on`` is False. All [n]."""
    return torch.where(on, numerator - denominator, 0.0).clamp(-LIMIT, LIMIT)


def weighted_sum(inputs: LossInputs, per_token: torch.Tensor) -> torch.Tensor:
    """``sum(weight * per_token)`` over the tokens that count; a token of weight 0 adds 0 even when it is not finite."""
    on = active(inputs)
    return (torch.where(on, inputs.weight, 0.0) * torch.where(on, per_token, 0.0)).sum()


def token_mean(per_token: torch.Tensor, on: torch.Tensor) -> Metric:
    """``(sum, count)`` over the tokens that count, float64 so that micro-batches add exactly enough."""
    return torch.where(on, per_token.detach(), 0.0).double().sum(), on.double().sum()


def k3(log_r: torch.Tensor) -> torch.Tensor:
    """``exp(x) - 1 - x`` >= 0: Schulman's low-variance estimate of KL(q || p) from samples of q, x = log p - log q."""
    return torch.expm1(log_r) - log_r
