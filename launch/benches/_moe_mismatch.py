"""How far a trainer's log-probs are from the engine's, with and without replay: in two precisions, in one, and stale.

A token is *apart* when the forward that predicted it chose other experts than the engine's did, in some layer; it is
*agreed* when neither it nor any token before it in its segment was. With the same weights ``live`` and ``replayed``
differ by what the experts' choice does; what is left with replay is the arithmetic's own.

Invariants (``tests/launch/test_bench_moe.py``):

1. All sides score the same sampled tokens under the same weights; who is apart is decided without replay.
2. The stale run's engine has the weights of ``lag`` steps before, and its trainer learns from every batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from launch.benches._moe_setup import Size, World, groups_of, training_step
from megatron_ext.models.forward import unwrap
from megatron_ext.training.learner import Learner
from megatron_ext.training.publish import whole_tensors
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch

Weights = Sequence[tuple[str, torch.Tensor]]


@dataclass(frozen=True)
class Mismatch:
    """Of the n sampled tokens of a batch: |trainer - engine| in nats float64 [n] as the router chooses (``live``) and
    with replay (``replayed``); ``apart`` and ``agreed`` bool [n]."""

    live: NDArray[np.float64]
    replayed: NDArray[np.float64]
    apart: NDArray[np.bool_]
    agreed: NDArray[np.bool_]


def pooled(parts: Sequence[Mismatch]) -> Mismatch:
    """The tokens of all."""
    return Mismatch(
        live=np.concatenate([part.live for part in parts]),
        replayed=np.concatenate([part.replayed for part in parts]),
        apart=np.concatenate([part.apart for part in parts]),
        agreed=np.concatenate([part.agreed for part in parts]),
    )


def mismatch(live: Learner, replayed: Learner, batch: TrajectoryBatch) -> Mismatch:
    """Scores the batch under the current weights as both learners would (they share a trainer)."""
    rows = live.rows(batch)
    members = np.arange(rows.num_rows)
    found = []
    for learner in (live, replayed):
        micro = learner.microbatches(batch, rows, members)
        found.append(learner.trainer.score(micro, batch.num_tokens, record_experts=True))
    own, again = found
    assert own.experts is not None and own.routed is not None
    if batch.routed is None or batch.routed_valid is None:
        raise ValueError("the batch has no recorded routing: the engine was not asked for it")
    compared = own.routed & batch.routed_valid
    other = np.zeros(batch.num_tokens, dtype=bool)
    ours, theirs = np.sort(own.experts[compared], axis=-1), np.sort(batch.routed[compared].astype(np.int64), axis=-1)
    other[compared] = (ours != theirs).any(axis=(1, 2))
    token = np.flatnonzero(batch.loss_mask)
    before = np.concatenate([[0], np.cumsum(other)])  # tokens routed apart before each
    start = batch.segment_tokens[batch.token_segment()[token]]
    sampled = batch.rollout_logp[token].astype(np.float64)
    return Mismatch(
        live=np.abs(own.logp[token] - sampled),
        replayed=np.abs(again.logp[token] - sampled),
        apart=other[token - 1],
        agreed=before[token] == before[start],
    )


def played(world: World, tasks: int, dtype: str) -> tuple[TrajectoryBatch, Mismatch]:
    """Episodes of an engine of that precision with the warm checkpoint, scored by a trainer that has it too."""
    trainer = world.trainer()
    with world.playing(dtype) as players:
        players.engine.publish(_copies(world, trainer), 0)
        batch = players.roll_out(dtype, 0, tasks)
    return batch, mismatch(world.learner(trainer), world.learner(trainer, replay=True), batch)


def stale(world: World, size: Size) -> tuple[list[Mismatch], list[float]]:
    """One a step of RL with replay, before the step trains: the bf16 engine sampled with older weights than those that
    score. And each step's success."""
    trainer = world.trainer()
    live = world.learner(trainer)
    learner = world.learner(trainer, replay=True, lr=size.stale_lr, steps=size.stale_steps)
    kept: deque[Weights] = deque(maxlen=size.lag + 1)
    found, success = [], []
    with world.playing("bfloat16") as players:
        for step in range(size.stale_steps):
            kept.append(_copies(world, trainer))
            players.engine.publish(kept[0], step)
            batch = players.roll_out(f"stale{step}", step * size.stale_tasks, size.stale_tasks)
            found.append(mismatch(live, learner, batch))
            success.append(float(batch.success.mean()))
            training_step(learner, groups_of(batch))
    return found, success


def _copies(world: World, trainer: Trainer) -> Weights:
    """By HF name, as an engine is sent them."""
    chunks = [unwrap(chunk) for chunk in trainer.chunks]
    return [(name, tensor.clone()) for name, tensor in whole_tensors(chunks, world.hf)]
