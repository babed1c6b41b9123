"""Policy losses and KL estimates against independent implementations, on random inputs in double precision, to 1e-6.

| ours | verl 0.9.1 | TRL 1.16 | other |
|---|---|---|---|
| ClipLoss (PPO, GRPO, DAPO) | vanilla | grpo, dapo | |
| ClipLoss with dual_clip | vanilla (c) | delta | |
| GSPO, gradient token | gspo | | |
| GSPO, gradient unit | gspo at one advantage a sequence | sequence level | |
| StepClip | gspo, a row a step | sequence level, a row a step | |
| StepClip, product | | | written out |
| CISPO | cispo | cispo | |
| IntervalMask, TwoSidedMask | reinforce with IcePop weights (one interval) | | intervals by sign: none |
| correction truncate, icepop, mask | rollout correction weights | the product with the loss alone | |
| KL k1, k2, k3; k2 gradient | kl_penalty | k3 | torch.distributions (expectations) |
| effective sample size | rollout correction metrics | | |
| PosteriorMatching | | | torch's binary cross-entropy (``test_posterior.py``) |

megatron-core's package holds no policy loss. TRL's weights for truncated sampling are computed inside its generation
step, which needs an engine; only what its loss does with them is compared.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.losses.cispo import CISPO
from megatron_ext.losses.correction import Correction, CorrectionKind
from megatron_ext.losses.diagnostics import ratio_stats
from megatron_ext.losses.kl import KLToReference
from megatron_ext.losses.kl_penalty import kl_penalty
from megatron_ext.losses.masks import IntervalMask, TwoSidedMask
from megatron_ext.losses.policy import GSPO, ClipLoss, StepClip
from megatron_ext.losses.protocol import LossInputs, LossTerm
from megatron_ext.losses.ratio import active

ROWS, LENGTH = 6, 9
TOKEN_MEAN, ROW_MEAN = "token-mean", "seq-mean-token-mean"


@pytest.fixture(scope="module")
def verl() -> Any:  # untyped package
    return pytest.importorskip("verl.trainer.ppo.core_algos")


@pytest.fixture(scope="module")
def correction() -> Any:
    return pytest.importorskip("verl.trainer.ppo.rollout_corr_helper")


@pytest.fixture(scope="module")
def trl() -> Any:
    return pytest.importorskip("trl.trainer.grpo_trainer").GRPOTrainer


@dataclass(frozen=True)
class Padded:
    """The same tokens as the peers hold them, all [ROWS, LENGTH]: a row is a sequence, masked to random lengths and
    with observations inside."""

    cur: torch.Tensor
    old: torch.Tensor
    rollout: torch.Tensor
    ref: torch.Tensor
    advantage: torch.Tensor
    mask: torch.Tensor

    def weights(self, mode: str) -> torch.Tensor:
        if mode == TOKEN_MEAN:
            return self.mask / self.mask.sum()
        return self.mask / self.mask.sum(1, keepdim=True) / ROWS

    def inputs(self, mode: str) -> LossInputs:
        rows = torch.arange(ROWS).repeat_interleave(LENGTH)
        return LossInputs(
            cur_logp=self.cur.flatten(),
            old_logp=self.old.flatten(),
            rollout_logp=self.rollout.flatten(),
            advantage=self.advantage.flatten(),
            weight=self.weights(mode).flatten(),
            entropy=torch.zeros(ROWS * LENGTH, dtype=torch.float64),
            row=rows,
            turn=rows,
            ref_logp=self.ref.flatten(),
        )


@pytest.fixture(params=range(3), ids=lambda seed: f"seed{seed}")
def padded(request: pytest.FixtureRequest) -> Padded:
    rng = torch.Generator().manual_seed(request.param)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(ROWS, LENGTH, generator=rng, dtype=torch.float64)

    old = -normal(1.0).abs() - 0.1
    lengths = torch.randint(2, LENGTH + 1, (ROWS, 1), generator=rng)
    observation = torch.rand(ROWS, LENGTH, generator=rng) < 0.2
    observation[:, 0] = False
    mask = ((torch.arange(LENGTH) < lengths) & ~observation).double()
    one_each = torch.randn(ROWS, 1, generator=rng, dtype=torch.float64).expand(ROWS, LENGTH)
    return Padded(
        (old + normal(0.5)).requires_grad_(), old, old + normal(0.5), old + normal(0.5), one_each.clone(), mask
    )


def spread_advantage(padded: Padded) -> Padded:
    """With an advantage of its own for every token."""
    rng = torch.Generator().manual_seed(9)
    values = torch.randn(ROWS, LENGTH, generator=rng, dtype=torch.float64)
    return Padded(padded.cur, padded.old, padded.rollout, padded.ref, values, padded.mask)


def same(term: LossTerm, padded: Padded, mode: str, theirs: torch.Tensor) -> dict[str, float]:
    """Loss and gradient agree to 1e-6; returns our metrics as means."""
    (want,) = torch.autograd.grad(theirs, padded.cur, retain_graph=True)
    out = term(padded.inputs(mode))
    (got,) = torch.autograd.grad(out.loss, padded.cur)
    assert float(out.loss.detach()) == pytest.approx(float(theirs.detach()), abs=1e-6)
    torch.testing.assert_close(got, want, rtol=0, atol=1e-6)
    assert got.abs().max() > 1e-3, "a comparison of zeros says nothing"
    return {name: float(a / b) if b else 0.0 for name, (a, b) in out.metrics.items()}


def actor(**keys: float) -> Any:
    """The peer's configuration of an actor, with these keys of its loss."""
    config = pytest.importorskip("verl.workers.config")
    return config.ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **keys)


