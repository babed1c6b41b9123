"""Invariants of ``losses/protocol.py`` and ``losses/surrogate.py`` for every loss term, and of ``losses/total.py``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.losses.cispo import CISPO
from megatron_ext.losses.entropy import EntropyBonus
from megatron_ext.losses.kl import KLToReference
from megatron_ext.losses.masks import IntervalMask, TwoSidedMask
from megatron_ext.losses.policy import GSPO, ClipLoss, StepClip
from megatron_ext.losses.posterior import PosteriorMatching
from megatron_ext.losses.protocol import Granularity, LossInputs, LossTerm
from megatron_ext.losses.sft import NegativeLogLikelihood
from megatron_ext.losses.surrogate import PolicyTerm
from megatron_ext.losses.total import needs_entropy_grad, needs_reference, total_loss
from megatron_ext.tracking.names import lookup
from tests.helpers.loss_inputs import inputs_of, run, take

TERMS: Mapping[str, LossTerm] = {
    "clip": ClipLoss(),
    "clip_dual": ClipLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0),
    "clip_over_reference": ClipLoss(denominator="reference"),
    "clip_truncated": ClipLoss(correction="truncate", correction_high=1.1),
    "clip_icepop": ClipLoss(correction="icepop", correction_low=0.9, correction_high=1.1),
    "clip_mask": ClipLoss(correction="mask", correction_granularity="step", correction_low=0.9, correction_high=1.1),
    "clip_sequence_truncated": ClipLoss(correction="truncate", correction_granularity="sequence"),
    "gspo": GSPO(),
    "gspo_unit": GSPO(gradient="unit", clip_low=0.02, clip_high=0.03),
    "step": StepClip(),
    "step_product": StepClip(reduce="product", clip_low=0.2, clip_high=0.2, gradient="unit"),
    "cispo": CISPO(clip_high=0.2),
    "cispo_step": CISPO(granularity="step", clip_low=0.1, clip_high=0.1),
    "interval": IntervalMask(positive_low=0.8, positive_high=1.2, negative_low=0.7, negative_high=1.1),
    "two_sided": TwoSidedMask(mask_low=0.2, mask_high=0.3),
    "posterior": PosteriorMatching(tau=1.0),
    "posterior_sequence": PosteriorMatching(granularity="sequence", gradient="token"),
    "kl_k1": KLToReference(estimator="k1"),
    "kl_k2": KLToReference(estimator="k2"),
    "kl_k3": KLToReference(estimator="k3"),
    "kl_k3_k2": KLToReference(estimator="k3", gradient="k2"),
    "entropy": EntropyBonus(),
    "nll": NegativeLogLikelihood(),
}
POLICY: Mapping[str, PolicyTerm] = {name: term for name, term in TERMS.items() if isinstance(term, PolicyTerm)}
every_term = pytest.mark.parametrize("term", TERMS.values(), ids=TERMS.keys())
every_policy_term = pytest.mark.parametrize("term", POLICY.values(), ids=POLICY.keys())


@every_term
def test_only_tokens_with_weight_count(term: LossTerm) -> None:  # protocol, invariant 1
    inputs = inputs_of()
    off = inputs.weight == 0
    for bad in (math.nan, -math.inf):
        poison = {
            name: torch.where(off, bad, getattr(inputs, name).detach())
            for name in ("cur_logp", "old_logp", "rollout_logp", "advantage", "entropy", "ref_logp")
        }
        want, got = run(term, inputs), run(term, replace(inputs, **poison))
        assert got.loss == want.loss and got.metrics == want.metrics
        assert torch.equal(got.grad, want.grad) and torch.equal(got.entropy_grad, want.entropy_grad)
        assert not got.grad[off].any() and not got.entropy_grad[off].any()


def key_of(inputs: LossInputs, unit: Granularity) -> torch.Tensor:
    own = torch.arange(len(inputs.row))
    return {Granularity.TOKEN: own, Granularity.STEP: inputs.turn, Granularity.SEQUENCE: inputs.row}[unit]


@every_term
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 6))
def test_micro_batches_and_order_change_nothing(term: LossTerm, seed: int, count: int) -> None:
    """Protocol, invariants 1 and 3; slime 365 and 2090 (weights by micro-batch), ROLL 409 (an optimizer step a part).

    The parts of one optimizer step, in any order, add up to its one loss and gradient: token and step ratios survive
    every cut at turns, a sequence ratio every cut at rows.
    """
    inputs = inputs_of(seed=seed, dtype=torch.float64)
    whole = run(term, inputs)
    rng = torch.Generator().manual_seed(seed)
    order = torch.randperm(40, generator=rng)
    part_of = torch.randint(count, (40,), generator=rng)[key_of(inputs, term.unit)]
    loss, grad, entropy_grad = 0.0, torch.zeros_like(whole.grad), torch.zeros_like(whole.grad)
    metrics = {name: [0.0, 0.0] for name in whole.metrics}
    for part in range(count + 1):  # the last one is empty
        at = order[part_of[order] == part]
        result = run(term, take(inputs, at))
        loss += result.loss
        grad[at] += result.grad
        entropy_grad[at] += result.entropy_grad
        for name, pair in result.metrics.items():
            metrics[name] = [a + b for a, b in zip(metrics[name], pair, strict=True)]
    assert loss == pytest.approx(whole.loss, abs=1e-12)
    torch.testing.assert_close(grad, whole.grad, rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(entropy_grad, whole.entropy_grad, rtol=1e-12, atol=1e-14)
    for name, pair in whole.metrics.items():
        assert metrics[name] == pytest.approx(list(pair), abs=1e-9), name


@every_term
def test_finite_inputs_give_finite_results(term: LossTerm) -> None:  # protocol, invariant 2
    extreme = torch.tensor([-1e30, -500.0, -0.0, -1e-30, -90.0, -1.0])
    inputs = replace(
        inputs_of(6),
        cur_logp=extreme.clone(),
        old_logp=extreme.flip(0),
        rollout_logp=extreme.roll(3),
        ref_logp=extreme.roll(2),
        weight=torch.ones(6),
        advantage=torch.tensor([1e3, -1e3, 1.0, -1.0, 5.0, -5.0]),
    )
    result = run(term, inputs)
    assert (
        math.isfinite(result.loss) and torch.isfinite(result.grad).all() and torch.isfinite(result.entropy_grad).all()
    )
    assert all(math.isfinite(a) and math.isfinite(b) for a, b in result.metrics.values())


@every_policy_term
def test_infinite_log_probs_are_finite_and_counted(term: PolicyTerm) -> None:  # protocol, invariant 2
    """Every pair of finite and infinite current, old, rollout and reference log-probs: verl 891's NaN, at its root."""
    inf, values = math.inf, (-1.0, -math.inf)
    grid = torch.tensor([(a, b, c, d) for a in values for b in values for c in values for d in values])
    n = len(grid)
    for sign in (1.0, -1.0, 0.0):
        inputs = LossInputs(
            cur_logp=grid[:, 0],
            old_logp=grid[:, 1],
            rollout_logp=grid[:, 2],
            advantage=torch.full((n,), sign),
            weight=torch.full((n,), 1 / n),
            entropy=torch.ones(n),
            row=torch.arange(n),
            turn=torch.arange(n),
            ref_logp=grid[:, 3],
        )
        result = run(term, inputs)
        assert math.isfinite(result.loss) and torch.isfinite(result.grad).all()
        assert all(math.isfinite(a) and math.isfinite(b) for a, b in result.metrics.values())
        assert not result.grad[grid[:, 0] == -inf].any(), "a log-prob of minus infinity has no gradient"
        below = inputs.logp(term.denominator)
        clamped = (grid[:, 0] == -inf) | (below == -inf)
        assert result.metrics["policy/log_ratio_clamped"] == (float(clamped.sum()), n)


