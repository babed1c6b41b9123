"""A warm start that is killed and interrupted, and goes on by the same command: whole processes, real signals."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch

from megatron_ext.training.warm_start.progress import unfinished_steps
from tests.helpers.repeated_runs import RepeatedRun

pytestmark = [pytest.mark.slow, pytest.mark.integration]


class Runs(RepeatedRun):
    """A warm start so slow that no look at its gate ends it."""

    def __init__(self, recipes: Path, folder: Path, root: Path) -> None:
        argv = ["run.steps=1", "warm_start.target_success=0.99", "warm_start.gate_every=8", "warm_start.max_epochs=5"]
        argv += ["warm_start.gate_tasks=8", "warm_start.optimizer.lr=1e-5"]
        super().__init__(recipes, folder, root, "StopInWarmStart", argv)

    def weights(self) -> dict[str, torch.Tensor]:
        (state,) = torch.load(self.path / "warm_start" / "rank_0.pt", weights_only=False)["model"]
        return dict(state)

    def gates(self) -> list[dict[str, float]]:
        return [json.loads(line) for line in (self.path / "logs" / "warm_start.jsonl").read_text().splitlines()]


def test_a_stopped_warm_start_is_the_one_that_was_not(walk_recipes: Path, root: Path, tmp_path: Path) -> None:
    whole, stopped = (Runs(walk_recipes, tmp_path / name, root) for name in ("whole", "stopped"))
    status, said, _ = whole.run()
    assert status == 0 and said["steps"] == 1

    status, _, _ = stopped.run("checkpoint.warm_start_minutes=1e-9", step=10)
    assert status == -signal.SIGKILL
    kept = unfinished_steps(stopped.path)
    assert kept is not None and 1 <= kept <= 10

    status, said, text = stopped.run(step=20, number=signal.SIGINT)
    assert status == 0 and said["kept"] == "its warm start is saved at step 21" == _kept(said)
    assert f"warm start: goes on from its step {kept}" in text and unfinished_steps(stopped.path) == 21

    status, said, text = stopped.run()
    assert status == 0 and said["steps"] == 1 and "goes on from its step 21" in text
    assert unfinished_steps(stopped.path) is None and not (stopped.path / "warm_start" / "unfinished").exists()
    one, other = whole.weights(), stopped.weights()
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert stopped.gates() == whole.gates(), "each look at the gate once"


def _kept(said: dict[str, object]) -> str:
    """What the line that tells how to go on says of the folder."""
    return str(said["said"]).partition(": ")[2].partition(". To go on")[0]
