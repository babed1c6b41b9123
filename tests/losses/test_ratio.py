"""Invariants 1-4 of ``losses/ratio.py``, and the worked numbers of the ratios."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_ext.losses.policy import GSPO, ClipLoss, StepClip
from megatron_ext.losses.protocol import LossInputs
from megatron_ext.losses.ratio import Ratio, active, log_ratio, reduce_units
from tests.helpers.loss_inputs import flat, inputs_of, run


def ratio_of(inputs: LossInputs, granularity: str, reduce: str = "geometric", **keys: float | str) -> list[float]:
    ratio = Ratio(numerator="current", denominator="old", granularity=granularity, reduce=reduce, **keys)  # type: ignore[arg-type]
    value: list[float] = ratio(inputs, active(inputs)).ratio.tolist()
    return value


def test_infinities_are_clamped_without_a_gradient() -> None:  # invariant 1
    inf = math.inf
    numerator = torch.tensor([-1.0, -inf, -1.0, -inf, -50.0, -2.0], requires_grad=True)
    denominator = torch.tensor([-1.0, -1.0, -inf, -inf, -1.0, -1.0])
    x, clamped = log_ratio(numerator, denominator, torch.ones(6, dtype=torch.bool))
    assert x.tolist() == [0.0, -20.0, 20.0, 0.0, -20.0, -1.0]
    assert clamped.tolist() == [False, True, True, True, True, False]
    x.exp().sum().backward()
    assert numerator.grad is not None
    assert numerator.grad.tolist() == pytest.approx([1.0, 0.0, 0.0, 0.0, 0.0, math.exp(-1)])


def test_one_infinite_token_does_not_spoil_its_unit() -> None:  # invariant 1
    """The token is clamped before the mean, so that the others keep theirs and their gradient."""
    inputs = flat([-math.inf, 0.1, 0.3], turn=[0, 0, 0])
    assert ratio_of(inputs, "step") == pytest.approx([math.exp((-20 + 0.4) / 3)] * 3)
    result = run(ClipLoss(granularity="step", gradient="unit", clip_low=1.0), inputs)
    assert result.grad[0] == 0 and (result.grad[1:] != 0).all()
    assert result.metrics["policy/log_ratio_clamped"] == (1.0, 3.0)


def test_a_product_that_leaves_the_range_is_clamped_again() -> None:  # invariant 1
    inputs = flat([15.0, 15.0], turn=[0, 0])
    assert ratio_of(inputs, "step", "product") == [math.exp(20)] * 2
    result = run(
        ClipLoss(granularity="step", reduce="product", gradient="unit"), replace(inputs, advantage=-inputs.weight)
    )
    assert not result.grad.any() and result.metrics["policy/log_ratio_clamped"] == (2.0, 2.0)


def test_tokens_that_do_not_count_belong_to_no_unit() -> None:  # invariant 2
    """interactor's trap: two observation tokens (3, -2) that leak in give 1.228753."""
    deltas = [0.01, -0.02, 0.04]
    clean = flat([*deltas, 3.0, -2.0], weight=[1 / 3, 1 / 3, 1 / 3, 0, 0])
    assert ratio_of(clean, "sequence") == pytest.approx([1.010050] * 3 + [1.0, 1.0], abs=5e-7)
    assert ratio_of(clean, "token") == pytest.approx([*(math.exp(x) for x in deltas), 1.0, 1.0])
    assert ratio_of(flat([*deltas, 3.0, -2.0]), "sequence")[0] == pytest.approx(1.228753, abs=5e-7)


def test_one_ratio_a_unit() -> None:  # invariant 3
    inputs = inputs_of(dtype=torch.float64)
    on = active(inputs)
    for granularity, key in (("step", inputs.turn), ("sequence", inputs.row)):
        for reduce in ("geometric", "product"):
            ratio = torch.tensor(ratio_of(inputs, granularity, reduce), dtype=torch.float64)
            for unit in key.unique():
                own = on & (key == unit)
                x = (inputs.cur_logp - inputs.old_logp)[own].detach()
                wanted = (x.mean() if reduce == "geometric" else x.sum()).exp()
                torch.testing.assert_close(ratio[own], wanted.expand(int(own.sum())))
            assert (ratio[~on] == 1).all()


def test_one_token_a_unit_is_the_token_loss() -> None:  # invariant 3 (steppo: one token a step equals token PPO)
    inputs = replace(inputs_of(), turn=torch.arange(40), row=torch.arange(40))
    want = run(ClipLoss(), inputs)
    for granularity in ("step", "sequence"):
        for reduce in ("geometric", "product"):
            for gradient in ("token", "unit"):
                got = run(ClipLoss(granularity=granularity, reduce=reduce, gradient=gradient), inputs)
                assert got.loss == pytest.approx(want.loss) and got.metrics == want.metrics
                torch.testing.assert_close(got.grad, want.grad)


