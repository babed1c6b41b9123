"""The supervised warm start of ``megatron_ext/training/warm_start/warm_start.py``, on a real model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_ext.config.schema import OptimizerConfig, WarmStartConfig
from megatron_ext.models.forward import packed_logits
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.interrupt import Interrupted
from megatron_ext.training.trainer import Trainer
from megatron_ext.training.warm_start.key import warm_start_key
from megatron_ext.training.warm_start.warm_start import WarmStartReport, run_warm_start, supervised_weights
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import build, model, random_batch, single, user
from tests.helpers.training import (
    gradients,
    identical,
    make_trainer,
    micro_of,
    parameters,
    plain_gradients,
    plain_model,
    relative,
    rows_of,
)


def demonstrations(count: int = 12) -> TrajectoryBatch:
    """Groups of one, as demonstrations are: answer ``n`` by ``n + 1`` and then 50."""
    return build([(single([user([7, n]), model([n + 1, 50])], success=True, reward=1.0),) for n in range(count)])


def config(**values: object) -> WarmStartConfig:
    fields: dict[str, object] = {
        "trajectories_per_step": 4,
        "max_epochs": 3.0,
        "min_epochs": 0.0,
        "target_success": 0.0,
        "gate_every": 2,
        "optimizer": OptimizerConfig(lr=3e-3, warmup_steps=2),
    }
    return WarmStartConfig(**(fields | values))  # type: ignore[arg-type]


class Record:
    """What the warm start told its caller, and a gate that answers from a list (the last answer stays)."""

    def __init__(self, *answers: float) -> None:
        self.answers = list(answers) or [0.0]
        self.gates: list[int] = []
        self.seen: list[tuple[int, float]] = []
        self.steps: list[tuple[int, int, float]] = []

    def gate(self) -> float:
        self.gates.append(len(self.steps))
        return self.answers[min(len(self.gates), len(self.answers)) - 1]

    def on_step(self, step: int, total: int, loss: float) -> None:
        self.steps.append((step, total, loss))

    def on_gate(self, step: int, loss: float, success: float) -> None:
        assert (step, loss) == (self.steps[-1][0], self.steps[-1][2])
        self.seen.append((step, success))


def run(
    trainer: Trainer, batch: TrajectoryBatch, cfg: WarmStartConfig, record: Record, seed: int = 5
) -> WarmStartReport:
    return run_warm_start(
        trainer,
        batch,
        cfg,
        seed=seed,
        tokens_per_microbatch=64,
        gate=record.gate,
        on_step=record.on_step,
        on_gate=record.on_gate,
    )


def test_it_learns_the_script(rank: ParallelContext) -> None:
    trainer, record, batch = make_trainer(rank), Record(0.7), demonstrations()
    report = run(trainer, batch, config(max_epochs=40.0, optimizer=OptimizerConfig(lr=1e-2, warmup_steps=2)), record)
    assert report.steps == 120 and report.epochs == 40.0 and report.dev_success == 0.7
    assert not report.gate_met, "without a target there is no gate to meet"
    assert [step for step, _, _ in record.steps] == list(range(1, 121))
    assert {total for _, total, _ in record.steps} == {120}
    losses = [loss for _, _, loss in record.steps]
    assert report.loss == losses[-1] < losses[0] / 4
    logp = trainer.score(micro_of(batch, rows_of(batch)), batch.num_tokens).logp
    assert np.exp(logp[batch.loss_mask]).mean() > 0.6


def test_it_stops_at_the_gate(rank: ParallelContext) -> None:
    record = Record(0.1, 0.2, 0.4, 0.9)
    report = run(make_trainer(rank), demonstrations(), config(max_epochs=50.0, target_success=0.3), record)
    assert record.gates == [2, 4, 6], "consulted every gate_every steps, and no more once met"
    assert record.seen == [(2, 0.1), (4, 0.2), (6, 0.4)]
    assert report == WarmStartReport(6, 2.0, record.steps[-1][2], 0.4, gate_met=True)


def test_the_gate_waits_for_the_first_passes(rank: ParallelContext) -> None:
    record = Record(1.0)
    report = run(make_trainer(rank), demonstrations(), config(target_success=0.3, min_epochs=1.5), record)
    assert record.gates == [6] and report.gate_met and report.epochs == 2.0


def test_an_unmet_gate_is_told(rank: ParallelContext) -> None:
    record = Record(0.1)
    report = run(make_trainer(rank), demonstrations(), config(max_epochs=1.0, target_success=0.3), record)
    assert report.steps == 3 and not report.gate_met and report.dev_success == 0.1


def test_part_of_a_pass(rank: ParallelContext) -> None:
    record = Record()
    assert run(make_trainer(rank), demonstrations(), config(max_epochs=1.4), record).steps == 4
    assert run(make_trainer(rank), demonstrations(), config(max_epochs=0.01), Record()).steps == 1


def test_the_same_seed_gives_the_same_weights(rank: ParallelContext) -> None:
    """Another seed orders the demonstrations otherwise."""
    results = []
    for seed in (5, 5, 6):
        trainer = make_trainer(rank)
        run(trainer, demonstrations(), config(), Record(), seed=seed)
        results.append(parameters(trainer))
    assert identical(results[0], results[1]) and not identical(results[0], results[2])


def test_an_interrupt_comes_through(rank: ParallelContext) -> None:
    def stop(step: int, total: int, loss: float) -> None:
        if step == 2:
            raise Interrupted

    with pytest.raises(Interrupted):
        run_warm_start(
            make_trainer(rank),
            demonstrations(),
            config(),
            seed=1,
            tokens_per_microbatch=64,
            gate=lambda: 0.0,
            on_step=stop,
            on_gate=lambda step, loss, success: None,
        )


# -- what is learned -----------------------------------------------------------------------------------------------
def one_step(rank: ParallelContext, batch: TrajectoryBatch, observation_weight: float, cap: int = 4096) -> Trainer:
    trainer = make_trainer(rank)
    run_warm_start(
        trainer,
        batch,
        config(trajectories_per_step=1000, max_epochs=1.0, observation_weight=observation_weight),
        seed=1,
        tokens_per_microbatch=cap,
        gate=lambda: 0.0,
        on_step=lambda step, total, loss: None,
        on_gate=lambda step, loss, success: None,
    )
    return trainer


def manual(rank: ParallelContext, batch: TrajectoryBatch, observation_weight: float) -> dict[str, torch.Tensor]:
    """Gradient of mean NLL of the actions + observation_weight * mean NLL of the other predicted tokens."""
    chunk, rows = plain_model(rank), rows_of(batch)
    action: list[torch.Tensor] = []
    other: list[torch.Tensor] = []
    for row in range(rows.num_rows):
        token = rows.token[rows.span(row)]
        ids = torch.from_numpy(batch.ids[token].astype(np.int64))
        logits = packed_logits(chunk, ids, torch.arange(len(ids)), torch.tensor([0, len(ids)]))
        nll = torch.nn.functional.cross_entropy(logits[:-1].double(), ids[1:], reduction="none")
        for t, loss in zip(token[1:].tolist(), nll, strict=True):
            (action if batch.loss_mask[t] else other).append(loss)
    loss = torch.stack(action).mean()
    if observation_weight:
        loss = loss + observation_weight * torch.stack(other).mean()
    loss.backward()
    return plain_gradients(chunk)


@pytest.mark.parametrize("observation_weight", [0.0, 0.3])
@pytest.mark.parametrize("cap", [4096, 40])
def test_the_gradient_is_that_of_the_written_loss(rank: ParallelContext, observation_weight: float, cap: int) -> None:
    batch = random_batch(5, groups=6, samples=(1, 1), sessions=(1, 1), segments=(1, 1), untrainable=0.0)
    trainer = one_step(rank, batch, observation_weight, cap)
    assert relative(gradients(trainer), manual(rank, batch, observation_weight)) <= 1e-6


def test_supervised_weights_number() -> None:
    batch = build([(single([user([1, 2]), model([3, 4], mask=(True, False))]),)])
    assert supervised_weights(batch, 0.25).tolist() == [0.25, 0.25, 1.0, 0.25]
    assert supervised_weights(batch, 0.0).dtype == np.float32


def test_keys_name_what_decides_the_weights() -> None:
    parts = {"seed": 1, "hf": {"layers": 2, "hidden": 32}}
    key = warm_start_key(parts)
    assert key == warm_start_key({"hf": {"hidden": 32, "layers": 2}, "seed": 1}), "order does not matter"
    assert len({key, warm_start_key(parts | {"seed": 2}), warm_start_key(parts | {"hf": {"layers": 3}})}) == 3
    assert len(key) == 16 and set(key) <= set("0123456789abcdef")
