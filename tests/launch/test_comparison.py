"""``comparison.yaml`` read, and the runs that it asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.comparison import Comparison, plan, read_comparison, warm_starts
from megatron_ext.config.compose import ConfigError, recipes

GOOD = """
title: is it?
arms:
  on: {preset: recipe, title: as it is}
  off: {preset: recipe, title: permuted, overrides: [control.permute_rewards=true]}
changed: credit/edit/changed_fraction
counters: {rollout/turns_mean: turns}
"""


def write(folder: Path, text: str) -> None:
    (folder / "walk" / "comparison.yaml").write_text(text)


@pytest.fixture
def walk(tmp_path: Path, root: Path) -> Path:
    from tests.helpers.walk_recipe import write_recipes

    (tmp_path / "recipes").mkdir()
    return write_recipes(tmp_path / "recipes", root)


def read(walk: Path, text: str = GOOD) -> Comparison:
    write(walk, text)
    return read_comparison("walk", walk)


def test_what_the_file_says(walk: Path) -> None:
    found = read(walk)
    assert [arm.name for arm in found.arms] == ["on", "off"], "YAML's truth values are names here"
    assert found.baseline == "off" and found.seeds == (1, 2, 3) and found.title == "is it?"
    assert found.arms[0].recipe("walk") == "walk" and found.arms[1].overrides == ("control.permute_rewards=true",)
    assert found.changed == "credit/edit/changed_fraction" and found.counters == {"rollout/turns_mean": "turns"}
    assert recipes(walk)["walk"] == ["recipe"], "a comparison is no preset"
    assert [arm.name for arm in found.only(["on"], [7]).arms] == ["on"] and found.only([], [7]).seeds == (7,)
    with pytest.raises(ConfigError, match="--arms of: no such arm; there are on, off"):
        found.only(["of"], [])


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("title: is it?", "titel: x", ["titel: no such key; nearest: title"]),
        ("{preset: recipe, title: as it is}", "recipe", ["arms.on: needs {preset"]),
        ("preset: recipe, title: as", "present: recipe, title: as", ["arms.on: present: no such key; nearest: preset"]),
        ("rollout/turns_mean", "rollout/turns_meen", ["rollout/turns_mean", "is not in the table"]),
        ("changed: credit/edit/changed_fraction", "changed: credit/edit/share", ["credit/edit/share"]),
        ("title: is it?", "baseline: of", ["baseline: of is none of the arms on, off"]),
        ("title: is it?", "seeds: [one]", ["seeds: needs a list of numbers"]),
        ("title: is it?", "title: [", ["walk/comparison.yaml: "]),
    ],
)
def test_bad_files(walk: Path, old: str, new: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read(walk, GOOD.replace(old, new))
    assert all(word in str(caught.value) for word in words), caught.value
    with pytest.raises(ConfigError, match=r"walk/comparison.yaml is not there"):
        (walk / "walk" / "comparison.yaml").unlink()
        read_comparison("walk", walk)


def test_the_runs_share_one_warm_start(walk: Path, tmp_path: Path) -> None:
    jobs = plan(read(walk), [], tmp_path / "out", walk, threads=None)
    assert [(job.name, job.after) for job in jobs] == [
        ("on_seed_1", None),
        *(
            (f"{arm}_seed_{seed}", "on_seed_1")
            for seed in (1, 2, 3)
            for arm in ("on", "off")
            if (arm, seed) != ("on", 1)
        ),
    ]
    assert warm_starts(jobs) == 1
    assert {job.config.warm_start.cache for job in jobs} == {str(tmp_path / "out" / "warm_starts")}
    assert {(job.config.run.seed, job.config.control.permute_rewards) for job in jobs} == {
        (seed, permuted) for seed in (1, 2, 3) for permuted in (False, True)
    }
    assert {job.config.warm_start.seed for job in jobs} == {1}
    # What a kill costs, and what the share of changed tokens is found from.
    assert all(job.config.checkpoint.every == 5 and job.config.samples.groups == 0 for job in jobs)
    given = plan(read(walk), ["checkpoint.every=2", "run.threads=1"], tmp_path, walk, threads=3)
    assert {(job.config.checkpoint.every, job.config.run.threads) for job in given} == {(2, 1)}


def test_an_arm_that_sees_another_world_has_its_own_warm_start(walk: Path, tmp_path: Path) -> None:
    other = GOOD.replace("control.permute_rewards=true", "environments.walk.length=3")
    jobs = plan(read(walk, other), [], tmp_path, walk, threads=None)
    owner = {job.name: job.after or job.name for job in jobs}
    assert owner["off_seed_3"] == "off_seed_1" and owner["on_seed_3"] == "on_seed_1" and warm_starts(jobs) == 2


def test_every_problem_of_every_arm_before_anything_runs(walk: Path, tmp_path: Path) -> None:
    bad = GOOD.replace("control.permute_rewards=true", "loss.aggregation=none")
    bad = bad.replace("preset: recipe, title: as", "preset: micro, title: as")
    with pytest.raises(ConfigError) as caught:
        plan(read(walk, bad), ["run.seed=3"], tmp_path, walk, threads=None)
    said = caught.value.problems
    assert len(said) == 3 and said[0] == "run.seed=3: the comparison sets this key"
    assert "arm on: recipe=walk/micro: no such preset" in said[1] and "arm off: loss.aggregation=none" in said[2]
    with pytest.raises(ConfigError, match="arm on: arms are compared on held-out tasks"):
        plan(read(walk), ["evaluation.after=false"], tmp_path, walk, threads=None)


def test_comparisons_of_the_recipes_can_be_planned(root: Path, tmp_path: Path) -> None:
    compared = [file.parent.name for file in (root / "recipes").glob("*/comparison.yaml")]
    assert "quickstart" in compared
    for slug in compared:
        comparison = read_comparison(slug, root / "recipes")
        assert plan(comparison.only([], [1]), [], tmp_path, root / "recipes", threads=None)