def test_the_two_gradients_agree_for_one_advantage_and_even_weights() -> None:
    """GSPO's remark that its token variant has the sequence's gradient where advantages are equal (eq. 10 and 17)."""
    inputs = replace(inputs_of(dtype=torch.float64), weight=torch.full((40,), 1 / 40, dtype=torch.float64))
    inputs = replace(inputs, advantage=inputs.advantage[:5].repeat_interleave(8))
    token, unit = (run(GSPO(gradient=g, clip_low=0.05, clip_high=0.05), inputs) for g in ("token", "unit"))
    assert token.loss == pytest.approx(unit.loss) and token.grad.any() and not token.grad.all()
    torch.testing.assert_close(token.grad, unit.grad)
    uneven = replace(inputs, weight=inputs.weight * torch.rand(40, dtype=torch.float64))
    token, unit = (run(GSPO(gradient=g, clip_low=0.05, clip_high=0.05), uneven) for g in ("token", "unit"))
    assert token.loss == pytest.approx(unit.loss) and not torch.allclose(token.grad, unit.grad)


def test_steppo_numbers() -> None:
    deltas = [0.1, -0.3, 0.05, 0.25]
    assert ratio_of(flat(deltas), "step")[0] == pytest.approx(1.025315, abs=5e-7)
    assert ratio_of(flat(deltas), "step", "product")[0] == pytest.approx(1.105171, abs=5e-7)
    eight = flat([0.4] * 8)
    assert ratio_of(eight, "step")[0] == pytest.approx(1.491825, abs=5e-7)
    assert ratio_of(eight, "step", "product")[0] == pytest.approx(24.53253, abs=5e-6)
    assert run(StepClip(clip_low=0.2, clip_high=0.28), eight).loss == pytest.approx(-1.28)


def test_rufus_air_numbers() -> None:
    deltas = [0.1, -0.05, 0.02, 0.03]
    assert ratio_of(flat(deltas), "sequence")[0] == pytest.approx(1.0253151, abs=5e-8)
    assert ratio_of(flat(deltas), "sequence", "product")[0] == pytest.approx(1.1051709, abs=5e-8)


def test_interactor_numbers() -> None:
    deltas = [0.01, -0.02, 0.04]
    assert run(GSPO(), flat(deltas)).loss == pytest.approx(-1.0004)
    assert run(GSPO(), flat(deltas, advantage=[-1.0] * 3)).loss == pytest.approx(1.010050, abs=5e-7)


def test_cutting_rows_at_turns_keeps_step_ratios_and_changes_sequence_ratios() -> None:  # invariant 4
    inputs = inputs_of()
    cut = replace(inputs, row=torch.arange(40) // 4)
    assert run(StepClip(), cut).loss == run(StepClip(), inputs).loss
    assert run(GSPO(), cut).loss != run(GSPO(), inputs).loss, "which is why the configuration refuses the cut"


def test_float32_does_not_see_the_order() -> None:  # invariant 4
    rng = torch.Generator().manual_seed(0)
    x, key = torch.randn(4096, generator=rng), torch.zeros(4096, dtype=torch.int64)
    on, order = torch.ones(4096, dtype=torch.bool), torch.randperm(4096, generator=rng)
    for reduce in ("geometric", "product"):
        assert torch.equal(reduce_units(x, on, key, reduce), reduce_units(x[order], on, key, reduce))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"denominator": "olds"}, "denominator 'olds': must be one of current, old, rollout, reference"),
        ({"denominator": "current"}, "denominator 'current': is the numerator too"),
        ({"granularity": "turn"}, "granularity 'turn': must be one of token, step, sequence"),
        ({"reduce": "mean"}, "reduce 'mean': must be one of geometric, product"),
        ({"gradient": "row"}, "gradient 'row': must be one of token, unit"),
        ({"log_ratio_limit": 0.0}, "log_ratio_limit 0.0: must be above 0 and at most 40"),
        ({"log_ratio_limit": 100.0}, "log_ratio_limit 100.0"),
        ({"log_ratio_limit": math.nan}, "log_ratio_limit nan"),
        ({"correction": "tis"}, "correction 'tis': must be one of none, truncate, icepop, mask"),
        ({"correction_high": 2.0}, "correction_high 2.0: correction is none"),
        ({"correction": "mask", "correction_low": 1.5}, "correction_low 1.5, correction_high 5.0: must hold"),
        ({"correction": "mask", "denominator": "rollout"}, "already divides by the sampling policy"),
        ({"correction": "mask", "correction_reduce": "sum"}, "correction_reduce 'sum'"),
        ({"correction_granularity": "row"}, "correction_granularity 'row'"),
    ],
)
def test_impossible_settings_are_named(keys: dict[str, str | float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClipLoss(**keys)  # type: ignore[arg-type]
