"""The invariants of ``megatron_ext/report/build.py`` and ``render.py``."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.config.schema import SamplesConfig
from megatron_ext.report.build import build_page
from megatron_ext.report.render import write_report
from megatron_ext.report.run_data import ReportError, read_run
from megatron_ext.report.samples import Limits
from megatron_ext.training.step_replay.kept_step import write_step
from tests.helpers.records import build, model, single, user
from tests.helpers.run_folders import config, evaluation, kept_step, make_run, rows
from tests.helpers.scripted import small_codec

RESULT = {"success_before": 0.2, "success_after": 0.9, "steps": 40, "seconds": 3.0, "interrupted": False}
VOID = {"meta"}


class Tree(HTMLParser):
    """Checks that tags close in order; collects scripts, attributes and text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: dict[str, int] = {}
        self.attributes: list[tuple[str, str]] = []
        self.scripts: list[str] = []
        self.text: list[str] = []
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] = self.tags.get(tag, 0) + 1
        self.attributes += [(name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        (self.scripts if self.open and self.open[-1] == "script" else self.text).append(data)

    @property
    def said(self) -> str:
        return " ".join(" ".join(self.text).split())


def report(*runs: Path) -> Tree:
    return Tree(write_report(list(runs), runs[0].parent / "out.html").read_text())


def finished(folder: Path, *, seed: int = 1, rate: float = 1.0, permuted: bool = False, samples: bool = True) -> Path:
    made = config(folder.parent, folder.name, seed)
    made.control.permute_rewards = permuted
    solved = np.arange(50) < 45 * rate
    run = make_run(
        folder,
        made=made,
        metrics=rows(40, seed=seed, rate=rate),
        before=evaluation("before", np.arange(50) < 10),
        after=evaluation("after", solved),
        result=RESULT,
        kept=[kept_step(step, seed=step) for step in (1, 10)] if samples else [],
    )
    small_codec(run / "tokenizer")
    return run


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


def test_ten_thousand_steps_stay_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics=rows(10_000))
    html = write_report([run]).read_text()
    assert len(html) < 2_500_000 and "Each point is the mean of about 25 steps" in html


def test_huge_trajectories_are_folded(tmp_path: Path) -> None:
    turns = [t for i in range(120) for t in (user(range(50)), model(range(3000 if i == 0 else 5)))]
    run = make_run(tmp_path / "run", metrics=rows(3), kept=[kept_step(1, build([(single(turns),)]))])
    path = write_report([run], limits=Limits(turns=20, tokens=100))
    said = Tree(path.read_text()).said
    assert "220 turns between are left out" in said and "… 2900 tokens …" in said and path.stat().st_size < 400_000


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


def test_several_runs(tmp_path: Path) -> None:
    runs = [finished(tmp_path / f"s{seed}", seed=seed, rate=1 - seed / 20, samples=seed == 1) for seed in (1, 2, 3)]
    runs += [finished(tmp_path / f"c{seed}", seed=seed, rate=0.3, permuted=True, samples=False) for seed in (1, 2, 3)]
    runs.append(make_run(tmp_path / "fresh", made=config(tmp_path, "fresh", seed=9)))
    path = write_report(runs, tmp_path / "all" / "out.html")
    page = Tree(path.read_text())
    assert "control.permute_rewards=false" in page.said and "control.permute_rewards=true" in page.said
    assert page.said.count("seed 2: ") == 1 and "Paired over seeds and tasks" in page.said
    assert "Each line is the mean over the runs of a group" in page.said and "t interval" in page.said
    assert "Where a run logged a metric more than 10 times, each value is the mean of its last 5" in page.said
    found = build_page([read_run(run) for run in runs], None, Limits())
    entropy = next(p for section in found.sections for p in section.plots if p.title == "Entropy: full vocabulary")
    assert [line.label for line in entropy.lines] == [group.label for group in found.groups]
    assert [len(line.thin) for line in entropy.lines] == [3, 3]
    assert any(p.title == "Time of a step" for section in found.sections for p in section.plots)


def test_a_curve_of_few_steps_is_drawn_as_it_is_and_the_caption_says_so(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        made = config(tmp_path, name)
        made.optimizer.lr = 1e-3 if name == "a" else 2e-3
        runs.append(make_run(tmp_path / name, made=made, metrics=rows(10, seed=ord(name))))
    said = report(*runs).said
    assert "Each line is a run." in said and "mean of its last" not in said
    read = [read_run(run) for run in runs]
    found = build_page(read, None, Limits())
    reward = next(p for section in found.sections for p in section.plots if p.title == "Reward: mean")
    assert reward.data["lines"][0]["values"] == pytest.approx(read[0].series["reward/mean"].values, rel=1e-5)


def test_what_a_router_policy_did_is_on_the_page(tmp_path: Path, root: Path) -> None:
    """Policy and movement in the card; the gate's entropy with its band, apart from whether it was open."""
    made = config(tmp_path, "run")
    made.model.router = {"_target_": "megatron_ext.moe.structured.StructuredRouter", "entropy_high": 0.3}
    made.rollout.replay_routing = True
    metrics = rows(4)
    for row in metrics[1:]:
        row |= {"moe/gate": 1.0, "moe/gate_entropy": 0.25, "moe/router_change": 0.012, "moe/token_loss": 0.5}
        row |= {"moe/loss/turn": -0.01, "moe/loss/token": 0.05, "moe/pulled_fraction": 0.6}
    run = make_run(tmp_path / "run", made=made, metrics=metrics)
    shutil.copy(root / "recipes/base/models/tiny_qwen3_moe/config.json", run / "model_config.json")
    found = build_page([read_run(run)], None, Limits())
    facts = dict(found.runs[0].facts)
    assert facts["Routers"] == "structured, replayed; moved by 0.012 of their norm since RL started"
    plots = {plot.title: plot for section in found.sections for plot in section.plots}
    assert [line.label for line in plots["Loss"].lines] == ["loss terms together", "routing, token", "routing, turn"]
    gate = plots["Entropy at the gate"]
    assert [level.text for level in gate.levels] == ["open from 0", "open up to 0.3"] and gate.note == "nats"
    for title in ("Gate of the routing losses", "Token loss", "Tokens pulled together"):
        assert len(plots[title].lines) == 1 and plots[title].levels == ()
    html = write_report([run]).read_text()
    assert html.count('class="level"') == 2 and "darker is worse" in html


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


def test_runs_without_anything_in_common(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name, made=config(tmp_path, name, seed)) for seed, name in enumerate("ab")]
    said = report(*runs).said
    assert "all runs" in said and "The runs differ in nothing but their seed and place." in said


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
