"""A checkpoint played again gives what the run itself measured; stdout of ``--json`` is JSON alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from launch import eval as evaluation
from megatron_ext.training.evaluate import load_result
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.run import RunResult


def test_the_last_checkpoint_gives_the_runs_own_result(walk_run: RunResult, capfd: pytest.CaptureFixture[str]) -> None:
    run = walk_run.run_dir
    before = sorted(p for p in run.rglob("*") if p.is_file() and "logs" not in p.parts)
    assert evaluation.main([str(run), "--json"]) == 0
    captured = capfd.readouterr()
    got = json.loads(captured.out)
    own = load_result(run / "evaluations" / "after.json")
    assert (got["step"], got["split"], got["tasks"], got["samples"]) == (2, "test", 12, 2)
    assert got["greedy_pass1"]["mean"] == own.greedy.mean() == walk_run.success_after
    assert got["sampled_pass1"]["mean"] == pytest.approx(own.sampled.mean())
    assert got["greedy_pass1"]["low"] <= got["greedy_pass1"]["mean"] <= got["greedy_pass1"]["high"]
    assert got["pass_at_2"]["mean"] >= got["sampled_pass1"]["mean"]
    assert "evaluate" in captured.err
    assert sorted(p for p in run.rglob("*") if p.is_file() and "logs" not in p.parts) == before


def test_other_tasks_other_step_as_a_table(walk_run: RunResult, capfd: pytest.CaptureFixture[str]) -> None:
    argv = [str(walk_run.run_dir), "--step", "0", "--split", "dev", "--tasks", "3", "--start", "2", "--samples", "0"]
    assert evaluation.main(argv) == 0
    out = capfd.readouterr().out
    assert "step 0, 3 dev tasks from number 2" in out and "greedy pass@1" in out and "sampled" not in out


def test_intervals_are_over_tasks() -> None:
    sampled = np.array([[1, 0, 0, 0]] * 50 + [[1, 1, 1, 1]] * 50, dtype=bool)
    result = EvalResult("test", tuple(str(i) for i in range(100)), sampled[:, 0], sampled, np.ones(100), np.ones(100))
    got = evaluation.intervals(result)
    assert list(got) == ["greedy_pass1", "sampled_pass1", "pass_at_2", "pass_at_3", "pass_at_4"]
    assert [round(i.mean, 4) for i in got.values()] == [1.0, 0.625, 0.75, 0.875, 1.0]
    assert all(i.n == 100 and i.low <= i.mean <= i.high and i.low < i.high for i in got.values())


def test_bad_input(walk_run: RunResult, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert evaluation.main([str(tmp_path / "none"), "--json"]) == 2
    captured = capfd.readouterr()
    assert captured.out == "" and "no such run folder" in captured.err
    for argv in (["--tasks", "0"], ["--samples", "-1"], ["--start", "-1"], ["--temperature", "0"], ["--split", "x"]):
        with pytest.raises(SystemExit) as stopped:
            evaluation.main([str(walk_run.run_dir), *argv])
        assert stopped.value.code == 2
        assert argv[0] in capfd.readouterr().err
