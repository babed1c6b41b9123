"""``launch.report`` and the report that a run writes when it ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from launch import cli, report
from megatron_ext.training.run import RunResult
from megatron_ext.training.step_replay.kept_step import read_step, sampled_steps
from tests.helpers.run_folders import config, make_run, rows


def test_a_run_writes_its_report_and_keeps_its_samples(walk_run: RunResult) -> None:
    run = walk_run.run_dir
    assert walk_run.report == run / "report.html"
    html = walk_run.report.read_text()
    assert "finished: 2 steps" in html and "Step 2" in html and "walk (Walk)" in html
    assert "report" not in json.loads((run / "result.json").read_text())

    assert sampled_steps(run) == [1, 2]
    kept = read_step(run, 2)
    assert kept.whole and kept.scores is not None and kept.scores.reference is None
    trained = kept.batch.loss_mask
    assert (kept.scores.logp[trained] < 0).all() and (kept.scores.entropy[trained] > 0).all()
    assert not kept.scores.advantage[~trained].any() and kept.scores.weight[trained].sum() == pytest.approx(1.0)
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    logged = next(row for row in metrics if row["step"] == 2)
    assert all(logged[name] == value for name, value in kept.metrics.items()) and "train/loss" in kept.metrics


def test_one_run_and_several(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    runs = [
        make_run(tmp_path / name, made=config(tmp_path, name, seed), metrics=rows(5)) for seed, name in enumerate("ab")
    ]
    assert cli.main(["report", str(runs[0])]) == 0
    assert capsys.readouterr().out == f"{runs[0] / 'report.html'}\n" and (runs[0] / "report.html").is_file()
    assert report.main([str(runs[0]), f"{runs[0]}/", str(runs[1])]) == 0
    assert "2 runs" in (tmp_path / "report.html").read_text()
    assert report.main([*map(str, runs), "--out", str(tmp_path / "deep" / "x.html")]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(tmp_path / "deep" / "x.html")


def test_what_is_no_run_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main([str(tmp_path / "nowhere")]) == 2
    assert report.main([str(tmp_path)]) == 2
    run = make_run(tmp_path / "run")
    (run / "metrics.jsonl").write_text("[]\n")
    assert report.main([str(run)]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3 and all(line.startswith("error: ") for line in lines)
    assert "no such run folder" in lines[0] and "holds no config.yaml" in lines[1] and "line 1" in lines[2]
