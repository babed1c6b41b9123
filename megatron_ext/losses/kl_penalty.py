"""KL estimates as numbers, for a penalty on the reward (credit is numpy; the loss's twin is ``losses/kl.py``).

Invariants (``tests/losses/test_kl.py``): those of ``losses/kl.py``, and tokens outside the mask get exactly 0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

ESTIMATORS = ("k1", "k2", "k3")


def kl_penalty(
    logp: NDArray[Any], ref_logp: NDArray[Any], mask: NDArray[np.bool_], *, estimator: str, limit: float
) -> tuple[NDArray[np.float64], int]:
    """Estimate of KL(policy || reference) at each token, in nats; subtract ``beta`` times it from the token's reward.

    Args:
        logp, ref_logp: [T], log-probs of the sampled tokens under the policy that is penalised and the reference.
        mask: bool [T], the tokens that were sampled.
        estimator: ``k1`` (x), ``k2`` (x^2 / 2) or ``k3`` (exp(-x) - 1 + x), x = logp - ref_logp.
        limit: x is clamped to +-limit first, above 0.

    Returns:
        float64 [T], 0 outside the mask; and how many tokens were clamped.
    """
    if estimator not in ESTIMATORS:
        raise ValueError(f"estimator {estimator!r}: must be one of {', '.join(ESTIMATORS)}")
    if not limit > 0:
        raise ValueError(f"limit {limit}: must be above 0")
    if not logp.shape == ref_logp.shape == mask.shape:
        raise ValueError(f"logp {logp.shape}, ref_logp {ref_logp.shape}, mask {mask.shape}: all must be [T]")
    policy, reference = logp[mask].astype(np.float64), ref_logp[mask].astype(np.float64)
    neither = np.isinf(policy) & (policy == reference)
    raw = np.subtract(policy, reference, out=np.zeros_like(policy), where=~neither)
    x = raw.clip(-limit, limit)
    penalty = np.zeros(mask.shape)
    penalty[mask] = x if estimator == "k1" else 0.5 * x**2 if estimator == "k2" else np.expm1(-x) + x
    return penalty, int(np.count_nonzero((np.abs(raw) >= limit) | neither))
