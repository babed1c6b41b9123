"""A warm start that is killed and interrupted, and goes on by the same command: whole processes, real signals."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_ext.training.warm_start.progress import unfinished_steps

pytestmark = [pytest.mark.slow, pytest.mark.integration]

PROGRAM = """
import json, sys
from pathlib import Path
from launch.prepare import prepare
from launch.train import how_to_go_on
from megatron_ext.training.run import train

config = prepare(json.loads(sys.argv[2]), Path(sys.argv[1]))
if len(sys.argv) > 3:
    config.tracking["stop"] = {"_target_": "tests.helpers.stopping.StopInWarmStart", **json.loads(sys.argv[3])}
result = train(config)
print(json.dumps({"said": how_to_go_on([], result), "steps": result.steps, "kept": result.kept}))
"""


class Runs:
    """One command, run again and again in processes of its own."""

    def __init__(self, recipes: Path, folder: Path, root: Path) -> None:
        self.path = folder / "walk"
        self._recipes, self._root = recipes, root
        self._argv = ["recipe=walk", f"run.root={folder}", "run.steps=1", "warm_start.target_success=0.99"]
        self._argv += ["warm_start.gate_every=8", "warm_start.max_epochs=5", "warm_start.gate_tasks=8"]
        self._argv += ["warm_start.optimizer.lr=1e-5"]  # so slow that no look at the gate ends it

    def __call__(self, *argv: str, **stop: object) -> tuple[int, dict[str, object], str]:
        """Exit status, what the run says of itself (nothing when it was killed), and what was on its console."""
        command = [sys.executable, "-c", PROGRAM, str(self._recipes), json.dumps([*self._argv, *argv])]
        done = subprocess.run(
            [*command, *([json.dumps(stop)] if stop else [])],
            cwd=self._root,
            env=os.environ | {"PYTHONPATH": str(self._root), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        lines = done.stdout.splitlines()
        assert lines or done.returncode < 0, done.stderr
        return done.returncode, json.loads(lines[-1]) if lines else {}, done.stderr

    def weights(self) -> dict[str, torch.Tensor]:
        (state,) = torch.load(self.path / "warm_start" / "rank_0.pt", weights_only=False)["model"]
        return dict(state)

    def gates(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.path / "logs" / "warm_start.jsonl").read_text().splitlines()]


def test_a_stopped_warm_start_is_the_one_that_was_not(walk_recipes: Path, root: Path, tmp_path: Path) -> None:
    whole, stopped = (Runs(walk_recipes, tmp_path / name, root) for name in ("whole", "stopped"))
    status, said, _ = whole()
    assert status == 0 and said["steps"] == 1

    status, _, _ = stopped("checkpoint.warm_start_minutes=1e-9", step=10)
    assert status == -signal.SIGKILL
    kept = unfinished_steps(stopped.path)
    assert kept is not None and 1 <= kept <= 10

    status, said, text = stopped(step=20, number=signal.SIGINT)
    assert status == 0 and said["kept"] == "its warm start is saved at step 21" == _kept(said)
    assert f"warm start: goes on from its step {kept}" in text and unfinished_steps(stopped.path) == 21

    status, said, text = stopped()
    assert status == 0 and said["steps"] == 1 and "goes on from its step 21" in text
    assert unfinished_steps(stopped.path) is None and not (stopped.path / "warm_start" / "unfinished").exists()
    one, other = whole.weights(), stopped.weights()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert stopped.gates() == whole.gates(), "each look at the gate once"


def _kept(said: dict[str, object]) -> str:
    """What the line that tells how to go on says of the folder."""
    return str(said["said"]).partition(": ")[2].partition(". To go on")[0]
