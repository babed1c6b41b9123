"""Numbers, bounds and gradients of the policy losses: ``policy.py``, ``cispo.py``, ``masks.py``."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_ext.losses.cispo import CISPO
from megatron_ext.losses.masks import IntervalMask, TwoSidedMask
from megatron_ext.losses.policy import GSPO, ClipLoss, StepClip
from megatron_ext.losses.posterior import PosteriorMatching
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.losses.surrogate import PolicyTerm
from tests.helpers.loss_inputs import flat, inputs_of, run


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
    result = run(ClipLoss(clip_low=0.2, clip_high=0.28, dual_clip=3.0), flat([math.log(ratio)], advantage=[advantage]))
    assert result.loss == pytest.approx(loss) and float(result.grad[0]) == pytest.approx(gradient)
    assert result.metrics["policy/ratio_mean"] == (pytest.approx(ratio), 1.0)
    for side in ("low", "high", "dual"):
        assert result.metrics[f"policy/clip_fraction_{side}"][0] == (side == clipped)
    for side, own in (("positive", advantage > 0), ("negative", advantage < 0)):
        assert result.metrics[f"policy/stopped_{side}"] == (float(own and clipped is not None), float(own))


def test_spade_clip_numbers() -> None:
    for ratio, advantage, objective in ((1.5, 1.0, 1.28), (0.5, -1.0, -0.8), (1.5, -1.0, -1.5), (0.7, 1.0, 0.7)):
        result = run(ClipLoss(), flat([math.log(ratio)], advantage=[advantage]))
        assert -result.loss == pytest.approx(objective)


def test_infinite_ratios_are_clamped_and_counted() -> None:
    for low in (-1e9, -math.inf):
        result = run(ClipLoss(), flat([0.0], [low], [-1.0]))
        assert result.loss == pytest.approx(math.exp(20)) and not result.grad[0]
        assert result.metrics["policy/log_ratio_clamped"] == (1.0, 1.0)
    bounded = run(ClipLoss(dual_clip=3.0), flat([0.0], [-math.inf], [-1.0]))
    assert bounded.loss == pytest.approx(3.0)
    assert run(ClipLoss(log_ratio_limit=2.0), flat([0.0], [-9.0], [-1.0])).loss == pytest.approx(math.exp(2))


def test_kl_old_estimates_the_divergence_of_old_from_current() -> None:
    old, cur = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.2, 0.6])
    exact = float((old * (old / cur).log()).sum())
    inputs = flat(cur.log().tolist(), old.log().tolist())
    for term in (ClipLoss(), GSPO(), TwoSidedMask()):  # token by token, whatever ratio the loss takes
        estimate = sum(
            float(p) * run(term, flat([float(c.log())], [float(p.log())])).mean("policy/kl_old")
            for p, c in zip(old, cur, strict=True)
        )
        assert estimate == pytest.approx(exact, rel=1e-5)
        assert run(term, inputs).mean("policy/kl_old") > 0


# -- CISPO ---------------------------------------------------------------------------------------------------------
def test_minimax_m2_numbers() -> None:
    """Ratios [.5, 1, 3], bound 2: weights [.5, 1, 2]; the clip of PPO gives the third token no gradient."""
    logp = [-1.0, -0.5, -2.0]
    inputs = flat(logp, [x - math.log(r) for x, r in zip(logp, (0.5, 1.0, 3.0), strict=True)])
    result = run(CISPO(clip_high=1.0), inputs)
    assert result.loss == pytest.approx(1.666667, abs=5e-7)
    assert result.grad.tolist() == pytest.approx([-0.166667, -0.333333, -0.666667], abs=5e-7)
    assert result.metrics["policy/clip_fraction_high"] == (1.0, 3.0)
    assert result.metrics["policy/clip_fraction_low"] == result.metrics["policy/stopped_positive"] == (0.0, 3.0)
    assert run(ClipLoss(clip_high=1.0), inputs).grad[2] == 0.0


def test_cispo_keeps_every_gradient() -> None:
    inputs = inputs_of(200, spread=2.0)
    result = run(CISPO(clip_low=0.2, clip_high=0.2), inputs)
    assert torch.equal(result.grad != 0, inputs.weight > 0)
    assert result.mean("policy/clip_fraction_low") > 0.1 < result.mean("policy/clip_fraction_high")


# -- masks ---------------------------------------------------------------------------------------------------------
def sao(ratios: list[float], term: TwoSidedMask) -> list[float]:
    """The weight f(r) of each token: minus the gradient times the count, at advantage 1."""
    result = run(term, flat([0.0] * len(ratios), rollout=[-math.log(r) for r in ratios]))
    return [-float(g) * len(ratios) for g in result.grad]


def test_sao_numbers() -> None:
    assert sao([0.65, 0.75, 1, 5.5, 6.2], TwoSidedMask()) == pytest.approx([0, 0.75, 1, 5.5, 0])
    coding = TwoSidedMask(mask_low=0.8, mask_high=3.0)
    assert sao([0.1, 0.25, 1, 3.5, 4.1], coding) == pytest.approx([0, 0.25, 1, 3.5, 0])
    cur = [math.log(p) for p in (0.3, 0.3, 0.5, 0.6, 0.6)]
    rollout = [c - math.log(r) for c, r in zip(cur, (0.65, 0.75, 1, 5.5, 6.2), strict=True)]
    inputs = flat(cur, advantage=[1, 1, -1, 1, 1], rollout=rollout)
    result = run(TwoSidedMask(), inputs)
    assert result.loss == pytest.approx(0.603875, abs=5e-7)
    assert result.metrics["policy/stopped_positive"] == (2.0, 4.0)
    assert result.metrics["policy/stopped_negative"] == (0.0, 1.0)
    assert result.metrics["policy/clip_fraction_low"] == result.metrics["policy/clip_fraction_high"] == (1.0, 5.0)
    # The sign of the advantage is irrelevant to the mask.
    assert run(TwoSidedMask(), replace(inputs, advantage=-inputs.advantage)).loss == pytest.approx(-0.603875, abs=5e-7)


def test_a_ratio_exactly_at_a_bound() -> None:
    """SAO masks it (strict), the base objective keeps it (inclusive). The bounds are the ratio's own float64 values."""
    r = math.exp(0.25)
    at = flat([0.25])
    assert run(TwoSidedMask(denominator="old", mask_high=r - 1), at).grad[0] == 0
    assert run(TwoSidedMask(denominator="old", mask_high=r - 1 + 1e-12), at).grad[0] != 0
    below = flat([-0.25])
    at_low = 1 - math.exp(-0.25)
    assert 1 - at_low == math.exp(-0.25)
    assert run(TwoSidedMask(denominator="old", mask_low=at_low), below).grad[0] == 0
    assert run(TwoSidedMask(denominator="old", mask_low=at_low + 1e-12), below).grad[0] != 0
    assert run(IntervalMask(denominator="old", positive_low=1 - at_low), below).grad[0] != 0
    assert run(IntervalMask(denominator="old", positive_high=r), at).grad[0] != 0
    assert run(IntervalMask(denominator="old", positive_high=r - 1e-12), at).grad[0] == 0


