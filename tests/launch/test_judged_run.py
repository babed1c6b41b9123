"""A run whose turns are labelled by a model behind an address that sometimes fails: what reaches record and metrics."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from launch.inspect import main as inspect
from launch.prepare import prepare
from megatron_ext.report.render import write_report
from megatron_ext.report.samples import Limits
from megatron_ext.training.run import train
from megatron_ext.trajectory.record import Role
from megatron_ext.trajectory.store import TrajectoryStore
from tests.helpers.judge_server import Say, judge_server

pytestmark = [pytest.mark.slow, pytest.mark.integration]


def script(number: int, body: Mapping[str, Any]) -> Say:
    """Progress for ``go``, sometimes in words of its own, and now and then no answer at all."""
    if number % 7 == 3:
        return Say(status=500)
    judged = body["messages"][-1]["content"].split("The step to judge:\n> ")[1]
    return Say("splendid" if number % 5 == 0 else "progress" if judged.startswith("go") else "detour")


def test_labels_and_missing_parts_of_a_run(
    walk_recipes: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with judge_server(script) as server:
        judge = (
            "{_target_: megatron_ext.rewards.model_judge.ModelJudge, model: m, attempts: 1, concurrency: 4, cache: 0, "
            f"base_url: '{server.base_url}'}}"
        )
        roles = (
            "{_target_: megatron_ext.rewards.judge_reward.JudgeReward, labels: {progress: 0, detour: 1}, "
            f"default: detour, values: {{progress: 0.5}}, average: true, judge: {judge}}}"
        )
        argv = ["recipe=walk", f"run.root={tmp_path}", "evaluation.before=false", "evaluation.after=false"]
        result = train(prepare([*argv, f"rewards.roles={roles}", "samples.every=1", "samples.groups=0"], walk_recipes))
    assert result.steps == 2
    folder = tmp_path / "walk"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "judge/asked" in line]
    assert len(steps) == 2
    for step in steps:
        assert step["judge/calls"] == step["judge/asked"] > 0 and 0 < step["judge/failed"] < step["judge/asked"]
        assert step["judge/unknown"] > 0 and step["judge/trajectories"] >= 32
        assert step["judge/label/role/progress"] + step["judge/label/role/detour"] == pytest.approx(1.0)
        assert step["reward/missing/success"] == 0 and 0 <= step["reward/part/roles"] <= 0.5
    assert sum(step["reward/missing/roles"] for step in steps) > 0
    assert sum(step["judge/calls"] for step in steps) == len(server.requests)
    assert "turns have no answer of a judge" in capfd.readouterr().err
    store = TrajectoryStore(folder / "store")
    batch = store.read(store.list()[0])
    labels = batch.turn_labels["role"]
    assert set(labels.tolist()) <= {-1, 0, 1} and (labels[batch.turn_role != Role.MODEL] == -1).all()
    assert np.isfinite(batch.reward).all()
    assert inspect([str(folder), "--step", "2", "--json"]) == 0
    shown = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    turns = [one["labels"] for one in shown if one["kind"] == "turn" and one["role"] == "model"]
    assert {turn["role"] for turn in turns} >= {0, 1}
    assert any(None in one["reward_parts"].values() for one in shown if one["kind"] == "trajectory")
    page = write_report([folder], limits=Limits(trajectories=64)).read_text()
    assert "roles missing" in page and "role 0</small>" in page
