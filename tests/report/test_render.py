"""The invariants of ``megatron_ext/report/render.py``."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path

import pytest

from megatron_ext.report.render import write_report
from megatron_ext.report.run_data import ReportError
from megatron_ext.report.samples import Limits
from megatron_ext.training.step_replay.kept_step import write_step
from tests.helpers.pages import Tree, finished, report
from tests.helpers.records import build, model, single, user
from tests.helpers.run_folders import config, kept_step, make_run, rows
from tests.helpers.scripted import small_codec


def test_a_finished_run(tmp_path: Path) -> None:
    run = finished(tmp_path / "run")
    path = write_report([run])
    assert path == run / "report.html"
    html = path.read_text()
    page = Tree(html)
    for words in (
        "finished: 40 steps",
        "Gradient norm",
        "Clip fraction",
        "Imbalance of each layer",
        "Success on dev tasks",
    ):
        assert words in page.said, words
    assert "20.0 [" in page.said and "90.0 [" in page.said and "+70.0 [" in page.said
    assert page.tags["details"] > 2 and page.tags["svg"] >= 12
    # Nothing is loaded from anywhere.
    assert not [v for name, v in page.attributes if name in ("src", "href", "xlink:href") and not v.startswith("#")]
    assert not re.search(r"url\(|@import|https?://", html)
    assert sum("default-src 'none'" in value for _, value in page.attributes) == 1
    data = json.loads(page.scripts[0])
    assert len(data) == page.tags["figure"] and data[0]["lines"][0]["label"] == "mean"
    assert list(run.glob(".*")) == []


def test_huge_trajectories_are_folded(tmp_path: Path) -> None:
    turns = [t for i in range(120) for t in (user(range(50)), model(range(3000 if i == 0 else 5)))]
    run = make_run(tmp_path / "run", metrics=rows(3), kept=[kept_step(1, build([(single(turns),)]))])
    path = write_report([run], limits=Limits(turns=20, tokens=100))
    said = Tree(path.read_text()).said
    assert "220 turns between left out" in said and "… 2900 tokens …" in said and path.stat().st_size < 400_000


def test_text_of_a_run_is_never_markup(tmp_path: Path) -> None:
    """Generated text, names and values may hold anything: it is shown, not run."""
    attack = "<script>alert(1)</script><img src=x onerror=alert(2)>\"'&</svg></script>{{7*7}}"
    made = config(tmp_path, "run")
    made.environments = {attack: {"_target_": "tests.helpers.worlds.Walk"}}
    made.tasks.environment = attack
    run = make_run(tmp_path / "run", made=made, metrics=rows(12))
    codec = small_codec(run / "tokenizer")
    batch = build([(single([user(codec._text(attack)), model(codec._text(attack))], name=attack),)])
    batch = dataclasses.replace(batch, task_id=(attack,), group_id=(attack,), harness=(attack,))
    batch = dataclasses.replace(batch, reward_parts={attack: batch.reward})
    write_step(run, kept_step(10, batch))
    (run / "provenance.json").write_text(
        json.dumps({"command": [attack], "versions": {attack: attack}, "git": {"commit": attack, "dirty": True}})
    )
    page = report(run)
    assert page.tags["script"] == 2 and "img" not in page.tags
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert not any("alert" in script for script in page.scripts)
    assert page.said.count("alert(1)") >= 8 and "{{7*7}}" in page.said and " 49 " not in page.said


def test_where_a_report_goes(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in "ab"]
    with pytest.raises(ReportError, match="--out FILE"):
        write_report(runs)
    with pytest.raises(ReportError, match="at least one"):
        write_report([])
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match="not written"):
        write_report(runs, tmp_path / "file" / "out.html")
    assert write_report([*runs], tmp_path / "new" / "out.html").is_file()
    assert not list(tmp_path.rglob("*.tmp"))


def test_nothing_is_said_of_the_machine(tmp_path: Path) -> None:  # invariant 3
    """Neither where the runs lie, nor the interpreter, nor the folders that their configurations name."""
    runs = []
    for name in ("one/run", "two/run"):
        made = config(tmp_path / name, "run")
        made.model.weights = str(tmp_path / "weights" / name.split("/")[0])
        made.warm_start.cache = str(tmp_path / "cache")
        run = make_run(tmp_path / name, made=made, metrics=rows(3))
        command = [str(tmp_path / "bin" / "python3"), "-m", "launch.train", f"run.root={tmp_path / 'runs'}"]
        (run / "provenance.json").write_text(json.dumps({"command": command, "versions": {}, "git": None}))
        runs.append(run)
    for pages in (runs[:1], runs):
        html = write_report(pages, tmp_path / "out.html").read_text()
        assert str(tmp_path) not in html and str(tmp_path.parent) not in html
        said = Tree(html).said
        assert "python -m launch.train 'run.root=…/runs'" in said and "…/cache" in said and "…/one/run" in said
    assert "…/two/run" in said and "model.weights=…/two" in said
