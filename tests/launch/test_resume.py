"""A run that is killed and interrupted, and started again by the same command: whole processes, real signals."""

from __future__ import annotations

import json
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.rollout.coordinator import Coordinator, State
from megatron_ext.rollout.journal import read
from megatron_ext.tracking.jsonl import read_metrics
from megatron_ext.trajectory.store import TrajectoryStore
from tests.helpers.repeated_runs import RepeatedRun

pytestmark = [pytest.mark.slow, pytest.mark.integration]

STEPS = 4


class Runs(RepeatedRun):
    """One command, and what it leaves behind."""

    def __init__(self, recipes: Path, folder: Path, root: Path) -> None:
        # What is on the disk at a kill is then known; tests/launch/test_kill.py saves while training goes on.
        argv = [f"run.steps={STEPS}", "checkpoint.every=2", "checkpoint.asynchronous=false"]
        super().__init__(recipes, folder, root, "StopAt", argv)

    def __call__(self, *argv: str, **stop: object) -> tuple[int, dict[str, Any]]:
        """Exit status and what the run says of itself (nothing when it was killed)."""
        status, said, _ = self.run(*argv, **stop)
        return status, {name: said[name] for name in ("interrupted", "steps", "after") if said}

    def journal(self) -> Coordinator:
        return Coordinator.replay(read(self.path / "journal.jsonl")[0])

    def stored(self) -> set[str]:
        return set(TrajectoryStore(self.path / "store").list())

    def stored_of(self, journal: Coordinator, after: int) -> set[str]:
        """Data of the groups that are finished but not taken, or taken after step ``after``."""
        groups = (group for group in journal.groups.values() if group.meta is not None)
        return {g.meta.ref for g in groups if g.meta is not None and (g.state is State.FINISHED or g.step > after)}

    def steps(self) -> list[int]:
        return [row["step"] for row in read_metrics(self.path / "metrics.jsonl")]

    def saved(self) -> list[str]:
        return sorted(folder.name for folder in (self.path / "checkpoints").glob("step_*"))


@pytest.fixture(scope="module")
def runs(walk_recipes: Path, tmp_path_factory: pytest.TempPathFactory, root: Path) -> Runs:
    return Runs(walk_recipes, tmp_path_factory.mktemp("runs"), root)


def test_kills_and_an_interrupt_lose_nothing_and_train_nothing_twice(runs: Runs) -> None:
    # Killed before the first checkpoint, with step 1 consumed: everything is undone, what was generated is kept.
    assert runs(phase="publish", step=0)[0] == -signal.SIGKILL
    first = runs.journal().consumed_at(1)
    assert runs.saved() == [] and runs.steps() == [0], "the evaluation before training"
    torn = runs.path / "store" / "20200101T000000-killed.arrows"
    torn.write_bytes(b"left by a driver that was killed")
    store = TrajectoryStore(runs.path / "store")
    unheard_of = store.write(store.read(store.list()[0]))  # by a driver that could not report it any more

    # Killed with step 3 consumed and the checkpoint of step 2 written.
    assert runs(phase="publish", step=2)[0] == -signal.SIGKILL
    killed = runs.journal()
    assert killed.consumed_at(1) == first, "the same groups in the same order"
    assert killed.step == 3 and runs.saved() == ["step_2"] and runs.steps() == [0, 1, 2]
    third = killed.consumed_at(3)
    assert runs.stored() == runs.stored_of(killed, after=2), "what a resume needs, and nothing else"
    assert not torn.exists() and not store.exists(unheard_of)

    undone = runs.path / "samples" / "step_9.arrow"
    undone.parent.mkdir(exist_ok=True)
    undone.write_bytes(b"kept of a step that is made again")

    # Ctrl-C in the update of step 3: the step ends, the next one stops, and what is finished is saved.
    status, said = runs(phase="update", step=2, number=int(signal.SIGINT))
    assert not undone.exists()
    assert [row["step"] for row in read_metrics(runs.path / "routing.jsonl")] == [1, 2, 3]
    assert status == 0 and said == {"interrupted": True, "steps": 3, "after": None}
    assert runs.saved() == ["step_2", "step_3"] and runs.steps() == [0, 1, 2, 3]
    assert runs.journal().consumed_at(3) == third
    needed = runs.stored_of(runs.journal(), after=2)  # also by the older checkpoint
    spent = runs.stored_of(runs.journal(), after=0) - needed
    assert needed <= runs.stored() and spent and not spent & runs.stored()

    status, said = runs()
    assert status == 0 and said["interrupted"] is False and said["steps"] == STEPS and said["after"] is not None

    # Each trajectory was trained or filtered once on the history that survives, in the order in which it was drawn.
    end = runs.journal()
    taken = [end.consumed_at(step) for step in range(1, STEPS + 1)]
    groups = [name for event in taken for name in (*event.groups, *(name for name, _ in event.filtered))]
    assert set(Counter(groups).values()) == {1} and len(groups) + end.counts().finished == end.draws
    assert [name for event in taken for name in event.groups] == sorted(name for e in taken for name in e.groups)
    assert all(end.groups[name].state in (State.CONSUMED, State.FILTERED) for name in groups)
    assert end.incarnation == 3

    rows = read_metrics(runs.path / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(STEPS + 1))
    assert "eval/before/greedy_pass1" in rows[0] and "eval/after/greedy_pass1" in rows[-1]
    assert all(row["offpolicy/lag_max"] >= 0 for row in rows if "offpolicy/lag_max" in row)
    result = json.loads((runs.path / "result.json").read_text())
    assert result["success_after"] == said["after"] and result["success_before"] is not None


def test_a_longer_run_that_is_interrupted_does_not_show_the_shorter_one_s_result(runs: Runs) -> None:
    """Out of time ends between two checkpoints, and what it evaluates is saved."""
    status, said = runs(f"run.steps={STEPS + 2}", phase="scoring", step=STEPS, number=int(signal.SIGTERM))
    assert status == 0 and said == {"interrupted": True, "steps": STEPS + 1, "after": None}
    assert json.loads((runs.path / "result.json").read_text())["success_after"] is None
    seconds = float(read_metrics(runs.path / "metrics.jsonl")[-1]["progress/minutes"]) * 60
    status, said = runs(f"run.steps={STEPS + 50}", "checkpoint.every=50", f"run.max_minutes={(seconds + 0.5) / 60}")
    assert status == 0 and not said["interrupted"] and said["after"] is not None
    steps = int(str(said["steps"]))
    assert STEPS + 1 <= steps < STEPS + 50 and f"step_{steps}" in runs.saved()
