"""The invariants of ``megatron_ext/report/compare.py``."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from launch.paths import RECIPES
from launch.prepare import prepare
from megatron_ext.config.schema import Config
from megatron_ext.report.compare import changes, differences, group_runs, rows
from megatron_ext.report.run_data import RunData, read_run
from tests.helpers import run_folders
from tests.helpers.run_folders import config, evaluation, make_run


def run(
    root: Path, name: str, seed: int, solved: float, *, lr: float = 1e-3, first: int = 0, clip: float = 0.2
) -> RunData:
    made = config(root, name, seed)
    made.optimizer.lr = lr
    made.loss.terms["policy"]["clip_low"] = clip
    outcome = np.arange(100) < round(100 * solved)
    after = evaluation("after", outcome, first=first)
    before = evaluation("before", np.arange(100) < 20, first=first)
    folder = make_run(root / name, made=made, metrics=run_folders.rows(20, rate=solved), before=before, after=after)
    return read_run(folder)


def test_seeds_of_a_configuration_are_one_group(tmp_path: Path) -> None:
    runs = [run(tmp_path, "a1", 1, 0.5), run(tmp_path, "b1", 1, 0.7, lr=2e-3), run(tmp_path, "a2", 2, 0.6)]
    runs[2].config.tracking.clear()
    runs[2].config.run.threads = 7
    first, second = group_runs(runs)
    assert first.runs == (runs[0], runs[2]) and first.seeds == (1, 2) and second.seeds == (1,)
    assert first.keys == {"optimizer.lr": "0.001"} and second.label == "optimizer.lr=0.002"
    assert group_runs(runs[::2])[0].label == "all runs"


def test_many_differences_are_told_by_the_names_of_the_runs(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"a{seed}", seed, 0.5) for seed in (1, 2, 3)]
    runs.append(run(tmp_path, "b", 1, 0.7, lr=2e-3, clip=0.1))
    runs[3].config.run.steps = 7
    assert [group.label for group in group_runs(runs)] == ["a1, a2 and 1 more", "b"]


def test_what_differs_in_its_place_alone_is_told() -> None:
    made = prepare(["recipe=quickstart"])
    made.model.hf_config = "/elsewhere/" + Path(made.model.hf_config).name
    (change,) = changes(made, RECIPES)[1]
    assert change.key == "model.hf_config" and change.base.startswith("…/")
    assert change.value == f"{change.base} in another folder"


def test_no_two_groups_have_the_same_label(tmp_path: Path) -> None:
    """Runs of one recipe with several overrides each, beside one of another recipe; and runs of the same name."""
    runs = [run(tmp_path, name, 1, 0.5, lr=lr, clip=clip) for name, lr, clip in (("a", 1, 0.1), ("b", 2, 0.3))]
    other = run(tmp_path, "c", 1, 0.5)
    other.config.recipe, other.config.run.steps = "run", 7
    labels = [group.label for group in group_runs([*runs, other])]
    assert labels == ["recipe=walk (a)", "recipe=walk (b)", "recipe=run"]
    for made in runs:
        made.config.run.name = "same"
    runs[1].config.run.steps = 9
    labels = [group.label for group in group_runs([*runs, other])]
    assert labels[2] == "recipe=run" and labels[:2] == ["recipe=walk (same) (a)", "recipe=walk (same) (b)"]


def test_rows_have_intervals_over_seeds_or_tasks(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"a{s}", s, 0.4 + 0.1 * s) for s in (1, 2, 3)] + [run(tmp_path, "b", 1, 0.5, lr=2e-3)]
    several, one = rows(group_runs(runs))
    assert several.after is not None and several.after.mean == pytest.approx(0.6) and several.after.over == "3 seeds"
    assert several.after.high - 0.6 == pytest.approx(4.303 * 0.1 / 3**0.5)
    assert several.gain is not None and several.gain.mean == pytest.approx(0.4)
    assert one.after is not None and one.after.over == "100 tasks" and one.after.low == pytest.approx(0.404, abs=2e-3)
    assert several.minutes == 2.0 and several.reward is not None


def test_differences_are_paired_over_seeds_and_tasks(tmp_path: Path) -> None:
    runs = [run(tmp_path, f"a{s}", s, 0.4) for s in (1, 2)]
    runs += [run(tmp_path, f"b{s}", s, 0.6, lr=2e-3) for s in (1, 2, 3)]
    (found,) = differences(group_runs(runs))
    assert found.seeds == ((1, pytest.approx(0.2)), (2, pytest.approx(0.2))) and found.why == ""
    assert found.value is not None and found.value.n == 100 and found.value.mean == pytest.approx(0.2)
    # Both seeds gain on the same 20 of 100 tasks: the interval is that of a share of 0.2 over 100, not over 200.
    assert found.value.high - found.value.low == pytest.approx(2 * 1.96 * (0.2 * 0.8 / 100) ** 0.5, abs=0.02)


def test_no_difference_without_common_seeds_or_tasks(tmp_path: Path) -> None:
    runs = [
        run(tmp_path, "a", 1, 0.4),
        run(tmp_path, "b", 2, 0.6, lr=2e-3),
        run(tmp_path, "c", 1, 0.5, lr=3e-3, first=50),
    ]
    seeds, tasks = differences(group_runs(runs))
    assert seeds.value is None and "no seed" in seeds.why
    assert tasks.value is None and "different tasks" in tasks.why


def test_changes_against_the_preset() -> None:
    made = prepare(["recipe=quickstart", "optimizer.lr=0.5", "tracking.wandb=null"])
    base, found = changes(made, RECIPES)
    assert base == "recipe=quickstart"
    assert ("optimizer.lr", "0.001", "0.5") in [(c.key, c.base, c.value) for c in found]
    assert {c.key.split(".")[0] for c in found} == {"optimizer", "tracking"}
    assert changes(Config(recipe="quickstart"), None)[0] == "the defaults of the schema"
    assert "no longer there" in changes(config(Path("runs")), RECIPES)[0]
