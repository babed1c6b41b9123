"""bf16 parameters with fp32 master weights, on a CPU: a supervised smoke training of the tiny MoE.

Everything else is tested in fp32; what is particular to bf16 is asserted here: where fp32 is kept (masters, moments,
router, log-probs, losses), that small updates are not lost, and that a checkpoint holds the masters.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig
from megatron_ext.losses.sft import NegativeLogLikelihood
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.forward import unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints.checkpoint import CheckpointError, SaveRequest, list_checkpoints
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.training import TINY, micro_of, moments, random_inputs, rows_of

BF16 = resolve_backend(BackendConfig(device="cpu", dtype="bfloat16"))
NLL = {"nll": NegativeLogLikelihood()}
ULP = 2.0**-8  # relative distance of neighbouring bf16 numbers, at most


def bf16_trainer(context: ParallelContext, seed: int = 1, **optimizer: Any) -> Trainer:
    policy = TrainedRouter()
    model = ModelConfig(hf_config="", max_context=256)
    chunks = build_model(TINY, model, context.config, BF16, policy.config_overrides(), seed)
    wrapped, megatron = wrap(chunks, OptimizerConfig(**({"clip_grad": 1.0} | optimizer)), context.config, BF16)
    return Trainer(wrapped, megatron, context, temperature=1.0, router=policy)


def masters(trainer: Trainer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter, its master) of every parameter."""
    (part,) = trainer.optimizer.chained_optimizers
    assert not any(part.fp32_from_fp32_groups)
    pairs = zip(part.float16_groups, part.fp32_from_float16_groups, strict=True)
    return [pair for own, main in pairs for pair in zip(own, main, strict=True)]


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return random_batch(3, groups=4)


def inputs_of(batch: TrajectoryBatch) -> TokenInputs:
    return replace(random_inputs(batch), old_logp=None)


def train(trainer: Trainer, batch: TrajectoryBatch, steps: int, lr: float = 3e-3) -> list[float]:
    micro = micro_of(batch, rows_of(batch))
    return [trainer.update(micro, inputs_of(batch), NLL, lr=lr).loss for _ in range(steps)]