def test_the_base_objective_has_an_interval_for_each_sign() -> None:
    """``A >= 0`` reads the positive interval, 0 included."""
    term = IntervalMask(positive_low=0.5, positive_high=1.5, negative_low=0.8, negative_high=4.0)
    ratios, advantage = [0.6, 2.0, 0.6, 2.0, 5.0, 0.6], [1.0, 1.0, -1.0, -1.0, -1.0, 0.0]
    result = run(term, flat([-1.0] * 6, advantage=advantage, rollout=[-1 - math.log(r) for r in ratios]))
    weights = [0.6, 0, 0, 2.0, 0, 0]
    assert [-float(g) * 6 for g in result.grad] == pytest.approx(
        [w * a for w, a in zip(weights, advantage, strict=True)]
    )
    assert result.loss == pytest.approx((0.6 - 2.0) / 6)
    assert result.metrics["policy/clip_fraction_low"] == (1.0, 6.0)
    assert result.metrics["policy/clip_fraction_high"] == (2.0, 6.0)
    assert result.metrics["policy/stopped_positive"] == (1.0, 2.0)
    assert result.metrics["policy/stopped_negative"] == (2.0, 3.0)


def test_an_open_interval_is_the_policy_gradient_with_a_constant_ratio() -> None:
    inputs = inputs_of(dtype=torch.float64)
    wide = run(IntervalMask(positive_low=0, positive_high=1e9, negative_low=0, negative_high=1e9), inputs)
    r = (inputs.cur_logp - inputs.rollout_logp).exp().detach()
    torch.testing.assert_close(wide.grad, -inputs.weight * r * inputs.advantage)


