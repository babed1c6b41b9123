"""Invariants 1-3 of ``losses/kl.py`` and ``losses/kl_penalty.py``."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.losses.kl import KLToReference
from megatron_ext.losses.kl_penalty import ESTIMATORS, kl_penalty
from tests.helpers.loss_inputs import flat, inputs_of, run

every_estimator = pytest.mark.parametrize("estimator", ESTIMATORS)


def test_estimators_are_unbiased() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((policy * (policy / reference).log()).sum())
    for estimator in ("k1", "k3"):
        total = 0.0
        for p, r in zip(policy, reference, strict=True):
            total += (
                float(p) * run(KLToReference(estimator=estimator), flat([float(p.log())], ref=[float(r.log())])).loss
            )
        assert total == pytest.approx(exact, rel=1e-5)
    assert run(KLToReference(estimator="k2"), flat([-0.3], ref=[-1.0])).loss == pytest.approx(0.7**2 / 2)


@every_estimator
def test_equal_policies_are_at_exactly_no_distance(estimator: str) -> None:  # invariant 1
    inputs = inputs_of(dtype=torch.float64)
    result = run(KLToReference(estimator=estimator), replace(inputs, ref_logp=inputs.cur_logp.detach()))
    assert result.loss == 0.0
    assert bool(result.grad.any()) == (estimator == "k1"), "k1's gradient is that of log pi"
    if estimator != "k1":
        assert all(run(KLToReference(estimator=estimator), flat([x], ref=[-2.0])).loss >= 0 for x in (-5.0, -2.1, -0.1))


@every_estimator
@pytest.mark.parametrize("gradient", ["own", "k2"])
def test_the_exponent_is_clamped_first(estimator: str, gradient: str) -> None:  # invariant 2
    """verl 891: a reference (or policy) that gives a token no mass made k3 infinite and the gradient NaN."""
    inf = math.inf
    inputs = flat([-1.0, -1.0, -800.0, -inf, -inf, -1.0], ref=[-900.0, -inf, -1.0, -1.0, -inf, -1.5])
    assert inputs.ref_logp is not None
    result = run(KLToReference(estimator=estimator, gradient=gradient), inputs)
    assert math.isfinite(result.loss) and torch.isfinite(result.grad).all()
    assert not result.grad[:5].any() and result.grad[5] != 0
    assert result.metrics["policy/kl_ref_clamped"] == (5.0, 6.0)
    penalty, clamped = kl_penalty(
        inputs.cur_logp.numpy(), inputs.ref_logp.numpy(), np.ones(6, bool), estimator=estimator, limit=20.0
    )
    assert clamped == 5 and np.isfinite(penalty).all() and penalty[4] == 0.0
    assert float(penalty.mean()) == pytest.approx(result.loss)
    assert run(KLToReference(estimator=estimator, log_ratio_limit=2.0), inputs).loss < result.loss or estimator == "k1"


@every_estimator
def test_the_penalty_is_the_loss_token_by_token(estimator: str) -> None:  # invariant 3
    inputs = inputs_of(dtype=torch.float64)
    mask = (inputs.weight > 0).numpy()
    assert inputs.ref_logp is not None
    logp, ref = inputs.cur_logp.detach().numpy(), inputs.ref_logp.numpy()
    logp[~mask] = np.nan
    penalty, clamped = kl_penalty(logp, ref, mask, estimator=estimator, limit=20.0)
    assert not penalty[~mask].any() and clamped == 0
    loss = run(KLToReference(estimator=estimator), inputs_of(dtype=torch.float64)).loss
    assert float((inputs.weight.numpy() * penalty).sum()) == pytest.approx(loss)


def test_k2_gradient_keeps_the_value() -> None:
    inputs = inputs_of(dtype=torch.float64)
    k2 = run(KLToReference(estimator="k2"), inputs)
    for estimator in ("k1", "k3"):
        own = run(KLToReference(estimator=estimator), inputs)
        got = run(KLToReference(estimator=estimator, gradient="k2"), inputs)
        assert got.loss == pytest.approx(own.loss) and not torch.allclose(own.grad, k2.grad)
        torch.testing.assert_close(got.grad, k2.grad)


@every_estimator
def test_double_precision_gradients(estimator: str) -> None:
    inputs = inputs_of(16, dtype=torch.float64)

    def loss(cur: torch.Tensor) -> torch.Tensor:
        return KLToReference(estimator=estimator)(replace(inputs, cur_logp=cur)).loss

    assert torch.autograd.gradcheck(loss, (inputs.cur_logp.detach().clone().requires_grad_(),), atol=1e-8)


def test_impossible_settings_are_named() -> None:
    with pytest.raises(ValueError, match="estimator 'k4': must be one of k1, k2, k3"):
        KLToReference(estimator="k4")
    with pytest.raises(ValueError, match="gradient 'k3': must be one of own, k2"):
        KLToReference(gradient="k3")
    with pytest.raises(ValueError, match="log_ratio_limit 90.0"):
        KLToReference(log_ratio_limit=90.0)
    with pytest.raises(ValueError, match="score the reference model"):
        KLToReference()(flat([0.0]))
    one = np.zeros(1)
    with pytest.raises(ValueError, match="estimator 'low_var'"):
        kl_penalty(one, one, one > 0, estimator="low_var", limit=1.0)
    with pytest.raises(ValueError, match="limit 0"):
        kl_penalty(one, one, one > 0, estimator="k1", limit=0)
    with pytest.raises(ValueError, match="all must be"):
        kl_penalty(one, np.zeros(2), one > 0, estimator="k1", limit=1.0)