def test_a_supervised_loss_falls_and_masters_are_fp32(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    trainer = bf16_trainer(rank)
    losses = train(trainer, batch, 8)
    assert losses[0] > np.log(TINY.vocab) - 0.5 and losses[-1] < 0.75 * losses[0]
    assert all(later < earlier for earlier, later in zip(losses, losses[1:], strict=False))
    parameters = {id(p) for chunk in trainer.chunks for p in chunk.parameters()}
    pairs = masters(trainer)
    assert {id(p) for p, _ in pairs} == parameters
    for p, main in pairs:
        assert p.dtype is torch.bfloat16 and main.dtype is torch.float32 and vars(p)["main_grad"].dtype is torch.float32
        assert torch.equal(p, main.bfloat16())  # a parameter is its rounded master
    # A master holds more than its parameter does, so it is one.
    assert sum(int((p.float() != main).sum()) for p, main in pairs) > 0.9 * sum(p.numel() for p, _ in pairs)
    assert all(t.dtype is torch.float32 for t in moments(trainer) if t.is_floating_point() and t.dim() > 0)


def test_router_and_log_probs_compute_in_fp32(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """Both against the same weights in fp32: only the layers between are rounded."""
    trainer = bf16_trainer(rank)
    seen: list[torch.dtype] = []
    routers = [layer.mlp.router for layer in unwrap(trainer.chunks[0]).decoder.layers]
    hooks = [router.register_forward_hook(lambda module, given, out: seen.append(out[0].dtype)) for router in routers]
    gating = [router.gating for router in routers]
    for router, compute in zip(routers, gating, strict=True):

        def spied(x: torch.Tensor, compute: Any = compute) -> torch.Tensor:
            logits: torch.Tensor = compute(x)
            seen.append(logits.dtype)
            return logits

        router.gating = spied
    rows = rows_of(batch)
    micro = micro_of(batch, rows)
    scores = trainer.score(micro, batch.num_tokens)
    for hook in hooks:
        hook.remove()
    assert seen and set(seen) == {torch.float32}
    # bf16 has 256 steps between 1 and 2: log-probs that were computed in it would all be multiples of 2^-8.
    scored = scores.logp[scores.logp != 0]
    assert np.mean(scored == torch.from_numpy(scored).bfloat16().float().numpy()) < 0.05

    # The same weights (the rounded ones) in fp32 throughout.
    policy = TrainedRouter()
    full = resolve_backend(BackendConfig(device="cpu"))
    model = ModelConfig(hf_config="", max_context=256)
    chunks = build_model(TINY, model, rank.config, full, policy.config_overrides(), 1)
    with torch.no_grad():
        for wide, narrow in zip(chunks[0].parameters(), trainer.chunks[0].parameters(), strict=True):
            wide.copy_(narrow)
    wrapped, optimizer = wrap(chunks, OptimizerConfig(), rank.config, full)
    exact = Trainer(wrapped, optimizer, rank, temperature=1.0, router=policy).score(micro, batch.num_tokens)
    difference = np.abs(scores.logp - exact.logp)[exact.logp != 0]
    assert difference.mean() < 0.02 and difference.max() < 0.25  # two layers' rounding, some tokens routed differently
    assert difference.max() > 1e-4  # it is bf16 that is compared


def test_updates_below_a_bf16_step_are_not_lost(rank: ParallelContext, batch: TrajectoryBatch) -> None:
    """Adam moves every weight by about ``lr``; with lr far below half a bf16 step of most weights no single update
    could be seen in a bf16 parameter, and a hundred of them can."""
    trainer = bf16_trainer(rank, clip_grad=0.0)
    named = dict(unwrap(trainer.chunks[0]).named_parameters())
    weight = named["decoder.layers.0.self_attention.linear_qkv.weight"]
    (main,) = [main for p, main in masters(trainer) if p is weight]
    before, main_before = weight.detach().clone(), main.detach().clone()
    large = before.abs() > 0.1
    lr = 1e-5
    assert int(large.sum()) > 100 and lr < 0.5 * ULP / 2 * 0.1 / 4
    train(trainer, batch, 1, lr=lr)
    moved = (main - main_before).abs()[large]
    assert float((weight != before)[large].float().mean()) < 0.1  # what bf16 alone would have kept of it
    assert float((moved > 0).float().mean()) > 0.95 and float(moved.max()) < 3 * lr
    train(trainer, batch, 99, lr=lr)
    moved = (main - main_before).abs()[large]
    assert float(moved.median()) > 20 * lr
    assert float((weight != before)[large].float().mean()) > 0.3


def test_a_checkpoint_keeps_the_masters(rank: ParallelContext, batch: TrajectoryBatch, tmp_path: Path) -> None:
    trainer = bf16_trainer(rank)
    train(trainer, batch, 3)
    saved = [main.clone() for _, main in masters(trainer)]
    checkpoint.save(tmp_path, SaveRequest(3, "bf16", {}), trainer)
    other = bf16_trainer(rank, seed=9)
    train(other, batch, 1)
    (info,) = list_checkpoints(tmp_path)
    checkpoint.load(info, "bf16", other)
    assert all(torch.equal(main, want) for (_, main), want in zip(masters(other), saved, strict=True))
    assert all(torch.equal(p, main.bfloat16()) for p, main in masters(other))
    assert train(other, batch, 3) == train(trainer, batch, 3)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(masters(other), masters(trainer), strict=True))


def test_a_checkpoint_of_another_type_is_refused(rank: ParallelContext, batch: TrajectoryBatch, tmp_path: Path) -> None:
    from tests.helpers.training import make_trainer

    checkpoint.save(tmp_path, SaveRequest(1, "bf16", {}), make_trainer(rank))
    (info,) = list_checkpoints(tmp_path)
    with pytest.raises(CheckpointError, match="without fp32 master weights.*use the same backend.dtype"):
        checkpoint.load(info, "bf16", bf16_trainer(rank))
