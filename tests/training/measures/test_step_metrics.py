"""Metrics of a step (``megatron_ext/training/measures/step_metrics.py``): numbers by hand, all names in the table."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from megatron_ext.moe.replay_tokens import ReplayCounts
from megatron_ext.rollout.agreement import CONSTANT, UNTRAINABLE
from megatron_ext.rollout.dialogues import SessionCounts
from megatron_ext.rollout.driver import GroupDone
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.tracking.names import check
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.measures.step_metrics import rollout_metrics, update_metrics
from megatron_ext.training.ranks.ranks import Gather, alone
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.training.step_replay.sample_parts import group_tokens
from megatron_ext.training.trainer import UpdateResult
from megatron_ext.trajectory import version as policy_version
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import Status, TrajectoryBatch
from megatron_ext.trajectory.routed_rows import RerunCounts
from megatron_ext.trajectory.rows import make_rows
from tests.helpers.gathering import on_ranks
from tests.helpers.records import Traj, build, model, random_batch, single, user

NOW = policy_version.pack(1, 10)


def trajectory(turns: int, reward: float, success: bool, status: Status = Status.DONE, version: int = NOW) -> Traj:
    """``turns`` exchanges of three tokens, two of them sampled."""
    said = [
        part
        for _ in range(turns)
        for part in (user([1]), model([2, 3], mask=status.trainable, logp=-0.5, version=version))
    ]
    return single(said, reward=reward, success=success, status=status)


@pytest.fixture
def whole() -> TrajectoryBatch:
    return build(
        [
            (trajectory(1, 1.0, True), trajectory(3, 0.0, False, Status.MAX_TURNS)),
            (trajectory(2, 1.0, True), trajectory(2, 1.0, True)),
            (trajectory(1, 0.0, False), trajectory(1, 0.0, False, Status.MAX_CONTEXT)),
            (trajectory(1, 0.0, False, Status.ENV_ERROR), trajectory(1, 0.0, False, Status.ENV_DEADLINE)),
            (trajectory(4, 0.5, False), trajectory(1, 0.0, False, Status.REWARD_INVALID)),
            (trajectory(1, 0.25, False), trajectory(2, 0.0, False, Status.ABORTED)),
        ]
    )


SESSIONS = SessionCounts(sessions=5, compressions=2, subagents=1, retokenised=1, empty=2)


def step_groups(whole: TrajectoryBatch) -> StepGroups:
    metas = [GroupMeta.from_batch(whole, f"ref{g}", g) for g in range(whole.num_groups)]
    names = [meta.group_id for meta in metas]
    train = (names[0], names[4], names[5])
    filtered = ((names[1], CONSTANT), (names[2], CONSTANT), (names[3], UNTRAINABLE))
    drawn = [
        GroupDone("", meta, malformed=1, invalid_actions=2, problems=(), seconds=0.1, sessions=SESSIONS)
        for meta in metas[:5]
    ]
    return StepGroups(drawn, metas, train, filtered, select_groups(whole, [0, 4, 5]))


def test_rollout_numbers(whole: TrajectoryBatch) -> None:
    metrics = rollout_metrics(step_groups(whole), seconds=4.0)
    check(metrics)
    turns, sampled = 20, 2 * (20 - 1 - 1 - 1 - 2)  # untrainable trajectories have no trained tokens
    own_turns, own_sampled = turns - 3, sampled - 2  # the last group finished before a resume
    wanted = {
        "rollout/trajectories": 12,
        "rollout/tokens": sampled,
        "rollout/tokens_per_s": own_sampled / 4,
        "rollout/malformed_fraction": 5 / own_turns,
        "rollout/invalid_fraction": 10 / own_turns,
        "rollout/turns_mean": turns / 12,
        "rollout/turns_max": 4,
        "rollout/tokens_mean": sampled / 12,
        "rollout/length_mean": 3 * turns / 12,
        "rollout/max_turns_fraction": 1 / 12,
        "rollout/max_context_fraction": 1 / 12,
        "rollout/env_errors": 1,
        "rollout/env_deadlines": 1,
        "rollout/reward_invalid": 1,
        "rollout/aborted": 1,
        "rollout/sessions_mean": 5 * 5 / 10,
        "rollout/compressions_mean": 5 * 2 / 10,
        "rollout/subagents_mean": 5 * 1 / 10,
        "rollout/summaries_retokenised": 5,
        "rollout/summaries_empty": 10,
        "filter/groups_drawn": 6,
        "filter/groups_kept": 3,
        "filter/groups_constant": 2,
        "filter/groups_all_success": 1,
        "filter/groups_all_failure": 1,
        "filter/groups_untrainable": 1,
        "filter/kept_fraction": 0.5,
        # over the eight trajectories whose end says something about the policy
        "reward/mean": 3.75 / 8,
        "reward/min": 0.0,
        "reward/max": 1.0,
        "reward/success": 3 / 8,
        "reward/part/half": np.mean([0.5, 0.0, 0.25, 0.125]),  # of those that are trained
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value), name
    assert metrics["reward/std"] == pytest.approx(np.std([1, 0, 1, 1, 0, 0, 0.5, 0.25]))
    stored = rollout_metrics(replace(step_groups(whole), drawn=[]), seconds=4.0)  # all of them before a resume
    assert stored["rollout/tokens"] == sampled and "rollout/tokens_per_s" not in stored


def test_routing_that_was_recorded_again(whole: TrajectoryBatch) -> None:
    """Counted where routing is recorded, and said nowhere else."""
    groups = step_groups(whole)
    assert not {"moe/replay_reruns", "moe/replay_displaced"} & rollout_metrics(groups, seconds=1.0).keys()
    drawn = [replace(done, reruns=RerunCounts(i, i // 3)) for i, done in enumerate(groups.drawn)]
    metrics = rollout_metrics(replace(groups, drawn=drawn), seconds=1.0)
    check(metrics)
    assert metrics["moe/replay_reruns"] == 10 and metrics["moe/replay_displaced"] == 2


def test_parts_that_are_missing_are_counted_and_left_out(whole: TrajectoryBatch) -> None:
    part = np.arange(12, dtype=np.float32)
    part[[0, 8, 9]] = np.nan  # the group of 8 and 9 has one trajectory that does not count
    nobody = np.full(12, np.nan, dtype=np.float32)
    groups = step_groups(replace(whole, reward_parts={"roles": part, "nobody": nobody}))
    metrics = rollout_metrics(groups, seconds=1.0)
    check(metrics)
    assert metrics["reward/missing/roles"] == 2 and metrics["reward/part/roles"] == pytest.approx((1 + 10) / 2)
    assert metrics["reward/missing/nobody"] == 4 and "reward/part/nobody" not in metrics

    def work(half: int, gather: Gather) -> Mapping[str, float]:
        assert groups.batch is not None
        mine = select_groups(groups.batch, [0] if half == 0 else [1, 2])
        return rollout_metrics(replace(groups, batch=mine), 1.0, gather)

    for found in on_ranks(work, 2):
        assert {k: found[k] for k in found if "roles" in k} == {k: metrics[k] for k in metrics if "roles" in k}


def test_what_judges_counted(whole: TrajectoryBatch) -> None:
    counted = {"judge/trajectories": 2.0, "judge/asked": 8.0, "judge/calls": 9.0, "judge/failed": 1.0}
    counted |= {"judge/unknown": 2.0, "judge/seconds": 3.0, "judge/label/role/D": 1.0, "judge/label/role/N": 6.0}
    groups = step_groups(whole)
    drawn = [replace(group, rewards=counted if n < 2 else {}) for n, group in enumerate(groups.drawn)]
    metrics = rollout_metrics(replace(groups, drawn=drawn), seconds=1.0)
    check(metrics)
    found = {name: value for name, value in metrics.items() if name.startswith("judge/")}
    assert found == {
        "judge/trajectories": 4.0,
        "judge/asked": 16.0,
        "judge/calls": 18.0,
        "judge/failed": 2.0,
        "judge/unknown": 4.0,
        "judge/seconds": 1.5,
        "judge/label/role/D": 1 / 7,
        "judge/label/role/N": 6 / 7,
    }
    silent = [replace(groups.drawn[0], rewards=dict.fromkeys(counted, 0.0))]
    assert all(
        value == 0.0 for name, value in rollout_metrics(replace(groups, drawn=silent), 1.0).items() if "judge/" in name
    )


def test_a_step_without_groups_or_without_trainable_ones(whole: TrajectoryBatch) -> None:
    nothing = rollout_metrics(StepGroups([], [], (), (), None), seconds=0.0)
    check(nothing)
    assert nothing["rollout/trajectories"] == 0 and "reward/mean" not in nothing
    lost = rollout_metrics(
        StepGroups([], [GroupMeta.from_batch(whole, "r", 3)], (), (("group3", UNTRAINABLE),), None), seconds=1.0
    )
    check(lost)
    assert lost["rollout/trajectories"] == 2 and "reward/mean" not in lost
    assert all(math.isfinite(value) for value in [*nothing.values(), *lost.values()])


class Silent:
    def start(self, *args: Any) -> None: ...
    def phase(self, name: str, total: int | None = None) -> None: ...
    def advance(self, done: int, note: str = "") -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def finish(self, summary: Mapping[str, Any]) -> None: ...


@pytest.fixture
def trained() -> TrajectoryBatch:
    """Sampled 0, 1 and 3 optimizer steps ago: 2, 4 and 2 tokens."""
    then = [policy_version.pack(1, 10 - lag) for lag in (0, 1, 3)]
    turns = (1, 2, 1)
    return build([tuple(trajectory(n, 1.0, True, version=v) for n, v in zip(turns, then, strict=True))])


def scored(batch: TrajectoryBatch, differences: list[float]) -> TokenScores:
    logp = np.zeros(batch.num_tokens, dtype=np.float32)
    logp[batch.loss_mask] = batch.rollout_logp[batch.loss_mask] + np.array(differences, dtype=np.float32)
    return TokenScores(logp, np.zeros_like(logp))


def test_update_numbers(trained: TrajectoryBatch) -> None:
    rows = make_rows(trained)
    results = [
        UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, applied=True, metrics={"policy/ratio_mean": 1.0}),
        UpdateResult(loss=3.0, grad_norm=6.0, lr=0.2, applied=True, metrics={"policy/ratio_mean": 1.2}),
    ]
    clock = Phases(Silent())
    scores = scored(trained, [0.0, 0.25, 0.0, 0.0, -0.5, 0.0, 0.0, 0.0])
    metrics = update_metrics(results, trained, rows, scores, NOW, clock, resumed={})
    check(metrics)
    wanted = {
        "train/loss": 2.0,
        "train/grad_norm": 4.0,
        "train/lr": 0.2,
        "train/nan_steps": 0.0,
        "train/tokens": 12.0,
        "train/trained_tokens": 8.0,
        "train/rows": 3.0,
        "policy/ratio_mean": 1.1,
        "rollout/entropy": 0.5,
        "offpolicy/logp_diff_mean": 0.75 / 8,
        "offpolicy/logp_diff_max": 0.5,
        "offpolicy/lag_mean": (2 * 0 + 4 * 1 + 2 * 3) / 8,
        "offpolicy/lag_max": 3.0,
    }
    for name, value in wanted.items():
        assert metrics[name] == pytest.approx(value), name


def test_skipped_steps_are_counted_and_their_numbers_left_out(trained: TrajectoryBatch) -> None:
    good = UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, applied=True, metrics={"policy/ratio_mean": 1.0})
    bad = replace(good, loss=math.nan, grad_norm=math.nan, applied=False, metrics={"policy/ratio_mean": math.nan})
    rows, scores, clock = make_rows(trained), scored(trained, [0.0] * 8), Phases(Silent())
    metrics = update_metrics([good, bad], trained, rows, scores, NOW, clock, resumed={})
    assert metrics["train/nan_steps"] == 1.0 and metrics["train/loss"] == 1.0 and metrics["policy/ratio_mean"] == 1.0
    none = update_metrics([bad], trained, rows, scores, NOW, clock, resumed={})
    check(none)
    assert none["train/nan_steps"] == 1.0 and "train/loss" not in none
    assert all(math.isfinite(value) for value in [*metrics.values(), *none.values()])


def test_speed_is_over_the_update_phase(trained: TrajectoryBatch) -> None:
    clock = Phases(Silent())
    with clock("update"):
        time.sleep(0.02)
    good = UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, applied=True)
    rows, scores = make_rows(trained), scored(trained, [0.0] * 8)
    metrics = update_metrics([good], trained, rows, scores, NOW, clock, resumed={})
    assert metrics["train/tokens_per_s"] == pytest.approx(12 / clock.seconds("update"))


@pytest.mark.parametrize("homes", [((0, 2), (1,)), ((1,), (), (0,), (2,))])
def test_ranks_that_share_a_step_get_the_metrics_of_one(homes: tuple[tuple[int, ...], ...]) -> None:
    """Invariant 1, speeds apart; a rank without groups counts for nothing."""
    batch = random_batch(7, groups=3)
    rng = np.random.default_rng(0)
    size = batch.num_tokens
    logp = np.where(batch.loss_mask, batch.rollout_logp + rng.normal(0, 0.1, size), 0.0).astype(np.float32)
    results = [UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, applied=True, metrics={"policy/ratio_mean": 1.0})]
    now = int(batch.version.max())

    def of(part: TrajectoryBatch, token: np.ndarray, gather: Gather) -> dict[str, float]:
        scores = TokenScores(logp[token], np.zeros(len(token), np.float32))
        update = update_metrics(results, part, make_rows(part), scores, now, Phases(Silent()), {}, gather)
        groups = StepGroups([], [], ("a",), (), part)
        return update | rollout_metrics(groups, 1.0, gather)

    one = of(batch, np.arange(size), alone)

    def rank(number: int, gather: Gather) -> dict[str, float]:
        return of(select_groups(batch, homes[number]), group_tokens(batch, homes[number]), gather)

    assert any(name.startswith("reward/part/") for name in one)
    for found in on_ranks(rank, len(homes)):
        speeds = {"train/tokens_per_s"}
        assert found.keys() == one.keys()
        assert {k: v for k, v in found.items() if k not in speeds} == pytest.approx(
            {k: v for k, v in one.items() if k not in speeds}, rel=1e-9, abs=1e-12
        )


def test_what_was_replayed_is_counted_over_steps_and_ranks(trained: TrajectoryBatch) -> None:
    """Shares are of the tokens that ran on all ranks, also where one ran none."""
    plain = UpdateResult(loss=1.0, grad_norm=2.0, lr=0.1, applied=True)
    rows, scores = make_rows(trained), scored(trained, [0.0] * 8)
    without = update_metrics([plain], trained, rows, scores, NOW, Phases(Silent()), {})
    assert not any(name.startswith("moe/repl") for name in without)
    counts = [(ReplayCounts(8, 6, 4, 1), ReplayCounts(4, 4, 4, 0)), (ReplayCounts(), ReplayCounts(4, 2, 2, 1))]

    def rank(number: int, gather: Gather) -> Mapping[str, float]:
        results = [replace(plain, replay=each) for each in counts[number]]
        return update_metrics(results, trained, rows, scores, NOW, Phases(Silent()), {}, gather)

    for found in on_ranks(rank, 2):
        check(found)
        assert found["moe/replayed_share"] == 12 / 16
        assert found["moe/replay_missing"] == 2 / 10
