"""Metrics of one step from what the phases returned. Names are those of ``megatron_ext.tracking.names``.

Invariants (``tests/training/measures/test_step_metrics.py``):

1. Metrics are of the step over all ranks, and the same on every rank but for speeds and durations, which are a rank's
   own: data-parallel ranks that hold parts of the batch get what one rank with all of it would.
2. One gathering of sums for rewards, one for the update, on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add

import numpy as np

from megatron_ext.losses.diagnostics import MeanMax, RatioStats, lag_stats, ratio_stats, train_rollout_difference
from megatron_ext.moe.replay_tokens import ReplayCounts
from megatron_ext.rollout.agreement import CONSTANT, UNTRAINABLE
from megatron_ext.rollout.dialogues import SessionCounts
from megatron_ext.rollout.driver import GroupDone
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.ranks.ranks import Gather, alone
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.training.trainer import UpdateResult
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from megatron_ext.trajectory.routed_rows import RerunCounts
from megatron_ext.trajectory.rows import Rows

LABEL = "judge/label/"


def rollout_metrics(groups: StepGroups, seconds: float, gather: Gather = alone) -> dict[str, float]:
    """Everything the rollout phase says, over all groups that were looked at (filtered ones included).

    What the driver counted, and the speed, are over the groups of this process: those that finished before a resume
    come without the driver's counts and took none of these ``seconds``. Only rank 0 has them.
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
    if generated := sum(sum(m.trained_tokens) for m in own):  # a resumed step may take all that it has from the store
        metrics["rollout/tokens_per_s"] = generated / max(seconds, 1e-9)
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
    metrics |= _judging(groups.drawn) | _sessions(groups.drawn) | _reruns(groups.drawn)
    if groups.batch is not None:
        metrics |= _reward_parts(groups.batch, gather)
    return metrics


def _reward_parts(batch: TrajectoryBatch, gather: Gather) -> dict[str, float]:
    """Of the step's trainable trajectories: means over those that have the part, and how many lack it."""
    own = {}
    for name, part in batch.reward_parts.items():
        counted = part[batch.trainable()]
        have = counted[~np.isnan(counted)]
        own[name] = (float(have.sum(dtype=np.float64)), len(have), len(counted) - len(have))
    # A rank whose groups know nothing of a part has 0 of it, as in one batch with theirs.
    trainable, metrics = int(batch.trainable().sum()), {}
    everybody = gather((own, trainable))
    for name in sorted({name for sums, _ in everybody for name in sums}):
        found = [sums.get(name, (0.0, number, 0)) for sums, number in everybody]
        total, have, missing = (sum(column) for column in zip(*found, strict=True))
        metrics[f"reward/missing/{name}"] = float(missing)
        if have:
            metrics[f"reward/part/{name}"] = total / have
    return metrics


def _sessions(drawn: Sequence[GroupDone]) -> dict[str, float]:
    """Sessions of the trajectories that this process generated."""
    counts = sum((group.sessions for group in drawn), SessionCounts())
    number = max(sum(len(group.meta.tokens) for group in drawn), 1)
    return {
        "rollout/sessions_mean": counts.sessions / number,
        "rollout/compressions_mean": counts.compressions / number,
        "rollout/subagents_mean": counts.subagents / number,
        "rollout/summaries_retokenised": float(counts.retokenised),
        "rollout/summaries_empty": float(counts.empty),
    }


def _reruns(drawn: Sequence[GroupDone]) -> dict[str, float]:
    """Recorded routing that the engine gave again and differently, in the trajectories that this process generated."""
    counts = [group.reruns for group in drawn if group.reruns is not None]
    total = sum(counts, RerunCounts())
    found = {"moe/replay_reruns": float(total.positions), "moe/replay_displaced": float(total.displaced)}
    return found if counts else {}


