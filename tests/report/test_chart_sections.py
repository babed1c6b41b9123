"""The invariants of ``megatron_ext/report/chart_sections.py``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.report.chart_sections import REST, ChartSection, compared, compared_note, single, single_note
from megatron_ext.report.compare import group_runs
from megatron_ext.report.plot import Plot
from megatron_ext.report.render import write_report
from megatron_ext.report.run_data import Resume, read_run
from tests.helpers.pages import finished
from tests.helpers.run_folders import config, make_run, rows


def titled(sections: Sequence[ChartSection]) -> dict[str, Plot]:
    """The charts by their titles, which are all different."""
    plots = [plot for section in sections for plot in section.plots]
    found = {plot.title: plot for plot in plots}
    assert len(found) == len(plots)
    return found


def test_one_run_shows_what_it_logged(tmp_path: Path) -> None:
    sections = single(read_run(make_run(tmp_path / "run", metrics=rows(6))))
    assert [section.title for section in sections if section.folded] == [REST] and sections[-1].title == REST
    plots = titled(sections)
    assert [line.label for line in plots["Parts of the reward"].lines] == ["form", "success"]
    assert plots["Imbalance of each layer"].cells and plots["Time per phase"].stacked
    assert "Tokens pulled together" not in plots, "what was not logged has no chart"
    rest = [plot.title for plot in sections[-1].plots]
    assert "filter/groups_drawn" in rest and "memory/rss_gib" not in rest


def test_the_note_says_what_a_resume_looks_like(tmp_path: Path) -> None:
    run = read_run(make_run(tmp_path / "run", metrics=rows(6)))
    assert single_note(run) == ""
    plain, undone = (replace(run, resumes=(Resume(3, end),)) for end in (None, 5))
    assert single_note(plain) == "A dotted line is where the run was resumed."
    assert single_note(undone).startswith(f"{single_note(plain)} Shaded behind it")


def test_the_only_part_of_a_reward_has_no_chart(tmp_path: Path) -> None:
    metrics = [{name: v for name, v in row.items() if name != "reward/part/form"} for row in rows(6)]
    assert "Parts of the reward" not in titled(single(read_run(make_run(tmp_path / "run", metrics=metrics))))


def test_ten_thousand_steps_stay_small(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", metrics=rows(10_000))
    assert len(write_report([run]).read_text()) < 2_500_000
    assert single_note(read_run(run)).startswith("Each point is the mean of about 25 steps")


def test_what_a_router_policy_did_is_in_the_charts(tmp_path: Path) -> None:
    """The gate's entropy with its band, apart from whether it was open; the terms of the loss by name."""
    made = config(tmp_path, "run")
    made.model.router = {"_target_": "megatron_ext.moe.structured.StructuredRouter", "entropy_high": 0.3}
    metrics = rows(4)
    for row in metrics[1:]:
        row |= {"moe/gate": 1.0, "moe/gate_entropy": 0.25, "moe/token_loss": 0.5}
        row |= {"moe/loss/turn": -0.01, "moe/loss/token": 0.05, "moe/pulled_fraction": 0.6}
    run = make_run(tmp_path / "run", made=made, metrics=metrics)
    plots = titled(single(read_run(run)))
    assert [line.label for line in plots["Loss"].lines] == ["loss terms together", "routing, token", "routing, turn"]
    gate = plots["Entropy at the gate"]
    assert [level.text for level in gate.levels] == ["open up to 0.3"] and gate.note == "nats, open from 0"
    for title in ("Gate of the routing losses", "Token loss", "Tokens pulled together"):
        assert len(plots[title].lines) == 1 and plots[title].levels == ()
    html = write_report([run]).read_text()
    assert html.count('class="level"') == 1 and "darker is worse" in html


def test_routing_losses_without_a_gate_have_no_chart_of_one(tmp_path: Path) -> None:
    metrics = [row | ({"moe/token_loss": 0.5, "moe/loss/token": 0.05} if row["step"] else {}) for row in rows(4)]
    run = read_run(make_run(tmp_path / "run", metrics=metrics))
    other = read_run(make_run(tmp_path / "other", made=config(tmp_path, "other", 2), metrics=metrics))
    for sections in (single(run), compared(group_runs([run, other]))):
        titles = [plot.title for section in sections for plot in section.plots]
        assert any("Token loss" in title for title in titles) and not any("gate" in title.lower() for title in titles)
        assert not any(plot.empty for section in sections for plot in section.plots)


def test_a_gate_has_its_band_beside_runs_without_one(tmp_path: Path) -> None:
    runs = []
    for name in ("plain", "gated"):
        made, metrics = config(tmp_path, name), rows(4)
        if name == "gated":
            made.model.router = {"_target_": "megatron_ext.moe.structured.StructuredRouter", "entropy_high": 0.3}
            metrics = [row | ({"moe/gate_entropy": 0.25} if row["step"] else {}) for row in metrics]
        runs.append(read_run(make_run(tmp_path / name, made=made, metrics=metrics)))
    gate = titled(compared(group_runs(runs)))["Entropy at the gate"]
    assert [level.text for level in gate.levels] == ["open up to 0.3"] and len(gate.lines) == 1


def test_several_runs_are_a_line_a_group(tmp_path: Path) -> None:
    made = [(seed, permuted) for permuted in (False, True) for seed in (1, 2, 3)]
    runs = [finished(tmp_path / f"{p}{s}", seed=s, rate=1 - s / 20, permuted=p, samples=False) for s, p in made]
    groups = group_runs([read_run(run) for run in runs])
    plots = titled(compared(groups))
    entropy = plots["Entropy: full vocabulary, in the update"]
    assert [line.label for line in entropy.lines] == [group.label for group in groups]
    assert [len(line.thin) for line in entropy.lines] == [3, 3] and all(line.band for line in entropy.lines)
    assert "Time of a step" in plots and not any(plot.cells for plot in plots.values())
    said = compared_note(groups)
    assert "Each line is the mean over the runs of a group" in said and "t interval" in said
    assert "Where a run logged a metric more than 10 times, each value is the mean of its last 5" in said
    assert "reaches from one to the other" in compared_note(group_runs([read_run(run) for run in (*runs[:2], runs[3])]))


def test_a_curve_of_few_steps_is_drawn_as_it_is_and_the_caption_says_so(tmp_path: Path) -> None:
    runs = []
    for name in "ab":
        made = config(tmp_path, name)
        made.optimizer.lr = 1e-3 if name == "a" else 2e-3
        runs.append(make_run(tmp_path / name, made=made, metrics=rows(10, seed=ord(name))))
    read = [read_run(run) for run in runs]
    assert compared_note(group_runs(read)) == "Each line is a run."
    reward = titled(compared(group_runs(read)))["Reward: mean"]
    assert reward.data["lines"][0]["values"] == pytest.approx(read[0].series["reward/mean"].values, rel=1e-5)
