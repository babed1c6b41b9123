"""Metrics of one step from what the phases returned. Names are those of ``megatron_ext.tracking.names``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron_ext.rollout.agreement import CONSTANT, UNTRAINABLE
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from megatron_ext.trajectory.version import lag
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.phases import Phases
from megatron_ext.training.trainer import TokenScores, UpdateResult


def rollout_metrics(groups: StepGroups, seconds: float) -> dict[str, float]:
    """Everything the rollout phase says, over all groups that were drawn (filtered ones included)."""
    done = groups.drawn
    rewards = np.array([r for m in groups.metas for r in m.rewards], dtype=np.float64)
    success = np.array([s for m in groups.metas for s in m.success], dtype=np.float64)
    status = np.array([s for m in groups.metas for s in m.status], dtype=np.int64)
    turns = np.array([t for m in groups.metas for t in m.model_turns], dtype=np.float64)
    tokens = np.array([t for m in groups.metas for t in m.tokens], dtype=np.float64)
    trained = np.array([t for m in groups.metas for t in m.trained_tokens], dtype=np.float64)
    counted = status < int(Status.ENV_ERROR)
    mean = lambda x: float(x.mean()) if len(x) else 0.0  # noqa: E731
    metrics = {
        "reward/mean": mean(rewards[counted]),
        "reward/std": float(rewards[counted].std()) if counted.any() else 0.0,
        "reward/success": mean(success[counted]),
        "rollout/trajectories": float(len(status)),
        "rollout/tokens": float(tokens.sum()),
        "rollout/tokens_mean": mean(tokens),
        "rollout/sampled_tokens": float(trained.sum()),
        "rollout/turns_mean": mean(turns),
        "rollout/turns_median": float(np.median(turns)) if len(turns) else 0.0,
        "rollout/tokens_per_s": float(tokens.sum()) / max(seconds, 1e-9),
        "rollout/malformed_fraction": sum(g.malformed for g in done) / max(turns.sum(), 1.0),
        "rollout/invalid_action_fraction": sum(g.invalid_actions for g in done) / max(turns.sum(), 1.0),
        "rollout/truncated_fraction": mean(
            ((status == int(Status.MAX_TURNS)) | (status == int(Status.MAX_CONTEXT))).astype(np.float64)
        ),
        "rollout/env_errors": float(np.count_nonzero(status == int(Status.ENV_ERROR))),
        "rollout/env_deadlines": float(np.count_nonzero(status == int(Status.ENV_DEADLINE))),
        "rollout/reward_invalid": float(np.count_nonzero(status == int(Status.REWARD_INVALID))),
        "filter/drawn_groups": float(len(groups.metas)),
        "filter/constant_groups": float(sum(reason == CONSTANT for _, reason in groups.filtered)),
        "filter/untrainable_groups": float(sum(reason == UNTRAINABLE for _, reason in groups.filtered)),
        "filter/trained_groups": float(len(groups.train)),
    }
    if groups.batch is not None:
        for name, part in groups.batch.reward_parts.items():
            metrics[f"reward/part/{name}"] = mean(part[groups.batch.trainable()].astype(np.float64))
    return metrics


def update_metrics(
    results: Sequence[UpdateResult], batch: TrajectoryBatch, scores: TokenScores, version: int, clock: Phases
) -> dict[str, float]:
    """Loss, gradient norm and policy metrics (means over the batch's optimizer steps), drift and staleness."""
    names = sorted({name for r in results for name in r.metrics})
    metrics = {name: float(np.mean([r.metrics[name] for r in results if name in r.metrics])) for name in names}
    applied = [r for r in results if r.applied]
    mask = batch.loss_mask
    difference = np.abs(scores.logp[mask].astype(np.float64) - batch.rollout_logp[mask])
    versions, counts = np.unique(batch.version[mask], return_counts=True)
    lags = np.array([lag(version, int(v)) for v in versions], dtype=np.float64)
    seconds = clock.seconds("scoring") + clock.seconds("update")
    metrics |= {
        "train/loss": float(np.mean([r.loss for r in applied])) if applied else 0.0,
        "train/grad_norm": float(np.mean([r.grad_norm for r in applied])) if applied else 0.0,
        "train/lr": results[-1].lr,
        "train/nan_steps": float(len(results) - len(applied)),
        "train/tokens": float(batch.num_tokens),
        "train/tokens_per_s": batch.num_tokens / max(seconds, 1e-9),
        "offpolicy/logp_diff_mean": float(difference.mean()) if len(difference) else 0.0,
        "offpolicy/logp_diff_max": float(difference.max()) if len(difference) else 0.0,
        "offpolicy/lag_mean": float((lags * counts).sum() / max(counts.sum(), 1)),
        "offpolicy/lag_max": float(lags.max()) if len(lags) else 0.0,
        "policy/entropy_old": float(scores.entropy[mask].mean()) if mask.any() else 0.0,
    }
    return metrics
