"""Invariants of ``training/measures/router_change.py`` (numbers refer to it), and that a checkpoint keeps the start."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter, router_parameters
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.tracking.names import check
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints.checkpoint import SaveRequest, list_checkpoints
from megatron_ext.training.measures.router_change import router_change, router_start
from megatron_ext.training.trainer import Trainer
from tests.helpers.frozen_ranks import MODEL
from tests.helpers.records import random_batch
from tests.helpers.training import TERMS, make_trainer, micro_of, random_inputs, rows_of

NAME = "moe/router_change"


def train(trainer: Trainer, steps: int) -> None:
    batch = random_batch(3, groups=2)
    for step in range(steps):
        trainer.update(micro_of(batch, rows_of(batch)), random_inputs(batch, step), TERMS, lr=1e-2)


def change(trainer: Trainer, start: dict[str, torch.Tensor] | None = None) -> float:
    found = router_change(trainer.chunks, router_start(trainer.chunks) if start is None else start, trainer.context)
    check(found)
    return found[NAME]


@pytest.mark.parametrize("router", [FrozenRouter(), TrainedRouter(bias_update_rate=0.01)])
def test_zero_exactly_where_no_router_moved(rank: ParallelContext, router: RouterPolicy) -> None:  # invariant 1
    trainer = make_trainer(rank, hf=MODEL, router=router)
    start = dict(router_start(trainer.chunks))
    assert len(start) == 8 and change(trainer, start) == 0.0, "weight and bias of four layers"
    train(trainer, 2)
    moved = change(trainer, start)
    assert (moved == 0.0) == isinstance(router, FrozenRouter)
    now = {name: tensor.detach() for name, tensor in router_parameters(trainer.chunks)}
    distance = math.sqrt(sum(float((now[n].double() - start[n].double()).square().sum()) for n in start))
    norm = math.sqrt(sum(float(tensor.double().square().sum()) for tensor in start.values()))
    assert moved == pytest.approx(distance / norm, rel=1e-12)


def test_the_smallest_movement_counts(rank: ParallelContext) -> None:
    trainer = make_trainer(rank, hf=MODEL, router=FrozenRouter())
    start = dict(router_start(trainer.chunks))
    bias = next(tensor for name, tensor in router_parameters(trainer.chunks) if name.endswith("expert_bias"))
    with torch.no_grad():
        bias[0] = 1e-45  # the smallest number of its type
    assert 0 < change(trainer, start) < 1e-40


def test_routers_that_began_as_zeros_and_a_start_that_is_not_known(rank: ParallelContext) -> None:
    trainer = make_trainer(rank)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in router_start(trainer.chunks).items()}
    assert change(trainer, zeros) == math.inf
    assert router_change(trainer.chunks, {}, rank) == {}


def test_a_checkpoint_keeps_what_rl_started_from(rank: ParallelContext, tmp_path: Path) -> None:
    trainer = make_trainer(rank, hf=MODEL, router=TrainedRouter(bias_update_rate=0.01))
    start = dict(router_start(trainer.chunks))
    train(trainer, 2)
    moved = change(trainer, start)
    checkpoint.save(tmp_path, SaveRequest(2, "tiny", {}, router_start=start), trainer)
    other = make_trainer(rank, hf=MODEL, router=TrainedRouter(bias_update_rate=0.01), seed=9)
    restored = checkpoint.load(list_checkpoints(tmp_path)[0], "tiny", other)
    assert restored.router_start.keys() == start.keys()
    assert all(torch.equal(restored.router_start[name], tensor) for name, tensor in start.items())
    assert change(other, dict(restored.router_start)) == moved > 0
    checkpoint.load_weights(list_checkpoints(tmp_path)[0].folder, other.chunks)  # its other tensors are no strangers