def verl_loss(
    verl: Any, name: str, padded: Padded, mode: str, weights: torch.Tensor | None = None, **keys: float
) -> tuple[torch.Tensor, dict[str, float]]:
    loss, metrics = verl.get_policy_loss_fn(name)(
        padded.old, padded.cur, padded.advantage, padded.mask, mode, actor(**keys), weights
    )
    return loss, metrics


def trl_loss(
    trl: Any,
    padded: Padded,
    loss_type: str,
    *,
    level: str = "token",
    low: float = 0.2,
    high: float = 0.28,
    delta: float | None = None,
    beta: float = 0.0,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, dict[str, list[float]]]:
    """The trainer's own loss, with the forward of its model replaced by the log-probs given."""
    accelerator = SimpleNamespace(
        num_processes=1, gather=lambda x: x, reduce=lambda x, reduction: x, gather_for_metrics=lambda x: x
    )
    entropies = torch.zeros(ROWS, LENGTH, dtype=torch.float64)
    metrics: dict[str, dict[str, list[float]]] = {"train": defaultdict(list)}
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *a, **k: (padded.cur, entropies, None),
        accelerator=accelerator,
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        epsilon_low=low,
        epsilon_high=high,
        args=SimpleNamespace(delta=delta, use_bias_correction_kl=False, steps_per_generation=1),
        loss_type=loss_type,
        use_vllm=weights is not None,
        vllm_importance_sampling_correction=weights is not None,
        model=SimpleNamespace(training=True),
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics=metrics,
    )
    ids = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": padded.mask,
        "advantages": padded.advantage,
        "old_per_token_logps": padded.old,
        "ref_per_token_logps": padded.ref,
        "num_items_in_batch": padded.mask.sum(),
        "importance_sampling_ratio": weights,
    }
    return trl._compute_loss(trainer, None, inputs), metrics["train"]


# -- clipped losses ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mode", [TOKEN_MEAN, ROW_MEAN])
def test_clip(verl: Any, trl: Any, padded: Padded, mode: str) -> None:
    padded = spread_advantage(padded)
    keys = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}
    theirs, their_metrics = verl_loss(verl, "vanilla", padded, mode, **keys)
    ours = same(ClipLoss(), padded, mode, theirs)
    clipped = ours["policy/clip_fraction_low"] + ours["policy/clip_fraction_high"]
    assert clipped == pytest.approx(their_metrics["actor/pg_clipfrac"], abs=1e-6) and clipped > 0
    theirs, metrics = trl_loss(trl, padded, "dapo" if mode == TOKEN_MEAN else "grpo")
    ours = same(ClipLoss(), padded, mode, theirs)
    assert ours["policy/clip_fraction_low"] == pytest.approx(metrics["clip_ratio/low_mean"][0], abs=1e-6)
    assert ours["policy/clip_fraction_high"] == pytest.approx(metrics["clip_ratio/high_mean"][0], abs=1e-6)


def test_dual_clip(verl: Any, trl: Any, padded: Padded) -> None:
    padded = spread_advantage(padded)
    keys = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1.5}
    theirs, their_metrics = verl_loss(verl, "vanilla", padded, TOKEN_MEAN, **keys)
    ours = same(ClipLoss(dual_clip=1.5), padded, TOKEN_MEAN, theirs)
    assert ours["policy/clip_fraction_dual"] == pytest.approx(their_metrics["actor/pg_clipfrac_lower"], abs=1e-6)
    assert ours["policy/clip_fraction_dual"] > 0
    same(ClipLoss(dual_clip=1.5), padded, TOKEN_MEAN, trl_loss(trl, padded, "dapo", delta=1.5)[0])


