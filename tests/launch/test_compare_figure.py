"""The invariants of ``launch/compare_figure.py``, read from the figure that it draws."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import to_hex

from launch.compare_figure import BASELINE, COLOURS, SMOOTH, SOLID, axis_title, draw, looks, metrics
from launch.compare_report import ArmRuns, compare
from launch.comparison import Arm, Comparison
from megatron_ext.report.series import Series, smooth
from tests.helpers.compared import arms, comparison


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The figure stays open behind ``draw``, and is closed after the test."""
    matplotlib.use("Agg")
    monkeypatch.setattr(pyplot, "close", lambda figure: None)
    yield
    monkeypatch.undo()
    pyplot.close("all")


NAMED = {"policy/entropy": "entropy of the policy", "moe/load_cv": "spread of the load", "moe/op_mi": "information"}


def made(folder: Path, *, counters: dict[str, str], over_steps: dict[str, str]) -> tuple[Comparison, list[ArmRuns]]:
    """Two arms of three seeds; ``on`` alone logs ``moe/gate_entropy``."""
    found = replace(comparison(), counters=counters, over_steps=over_steps)
    both = arms(folder, {"on": (0.9, 0.8, 0.7), "off": (0.5, 0.6, 0.4)}, found)
    steps = np.arange(1, 21)
    own = {"moe/gate_entropy": Series(steps, steps / 10.0), "moe/disagreement": Series(steps, steps / 1e6)}
    runs = tuple(replace(run, series={**run.series, **own}) for run in both[0].runs)
    return found, [replace(both[0], runs=runs), both[1]]


def titles(axes: list[Axes]) -> list[str]:
    return [one.get_title().replace("\n", " ") for one in axes]


@pytest.mark.usefixtures("kept")
def test_a_panel_for_each_metric_that_was_logged(tmp_path: Path) -> None:  # invariants 1 and 2
    over_steps = {"train/grad_norm": "norm of the gradient", "moe/load_cv": "spread of the load"}
    counters = NAMED | {"moe/gate_entropy": "entropy at the gate", "moe/disagreement": "routed otherwise"}
    found, both = made(tmp_path, counters=counters, over_steps=over_steps)
    draw(compare(found, both), both, tmp_path / "figure.png")
    axes = pyplot.gcf().axes
    panels = [one for one in axes if one.get_title()][2:]
    assert titles(panels) == ["Norm of the gradient", "Entropy of the policy", "Entropy at the gate"]
    assert [one.get_ylabel() for one in panels] == ["norm", "nats", "nats"]
    said = [text.get_text() for one in axes for text in one.texts]
    assert "Not drawn: spread of the load: 0.3 in every arm and step" in said[-1]
    assert "Not drawn: routed otherwise: at most 2e-05 in any arm and step" in said[-1]
    assert "information" not in said[-1], "no arm logged it"
    shown, _ = metrics(found, both)
    assert list(shown) == ["train/grad_norm", "policy/entropy", "moe/gate_entropy"]
    assert axis_title("moe/load_cv") == "ratio, lower is better" and axis_title("credit/a/mean/b") == ""


@pytest.mark.usefixtures("kept")
def test_curves_are_the_means_over_seeds_and_the_axis_holds_every_run(tmp_path: Path) -> None:
    found, both = made(tmp_path, counters={}, over_steps={"train/grad_norm": "norm", "moe/gate_entropy": "gate"})
    draw(compare(found, both), both, tmp_path / "figure.png")
    norm, gate = [one for one in pyplot.gcf().axes if one.get_title()][2:]
    runs = {
        arm.arm.name: np.stack([smooth(run.series["train/grad_norm"], SMOOTH).values for run in arm.runs])
        for arm in both
    }
    lines = {to_hex(line.get_color()): np.asarray(line.get_ydata()) for line in norm.lines}
    assert lines[BASELINE] == pytest.approx(runs["off"].mean(axis=0))
    assert lines[COLOURS[0]] == pytest.approx(runs["on"].mean(axis=0))
    low, high = norm.get_ylim()
    assert low < min(run.min() for run in runs.values()) and high > max(run.max() for run in runs.values())
    assert len(norm.collections) == 2, "a band an arm"
    assert len(gate.lines) == 1 and gate.get_xlim() == norm.get_xlim()


@pytest.mark.usefixtures("kept")
def test_one_legend(tmp_path: Path) -> None:  # invariant 3
    found, both = made(tmp_path, counters=NAMED, over_steps={})
    draw(compare(found, both), both, tmp_path / "figure.png")
    legends = [legend for one in pyplot.gcf().axes if (legend := one.get_legend()) is not None]
    (legend,) = legends
    assert [text.get_text() for text in legend.get_texts()] == ["on: with it", "off: without it"]
    assert [to_hex(line.get_color()) for line in legend.get_lines()] == [COLOURS[0], BASELINE]


def test_arms_that_coincide_are_told_apart() -> None:  # invariant 3
    found = replace(comparison(), arms=tuple(Arm(name, "recipe", name) for name in ("a", "off", "b", "c")))
    styles = looks(found, [ArmRuns(arm, (), ()) for arm in found.arms])
    assert len({one.colour for one in styles.values()}) == 4
    assert styles["off"].dashes == SOLID and styles["b"].dashes != styles["a"].dashes != styles["c"].dashes


def test_one_seed_and_no_metric(tmp_path: Path) -> None:
    found = replace(comparison(seeds=(1,)), counters={}, over_steps={})
    both = arms(tmp_path, {"on": (0.9,), "off": (0.2,)}, found)
    draw(compare(found, both), both, tmp_path / "figure.png")
    data = (tmp_path / "figure.png").read_bytes()
    assert data.startswith(b"\x89PNG") and str(tmp_path).encode() not in data
