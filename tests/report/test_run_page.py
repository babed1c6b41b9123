"""The invariants of ``megatron_ext/report/run_page.py``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron_ext.config.schema import SamplesConfig
from megatron_ext.report.run_data import read_run
from megatron_ext.report.run_page import run_page
from megatron_ext.report.samples import Limits
from tests.helpers.pages import RESULT, finished, report
from tests.helpers.run_folders import config, evaluation, make_run, rows


@pytest.mark.parametrize("state", ["empty", "no_step", "going", "interrupted", "no_samples"])
def test_any_folder_gives_a_page(tmp_path: Path, state: str) -> None:
    kwargs = {
        "empty": {},
        "no_step": {
            "metrics": rows(0),
            "before": evaluation("before", [True, False]),
            "result": {**RESULT, "steps": 0},
        },
        "going": {"metrics": rows(7)},
        "interrupted": {"metrics": rows(7), "result": {**RESULT, "steps": 7, "interrupted": True}},
        "no_samples": {"metrics": rows(40), "result": RESULT},
    }[state]
    made = config(tmp_path, "run")
    made.samples = SamplesConfig()
    said = report(make_run(tmp_path / "run", made=made, **kwargs)).said  # type: ignore[arg-type]
    wanted = {
        "empty": "not finished: no step of 40 yet",
        "no_step": "finished without a step",
        "going": "not finished: step 7 of 40, metrics last written",
        "interrupted": "interrupted after step 7 of 40",
        "no_samples": "finished: 40 steps",
    }
    assert wanted[state] in said and "samples.every=N keeps" in said


def test_undone_steps_and_values_that_are_not_finite(tmp_path: Path) -> None:
    def opened(step: int) -> dict[str, object]:
        return {"event": "open", "incarnation": 0, "step": step, "lost": []}

    consumed = [{"event": "consume", "step": step, "groups": [], "filtered": []} for step in range(1, 16)]
    metrics = rows(20)
    metrics[5]["train/grad_norm"] = metrics[6]["train/grad_norm"] = None
    metrics[5]["train/nan_steps"] = 2.0
    run = make_run(tmp_path / "run", metrics=metrics, journal=[opened(0), *consumed, opened(10)])
    said = report(run).said
    assert "from step 10; undone and trained again: 11 to 15" in said
    assert "resumed from step 10; steps 11 to 15 of the earlier history undone and trained again" in said
    assert "A dotted line is where the run was resumed. Shaded behind it" in said
    assert "× 2 not finite" in said and "2, loss or gradient was not finite" in said


def test_steps_that_trained_nothing_are_told(tmp_path: Path) -> None:
    metrics = rows(3)
    for row, kept in zip(metrics[1:], (0, 3, 0), strict=True):
        row["filter/groups_kept"] = float(kept)
    run = make_run(tmp_path / "run", metrics=metrics)
    assert "Steps that trained nothing 2: no group was kept" in report(run).said
    hint = "2 of 3 steps trained nothing. Easier tasks help."
    other = make_run(tmp_path / "other", metrics=metrics, result={**RESULT, "steps": 3, "hint": hint})
    assert f"Steps that trained nothing {hint}" in report(other).said
    assert "Steps that trained nothing" not in report(make_run(tmp_path / "fine", metrics=rows(3))).said


def test_a_control_is_told(tmp_path: Path) -> None:
    page = run_page(read_run(finished(tmp_path / "run", permuted=True)), None, Limits(), 2.0)
    assert dict(page.facts)["Control"].startswith("rewards permuted")
    assert [(one.label, one.tasks) for one in page.success] == [("before", 50), ("after", 50)]
    assert [kept.step for kept in page.samples] == [1, 10] and page.gain is not None


def test_a_router_policy_and_how_far_it_moved_are_facts(tmp_path: Path, root: Path) -> None:
    made = config(tmp_path, "run")
    made.model.router = {"_target_": "megatron_ext.moe.structured.StructuredRouter"}
    made.rollout.replay_routing = True
    metrics = [row | ({"moe/router_change": 0.012} if row["step"] else {}) for row in rows(4)]
    run = make_run(tmp_path / "run", made=made, metrics=metrics)
    shutil.copy(root / "recipes/base/models/tiny_qwen3_moe/config.json", run / "model_config.json")
    facts = dict(run_page(read_run(run), None, Limits(), 2.0).facts)
    assert facts["Routers"] == "structured, replayed; moved by 0.012 of their norm since RL started"
