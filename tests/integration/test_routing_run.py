"""The main job with routing replay, on one rank and on two: what the engine recorded is what training runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics

pytestmark = [pytest.mark.slow, pytest.mark.integration]

SMALL = (
    "recipe=quickstart",
    "run.steps=3",
    "run.threads=1",
    "tasks.train_tasks=64",
    "tasks.dev_tasks=8",
    "tasks.test_tasks=8",
    "batch.tasks_per_step=4",
    "batch.trajectories_per_task=4",
    "rollout.max_turns=4",
    "rollout.concurrency=16",
    "warm_start.demonstrations=32",
    "warm_start.max_epochs=1",
    "warm_start.min_epochs=0",
    "warm_start.target_success=0",
    "credit.filter.constant_groups=false",
    "evaluation.before=false",
    "evaluation.after=false",
    "tracking.wandb=null",
    "rollout.replay_routing=true",
    # So short a warm start earns nothing: something else must give a gradient.
    "loss.terms.entropy={_target_: megatron_ext.losses.entropy.EntropyBonus, coefficient: 0.01}",
)
LAYOUTS = {
    "one rank": (1, ()),
    "one rank, shared prefixes": (1, ("batch.share_prefixes=true",)),
    "two ranks, frozen": (2, ("parallel.expert=2", "model.router={_target_: megatron_ext.moe.policies.FrozenRouter}")),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_main_job_replays_its_routing(root: Path, tmp_path: Path, layout: str) -> None:
    ranks, argv = LAYOUTS[layout]
    launcher = [] if ranks == 1 else ["-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    if ranks > 1:
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]  # a free port
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "launch.train", *SMALL, f"run.root={tmp_path}", "run.name=run", *argv],
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = [row for row in read_metrics(tmp_path / "run" / FILE_NAME) if row["step"] > 0]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["moe/replay_missing"] == 0 and row["moe/replayed_share"] > 0.8
        assert 0 <= row["offpolicy/routing_flips"] < 0.05
        assert row["offpolicy/lag_max"] == 0 and row["train/nan_steps"] == 0 and row["train/grad_norm"] > 0
        assert row["offpolicy/logp_diff_max"] <= 1e-4, "with replay no token is further apart than float error"
