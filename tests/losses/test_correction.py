"""Invariants 1-3 of ``losses/correction.py``, and the worked numbers of truncated importance sampling."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_ext.losses.cispo import CISPO
from megatron_ext.losses.correction import Correction, CorrectionKind
from megatron_ext.losses.policy import GSPO, ClipLoss
from megatron_ext.losses.ratio import active
from megatron_ext.losses.surrogate import PolicyTerm
from tests.helpers.loss_inputs import flat, inputs_of, run

K = (0.3, 0.5, 1.0, 1.1, 3.0, 5.0, 6.0)


def weights(kind: CorrectionKind, low: float, high: float, k: tuple[float, ...] = K) -> list[float]:
    inputs = flat([0.0] * len(k), rollout=[-math.log(x) for x in k])
    value: list[float] = Correction(kind=kind, low=low, high=high)(inputs, active(inputs))[0].tolist()
    return value


def test_weights() -> None:
    assert weights(CorrectionKind.TRUNCATE, 0.0, 2.0) == pytest.approx([0.3, 0.5, 1.0, 1.1, 2.0, 2.0, 2.0])
    assert weights(CorrectionKind.TRUNCATE, 0.5, 2.0) == pytest.approx([0.5, 0.5, 1.0, 1.1, 2.0, 2.0, 2.0])
    eps = 1e-9  # the logarithm of a bound comes back a few ulp beside it
    assert weights(CorrectionKind.ICEPOP, 0.5 - eps, 5.0 + eps) == pytest.approx([0, 0.5, 1.0, 1.1, 3.0, 5.0, 0])
    assert weights(CorrectionKind.MASK, 0.5 - eps, 5.0 + eps) == pytest.approx([0, 1, 1, 1, 1, 1, 0])


def test_spade_numbers() -> None:
    """TIS with (0, 2): ratios .3, 1.1, 3 weigh .3, 1.1, 2.0."""
    for k, weight in ((0.3, 0.3), (1.1, 1.1), (3.0, 2.0)):
        result = run(ClipLoss(correction="truncate"), flat([0.0], rollout=[-math.log(k)]))
        assert result.loss == pytest.approx(-weight) and float(result.grad[0]) == pytest.approx(-weight)


@pytest.mark.parametrize("term", [ClipLoss(), GSPO(gradient="unit"), CISPO()], ids=["clip", "gspo", "cispo"])
def test_it_multiplies_any_surrogate_as_a_constant(term: PolicyTerm) -> None:  # invariant 1
    inputs = inputs_of(seed=2, dtype=torch.float64)
    k = (inputs.old_logp - inputs.rollout_logp).exp()
    corrected = run(replace(term, correction="truncate", correction_high=1.1), inputs)
    by_hand = run(term, replace(inputs, weight=inputs.weight * k.clamp(0, 1.1)))
    assert corrected.loss == pytest.approx(by_hand.loss)
    torch.testing.assert_close(corrected.grad, by_hand.grad)
    rolled = inputs.rollout_logp.clone().requires_grad_()
    cur = inputs.cur_logp.detach().clone().requires_grad_()
    replace(term, correction="truncate")(replace(inputs, rollout_logp=rolled, cur_logp=cur)).loss.backward()
    assert rolled.grad is None


@pytest.mark.parametrize("kind", ["truncate", "icepop", "mask"])
@pytest.mark.parametrize("granularity", ["token", "step", "sequence"])
def test_equal_policies_are_not_corrected(kind: str, granularity: str) -> None:  # invariant 1
    inputs = replace(inputs_of(), rollout_logp=inputs_of().old_logp)
    want = run(ClipLoss(), inputs)
    got = run(ClipLoss(correction=kind, correction_granularity=granularity), inputs)
    assert got.loss == want.loss and torch.equal(got.grad, want.grad)
    assert got.mean("offpolicy/correction_mean") == 1.0
    assert got.mean("offpolicy/correction_low") == got.mean("offpolicy/correction_high") == 0.0


@pytest.mark.parametrize("kind", ["truncate", "icepop", "mask"])
def test_sides_are_counted_and_masks_give_exactly_zero(kind: str) -> None:  # invariants 2 and 3
    inputs = flat([0.0] * 7, rollout=[-math.log(k) for k in K])
    result = run(ClipLoss(correction=kind, correction_low=0.4, correction_high=4.0), inputs)
    assert result.metrics["offpolicy/correction_low"] == (1.0, 7.0)
    assert result.metrics["offpolicy/correction_high"] == (2.0, 7.0)
    outside = torch.tensor([k < 0.4 or k > 4.0 for k in K])
    assert result.grad[outside].any() == (kind == "truncate") and result.grad[~outside].all()


def test_a_sequence_weight_is_the_product_unless_it_is_asked_for_the_mean() -> None:
    inputs = flat([0.0] * 4, rollout=[-0.1, -0.2, -0.1, -0.4], turn=[0, 0, 1, 1])
    for granularity, reduce, wanted in (
        ("sequence", "product", [0.8] * 4),
        ("sequence", "geometric", [0.2] * 4),
        ("step", "product", [0.3, 0.3, 0.5, 0.5]),
    ):
        correction = Correction(kind=CorrectionKind.TRUNCATE, low=0.0, high=9.0, granularity=granularity, reduce=reduce)
        got = correction(inputs, active(inputs))[0]
        assert got.tolist() == pytest.approx([math.exp(x) for x in wanted])


def test_infinite_log_probs_are_masked_or_truncated_and_counted() -> None:
    inputs = flat([-1.0] * 3, old=[-1.0, -1.0, -math.inf], rollout=[-math.inf, -1.0, -1.0])
    for kind, weight in (("truncate", [2.0, 1.0, 0.0]), ("icepop", [0.0, 1.0, 0.0]), ("mask", [0.0, 1.0, 0.0])):
        low, high = (0.0, 2.0) if kind == "truncate" else (0.5, 5.0)
        value, metrics = Correction(kind=CorrectionKind(kind), low=low, high=high)(inputs, active(inputs))
        assert value.tolist() == pytest.approx(weight, abs=1e-8)
        assert float(metrics["offpolicy/correction_clamped"][0]) == 2.0
