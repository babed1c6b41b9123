"""Supervised warm start on scripted demonstrations, with the training step of RL.

A random model never earns a reward. The warm start stops when greedy success on dev tasks reaches a target, not after a
fixed number of passes: how weak the start is decides what RL has left to teach.

Every rank knows all demonstrations, so that the ranks share each step's out by themselves; the loss is the same for any
number of them (but for Megatron's auxiliary loss, which is one of a micro-batch).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.config.schema import WarmStartConfig
from megatron_ext.losses.sft import NegativeLogLikelihood
from megatron_ext.training.ranks.lockstep import rank_microbatches
from megatron_ext.training.schedule import learning_rate
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows


@dataclass(frozen=True)
class Position:
    """Where a warm start stands: optimizer steps made, and the loss of the last one (0 before the first)."""

    step: int = 0
    loss: float = 0.0


@dataclass(frozen=True)
class WarmStartReport:
    steps: int
    epochs: float
    loss: float
    dev_success: float
    gate_met: bool


def supervised_weights(batch: TrajectoryBatch, observation_weight: float) -> NDArray[np.float32]:
    """Unnormalised token weights: 1 on action tokens, ``observation_weight`` on the others."""
    return np.where(batch.loss_mask, 1.0, observation_weight).astype(np.float32)


def predicted(batch: TrajectoryBatch, rows: Rows, select: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Tokens of each row that are predicted, int64 [R, 2]: actions, and the others."""
    entry = select.copy()
    entry[rows.row_offsets[:-1]] = False  # nothing predicts a row's first token
    action = batch.loss_mask[rows.token]
    ends = [np.concatenate([[0], np.cumsum(entry & kind)])[rows.row_offsets] for kind in (action, ~action)]
    return np.stack([np.diff(counts) for counts in ends], axis=1)


def run_warm_start(
    trainer: Trainer,
    batch: TrajectoryBatch,
    config: WarmStartConfig,
    *,
    seed: int,
    tokens_per_microbatch: int,
    gate: Callable[[], float],
    on_step: Callable[[int, int, float], None],
    on_gate: Callable[[int, float, float], None],
    begin: Position | None = None,
) -> WarmStartReport:
    """Trains on ``batch`` until the gate or ``max_epochs``. ``gate`` returns greedy dev success under the current
    weights, the same on every rank; ``on_step(step, total, loss)`` is called after each optimizer step and may raise to
    interrupt (on every rank), ``on_gate(step, loss, success)`` after each look at the gate. ``begin`` is where
    ``trainer`` stands already: after that step, before its look at the gate."""
    rows = make_rows(batch)
    lengths = rows.lengths
    per_epoch = math.ceil(len(lengths) / config.trajectories_per_step)
    total = max(1, int(per_epoch * config.max_epochs))
    raw = supervised_weights(batch, config.observation_weight)
    select = raw[rows.token] > 0
    counts = predicted(batch, rows, select)
    device = trainer.context.device
    zeros = torch.zeros(batch.num_tokens, device=device)
    every_action, every_value = (torch.from_numpy(a.copy()).to(device) for a in (batch.loss_mask, raw))
    terms = {"nll": NegativeLogLikelihood()}
    position = begin or Position()
    step, loss = position.step, position.loss
    order = np.empty(0, dtype=np.int64)
    while True:
        due = step > 0 and step % config.gate_every == 0 and step >= config.min_epochs * per_epoch
        if config.target_success and due:
            success = gate()
            on_gate(step, loss, success)
            if success >= config.target_success:
                return WarmStartReport(step, step / per_epoch, loss, success, gate_met=True)
        if step >= total:
            break
        epoch, within = divmod(step, per_epoch)
        if within == 0 or not len(order):
            order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
        members = order[within * config.trajectories_per_step :][: config.trajectories_per_step]
        micro = rank_microbatches(
            batch, rows, trainer.context, cap=tokens_per_microbatch, members=members, select=select
        )
        weight = torch.zeros_like(zeros)
        tokens = torch.cat([mb.token for mb in micro])
        action, values = every_action[tokens], every_value[tokens]
        # Actions and observations are normalised apart: the weight of one does not depend on the other's number.
        actions, others = counts[members].sum(axis=0).clip(min=1).tolist()
        weight[tokens] = torch.where(action, values / actions, values / others)
        inputs = TokenInputs(zeros, zeros, zeros, weight)
        result = trainer.update(micro, inputs, terms, learning_rate(config.optimizer, step, total))
        step, loss = step + 1, result.loss
        on_step(step, total, loss)
    success = gate()
    on_gate(step, loss, success)
    met = config.target_success > 0 and success >= config.target_success
    return WarmStartReport(step, step / per_epoch, loss, success, gate_met=met)
