"""What a comparison tells of runs that are there: paired differences, verdicts, changed tokens, table and figure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from launch.compare_figure import draw
from launch.compare_report import Row, changed_share, compare
from launch.compare_text import markdown, number, verdicts
from megatron_ext.config.compose import ConfigError
from megatron_ext.credit.pipeline import open_view
from megatron_ext.report.compare import Figure
from megatron_ext.report.series import t975
from megatron_ext.training.session import credit_pipeline
from megatron_ext.training.step_replay.kept_step import KeptStep, StepScores
from tests.helpers.compared import arms, comparison
from tests.helpers.records import random_batch
from tests.helpers.run_folders import config, make_run, rows


def test_differences_are_paired_and_told_as_they_are(tmp_path: Path) -> None:
    """Seeds that differ much between each other, and by the same between the arms."""
    made = comparison()
    on, off = (0.90, 0.60, 0.31), (0.80, 0.51, 0.20)
    found = compare(made, arms(tmp_path, {"on": on, "off": off}, made), commands=["make it"])
    greedy = next(d for d in found.differences if d.what == "greedy")
    assert list(greedy.seeds.values()) == pytest.approx([0.10, 0.09, 0.11]) and greedy.mean == pytest.approx(0.10)
    half = t975(2) * 0.01 / 3**0.5
    assert greedy.over_seeds is not None and greedy.over_seeds.low == pytest.approx(0.10 - half)
    assert greedy.verdict == "higher"
    row = found.rows[0]
    assert row.greedy_after.low < 0.20 and row.greedy_after.high == 1.0, "an interval of shares ends at 1"
    assert (row.greedy_before.mean, row.greedy_before.over) == (pytest.approx(0.2), "100 tasks")
    assert row.changed is not None and row.changed.mean == pytest.approx(0.3)
    assert row.counters["moe/load_peak"] is None and row.counters["policy/entropy"] is not None
    assert row.over_steps["moe/load_peak"] is None
    runs = arms(tmp_path / "again", {"on": on, "off": off}, made)[0].runs
    entropies = [np.array_split(run.series["policy/entropy"].values, 3) for run in runs]
    expected = [np.mean([parts[i].mean() for parts in entropies]) for i in range(3)]
    assert row.over_steps["policy/entropy"] == pytest.approx(expected) and expected[0] != expected[2]
    assert row.minutes == pytest.approx(4.0) and found.rows[1].changed is None


@pytest.mark.parametrize(
    ("on", "verdict"),
    [
        ((0.5, 0.7, 0.3), "no difference at this scale (the interval contains 0)"),
        ((0.3, 0.31, 0.29), "lower"),
        ((0.5, 0.5, 0.5), "no difference at this scale (the interval contains 0)"),
    ],
)
def test_verdicts(on: Sequence[float], verdict: str, tmp_path: Path) -> None:
    made = comparison()
    found = compare(made, arms(tmp_path, {"on": on, "off": (0.5, 0.5, 0.5)}, made))
    assert found.differences[0].verdict == verdict


def test_one_seed_and_no_baseline(tmp_path: Path) -> None:
    made = comparison(seeds=(1,))
    both = arms(tmp_path, {"on": (0.9,), "off": (0.2,)}, made)
    found = compare(made, both)
    assert found.differences[0].over_seeds is None and found.differences[0].verdict == "one seed is no comparison"
    assert found.rows[0].greedy_after.over == "100 tasks"
    assert compare(made, both[:1]).differences == ()


def test_other_tasks_make_no_table(tmp_path: Path) -> None:
    made = comparison()
    with pytest.raises(ConfigError, match="different tasks"):
        compare(made, arms(tmp_path, {"on": (0.5,) * 3, "off": (0.5,) * 3}, made, first=7))


def test_table_and_figure(tmp_path: Path) -> None:
    made = comparison()
    read = arms(tmp_path, {"on": (0.9, 0.8, 0.7), "off": (0.5, 0.6, 0.4)}, made)
    found = compare(made, read, overrides=["x=1"], commands=["python -m launch.recipes compare walk"])
    text = markdown(found)
    for line in (
        "**walk**: does it?",
        "- `off`: without it (`recipe=walk a.b=1`)",
        "Success on 100 held-out tasks, seeds 1, 2, 3, one warm start for all runs:",
        "`on` against `off`, greedy success: +0.300",
        "`on`: 30.0 % of the trained tokens were changed",
        "python -m launch.recipes compare walk",
    ):
        assert line in text, line
    assert "has not been shown" not in text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 4 and all(len({line.count("|") for line in table.splitlines()}) == 1 for table in tables)
    tree = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert tree["rows"][0]["name"] == "on" and tree["differences"][0]["verdict"] == "higher"
    draw(found, read, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_a_mechanism_that_hardly_acts_is_told(tmp_path: Path) -> None:
    made = comparison()
    read = arms(tmp_path, {"on": (0.0,) * 3, "off": (0.0,) * 3}, made)
    found = compare(made, read)
    low = replace(found, rows=tuple(_with_change(row, 0.049) for row in found.rows))
    said = "\n".join(verdicts(low))
    assert "4.9 % of the trained tokens were changed (below 5 %: the mechanism has not been shown)" in said
    assert "no arm ever succeeded" in said


def _with_change(row: Row, share: float) -> Row:
    return replace(row, changed=Figure(share, share, share, ""))


def test_changed_tokens_are_found_from_the_credit_of_the_baseline(tmp_path: Path) -> None:
    """A run whose kept advantages are the baseline's but for every token of the first group."""
    plain = config(tmp_path)
    batch = random_batch(3)
    view, _ = credit_pipeline(plain).run(open_view(batch))
    assert view.advantage[view.trained].std() > 0
    first = np.arange(batch.num_tokens) < batch.num_tokens // 2
    advantage = np.where(first & view.trained, view.advantage + 1.0, view.advantage)
    zeros = np.zeros(batch.num_tokens, dtype=np.float32)
    scores = StepScores(advantage, zeros.astype(np.float64), zeros, zeros)
    kept = KeptStep(1, batch, batch.group_id, scores=scores)
    path = make_run(tmp_path / "run", metrics=rows(2), kept=[kept])
    expected = (first & view.trained).sum() / view.trained.sum()
    assert 0.1 < expected < 0.9
    assert changed_share(path, plain) == pytest.approx(expected)
    part = make_run(
        tmp_path / "part", metrics=rows(2), kept=[KeptStep(1, batch, (*batch.group_id, "gone"), scores=scores)]
    )
    assert changed_share(part, plain) is None, "a step that is not whole says nothing"


@pytest.mark.parametrize(
    ("value", "said"), [(0.0, "0.000"), (0.1234, "0.123"), (-12.34, "-12.3"), (4e-5, "4.00e-05"), (12345.0, "1.23e+04")]
)
def test_numbers(value: float, said: str) -> None:
    assert number(value) == said
