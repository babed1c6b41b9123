"""Supervised warm start on scripted demonstrations, with the training step of RL.

A random model never earns a reward. The warm start stops when greedy success on dev tasks reaches a target, not after a
fixed number of passes: how weak the start is decides what RL has left to teach.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.config.schema import WarmStartConfig
from megatron_ext.losses.sft import NegativeLogLikelihood
from megatron_ext.training.microbatch import build_microbatch
from megatron_ext.training.schedule import learning_rate
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.packing import pack
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import make_rows


@dataclass(frozen=True)
class WarmStartReport:
    steps: int
    epochs: float
    loss: float
    dev_success: float
    gate_met: bool


def warm_start_key(parts: Mapping[str, Any]) -> str:
    """Key of a cached warm start: equal parts give equal weights."""
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:16]


def supervised_weights(batch: TrajectoryBatch, observation_weight: float) -> NDArray[np.float32]:
    """Unnormalised token weights: 1 on action tokens, ``observation_weight`` on the others."""
    return np.where(batch.loss_mask, 1.0, observation_weight).astype(np.float32)


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
) -> WarmStartReport:
    """Trains on ``batch`` until the gate or ``max_epochs``. ``gate`` returns greedy dev success under the current
    weights; ``on_step(step, total, loss)`` is called after each optimizer step and may raise to interrupt,
    ``on_gate(step, loss, success)`` after each look at the gate."""
    rows = make_rows(batch)
    lengths = rows.lengths
    per_epoch = math.ceil(len(lengths) / config.trajectories_per_step)
    total = max(1, int(per_epoch * config.max_epochs))
    raw = supervised_weights(batch, config.observation_weight)
    zeros = torch.zeros(batch.num_tokens)
    terms = {"nll": NegativeLogLikelihood()}
    step, loss, success = 0, 0.0, 0.0
    while step < total:
        epoch = step // per_epoch
        order = np.random.default_rng([seed, epoch]).permutation(len(lengths))
        for begin in range(0, len(order), config.trajectories_per_step):
            members = order[begin : begin + config.trajectories_per_step]
            plan = pack(lengths[members], cap=tokens_per_microbatch)
            select = raw[rows.token] > 0
            micro = [build_microbatch(batch, rows, members[mb], select) for mb in plan.microbatches[0]]
            weight = torch.zeros(batch.num_tokens)
            tokens = torch.cat([mb.token for mb in micro])
            action = torch.from_numpy(batch.loss_mask.copy())[tokens]
            values = torch.from_numpy(raw)[tokens]
            # Actions and observations are normalised apart: the weight of one does not depend on the other's number.
            weight[tokens] = torch.where(action, values / action.sum(), values / (~action).sum().clamp(min=1))
            inputs = TokenInputs(zeros, zeros, zeros, weight)
            result = trainer.update(micro, inputs, terms, learning_rate(config.optimizer, step, total))
            step, loss = step + 1, result.loss
            on_step(step, total, loss)
            due = step % config.gate_every == 0 and step >= config.min_epochs * per_epoch
            if config.target_success and due:
                success = gate()
                on_gate(step, loss, success)
                if success >= config.target_success:
                    return WarmStartReport(step, step / per_epoch, loss, success, gate_met=True)
            if step >= total:
                break
    success = gate()
    on_gate(step, loss, success)
    met = config.target_success > 0 and success >= config.target_success
    return WarmStartReport(step, step / per_epoch, loss, success, gate_met=met)
