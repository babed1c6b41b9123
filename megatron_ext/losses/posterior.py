"""TreeOPSD: a step's credit becomes a bounded Bernoulli target that the policy's posterior is matched to.

Invariants (``tests/losses/test_posterior.py`` asserts each):

1. At the old policy the gradient with respect to the mean log-ratio is exactly ``-A / tau``; it is 0 at the target and
   has the other sign beyond it, so that repeated updates on one batch converge.
2. Credit 0 at the old policy gives loss and gradient exactly 0.
3. A constant log-ratio gives the same loss whatever the length of the step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import logsigmoid

from megatron_ext.losses.ratio import RatioValue
from megatron_ext.losses.surrogate import PolicyTerm, Surrogate


@dataclass(frozen=True, kw_only=True)
class PosteriorMatching(PolicyTerm):
    """``KL(Bernoulli(q) || Bernoulli(p))`` of each unit, ``q = 1/2 + A / tau`` and ``p = sigmoid(s)``.

    ``s`` is the mean over the unit's trained tokens of ``log pi_current - log pi_old``; the advantage is the step's
    pointwise credit (one value a unit). ``d loss / d s = p - q``, which vanishes at ``s* = logit(q)``, about ``4 A /
    tau`` nats a token: ``tau`` is the trust region. ``q`` is clipped to ``[floor, 1 - floor]``. The values of both keys
    are ours. Each of a unit's tokens carries the unit's loss, so that a mean over steps is a matter of the weights.

    More metrics: ``policy/target_clipped`` (share of tokens whose target was clipped), ``policy/target_gap`` (mean
    ``|p - q|``), ``policy/past_target`` (share of tokens whose unit has gone beyond its target).
    """

    granularity: str = "step"
    gradient: str = "unit"
    tau: float = 4.0
    floor: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tau > 0:
            raise ValueError(f"tau {self.tau}: must be above 0 (the target is 1/2 + advantage / tau)")
        if not 0 < self.floor < 0.5:
            raise ValueError(f"floor {self.floor}: must lie between 0 and 0.5 (the target is kept inside it)")

    def surrogate(self, ratio: RatioValue, logp: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
        s = ratio.log
        wanted = 0.5 + advantage / self.tau
        q = wanted.clamp(self.floor, 1 - self.floor)
        divergence = q * (q.log() - logsigmoid(s)) + (1 - q) * ((1 - q).log() - logsigmoid(-s))
        p = s.detach().sigmoid()
        beyond = torch.where(q > 0.5, p > q, p < q) & (q != 0.5)
        none = torch.zeros_like(beyond)
        values = {
            "policy/target_clipped": (wanted != q).float(),
            "policy/target_gap": (p - q).abs(),
            "policy/past_target": beyond.float(),
        }
        return Surrogate(-divergence, none, none, none, values)