def _judging(drawn: Sequence[GroupDone]) -> dict[str, float]:
    """What the reward parts counted in the groups of this process; labels as shares of their name's, the time as a mean
    over judged trajectories."""
    counts: dict[str, float] = {}
    for group in drawn:
        for name, value in group.rewards.items():
            counts[name] = counts.get(name, 0.0) + value
    labelled: dict[str, float] = {}
    for name, value in counts.items():
        if name.startswith(LABEL):
            family = name.rpartition("/")[0]
            labelled[family] = labelled.get(family, 0.0) + value
    metrics = {}
    for name, value in counts.items():
        if name.startswith(LABEL):
            metrics[name] = value / max(labelled[name.rpartition("/")[0]], 1.0)
        elif name == "judge/seconds":
            metrics[name] = value / max(counts["judge/trajectories"], 1.0)
        else:
            metrics[name] = value
    return metrics


@dataclass(frozen=True, eq=False)
class _Sums:
    """What a rank's part of the batch adds to the metrics of an update. ``experts`` [L, E] counts choices."""

    difference: MeanMax
    ratio: RatioStats
    lag: MeanMax
    tokens: int
    trained: int
    rows: int
    rollout_logp: float
    replay: ReplayCounts

    def __add__(self, other: _Sums) -> _Sums:
        return _Sums(
            self.difference + other.difference,
            self.ratio + other.ratio,
            self.lag + other.lag,
            self.tokens + other.tokens,
            self.trained + other.trained,
            self.rows + other.rows,
            self.rollout_logp + other.rollout_logp,
            self.replay + other.replay,
        )


def _sums(
    batch: TrajectoryBatch,
    rows: Rows,
    scores: TokenScores,
    version: int,
    resumed: Mapping[int, int],
    replay: ReplayCounts | None,
) -> _Sums:
    mask = batch.loss_mask
    return _Sums(
        difference=train_rollout_difference(scores.logp, batch.rollout_logp, mask),
        ratio=ratio_stats(scores.logp, batch.rollout_logp, mask),
        lag=lag_stats(batch.version, mask, version, resumed),
        tokens=len(rows.token),
        trained=int(mask.sum()),
        rows=rows.num_rows,
        rollout_logp=float(batch.rollout_logp[mask].sum(dtype=np.float64)),
        replay=ReplayCounts() if replay is None else replay,
    )


def update_metrics(
    results: Sequence[UpdateResult],
    batch: TrajectoryBatch,
    rows: Rows,
    scores: TokenScores,
    version: int,
    clock: Phases,
    resumed: Mapping[int, int],
    gather: Gather = alone,
) -> dict[str, float]:
    """Loss, gradient norm and policy metrics (means over the optimizer steps that were applied), drift and staleness.

    ``batch``, ``rows`` and ``scores`` are this rank's part. ``version`` is the policy version of the weights that
    opened the batch: lag counts from there.
    """
    applied = [r for r in results if r.applied]  # what a skipped step measured may be NaN, and trained nothing
    names = sorted({name for r in applied for name in r.metrics})
    metrics = {name: float(np.mean([r.metrics[name] for r in applied if name in r.metrics])) for name in names}
    counts = [r.replay for r in results if r.replay is not None]
    replay = sum(counts, ReplayCounts()) if counts else None
    sums = reduce(add, gather(_sums(batch, rows, scores, version, resumed, replay)))
    seconds = clock.seconds("update")
    metrics |= {
        "train/lr": results[-1].lr,
        "train/nan_steps": float(len(results) - len(applied)),
        "train/tokens": float(sums.tokens),
        "train/trained_tokens": float(sums.trained),
        "train/rows": float(sums.rows),
        "train/tokens_per_s": sums.tokens / max(seconds, 1e-9),
        "rollout/entropy": -sums.rollout_logp / max(sums.trained, 1),
        "offpolicy/logp_diff_mean": sums.difference.mean,
        "offpolicy/logp_diff_max": sums.difference.maximum,
        **sums.ratio.metrics(),
        "offpolicy/lag_mean": sums.lag.mean,
        "offpolicy/lag_max": sums.lag.maximum,
    }
    if replay is not None:
        metrics |= sums.replay.metrics()
    if applied:
        metrics |= {
            "train/loss": float(np.mean([r.loss for r in applied])),
            "train/grad_norm": float(np.mean([r.grad_norm for r in applied])),
        }
    return metrics
