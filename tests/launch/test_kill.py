"""kill -9 in every phase of a deterministic run, and the same command again: the metrics are those of a run that was
never killed, and the journal proves that nothing was lost and nothing trained twice."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from megatron_ext.rollout.journal import read
from megatron_ext.rollout.journal_audit import Audit, journal_audit
from megatron_ext.tracking.jsonl import read_metrics
from megatron_ext.training.checkpoints.checkpoint import list_checkpoints
from megatron_ext.training.deterministic import comparable
from tests.helpers.repeated_runs import run_program

pytestmark = [pytest.mark.slow, pytest.mark.integration]

PROGRAM = """
import json, sys
from pathlib import Path
from launch.prepare import prepare
from megatron_ext.training.run import train

config = prepare(json.loads(sys.argv[2]), Path(sys.argv[1]))
if len(sys.argv) > 3:
    config.tracking["stop"] = {"_target_": "tests.helpers.stopping.StopAt", **json.loads(sys.argv[3])}
print(json.dumps({"steps": train(config).steps}))
"""
STEPS = 5
# Several optimizer steps a batch, so that scoring has something to do; gradients accumulate over several micro-batches;
# a curriculum that adapts; filtered groups, so that steps draw in several rounds.
OVERRIDES = [
    "recipe=walk",
    f"run.steps={STEPS}",
    "run.deterministic=true",
    "checkpoint.every=2",
    "batch.optimizer_steps_per_batch=2",
    "batch.tokens_per_microbatch=256",
    "evaluation.every=2",
    "evaluation.before=false",
    "evaluation.after=false",
    "tasks.source._target_=megatron_ext.rollout.sources.WeightedTasks",
    "tasks.dev_tasks=4",
    "warm_start.max_epochs=1.0",
]
# Where each run is killed: the phase, and the steps that were logged when it began.
KILLS = (("rollout", 1), ("scoring", 1), ("save", 2), ("update", 2), ("publish", 3), ("rollout", 4))


class Runs:
    def __init__(self, recipes: Path, folder: Path, root: Path) -> None:
        self.folder, self._recipes, self._root = folder, recipes, root

    def __call__(self, name: str, *overrides: str, **stop: object) -> int:
        """Exit status of one process; negative when it was killed."""
        argv = [*OVERRIDES, f"run.root={self.folder}", f"run.name={name}", f"warm_start.cache={self.folder / 'cache'}"]
        done = run_program(PROGRAM, self._recipes, [*argv, *overrides], stop, self._root)
        assert done.returncode in (0, -signal.SIGKILL), done.stderr
        return done.returncode

    def metrics(self, name: str) -> list[dict[str, object]]:
        return [comparable(row) for row in read_metrics(self.folder / name / "metrics.jsonl")]

    def audit(self, name: str) -> Audit:
        return journal_audit(read(self.folder / name / "journal.jsonl")[0])


@pytest.fixture(scope="module")
def runs(walk_recipes: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Runs:
    return Runs(walk_recipes, tmp_path_factory.mktemp("runs"), root)


def test_a_run_that_is_killed_in_every_phase_is_the_run_that_is_not(runs: Runs) -> None:
    """Also prime-rl 748, NeMo-RL 1906, xtuner 1386: rollouts, data order and curriculum survive; AReaL 1388: staleness
    does too."""
    assert runs("whole") == 0
    whole = runs.metrics("whole")
    assert [row["step"] for row in whole] == list(range(1, STEPS + 1))
    assert any(row["filter/groups_drawn"] != row["filter/groups_kept"] for row in whole), "no step drew twice"

    for phase, step in KILLS:
        assert runs("killed", phase=phase, step=step) == -signal.SIGKILL, f"{phase} after step {step} did not come"
    assert runs("killed") == 0

    killed = runs.metrics("killed")
    for theirs, ours in zip(whole, killed, strict=True):
        assert ours == theirs, {
            key: (ours.get(key), theirs.get(key)) for key in ours if ours.get(key) != theirs.get(key)
        }
    audit = runs.audit("killed")
    assert audit.clean and audit.steps == STEPS and audit.resumes == len(KILLS), audit
    assert audit.taken == runs.audit("whole").taken, "no task was drawn that the whole run did not draw"
    found = list_checkpoints(runs.folder / "killed" / "checkpoints")
    assert [info.step for info in found] == [
        info.step for info in list_checkpoints(runs.folder / "whole" / "checkpoints")
    ]
    assert not list((runs.folder / "killed" / "checkpoints").glob("*.tmp"))
