"""Invariants 1-3 of ``losses/posterior.py``, TreeOPSD's worked numbers, and its drift test."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.losses.policy import ClipLoss
from megatron_ext.losses.posterior import PosteriorMatching
from megatron_ext.losses.protocol import LossTerm
from tests.helpers.loss_inputs import flat, run

CREDIT = {"t1a": 0.5, "t2a": 0.5, "t2b": 0.5, "t1c": -0.5, "u1": 0.0, "u2": -0.5, "u2b": 0.5}


def slope(s: float, advantage: float, length: int = 1, tau: float = 4.0) -> tuple[float, float]:
    """Loss of one step with mean log-ratio s, and its derivative with respect to s."""
    result = run(PosteriorMatching(tau=tau), flat([s] * length, advantage=[advantage] * length))
    return result.loss, float(result.grad.sum())


def test_gradient_at_the_old_policy_is_the_credit_over_tau() -> None:  # invariants 1 and 2
    for value in CREDIT.values():
        loss, gradient = slope(0.0, value)
        assert gradient == pytest.approx(-value / 4, abs=1e-15)
        if value == 0:
            assert loss == 0.0 and gradient == 0.0


def test_gradient_vanishes_at_the_target_and_turns_past_it() -> None:  # invariant 1
    for value, target in ((0.5, 0.510826), (-0.5, -0.510826)):
        assert math.log((0.5 + value / 4) / (0.5 - value / 4)) == pytest.approx(target, abs=5e-7)
        assert slope(target, value)[1] == pytest.approx(0.0, abs=5e-7)
        assert slope(target * 1.2, value)[1] * slope(0.0, value)[1] < 0
        for s, past in ((target * 1.2, 1.0), (target * 0.8, 0.0), (0.0, 0.0)):
            assert run(PosteriorMatching(), flat([s], advantage=[value])).metrics["policy/past_target"] == (past, 1.0)


def test_curve() -> None:
    """q = .583333: s, KL and gradient."""
    for s, kl, gradient in (
        (-0.2, 0.035612, -0.133167),
        (0.0, 0.013954, -0.083333),
        (0.336472, 0.0, 0.0),
        (0.6, 0.008295, 0.062323),
    ):
        assert slope(s, 1 / 3) == (pytest.approx(kl, abs=1e-6), pytest.approx(gradient, abs=1e-6))


def test_length_does_not_matter() -> None:  # invariant 3
    """200 tokens at log-ratio .05: the product ratio is 22026.5, the posterior .512497."""
    assert slope(0.05, 0.5, 200)[0] == pytest.approx(slope(0.05, 0.5)[0])
    result = run(PosteriorMatching(), flat([0.05] * 200, advantage=[0.0] * 200))
    assert result.mean("policy/target_gap") == pytest.approx(0.512497 - 0.5, abs=5e-7)
    assert result.mean("policy/ratio_mean") == pytest.approx(math.exp(0.05))


def test_a_step_of_no_model_token_is_no_step() -> None:
    with_empty = flat([0.1, 9.0, 0.3], advantage=[0.5, 0.5, -0.5], turn=[0, 1, 2], weight=[0.5, 0.0, 0.5])
    without = flat([0.1, 0.3], advantage=[0.5, -0.5], turn=[0, 2])
    assert run(PosteriorMatching(), with_empty).loss == run(PosteriorMatching(), without).loss


def test_targets_are_clipped_and_counted() -> None:
    result = run(PosteriorMatching(tau=0.5), flat([0.0] * 3, advantage=[1.0, 0.1, -1.0], turn=[0, 1, 2]))
    assert result.metrics["policy/target_clipped"] == (2.0, 3.0)
    assert math.isfinite(result.loss) and float(result.grad[0]) * 3 == pytest.approx(0.5 - 0.99)
    for value in (1.0, -1.0):  # rewards 0 and 1: |V| <= 1, so tau 2 clips by the floor alone
        assert run(PosteriorMatching(tau=2.1), flat([0.0], advantage=[value])).mean("policy/target_clipped") == 0


def drift(term: LossTerm, steps: int = 50) -> float:
    """Log-ratio of a one-parameter policy after gradient steps on one batch."""
    s = 0.0
    for _ in range(steps):
        s -= float(run(term, flat([s], advantage=[0.5])).grad[0])
    return s


def test_repeated_updates_stop_by_themselves() -> None:
    """The policy gradient drifts without bound on one batch; the posterior stops at its target."""
    assert drift(PosteriorMatching(), 200) == pytest.approx(0.510826, abs=1e-5)
    assert drift(ClipLoss(clip_high=1e9), 20) > 15


def test_against_binary_cross_entropy() -> None:
    rng = torch.Generator().manual_seed(0)
    s = torch.randn(50, generator=rng, dtype=torch.float64) * 3
    advantage = torch.rand(50, generator=rng, dtype=torch.float64) * 2 - 1
    q = 0.5 + advantage / 4
    cross = torch.nn.functional.binary_cross_entropy_with_logits(s, q, reduction="mean")
    own = torch.distributions.Bernoulli(q).entropy().mean()
    inputs = flat(s.tolist(), advantage=advantage.tolist(), turn=list(range(50)))
    assert run(PosteriorMatching(), inputs).loss == pytest.approx(float(cross - own), abs=1e-12)
