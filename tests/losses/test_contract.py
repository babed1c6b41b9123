"""Invariants of ``losses/protocol.py`` for every loss term, and the numbers of each term."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, replace

import pytest
import torch

from megatron_ext.losses.entropy import EntropyBonus
from megatron_ext.losses.kl import KLToReference
from megatron_ext.losses.policy import ClipLoss
from megatron_ext.losses.protocol import LossInputs, LossOutput, LossTerm
from megatron_ext.losses.sft import NegativeLogLikelihood
from megatron_ext.losses.total import needs_entropy_grad, needs_reference, total_loss
from megatron_ext.tracking.names import lookup

TERMS: Mapping[str, LossTerm] = {
    "clip": ClipLoss(),
    "clip_dual": ClipLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "kl_k1": KLToReference(estimator="k1"),
    "kl_k2": KLToReference(estimator="k2"),
    "kl_k3": KLToReference(estimator="k3"),
    "entropy": EntropyBonus(),
    "nll": NegativeLogLikelihood(),
}
every_term = pytest.mark.parametrize("term", TERMS.values(), ids=TERMS.keys())


def inputs_of(n: int = 40, seed: int = 0) -> LossInputs:
    rng = torch.Generator().manual_seed(seed)

    def normal() -> torch.Tensor:
        return torch.randn(n, generator=rng)

    base = -torch.rand(n, generator=rng) * 3
    weight = torch.rand(n, generator=rng) * (torch.rand(n, generator=rng) < 0.7) / n
    return LossInputs(
        cur_logp=(base + 0.3 * normal()).requires_grad_(),
        old_logp=base,
        rollout_logp=base + 1e-3 * normal(),
        advantage=normal(),
        weight=weight,
        entropy=torch.rand(n, generator=rng).requires_grad_(),
        row=torch.arange(n) // 8,
        turn=torch.arange(n) // 4,
        ref_logp=base + 0.2 * normal(),
    )


def take(inputs: LossInputs, index: torch.Tensor) -> LossInputs:
    return LossInputs(**{f.name: getattr(inputs, f.name)[index] for f in fields(inputs)})


def run(term: LossTerm, inputs: LossInputs) -> tuple[float, torch.Tensor, dict[str, tuple[float, float]]]:
    """Loss, gradient with respect to (cur_logp, entropy), and metrics as numbers."""
    leaves = [x.detach().clone().requires_grad_() for x in (inputs.cur_logp, inputs.entropy)]
    out: LossOutput = term(replace(inputs, cur_logp=leaves[0], entropy=leaves[1]))
    out.loss.backward()
    grads = torch.cat([torch.zeros_like(x) if x.grad is None else x.grad for x in leaves])
    return float(out.loss.detach()), grads, {k: (float(a), float(b)) for k, (a, b) in out.metrics.items()}


@every_term
def test_only_tokens_with_weight_count(term: LossTerm) -> None:  # invariant 1
    inputs = inputs_of()
    off = inputs.weight == 0
    poison = {
        name: torch.where(off, torch.nan, getattr(inputs, name).detach())
        for name in ("cur_logp", "old_logp", "rollout_logp", "advantage", "entropy", "ref_logp")
    }
    want, got = run(term, inputs), run(term, replace(inputs, **poison))
    assert got[0] == want[0] and got[2] == want[2]
    assert torch.equal(got[1], want[1]) and not got[1][torch.cat([off, off])].any()


@every_term
def test_micro_batches_and_order_change_nothing(term: LossTerm) -> None:  # invariants 1 and 3
    inputs = inputs_of()
    loss, grads, metrics = run(term, inputs)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))
    parts = [order[:7], order[7:8], order[8:], order[:0]]
    results = [run(term, take(inputs, part)) for part in parts]
    assert sum(r[0] for r in results) == pytest.approx(loss, abs=1e-6)
    for name, (numerator, denominator) in metrics.items():
        assert sum(r[2][name][0] for r in results) == pytest.approx(numerator, abs=1e-6)
        assert sum(r[2][name][1] for r in results) == denominator
    for part, result in zip(parts, results, strict=True):
        torch.testing.assert_close(result[1], torch.cat([grads[:40][part], grads[40:][part]]))


@every_term
def test_finite_inputs_give_finite_results(term: LossTerm) -> None:  # invariant 2
    inputs = inputs_of(6)
    extreme = torch.tensor([-1e30, -500.0, -0.0, -1e-30, -90.0, -1.0])
    inputs = replace(
        inputs,
        cur_logp=extreme.clone(),
        old_logp=extreme.flip(0),
        ref_logp=extreme.roll(2),
        weight=torch.ones(6),
        advantage=torch.tensor([1e3, -1e3, 1.0, -1.0, 5.0, -5.0]),
    )
    loss, grads, metrics = run(term, inputs)
    assert math.isfinite(loss) and torch.isfinite(grads).all()
    assert all(math.isfinite(a) and math.isfinite(b) for a, b in metrics.values())


@every_term
def test_metric_names_are_in_the_table(term: LossTerm) -> None:
    assert all(lookup(name) for name in run(term, inputs_of())[2])


def one(cur: float, old: float, advantage: float, **extra: float) -> LossInputs:
    def tensor(x: float) -> torch.Tensor:
        return torch.tensor([x], dtype=torch.float64)

    ref = tensor(extra["ref"]) if "ref" in extra else None
    zero = torch.zeros(1, dtype=torch.int64)
    return LossInputs(
        tensor(cur), tensor(old), tensor(old), tensor(advantage), tensor(1.0), tensor(0.5), zero, zero, ref
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "clipped"),
    [
        (1.0, 2.0, -2.0, -2.0, None),
        (1.2, 2.0, -2.4, -2.4, None),
        (1.5, 2.0, -2.56, 0.0, "high"),
        (0.5, 2.0, -1.0, -1.0, None),
        (0.5, -2.0, 1.6, 0.0, "low"),
        (1.5, -2.0, 3.0, 3.0, None),
        (9.0, -2.0, 6.0, 0.0, "dual"),
        (1.5, 0.0, 0.0, 0.0, None),
    ],
)
def test_clip_numbers(ratio: float, advantage: float, loss: float, gradient: float, clipped: str | None) -> None:
    got = run(ClipLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0), one(math.log(ratio), 0.0, advantage))
    assert got[0] == pytest.approx(loss) and float(got[1][0]) == pytest.approx(gradient)
    assert got[2]["policy/ratio_mean"] == (pytest.approx(ratio), 1.0)
    for side in ("low", "high", "dual"):
        assert got[2][f"policy/clip_fraction_{side}"][0] == (side == clipped)


def test_infinite_ratios_are_clamped_and_counted() -> None:
    loss, grads, metrics = run(ClipLoss(), one(0.0, -1e9, -1.0))
    assert loss == pytest.approx(math.exp(20)) and not grads[0]
    assert metrics["policy/log_ratio_clamped"] == (1.0, 1.0)


def test_kl_old_estimates_the_divergence_of_old_from_current() -> None:
    old, cur = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((old * (old / cur).log()).sum())
    estimate = sum(
        float(p) * run(ClipLoss(), one(float(c.log()), float(p.log()), 1.0))[2]["policy/kl_old"][0]
        for p, c in zip(old, cur, strict=True)
    )
    assert estimate == pytest.approx(exact, rel=1e-5)


def test_kl_estimators() -> None:
    policy, reference = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((policy * (policy / reference).log()).sum())
    for estimator in ("k1", "k3"):  # both are unbiased under the policy
        total = 0.0
        for p, r in zip(policy, reference, strict=True):
            inputs = one(float(p.log()), 0.0, 0.0, ref=float(r.log()))
            total += float(p) * run(KLToReference(estimator=estimator), inputs)[0]
        assert total == pytest.approx(exact, rel=1e-5)
    x = 0.7
    assert run(KLToReference(estimator="k2"), one(x - 1, 0.0, 0.0, ref=-1.0))[0] == pytest.approx(x**2 / 2)
    for estimator in ("k1", "k2", "k3"):
        assert run(KLToReference(estimator=estimator), one(-1.0, 0.0, 0.0, ref=-1.0))[0] == 0.0
    with pytest.raises(ValueError, match="needs ref_logp"):
        KLToReference()(one(0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_low": 1.5}, "clip_low 1.5"),
        ({"clip_high": -0.1}, "clip_high -0.1"),
        ({"dual_clip": 1.0}, "dual_clip 1.0"),
    ],
)
def test_impossible_settings_are_named(values: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClipLoss(**values)
    with pytest.raises(ValueError, match="estimator 'k4'"):
        KLToReference(estimator="k4")


def test_total_is_the_weighted_sum_of_the_terms() -> None:
    inputs = inputs_of()
    terms: dict[str, LossTerm]
    terms = {"policy": ClipLoss(), "kl": KLToReference(coefficient=0.1), "entropy": EntropyBonus(coefficient=0.01)}
    out = total_loss(terms, inputs)
    parts = {name: run(term, inputs)[0] for name, term in terms.items()}
    assert float(out.loss.detach()) == pytest.approx(parts["policy"] + 0.1 * parts["kl"] + 0.01 * parts["entropy"])
    numerator, denominator = out.metrics["train/loss/kl"]
    assert float(numerator) == pytest.approx(parts["kl"])
    assert float(denominator) == pytest.approx(float(inputs.weight.sum()))
    assert all(lookup(name) for name in out.metrics)


def test_coefficient_zero_is_a_metric_without_gradient() -> None:
    inputs = inputs_of()
    out = total_loss({"policy": ClipLoss(), "kl": KLToReference(coefficient=0.0)}, inputs)
    assert float(out.loss.detach()) == pytest.approx(run(ClipLoss(), inputs)[0])
    assert float(out.metrics["policy/kl_ref"][0]) != 0
    out.loss.backward()
    torch.testing.assert_close(inputs.cur_logp.grad, run(ClipLoss(), inputs)[1][:40])


def test_what_the_terms_need() -> None:
    assert needs_reference({"kl": KLToReference()}) and not needs_reference({"policy": ClipLoss()})
    assert needs_entropy_grad({"e": EntropyBonus()}) and not needs_entropy_grad({"e": EntropyBonus(coefficient=0.0)})
    with pytest.raises(ValueError, match="'a' and 'b' both report policy/kl_ref"):
        total_loss({"a": KLToReference(), "b": KLToReference()}, inputs_of())