@pytest.mark.parametrize("mode", [TOKEN_MEAN, ROW_MEAN])
def test_gspo_token(verl: Any, padded: Padded, mode: str) -> None:
    padded = spread_advantage(padded)
    theirs, metrics = verl_loss(verl, "gspo", padded, mode, clip_ratio_low=0.05, clip_ratio_high=0.05)
    ours = same(GSPO(clip_low=0.05, clip_high=0.05), padded, mode, theirs)
    clipped = ours["policy/clip_fraction_low"] + ours["policy/clip_fraction_high"]
    assert clipped == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6) and clipped > 0


def test_gspo_unit(verl: Any, trl: Any, padded: Padded) -> None:
    term = GSPO(clip_low=0.05, clip_high=0.05, gradient="unit")
    same(term, padded, ROW_MEAN, trl_loss(trl, padded_rows(padded), "grpo", level="sequence", low=0.05, high=0.05)[0])
    theirs, _ = verl_loss(verl, "gspo", padded, ROW_MEAN, clip_ratio_low=0.05, clip_ratio_high=0.05)
    same(term, padded, ROW_MEAN, theirs)


def padded_rows(padded: Padded) -> Padded:
    """One advantage a row, in TRL's own shape [ROWS]."""
    return Padded(padded.cur, padded.old, padded.rollout, padded.ref, padded.advantage[:, 0], padded.mask)


def test_step_ratio(verl: Any, trl: Any, padded: Padded) -> None:
    """The peers' row is a step, as in StepPO's own code."""
    theirs, _ = verl_loss(verl, "gspo", padded, ROW_MEAN, clip_ratio_low=0.05, clip_ratio_high=0.05)
    same(StepClip(clip_low=0.05, clip_high=0.05, dual_clip=None), padded, ROW_MEAN, theirs)
    theirs, _ = trl_loss(trl, padded_rows(padded), "grpo", level="sequence", low=0.05, high=0.05, delta=1.1)
    same(StepClip(clip_low=0.05, clip_high=0.05, dual_clip=1.1, gradient="unit"), padded, ROW_MEAN, theirs)


def test_product_ratio(padded: Padded) -> None:
    ratio = ((padded.cur - padded.old) * padded.mask).sum(1).exp()
    advantage = padded.advantage[:, 0]
    theirs = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
    term = StepClip(clip_low=0.2, clip_high=0.2, dual_clip=None, reduce="product", gradient="unit")
    same(term, padded, ROW_MEAN, theirs)


# -- weighted log-probs --------------------------------------------------------------------------------------------
def test_cispo(verl: Any, trl: Any, padded: Padded) -> None:
    padded = spread_advantage(padded)
    theirs, metrics = verl_loss(verl, "cispo", padded, TOKEN_MEAN, clip_ratio_low=0.3, clip_ratio_high=0.2)
    ours = same(CISPO(clip_low=0.3, clip_high=0.2), padded, TOKEN_MEAN, theirs)
    clipped = ours["policy/clip_fraction_low"] + ours["policy/clip_fraction_high"]
    assert clipped == pytest.approx(metrics["actor/pg_clipfrac"], abs=1e-6) and clipped > 0
    # TRL's bound is the ratio itself, and it has no lower one.
    same(CISPO(clip_high=0.2), padded, TOKEN_MEAN, trl_loss(trl, padded, "cispo", high=1.2)[0])


def test_masks(verl: Any, correction: Any, padded: Padded) -> None:
    """REINFORCE times IcePop's weight of current over rollout is the base objective with one interval, and SAO's."""
    padded = spread_advantage(padded)
    log_ratio = (padded.cur - padded.rollout).detach()
    weights, metrics = correction.compute_rollout_correction_weights(
        log_ratio, padded.mask, rollout_is="token", rollout_is_threshold="0.7_1.4"
    )
    theirs, _ = verl.compute_policy_loss_reinforce(
        padded.rollout, padded.cur, padded.advantage, padded.mask, TOKEN_MEAN, actor(), weights
    )
    interval = IntervalMask(positive_low=0.7, positive_high=1.4, negative_low=0.7, negative_high=1.4)
    for term in (interval, TwoSidedMask(mask_low=0.3, mask_high=0.4)):
        ours = same(term, padded, TOKEN_MEAN, theirs)
        masked = ours["policy/clip_fraction_low"] + ours["policy/clip_fraction_high"]
        assert masked == pytest.approx(metrics["rollout_is_oob_ratio"], abs=1e-6) and masked > 0