@every_term
def test_nan_is_not_hidden(term: LossTerm) -> None:  # protocol, invariant 2: the step is skipped and counted
    inputs = inputs_of()
    at = int(torch.nonzero(inputs.weight)[0])
    name = "entropy" if isinstance(term, EntropyBonus) else "cur_logp"
    broken = getattr(inputs, name).detach().clone()
    broken[at] = math.nan
    assert math.isnan(run(term, replace(inputs, **{name: broken})).loss)


@every_term
@pytest.mark.parametrize("n", [0, 12])
def test_nothing_to_train_is_exactly_zero(term: LossTerm, n: int) -> None:
    """An empty micro-batch, and an empty mask (a segment with no model token): value, gradient and counts are 0."""
    inputs = replace(inputs_of(n), weight=torch.zeros(n))
    result = run(term, inputs)
    assert result.loss == 0.0 and not result.grad.any() and not result.entropy_grad.any()
    assert all(pair == (0.0, 0.0) for pair in result.metrics.values())


@every_policy_term
def test_no_advantage_is_no_gradient(term: PolicyTerm) -> None:
    """A group of one or of constant rewards has advantage 0: exactly no gradient at the old policy."""
    inputs = inputs_of()
    inputs = replace(inputs, cur_logp=inputs.old_logp.clone(), advantage=torch.zeros(40))
    result = run(term, inputs)
    assert result.loss == 0.0 and not result.grad.any()
    assert result.metrics["policy/stopped_positive"] == (0.0, 0.0) == result.metrics["policy/stopped_negative"]


# Terms whose tokens stand alone: nothing else stops one, and no unit shares its gradient.
ALONE = ("clip", "clip_dual", "clip_over_reference", "clip_truncated", "cispo", "interval", "two_sided")


