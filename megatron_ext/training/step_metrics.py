"""Metrics of one step from what the phases returned. Names are those of ``megatron_ext.tracking.names``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from megatron_ext.losses.diagnostics import lag_stats, train_rollout_difference
from megatron_ext.moe.load import load_metrics, routing_flips
from megatron_ext.rollout.agreement import CONSTANT, UNTRAINABLE
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.phases import Phases
from megatron_ext.training.trainer import TokenScores, UpdateResult
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from megatron_ext.trajectory.rows import Rows


def rollout_metrics(groups: StepGroups, seconds: float) -> dict[str, float]:
    """Everything the rollout phase says, over all groups that were looked at (filtered ones included).

    What the driver counted, and the speed, are over the groups of this process: those that finished before a resume
    come without the driver's counts and took none of these ``seconds``.
    """
    metas = groups.metas
    rewards = np.array([r for m in metas for r in m.rewards], dtype=np.float64)
    success = np.array([s for m in metas for s in m.success], dtype=np.float64)
    status = np.array([s for m in metas for s in m.status], dtype=np.int64)
    turns = np.array([t for m in metas for t in m.turns], dtype=np.float64)
    tokens = np.array([t for m in metas for t in m.tokens], dtype=np.float64)
    sampled = np.array([t for m in metas for t in m.trained_tokens], dtype=np.float64)
    own = [g.meta for g in groups.drawn]
    own_turns = max(sum(sum(m.turns) for m in own), 1)
    counted = status < int(Status.ENV_ERROR)

    def ended(kind: Status) -> float:
        return float(np.count_nonzero(status == int(kind)))

    number = max(len(status), 1)
    constant = [m for m in metas if (m.group_id, CONSTANT) in set(groups.filtered)]
    metrics = {
        "rollout/trajectories": float(len(status)),
        "rollout/tokens": float(sampled.sum()),
        "rollout/tokens_per_s": sum(sum(m.trained_tokens) for m in own) / max(seconds, 1e-9),
        "rollout/malformed_fraction": sum(g.malformed for g in groups.drawn) / own_turns,
        "rollout/invalid_fraction": sum(g.invalid_actions for g in groups.drawn) / own_turns,
        "rollout/max_turns_fraction": ended(Status.MAX_TURNS) / number,
        "rollout/max_context_fraction": ended(Status.MAX_CONTEXT) / number,
        "rollout/env_errors": ended(Status.ENV_ERROR),
        "rollout/env_deadlines": ended(Status.ENV_DEADLINE),
        "rollout/reward_invalid": ended(Status.REWARD_INVALID),
        "rollout/aborted": ended(Status.ABORTED),
        "filter/groups_drawn": float(len(metas)),
        "filter/groups_kept": float(len(groups.train)),
        "filter/groups_constant": float(len(constant)),
        "filter/groups_all_success": float(sum(all(m.success) for m in constant)),
        "filter/groups_all_failure": float(sum(not any(m.success) for m in constant)),
        "filter/groups_untrainable": float(sum(reason == UNTRAINABLE for _, reason in groups.filtered)),
        "filter/kept_fraction": len(groups.train) / max(len(metas), 1),
    }
    if len(status):
        metrics |= {
            "rollout/turns_mean": float(turns.mean()),
            "rollout/turns_max": float(turns.max()),
            "rollout/tokens_mean": float(sampled.mean()),
            "rollout/length_mean": float(tokens.mean()),
        }
    if counted.any():
        metrics |= {
            "reward/mean": float(rewards[counted].mean()),
            "reward/std": float(rewards[counted].std()),
            "reward/min": float(rewards[counted].min()),
            "reward/max": float(rewards[counted].max()),
            "reward/success": float(success[counted].mean()),
        }
    if groups.batch is not None:
        for name, part in groups.batch.reward_parts.items():
            metrics[f"reward/part/{name}"] = float(part[groups.batch.trainable()].mean())
    return metrics


def update_metrics(
    results: Sequence[UpdateResult],
    batch: TrajectoryBatch,
    rows: Rows,
    scores: TokenScores,
    version: int,
    clock: Phases,
    num_experts: int,
    resumed: Mapping[int, int],
) -> dict[str, float]:
    """Loss, gradient norm and policy metrics (means over the optimizer steps that were applied), drift and staleness.

    ``version`` is the policy version of the weights that opened the batch: lag counts from there.
    """
    applied = [r for r in results if r.applied]  # what a skipped step measured may be NaN, and trained nothing
    names = sorted({name for r in applied for name in r.metrics})
    metrics = {name: float(np.mean([r.metrics[name] for r in applied if name in r.metrics])) for name in names}
    mask = batch.loss_mask
    difference = train_rollout_difference(scores.logp, batch.rollout_logp, mask)
    lag = lag_stats(batch.version, mask, version, resumed)
    seconds = clock.seconds("update")
    metrics |= {
        "train/lr": results[-1].lr,
        "train/nan_steps": float(len(results) - len(applied)),
        "train/tokens": float(len(rows.token)),
        "train/trained_tokens": float(mask.sum()),
        "train/rows": float(rows.num_rows),
        "train/tokens_per_s": len(rows.token) / max(seconds, 1e-9),
        "rollout/entropy": float(-batch.rollout_logp[mask].mean()),
        "offpolicy/logp_diff_mean": difference.mean,
        "offpolicy/logp_diff_max": difference.maximum,
        "offpolicy/lag_mean": lag.mean,
        "offpolicy/lag_max": lag.maximum,
    }
    if scores.experts is not None and scores.routed is not None:
        metrics |= load_metrics(scores.experts[scores.routed], num_experts)
        if batch.routed is not None and batch.routed_valid is not None:
            both = scores.routed & batch.routed_valid
            metrics["offpolicy/routing_flips"] = float(
                routing_flips(scores.experts[both], batch.routed[both]).mean() if both.any() else 0.0
            )
    if applied:
        metrics |= {
            "train/loss": float(np.mean([r.loss for r in applied])),
            "train/grad_norm": float(np.mean([r.grad_norm for r in applied])),
        }
    return metrics
