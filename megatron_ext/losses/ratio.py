"""Probability ratios between two policies, of a token, a step or a sequence: clamped before the exponent, and counted.

Invariants (``tests/losses/test_ratio.py`` asserts each):

1. A log-ratio is finite and within +-limit, infinite log-probs included; where it was clamped its gradient is 0. Two
   infinite log-probs of one sign have no ratio: theirs is 1, without a gradient, and counted as clamped.
2. Tokens of weight 0 get a log-ratio of exactly 0, whatever their log-probs hold, and belong to no unit's ratio.
3. All tokens of a unit have one ratio; with one token a unit every granularity, reduction and gradient agrees.
4. Splitting or ordering rows changes nothing; for steps, cutting rows at turns does not either.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

import torch

from megatron_ext.losses.protocol import Granularity, LossInputs, Policy

LIMIT = 20.0  # exp(20) = 4.9e8: its square is finite in fp32, and no ratio that large carries information
MAX_LIMIT = 40.0  # exp(40)^2 = 5.5e34, the largest that is still a float32
Metric = tuple[torch.Tensor, torch.Tensor]


class Reduce(StrEnum):
    """A unit's log-ratio: the mean of its tokens' (``geometric``: length-normalised) or their sum (``product``)."""

    GEOMETRIC = "geometric"
    PRODUCT = "product"


class Gradient(StrEnum):
    """Where the gradient of a unit's ratio goes.

    ``token``: token t's is ``s * d log pi_t``, each token on its own weight and advantage (GSPO-token, Zheng et al.
    2025, eq. 14). ``unit``: through the reduction (their eq. 7). With one advantage and equal weights inside a unit the
    two agree for the geometric mean.
    """

    TOKEN = "token"
    UNIT = "unit"


def one_of(key: str, value: str, allowed: Iterable[str]) -> None:
    """Refuses a value outside ``allowed``, naming the key and what there is."""
    names = [str(item) for item in allowed]
    if value not in names:
        raise ValueError(f"{key} {value!r}: must be one of {', '.join(names)}")


def check_limit(key: str, value: float) -> None:
    if not 0 < value <= MAX_LIMIT:
        raise ValueError(f"{key} {value}: must be above 0 and at most {MAX_LIMIT:g} (exp of it is squared in fp32)")


def active(inputs: LossInputs) -> torch.Tensor:
    """bool [n]: the tokens that count."""
    return inputs.weight > 0


def log_ratio(
    numerator: torch.Tensor, denominator: torch.Tensor, on: torch.Tensor, limit: float = LIMIT
) -> tuple[torch.Tensor, torch.Tensor]:
    """``log(numerator / denominator)`` per token, clamped to +-``limit`` and 0 where ``on`` is False; and which tokens
    were clamped (bool). All [n]."""
    neither = torch.isinf(numerator) & (numerator == denominator)
    raw = torch.where(on & ~neither, numerator - denominator, 0.0)
    return raw.clamp(-limit, limit), (raw.abs() >= limit) | (on & neither)


def reduce_units(x: torch.Tensor, on: torch.Tensor, key: torch.Tensor, reduce: str) -> torch.Tensor:
    """Mean or sum of ``x`` over the tokens of ``on`` that share a key, at each of these tokens; 0 elsewhere. All [n].

    Accumulates in float64, so that the order of the tokens does not show in float32.
    """
    at = torch.nonzero(on).squeeze(1)
    if len(at) == 0:
        return x * 0.0
    _, unit = torch.unique(key[at], return_inverse=True)
    size = int(unit.max()) + 1
    total = torch.zeros(size, dtype=torch.float64, device=x.device).index_add(0, unit, x[at].double())
    if reduce == Reduce.GEOMETRIC:
        total = total / torch.bincount(unit, minlength=size)
    return torch.zeros_like(x).index_copy(0, at, total[unit].to(x.dtype))


@dataclass(frozen=True)
class RatioValue:
    """``log`` and ``ratio`` = exp(log), each [n]: the unit's at every one of its tokens, with the gradient asked for;
    ``clamped`` bool [n]."""

    log: torch.Tensor
    ratio: torch.Tensor
    clamped: torch.Tensor


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The ratio ``numerator / denominator`` of a token, or of the unit that a token belongs to."""

    numerator: str
    denominator: str
    granularity: str = Granularity.TOKEN
    reduce: str = Reduce.GEOMETRIC
    gradient: str = Gradient.TOKEN
    limit: float = LIMIT

    def __post_init__(self) -> None:
        one_of("numerator", self.numerator, Policy)
        one_of("denominator", self.denominator, Policy)
        one_of("granularity", self.granularity, Granularity)
        one_of("reduce", self.reduce, Reduce)
        one_of("gradient", self.gradient, Gradient)
        check_limit("log_ratio_limit", self.limit)
        if self.numerator == self.denominator:
            raise ValueError(f"denominator {self.denominator!r}: is the numerator too, so the ratio is always 1")

    @property
    def needs_reference(self) -> bool:
        return Policy.REFERENCE in (self.numerator, self.denominator)

    def __call__(self, inputs: LossInputs, on: torch.Tensor) -> RatioValue:
        x, clamped = log_ratio(inputs.logp(self.numerator), inputs.logp(self.denominator), on, self.limit)
        if self.granularity != Granularity.TOKEN:
            key = inputs.turn if self.granularity == Granularity.STEP else inputs.row
            unit = reduce_units(x, on, key, self.reduce)
            if self.gradient == Gradient.TOKEN:
                unit = unit.detach() + (x - x.detach())
            clamped = clamped | (unit.detach().abs() >= self.limit)  # a sum may leave the range again
            x = unit.clamp(-self.limit, self.limit)
        return RatioValue(x, x.exp(), clamped)


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