@pytest.mark.parametrize("name", ALONE)
def test_stopped_tokens_are_those_without_a_gradient(name: str) -> None:  # surrogate, invariant 3
    term, inputs = POLICY[name], inputs_of(200, seed=3)
    result = run(term, inputs)
    on = inputs.weight > 0
    still = on & (result.grad == 0)
    for side, of_side in (("positive", inputs.advantage > 0), ("negative", inputs.advantage < 0)):
        want = (float((still & of_side).sum()), float((on & of_side).sum()))
        assert result.metrics[f"policy/stopped_{side}"] == want
    assert bool(still.any()) == (name != "cispo"), "CISPO stops none; for the others a check that cannot fail is none"


@every_term
def test_observations_between_the_tokens_change_nothing(term: LossTerm) -> None:
    """Inserted at weight 0, inside turns and between them (verl 2337, miles 1827 for the losses)."""
    inputs = inputs_of(seed=5, dtype=torch.float64)
    inputs = replace(inputs, weight=inputs.weight + 0.01)
    n = 40
    where = torch.arange(2 * n)  # every token is followed by an observation
    doubled = take(inputs, where // 2)
    noise = torch.randn(2 * n, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 5
    odd = where % 2 == 1
    doubled = replace(
        doubled,
        cur_logp=torch.where(odd, noise, doubled.cur_logp.detach()),
        old_logp=torch.where(odd, -noise, doubled.old_logp),
        weight=torch.where(odd, 0.0, doubled.weight),
    )
    want, got = run(term, inputs), run(term, doubled)
    assert got.loss == pytest.approx(want.loss, abs=1e-12)
    assert got.metrics == {name: pytest.approx(pair, rel=1e-12) for name, pair in want.metrics.items()}
    torch.testing.assert_close(got.grad[~odd], want.grad)
    assert not got.grad[odd].any()


@every_term
def test_metric_names_are_in_the_table(term: LossTerm) -> None:
    assert all(lookup(name) for name in run(term, inputs_of()).metrics)


@every_term
def test_terms_are_values(term: LossTerm) -> None:
    """Frozen, compared by value, and what scoring must prepare is known before the first input is."""
    assert hash(term) == hash(replace(term))  # type: ignore[type-var]
    assert term.needs_reference == isinstance(term, KLToReference) or term == TERMS["clip_over_reference"]
    assert term.needs_entropy == isinstance(term, EntropyBonus)


def test_the_unit_is_the_coarsest_that_a_term_combines() -> None:
    assert [TERMS[name].unit for name in ("clip", "step", "gspo", "clip_mask", "clip_sequence_truncated")] == [
        Granularity.TOKEN,
        Granularity.STEP,
        Granularity.SEQUENCE,
        Granularity.STEP,
        Granularity.SEQUENCE,
    ]
    assert ClipLoss(correction_granularity="sequence").unit == Granularity.TOKEN, "there is no correction"
    assert GSPO(correction="mask", correction_granularity="step").unit == Granularity.SEQUENCE


def test_inputs_are_checked() -> None:
    inputs = inputs_of(6)
    with pytest.raises(ValueError, match=r"advantage \(5,\) and cur_logp \(6,\)"):
        replace(inputs, advantage=torch.zeros(5))
    with pytest.raises(ValueError, match=r"weight \(6, 1\)"):
        replace(inputs, weight=torch.zeros(6, 1))
    with pytest.raises(ValueError, match="score the reference model"):
        ClipLoss(denominator="reference")(replace(inputs, ref_logp=None))


def test_total_is_the_weighted_sum_of_the_terms() -> None:
    inputs = inputs_of()
    terms: dict[str, LossTerm]
    terms = {"policy": ClipLoss(), "kl": KLToReference(coefficient=0.1), "entropy": EntropyBonus(coefficient=0.01)}
    out = total_loss(terms, inputs)
    parts = {name: run(term, inputs).loss for name, term in terms.items()}
    assert float(out.loss.detach()) == pytest.approx(parts["policy"] + 0.1 * parts["kl"] + 0.01 * parts["entropy"])
    numerator, denominator = out.metrics["train/loss/kl"]
    assert float(numerator) == pytest.approx(parts["kl"])
    assert float(denominator) == pytest.approx(float(inputs.weight.sum()))
    assert all(lookup(name) for name in out.metrics)


def test_coefficient_zero_is_a_metric_without_gradient() -> None:
    inputs = inputs_of()
    out = total_loss({"policy": ClipLoss(), "kl": KLToReference(coefficient=0.0)}, inputs)
    assert float(out.loss.detach()) == pytest.approx(run(ClipLoss(), inputs).loss)
    assert float(out.metrics["policy/kl_ref"][0]) != 0
    out.loss.backward()
    torch.testing.assert_close(inputs.cur_logp.grad, run(ClipLoss(), inputs).grad)


def test_what_the_terms_need() -> None:
    assert needs_reference({"kl": KLToReference()}) and not needs_reference({"policy": ClipLoss()})
    assert needs_entropy_grad({"e": EntropyBonus()}) and not needs_entropy_grad({"e": EntropyBonus(coefficient=0.0)})
    with pytest.raises(ValueError, match="'a' and 'b' both report policy/kl_ref"):
        total_loss({"a": KLToReference(), "b": KLToReference()}, inputs_of())
