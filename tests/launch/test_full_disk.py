"""A disk that is too full for checkpoints: training goes on, says so each time, and keeps what it had."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.prepare import prepare
from megatron_ext.tracking.jsonl import read_metrics
from megatron_ext.training.checkpoints import files
from megatron_ext.training.checkpoints.checkpoint import CheckpointError
from megatron_ext.training.run import train
from tests.helpers.limits import files_at_most

pytestmark = [pytest.mark.slow, pytest.mark.integration]

ENOUGH_FOR_ALL_BUT_CHECKPOINTS = 2 << 20


def test_training_goes_on_without_room_for_checkpoints(
    walk_recipes: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["recipe=walk", f"run.root={tmp_path}", "evaluation.before=false", "evaluation.after=false"]
    argv += ["evaluation.every=1", "checkpoint.keep=1", "tasks.dev_tasks=4"]
    run = tmp_path / "walk"
    assert train(prepare([*argv, "run.steps=1"], walk_recipes)).steps == 1
    (first,) = files.list_checkpoints(run / "checkpoints")
    assert first.step == 1
    capsys.readouterr()

    with files_at_most(ENOUGH_FOR_ALL_BUT_CHECKPOINTS), pytest.raises(CheckpointError, match="step_4: .*free space"):
        train(prepare([*argv, "run.steps=4"], walk_recipes))
    warnings = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning: cannot save")]
    # The last one is what the command ends with, and is said once.
    assert [line.split("/")[-1].split(":")[0] for line in warnings] == ["step_2", "step_3"]
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4], "every step was trained"
    assert [info.step for info in files.list_checkpoints(run / "checkpoints")] == [1]
    files.verify(first.folder, files.read_mark(first.folder)["files"])

    assert train(prepare([*argv, "run.steps=4"], walk_recipes)).steps == 4
    # The last one, and the best on the dev tasks (the later one of equals).
    kept = files.list_checkpoints(run / "checkpoints")
    assert kept[-1].step == 4 and len(kept) <= 2
    dev = {row["step"]: row.get("eval/dev/greedy_pass1") for row in read_metrics(run / "metrics.jsonl")}
    assert all(info.score == dev[info.step] for info in kept[:-1])
