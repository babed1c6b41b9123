"""Invariants 1-5 of ``tracking/jsonl.py``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_ext.tracking.jsonl import JsonlTracker, MetricsFileError, read_metrics
from tests.helpers.limits import files_at_most


def tracker(run_dir: Path, resumed_from: int | None = None) -> JsonlTracker:
    made = JsonlTracker()
    made.start(run_dir, {}, resumed_from)
    return made


def test_every_step_is_on_disk_as_one_line(tmp_path: Path) -> None:  # invariant 1
    log, path = tracker(tmp_path), tmp_path / "metrics.jsonl"
    log.log(1, {"reward/mean": 0.5})
    assert read_metrics(path) == [{"step": 1, "reward/mean": 0.5}]
    log.log(1, {"time/step": 2.0})
    log.log(2, {"reward/mean": 1.0})
    log.log(2, {"reward/mean": 0.25, "train/loss": float("inf")})
    assert read_metrics(path) == [
        {"step": 1, "reward/mean": 0.5, "time/step": 2.0},
        {"step": 2, "reward/mean": 0.25, "train/loss": None},  # invariant 4
    ]
    assert "Infinity" not in path.read_text()
    log.finish({})


def test_a_joined_line_that_got_shorter_leaves_nothing_behind(tmp_path: Path) -> None:
    log = tracker(tmp_path)
    log.log(1, {"reward/mean": 0.12345678901})
    log.log(1, {"reward/mean": 0.5})
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "reward/mean": 0.5}\n'


def test_steps_only_grow(tmp_path: Path) -> None:  # invariant 2
    log = tracker(tmp_path)
    log.log(3, {})
    with pytest.raises(MetricsFileError, match="step 2 after those of step 3"):
        log.log(2, {})


def test_resume_drops_undone_steps(tmp_path: Path) -> None:  # invariant 2
    log, path = tracker(tmp_path), tmp_path / "metrics.jsonl"
    for step in range(6):
        log.log(step, {"reward/mean": step})
    log = tracker(tmp_path, resumed_from=3)  # the first one was killed: no finish
    assert [row["step"] for row in read_metrics(path)] == [0, 1, 2, 3]
    log.log(3, {"eval/dev/greedy_pass1": 1.0})  # joins the line of the checkpoint's step
    log.log(4, {"reward/mean": 40})
    log.finish({})
    rows = read_metrics(path)
    assert rows[3] == {"step": 3, "reward/mean": 3.0, "eval/dev/greedy_pass1": 1.0} and rows[4]["reward/mean"] == 40
    tracker(tmp_path).finish({})  # from the beginning again: nothing survives
    assert read_metrics(path) == []
    assert [p.name for p in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_torn_last_line_is_dropped_and_damage_is_named(tmp_path: Path) -> None:  # invariant 3
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 1}) + "\n" + '{"step": 2, "rew')
    log = tracker(tmp_path, resumed_from=5)
    log.log(2, {})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
    path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(MetricsFileError, match=r"metrics.jsonl, line 2: not JSON"):
        tracker(tmp_path, resumed_from=5)
    path.write_text('{"step": 1}\n{"reward/mean": 1}\n')
    with pytest.raises(MetricsFileError, match="line 2: no integer 'step'"):
        read_metrics(path)


def test_a_full_disk_is_one_line_and_costs_the_step_alone(tmp_path: Path) -> None:  # invariant 5
    log, path = tracker(tmp_path), tmp_path / "metrics.jsonl"
    log.log(1, {"reward/mean": 0.5})
    with (
        files_at_most(path.stat().st_size + 10),
        pytest.raises(MetricsFileError, match=r"metrics.jsonl: step 2 not written: .*; free space and continue"),
    ):
        log.log(2, {"reward/mean": 0.25})
    log.finish({})  # does not try again
    assert read_metrics(path) == [{"step": 1, "reward/mean": 0.5}]
    log = tracker(tmp_path, resumed_from=1)
    log.log(2, {"reward/mean": 0.25})
    assert [row["step"] for row in read_metrics(path)] == [1, 2]