# -- gradients in double precision -----------------------------------------------------------------------------------
SMOOTH = {
    "clip": ClipLoss(dual_clip=3.0),
    "clip_corrected": ClipLoss(correction="truncate"),
    "gspo_unit": GSPO(gradient="unit", clip_low=0.2, clip_high=0.2),
    "step_product_unit": StepClip(reduce="product", gradient="unit", clip_low=0.2, clip_high=0.2),
    "posterior": PosteriorMatching(),
    "posterior_sequence": PosteriorMatching(granularity="sequence", tau=2.0),
}


@pytest.mark.parametrize("term", SMOOTH.values(), ids=SMOOTH.keys())
def test_double_precision_gradients(term: LossTerm) -> None:
    inputs = inputs_of(16, seed=4, dtype=torch.float64)

    def loss(cur: torch.Tensor) -> torch.Tensor:
        return term(replace(inputs, cur_logp=cur)).loss

    assert torch.autograd.gradcheck(loss, (inputs.cur_logp.detach().clone().requires_grad_(),), atol=1e-8)


WEIGHTED = {
    "cispo": (CISPO(clip_high=0.1), "old"),
    "cispo_sequence": (CISPO(clip_high=0.1, granularity="sequence"), "old"),
    "interval": (IntervalMask(positive_high=1.2), "rollout"),
    "two_sided": (TwoSidedMask(mask_low=0.1, mask_high=0.1), "rollout"),
    "gspo_token": (GSPO(clip_low=0.02, clip_high=0.02), "old"),
}


@pytest.mark.parametrize(("term", "denominator"), WEIGHTED.values(), ids=WEIGHTED.keys())
def test_stopped_gradients_are_those_of_a_constant_weight(term: PolicyTerm, denominator: str) -> None:
    """Where part of a loss is held constant its gradient is ``-weight * constant * A`` a token, in closed form."""
    inputs = inputs_of(64, seed=6, dtype=torch.float64)
    on = inputs.weight > 0
    x = (inputs.cur_logp - inputs.logp(denominator)).detach()
    if term.granularity == "sequence":
        for row in inputs.row.unique():
            own = on & (inputs.row == row)
            x = torch.where(inputs.row == row, x[own].mean(), x)
    r, a = x.exp(), inputs.advantage
    if isinstance(term, CISPO):
        constant = r.clamp(max=1.1)
    elif isinstance(term, GSPO):
        constant = torch.where(((a > 0) & (r > 1.02)) | ((a < 0) & (r < 0.98)), 0.0, r)
    elif isinstance(term, TwoSidedMask):
        constant = torch.where((r > 0.9) & (r < 1.1), r, 0.0)
    else:
        constant = torch.where((r >= 0.2) & (r <= torch.where(a >= 0, 1.2, 5.0)), r, 0.0)
    result = run(term, inputs)
    torch.testing.assert_close(result.grad, torch.where(on, -inputs.weight * constant * a, 0.0))
    assert (constant[on] != r[on]).any(), "some bound must bind for this to say anything"


@pytest.mark.parametrize(
    ("make", "keys", "message"),
    [
        (ClipLoss, {"clip_low": 1.5}, "clip_low 1.5"),
        (ClipLoss, {"clip_high": -0.1}, "clip_high -0.1"),
        (ClipLoss, {"dual_clip": 1.0}, "dual_clip 1.0"),
        (CISPO, {"clip_low": -0.5}, "clip_low -0.5"),
        (CISPO, {"clip_high": math.nan}, "clip_high nan"),
        (IntervalMask, {"positive_low": 6.0}, "positive_low 6.0, positive_high 5.0"),
        (IntervalMask, {"negative_low": -1.0}, "negative_low -1.0"),
        (TwoSidedMask, {"mask_low": 0.0}, "mask_low 0.0"),
        (PosteriorMatching, {"tau": 0.0}, "tau 0.0"),
        (PosteriorMatching, {"floor": 0.5}, "floor 0.5"),
    ],
)
def test_impossible_settings_are_named(make: type[PolicyTerm], keys: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**keys)  # type: ignore[arg-type]
