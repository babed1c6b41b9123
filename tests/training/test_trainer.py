"""Invariants of the trainer (numbers refer to ``megatron_ext/training/trainer.py``), on a real Megatron model."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_ext.losses.policy import ClipLoss
from megatron_ext.losses.protocol import Granularity, LossInputs, LossOutput, LossTerm
from megatron_ext.losses.sft import NegativeLogLikelihood
from megatron_ext.models.forward import packed_logits, record_routing
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.training import (
    TERMS,
    TINY,
    gradients,
    identical,
    make_trainer,
    micro_of,
    moments,
    parameters,
    plain_gradients,
    plain_model,
    random_inputs,
    relative,
    rows_of,
)

TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return random_batch(3, groups=4)


@pytest.fixture
def trainer(rank: ParallelContext) -> Trainer:
    return make_trainer(rank, temperature=TEMPERATURE)


class Bonus:
    """A second term with a coefficient and an entropy gradient, so that a sum of terms is what is tested."""

    coefficient = -0.3
    needs_reference = False
    needs_entropy = True
    unit = Granularity.TOKEN

    def __call__(self, inputs: LossInputs) -> LossOutput:
        return LossOutput((inputs.weight * inputs.entropy).sum(), {})


TWO_TERMS: dict[str, LossTerm] = {"policy": ClipLoss(), "bonus": Bonus()}


def written_out(rank: ParallelContext, batch: TrajectoryBatch, inputs: TokenInputs) -> dict[str, torch.Tensor]:
    """The gradient written out: an unwrapped model with the same weights, one row at a time, ``softmax`` and autograd.
    The loss is that of ``TWO_TERMS``, from the formulas."""
    chunk, rows = plain_model(rank), rows_of(batch)
    total = torch.zeros((), dtype=torch.float64)
    for row in range(rows.num_rows):
        span = rows.span(row)
        token, mask = torch.from_numpy(rows.token[span].copy()), torch.from_numpy(rows.mask[span].copy())
        ids = torch.from_numpy(batch.ids[token.numpy()].astype(np.int64))
        logits = packed_logits(chunk, ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
        logq = torch.log_softmax(logits[:-1].double() / TEMPERATURE, dim=-1)
        chosen = torch.nonzero(mask[1:]).squeeze(1)
        logp = logq.gather(1, ids[1:, None]).squeeze(1)[chosen]
        entropy = -(logq.exp() * logq).sum(-1)[chosen]
        at = token[1:][chosen]
        advantage, weight = inputs.advantage[at].double(), inputs.weight[at].double()
        assert inputs.old_logp is not None
        ratio = (logp - inputs.old_logp[at].double()).exp()
        clipped = ratio.clamp(0.8, 1.28)
        total = total - (weight * torch.minimum(ratio * advantage, clipped * advantage)).sum()
        total = total + Bonus.coefficient * (weight * entropy).sum()
    total.backward()
    return plain_gradients(chunk)


def test_the_gradient_is_that_of_the_weighted_sum(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer
) -> None:  # invariant 1
    inputs = random_inputs(batch)
    trainer.update(micro_of(batch, rows_of(batch)), inputs, TWO_TERMS, lr=1e-3)
    assert relative(gradients(trainer), written_out(rank, batch, inputs)) <= 1e-6


@pytest.mark.parametrize(
    "layout",
    ["three micro-batches", "one row each", "permuted", "permuted and cut", "shared prefixes", "shared and permuted"],
)
def test_the_gradient_does_not_depend_on_the_packing(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, layout: str
) -> None:  # invariant 1
    rows, inputs = rows_of(batch), random_inputs(batch)
    whole = trainer.update(micro_of(batch, rows), inputs, TWO_TERMS, lr=1e-3)
    permuted = np.random.default_rng(0).permutation(rows.num_rows)
    micro = {
        "three micro-batches": lambda: micro_of(batch, rows, cap=int(rows.lengths.sum()) // 3 + 10),
        "one row each": lambda: [build_microbatch(batch, rows, [row], rows.mask) for row in range(rows.num_rows)],
        "permuted": lambda: micro_of(batch, rows, members=permuted.tolist()),
        "permuted and cut": lambda: micro_of(batch, rows, members=permuted.tolist(), cap=60),
        "shared prefixes": lambda: [
            build_microbatch(batch, rows, range(rows.num_rows), rows.mask, share_prefixes=True)
        ],
        "shared and permuted": lambda: [
            build_microbatch(batch, rows, permuted[part].tolist(), rows.mask, share_prefixes=True)
            for part in (slice(0, 3), slice(3, None))
        ],
    }[layout]()
    assert layout.endswith("permuted") or layout == "shared prefixes" or len(micro) >= 3
    if layout.startswith("shared"):
        assert sum(mb.num_tokens for mb in micro) < sum(len(mb.source) for mb in micro)
    other = make_trainer(rank, temperature=TEMPERATURE)
    parts = other.update(micro, inputs, TWO_TERMS, lr=1e-3)
    assert relative(gradients(other), gradients(trainer)) <= 1e-6
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert parts.grad_norm == pytest.approx(whole.grad_norm, rel=1e-6)
    assert parts.metrics == pytest.approx(dict(whole.metrics), rel=1e-5)


def test_an_empty_microbatch_changes_nothing(rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer) -> None:
    rows, inputs = rows_of(batch), random_inputs(batch)
    full = micro_of(batch, rows, cap=100)
    empty = build_microbatch(batch, rows, [], rows.mask)
    trainer.update(full, inputs, TWO_TERMS, lr=1e-3)
    other = make_trainer(rank, temperature=TEMPERATURE)
    result = other.update([*full, empty], inputs, TWO_TERMS, lr=1e-3)
    assert relative(gradients(other), gradients(trainer)) <= 1e-6
    assert np.isfinite(result.loss)


def test_a_step_without_microbatches_is_refused(trainer: Trainer, batch: TrajectoryBatch) -> None:
    with pytest.raises(ValueError, match="at least one micro-batch"):
        trainer.update([], random_inputs(batch), TERMS, lr=1e-3)


def test_masked_tokens_have_no_gradient(rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer) -> None:
    """Whatever stands in the inputs of a token whose weight is 0."""
    rows, inputs = rows_of(batch), random_inputs(batch)
    off = inputs.weight == 0
    assert off[torch.from_numpy(np.flatnonzero(batch.loss_mask))].any(), "the batch needs a masked token to predict"
    changed = replace(inputs, advantage=torch.where(off, 1e6, inputs.advantage))
    trainer.update(micro_of(batch, rows), inputs, TERMS, lr=1e-3)
    other = make_trainer(rank, temperature=TEMPERATURE)
    other.update(micro_of(batch, rows), changed, TERMS, lr=1e-3)
    assert identical(gradients(other), gradients(trainer))


def test_one_optimizer_step_an_update(rank: ParallelContext, batch: TrajectoryBatch) -> None:  # invariant 2
    """Plain SGD moves by exactly lr * gradient, however many micro-batches there were."""
    rows, inputs = rows_of(batch), random_inputs(batch)
    trainer = make_trainer(rank, name="sgd", lr=0.5)
    before = parameters(trainer)
    result = trainer.update(micro_of(batch, rows, cap=60), inputs, TERMS, lr=0.25)
    assert result.lr == 0.25 and result.applied
    after, grads = parameters(trainer), gradients(trainer)
    assert grads and not identical(before, after)
    for name, grad in grads.items():
        torch.testing.assert_close(after[name], before[name] - 0.25 * grad, rtol=0, atol=1e-7)


def test_adam_counts_one_step_an_update(rank: ParallelContext, batch: TrajectoryBatch) -> None:  # invariant 2
    trainer = make_trainer(rank, lr=1e-3)
    for _ in range(3):
        trainer.update(micro_of(batch, rows_of(batch), cap=60), random_inputs(batch), TERMS, lr=1e-3)
    assert {int(state["step"]) for state in trainer.optimizer.optimizer.state.values()} == {3}


def test_clipping_bounds_the_step_not_the_reported_norm(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    rows, inputs = rows_of(batch), random_inputs(batch)
    free, clipped = make_trainer(rank, name="sgd", lr=1.0), make_trainer(rank, name="sgd", lr=1.0, clip_grad=0.01)
    before = parameters(clipped)
    norm = free.update(micro_of(batch, rows), inputs, TERMS, lr=1.0).grad_norm
    assert norm > 0.05
    assert clipped.update(micro_of(batch, rows), inputs, TERMS, lr=1.0).grad_norm == pytest.approx(norm, rel=1e-6)
    after = parameters(clipped)
    moved = torch.cat([(after[name] - before[name]).double().reshape(-1) for name in after]).norm()
    assert float(moved) == pytest.approx(0.01, rel=1e-3)


# -- scoring -------------------------------------------------------------------------------------------------------
def test_scores_are_log_probs_and_entropies_at_the_temperature(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer
) -> None:
    rows = rows_of(batch)
    scores = trainer.score(micro_of(batch, rows, cap=60), batch.num_tokens)
    assert scores.logp.dtype == scores.entropy.dtype == np.float32
    for row in (0, rows.num_rows - 1):
        span = rows.span(row)
        token, mask = rows.token[span], rows.mask[span]
        ids = torch.from_numpy(batch.ids[token].astype(np.int64))
        with torch.no_grad():
            logits = packed_logits(trainer.chunks[0], ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
        logq = torch.log_softmax(logits[:-1].double() / TEMPERATURE, dim=-1)
        chosen = np.flatnonzero(mask[1:])
        logp = logq.gather(1, ids[1:, None]).squeeze(1).numpy()[chosen]
        entropy = -(logq.exp() * logq).sum(-1).numpy()[chosen]
        np.testing.assert_allclose(scores.logp[token[1:][chosen]], logp, rtol=0, atol=1e-5)
        np.testing.assert_allclose(scores.entropy[token[1:][chosen]], entropy, rtol=0, atol=1e-5)
    others = ~np.asarray(batch.loss_mask)
    assert not scores.logp[others].any() and not scores.entropy[others].any()
    assert (scores.logp[~others] < 0).all() and (scores.entropy[~others] > 0).all()


@pytest.mark.parametrize("share", [False, True])
def test_recorded_experts_stand_at_their_tokens(batch: TrajectoryBatch, trainer: Trainer, share: bool) -> None:
    """Those of each row run alone; an empty micro-batch adds none, and recording changes no score."""
    rows = rows_of(batch)
    everything = np.arange(rows.num_rows)
    parts = [*np.array_split(everything, 2), everything[:0]]
    micro = [build_microbatch(batch, rows, part, rows.mask, share_prefixes=share) for part in parts]
    scores = trainer.score(micro, batch.num_tokens, record_experts=True)
    plain = trainer.score(micro, batch.num_tokens)
    assert plain.experts is None and np.array_equal(plain.logp, scores.logp)
    assert scores.experts is not None and scores.routed is not None
    assert scores.experts.shape == (batch.num_tokens, TINY.layers, TINY.top_k)
    assert np.flatnonzero(scores.routed).tolist() == sorted(set(rows.token.tolist()))
    for row in range(rows.num_rows):
        token = rows.token[rows.span(row)]
        ids = torch.from_numpy(batch.ids[token].astype(np.int64))
        with torch.no_grad(), record_routing(trainer.chunks) as routing:
            packed_logits(trainer.chunks[0], ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
        assert np.array_equal(scores.experts[token], routing.experts().numpy())


def test_scoring_leaves_everything_untouched(batch: TrajectoryBatch, trainer: Trainer) -> None:  # invariant 3
    rows = rows_of(batch)
    micro = micro_of(batch, rows, cap=60)
    trainer.update(micro, random_inputs(batch), TERMS, lr=1e-3)
    weights, grads, state = parameters(trainer), gradients(trainer), moments(trainer)
    noise = torch.get_rng_state()
    trainer.score(micro, batch.num_tokens)
    assert identical(parameters(trainer), weights)
    assert identical(gradients(trainer), grads)
    assert all(torch.equal(a, b) for a, b in zip(moments(trainer), state, strict=True))
    assert torch.equal(torch.get_rng_state(), noise)
    assert all(chunk.training for chunk in trainer.chunks)


def test_a_failed_scoring_leaves_the_model_in_training_mode(batch: TrajectoryBatch, trainer: Trainer) -> None:
    mb = micro_of(batch, rows_of(batch))[0]
    broken = replace(mb, target=mb.target + TINY.vocab)
    with pytest.raises(ValueError, match="outside the vocabulary"):
        trainer.score([broken], batch.num_tokens)
    assert all(chunk.training for chunk in trainer.chunks)


# -- gradients that are not finite ---------------------------------------------------------------------------------
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_step_that_is_not_finite_is_skipped(batch: TrajectoryBatch, trainer: Trainer, bad: float) -> None:
    """Invariant 4: parameters, moments and the next step are as if it had never been asked for."""
    micro, inputs = micro_of(batch, rows_of(batch), cap=60), random_inputs(batch)
    trainer.update(micro, inputs, TERMS, lr=1e-3)
    weights, state = parameters(trainer), moments(trainer)
    advantage = inputs.advantage.clone()
    advantage[int(np.flatnonzero(inputs.weight.numpy() > 0)[-1])] = bad
    result = trainer.update(micro, replace(inputs, advantage=advantage), TERMS, lr=1e-3)
    assert not result.applied and not np.isfinite(result.loss)
    assert identical(parameters(trainer), weights)
    assert all(torch.equal(a, b) for a, b in zip(moments(trainer), state, strict=True))
    again = trainer.update(micro, inputs, TERMS, lr=1e-3)
    assert again.applied and np.isfinite(again.grad_norm)
    assert all(torch.isfinite(value).all() for value in parameters(trainer).values() if value.is_floating_point())


def test_a_finite_loss_with_a_nan_gradient_is_skipped(batch: TrajectoryBatch, trainer: Trainer) -> None:  # invariant 4
    class Kink:
        """Loss 0 with a gradient of 0 * inf: sqrt at 0."""

        coefficient = 1.0
        needs_reference = needs_entropy = False
        unit = Granularity.TOKEN

        def __call__(self, inputs: LossInputs) -> LossOutput:
            zero = inputs.cur_logp.sum() - inputs.cur_logp.sum()
            return LossOutput(zero.sqrt(), {})

    before = parameters(trainer)
    result = trainer.update(micro_of(batch, rows_of(batch)), random_inputs(batch), {"kink": Kink()}, lr=1e-3)
    assert result.loss == 0.0 and not np.isfinite(result.grad_norm) and not result.applied
    assert identical(parameters(trainer), before)


# -- other weights -------------------------------------------------------------------------------------------------
def test_snapshots_swap_in_and_out(rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer) -> None:
    micro, inputs = micro_of(batch, rows_of(batch)), random_inputs(batch)
    reference, first = trainer.snapshot(), trainer.score(micro, batch.num_tokens).logp
    for _ in range(2):
        trainer.update(micro, inputs, TERMS, lr=1e-2)
    trained, second = parameters(trainer), trainer.score(micro, batch.num_tokens).logp
    assert np.abs(second - first).max() > 1e-3
    with trainer.weights(reference):
        assert np.array_equal(trainer.score(micro, batch.num_tokens).logp, first)
    assert identical(parameters(trainer), trained), "a snapshot is a copy, and the trained weights come back"
    with pytest.raises(RuntimeError, match="stop"), trainer.weights(reference):
        raise RuntimeError("stop")
    assert identical(parameters(trainer), trained)
    with pytest.raises(ValueError), trainer.weights(reference[:-1]):
        pass
    assert identical(parameters(trainer), trained), "also when the snapshot does not fit"
    control = make_trainer(rank, temperature=TEMPERATURE)
    for _ in range(2):
        control.update(micro, inputs, TERMS, lr=1e-2)
    control.update(micro, inputs, TERMS, lr=1e-2)
    trainer.update(micro, inputs, TERMS, lr=1e-2)
    assert identical(parameters(trainer), parameters(control)), "swapping leaves no trace in the next step"


def test_supervised_steps_learn_the_batch(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = make_trainer(rank)
    micro: list[MicroBatch] = micro_of(batch, rows_of(batch))
    zeros = torch.zeros(batch.num_tokens)
    inputs = TokenInputs(zeros, zeros, zeros, random_inputs(batch).weight)
    terms: dict[str, LossTerm] = {"nll": NegativeLogLikelihood()}
    losses = [trainer.update(micro, inputs, terms, lr=1e-2).loss for _ in range(25)]
    assert losses[-1] < 0.3 * losses[0]


def test_the_only_step_of_a_batch_scores_itself(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """Old log-probs from the update's own forward give the step that scoring first would have given, and its scores."""
    micro = micro_of(batch, rows_of(batch), cap=200)
    assert len(micro) > 1
    results, after = [], []
    for fused in (False, True):
        trainer = make_trainer(rank, temperature=TEMPERATURE)
        scored = trainer.score(micro, batch.num_tokens, record_experts=True)
        inputs = random_inputs(batch, seed=3)
        old = None if fused else torch.from_numpy(scored.logp)
        inputs = replace(inputs, old_logp=old)
        result = trainer.update(micro, inputs, TERMS, 1e-2, keep_scores=fused, record_experts=fused)
        results.append(result)
        after.append(parameters(trainer))
    assert results[0].scores is None and results[1].scores is not None
    assert results[0].grad_norm == pytest.approx(results[1].grad_norm, rel=1e-6)
    for name, value in after[0].items():
        torch.testing.assert_close(after[1][name], value, rtol=1e-5, atol=1e-7)
    own = results[1].scores
    np.testing.assert_allclose(own.logp, scored.logp, atol=1e-5)
    np.testing.assert_allclose(own.entropy, scored.entropy, atol=1e-5)
    assert own.experts is not None and scored.experts is not None and np.array_equal(own.experts, scored.experts)


def test_an_auxiliary_scale_left_by_another_model_does_no_harm(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """A backward pass outside the schedule leaves a scale of another shape on Megatron's class."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    MoEAuxLossAutoScaler.main_loss_backward_scale = torch.tensor(3.0)
    trainer = make_trainer(rank, temperature=TEMPERATURE)
    assert trainer.update(micro_of(batch, rows_of(batch)), random_inputs(batch), TERMS, 1e-2).applied
