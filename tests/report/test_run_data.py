"""The invariants of ``megatron_ext/report/run_data.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config.compose import ConfigError
from megatron_ext.report.run_data import ReportError, Resume, read_run
from tests.helpers.run_folders import evaluation, make_run, rows

RESULT = {"success_before": 0.5, "success_after": 1.0, "steps": 4, "seconds": 3.0, "interrupted": False}


def test_a_run_that_has_not_begun(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run"))
    assert run.steps == 0 and not run.series and run.resumes == () and not run.finished
    assert run.before is None and run.gain is None and run.minutes is None


def test_a_finished_run(tmp_path: Path) -> None:
    before, after = evaluation("before", [True, False]), evaluation("after", [True, True])
    run = read_run(make_run(tmp_path / "run", metrics=rows(4), before=before, after=after, result=RESULT))
    assert run.finished and run.steps == 4 and run.minutes == pytest.approx(0.4)
    assert run.series["reward/mean"].steps.tolist() == [1, 2, 3, 4]
    assert run.gain is not None and run.gain.mean == 0.5 and run.gain.n == 2


def test_a_result_that_was_overtaken_is_not_the_end(tmp_path: Path) -> None:
    assert not read_run(make_run(tmp_path / "a", metrics=rows(6), result=RESULT)).finished
    assert not read_run(make_run(tmp_path / "b", metrics=rows(4), result={**RESULT, "interrupted": True})).finished


def test_null_is_nan_at_its_step_and_a_missing_metric_has_no_entry(tmp_path: Path) -> None:
    metrics: list[dict[str, float | None]] = [
        {"step": 1, "train/loss": 1.0},
        {"step": 2, "train/loss": None},
        {"step": 3},
        {"step": 4, "train/loss": 2},
    ]
    loss = read_run(make_run(tmp_path / "run", metrics=metrics)).series["train/loss"]
    assert loss.steps.tolist() == [1, 2, 4] and np.isnan(loss.values).tolist() == [False, True, False]


def test_torn_lines_are_left_out(tmp_path: Path) -> None:
    journal = [
        {"event": "open", "incarnation": 0, "step": 0, "lost": []},
        {"event": "consume", "step": 1, "groups": []},
    ]
    folder = make_run(tmp_path / "run", metrics=rows(3), journal=journal)
    for name in ("metrics.jsonl", "journal.jsonl"):
        with (folder / name).open("a") as file:
            file.write('{"seq":2,"event":"open","st')
    assert read_run(folder).steps == 3 and read_run(folder).resumes == ()


def test_resumes_say_what_they_undid(tmp_path: Path) -> None:
    def opened(step: int) -> dict[str, object]:
        return {"event": "open", "incarnation": 0, "step": step, "lost": []}

    def consumed(*steps: int) -> list[dict[str, object]]:
        return [{"event": "consume", "step": step, "groups": [], "filtered": []} for step in steps]

    journal = [opened(0), *consumed(1, 2, 3, 4, 5), opened(3), *consumed(4), opened(4), *consumed(5), opened(0)]
    run = read_run(make_run(tmp_path / "run", metrics=rows(5), journal=journal))
    assert run.resumes == (Resume(3, 5), Resume(4, None), Resume(0, 5))


def test_what_is_no_run_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="no such run folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(ReportError, match="holds no config.yaml"):
        read_run(tmp_path)
    (make_run(tmp_path / "run") / "result.json").write_text("{")
    with pytest.raises(ConfigError, match="result.json: not JSON"):
        read_run(tmp_path / "run")