# -- corrections ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("kind", "threshold"), [("truncate", 1.5), ("icepop", "0.6_1.5")])
def test_corrections(
    verl: Any, correction: Any, trl: Any, padded: Padded, level: str, kind: str, threshold: float | str
) -> None:
    padded = spread_advantage(padded)
    weights, metrics = correction.compute_rollout_correction_weights(
        padded.old - padded.rollout, padded.mask, rollout_is=level, rollout_is_threshold=threshold
    )
    bounds = {"correction_high": 1.5} | ({"correction_low": 0.6} if kind == "icepop" else {})
    keys: dict[str, Any] = {"correction": kind, "correction_granularity": level, **bounds}
    clip = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28, "clip_ratio_c": 1e9}
    theirs, _ = verl_loss(verl, "vanilla", padded, TOKEN_MEAN, weights, **clip)
    ours = same(ClipLoss(**keys), padded, TOKEN_MEAN, theirs)
    assert ours["offpolicy/correction_mean"] == pytest.approx(metrics["rollout_is_mean"], abs=1e-6)
    same(ClipLoss(**keys), padded, TOKEN_MEAN, trl_loss(trl, padded, "dapo", weights=weights)[0])
    theirs, _ = verl_loss(verl, "gspo", padded, ROW_MEAN, weights, clip_ratio_low=0.05, clip_ratio_high=0.05)
    same(GSPO(clip_low=0.05, clip_high=0.05, **keys), padded, ROW_MEAN, theirs)
    same(CISPO(clip_high=0.2, **keys), padded, TOKEN_MEAN, trl_loss(trl, padded, "cispo", high=1.2, weights=weights)[0])


@pytest.mark.parametrize(
    ("mode", "granularity", "reduce"),
    [("token_k1", "token", "product"), ("seq_sum_k1", "sequence", "product"), ("seq_mean_k1", "sequence", "geometric")],
)
def test_correction_mask(correction: Any, padded: Padded, mode: str, granularity: str, reduce: str) -> None:
    """The peer bounds ``rollout / old`` where we bound ``old / rollout``: the interval's ends swap and invert."""
    kept, _ = correction.compute_rollout_rejection_mask(
        padded.old - padded.rollout, padded.mask, mode, f"{1 / 1.15}_{1 / 0.9}"
    )
    own = Correction(kind=CorrectionKind.MASK, low=0.9, high=1.15, granularity=granularity, reduce=reduce)
    inputs = padded.inputs(TOKEN_MEAN)
    weight, ours = own(inputs, active(inputs))
    torch.testing.assert_close(weight * padded.mask.flatten(), kept.flatten(), check_dtype=False)
    assert 0 < float(ours["offpolicy/correction_mean"][0]) < float(padded.mask.sum())


# -- divergences and diagnostics -----------------------------------------------------------------------------------
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl(verl: Any, trl: Any, padded: Padded, estimator: str) -> None:
    for gradient, suffix in (("own", ""), ("k2", "+")):
        token = verl.kl_penalty(padded.cur, padded.ref, estimator + suffix)
        theirs = (token * padded.weights(TOKEN_MEAN)).sum()
        same(KLToReference(estimator=estimator, gradient=gradient), padded, TOKEN_MEAN, theirs)
    penalty, _ = kl_penalty(
        padded.cur.detach().numpy(), padded.ref.numpy(), padded.mask.bool().numpy(), estimator=estimator, limit=20.0
    )
    np.testing.assert_allclose(penalty, (token.detach() * padded.mask).numpy(), atol=1e-6)
    if estimator == "k3":
        theirs = trl_loss(trl, padded, "dapo", beta=1.0)[0] - trl_loss(trl, padded, "dapo")[0]
        same(KLToReference(), padded, TOKEN_MEAN, theirs)


def test_effective_sample_size(correction: Any, padded: Padded) -> None:
    log_ratio = padded.old - padded.rollout
    _, metrics = correction.compute_rollout_correction_weights(
        log_ratio, padded.mask, rollout_is="token", rollout_is_threshold=1e6
    )
    stats = ratio_stats(padded.old.numpy(), padded.rollout.numpy(), padded.mask.bool().numpy())
    assert stats.ess == pytest.approx(metrics["rollout_is_eff_sample_size"], abs=1e-6)
    assert stats.total / stats.count == pytest.approx(metrics["rollout_is_mean"], abs=1e-6)
    off = correction.compute_offpolicy_metrics(padded.old, padded.rollout, padded.mask)
    assert stats.kl == pytest.approx(off["k3_kl"], abs=1e-6)
