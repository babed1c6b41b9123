"""The invariants of ``megatron_ext/report/build.py``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from megatron_ext.report.build import build_page
from megatron_ext.report.render import write_report
from megatron_ext.report.run_data import read_run
from megatron_ext.report.samples import Limits
from tests.helpers.pages import Tree, finished, report
from tests.helpers.run_folders import config, make_run


def test_several_runs(tmp_path: Path) -> None:
    runs = [finished(tmp_path / f"s{seed}", seed=seed, rate=1 - seed / 20, samples=seed == 1) for seed in (1, 2)]
    runs += [finished(tmp_path / f"c{seed}", seed=seed, rate=0.3, permuted=True, samples=False) for seed in (1, 2)]
    runs.append(make_run(tmp_path / "fresh", made=config(tmp_path, "fresh", seed=9)))
    path = write_report(runs, tmp_path / "all" / "out.html")
    page = Tree(path.read_text())
    assert "control.permute_rewards=false" in page.said and "control.permute_rewards=true" in page.said
    assert page.said.count("seed 2: ") == 1 and "Paired over seeds and tasks" in page.said
    assert "Each line is the mean over the runs of a group" in page.said
    found = build_page([read_run(run) for run in runs], None, Limits())
    assert len(found.runs) == 5 and len(found.groups) == len(found.rows) == len(found.differences) + 1 == 2


def test_runs_without_anything_in_common(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, made=config(tmp_path, name, seed)) for seed, name in enumerate("ab")]
    said = report(*runs).said
    assert "all runs" in said and "The runs differ in nothing but their seed and place." in said
    assert "Each line is the mean" in said


def test_one_run_alone_is_compared_with_nothing(tmp_path: Path) -> None:
    now = datetime(2026, 1, 2, 3, 4, tzinfo=UTC)
    page = build_page([read_run(make_run(tmp_path / "run"))], None, Limits(), now)
    assert page.title == "run" and page.written == "2026-01-02 03:04 UTC" and len(page.runs) == 1
    assert page.groups == page.rows == page.differences == ()
