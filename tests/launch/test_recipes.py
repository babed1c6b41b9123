"""``launch.recipes``: lists, cards, constants and their marks, checks that hold and that fail, bad input."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch import recipes
from launch.recipes_about import about, composes, constants, edits
from launch.recipes_check import check_preset, smaller, smallest, smoke, worked_numbers
from megatron_ext.config.compose import compose
from megatron_ext.config.compose import recipes as known
from tests.helpers.walk_recipe import write_recipes

MICRO = """
# Smaller: for comparisons.
defaults: [recipe, _self_]
credit:
  edits:
    short:
      _target_: megatron_ext.credit.edits.length_penalty.LengthPenalty
      order: 1
      coefficient: 0.25  # ours: the paper gives none
      free: 2
      limit: 8
    white:
      _target_: megatron_ext.credit.edits.whiten.Whiten
      order: 2
      eps: 1.0e-4  # [ours]
rewards:
  success: {weight: 2.0}  # from our table
harness: {_target_: megatron_ext.harness.text.TextHarness} # ours: a mark for every value of the line
"""
README = """# Walking (somewhere)

*A walk* to the [flag](x).
In two lines, arXiv 2610.01234.

## What was measured

| a | b |

## More

arXiv 2610.09999
"""


@pytest.fixture
def walk(tmp_path: Path, root: Path) -> Path:
    (tmp_path / "recipes").mkdir()
    folder = write_recipes(tmp_path / "recipes", root)
    (folder / "walk" / "micro.yaml").write_text(MICRO)
    return folder


def test_everything_there_is_can_be_listed_and_shown(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.main(["list"]) == 0
    listed = capsys.readouterr().out
    for slug in known(root / "recipes"):
        assert f"\n{slug} " in f"\n{listed}"
    assert "TextWorldExpress · TextHarness · rewards: success · loss: ClipLoss" in listed
    assert recipes.main(["show", "quickstart/calculator"]) == 0
    shown = capsys.readouterr().out
    assert "Calculator  operations=2, largest=20" in shown and "python -m launch.recipes compare quickstart" in shown


def test_a_recipe_that_does_not_compose_is_listed(walk: Path, tmp_path: Path) -> None:
    (walk / "walk" / "recipe.yaml").write_text("credits: {}\n")
    assert composes("walk", walk).startswith("does not compose: walk/recipe.yaml: credits")
    assert about("walk", walk, tmp_path).has == "no evidence yet"


def test_what_the_readme_says(walk: Path, tmp_path: Path) -> None:
    (walk / "walk" / "README.md").write_text(README)
    (walk / "walk" / "comparison.yaml").write_text("arms: {}")
    (tmp_path / "tests" / "walk").mkdir(parents=True)
    found = about("walk", walk, tmp_path / "tests")
    assert found.title == "Walking (somewhere)" and found.paper == "arXiv 2610.01234"
    assert found.summary == "*A walk* to the [flag](x). In two lines, arXiv 2610.01234."
    assert found.presets == ("micro",) and found.evidence == "| a | b |"
    assert found.has == "worked numbers, comparison, measured"
    later = README.replace(", arXiv 2610.01234", "").replace("| a | b |", "<!-- the table\ncomes here -->")
    (walk / "walk" / "README.md").write_text(later)
    none = about("walk", walk, tmp_path / "tests")
    assert (none.paper, none.evidence, none.has) == ("", "", "worked numbers, comparison")


def test_edits_in_the_order_in_which_they_run(walk: Path) -> None:
    found = edits(compose(["recipe=walk/micro"], walk))
    assert [(edit.part.name, edit.part.kind) for edit in found] == [("short", "LengthPenalty"), ("white", "Whiten")]
    assert [edit.traits.scale.value for edit in found] == ["keeps", "sets"]


def test_constants_and_which_are_ours(walk: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = {c.key: c for c in constants("walk", "micro", walk)}
    short, eps = found["credit.edits.short.coefficient"], found["credit.edits.white.eps"]
    assert (short.value, short.ours, short.note) == ("0.25", True, "the paper gives none")
    assert (eps.value, eps.ours, eps.note) == ("1.0e-4", True, "")
    assert not found["rewards.success.weight"].ours, "a comment that does not begin with the word is no mark"
    assert found["environments.walk.length"].value == "2" and not any("_target_" in key for key in found)
    assert recipes.main(["show", "walk/micro"], walk, tmp_path) == 0
    shown = capsys.readouterr().out
    assert "* credit.edits.short.coefficient  0.25   the paper gives none" in shown
    assert "1. short  LengthPenalty: reward-side; keeps the scale" in shown
    assert "2. white  Whiten: advantage-side; sets the scale" in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["show", "quikstart"], "quikstart: no such recipe; nearest: quickstart"),
        (["check", "quikstart"], "quikstart: no such recipe; nearest: quickstart"),
        (["compare", "quikstart"], "quikstart: no such recipe; nearest: quickstart"),
        (["show", "quickstart/lang"], "quickstart/lang: no such preset; presets: "),
        (["compar", "quickstart"], "compar: no such command; nearest: compare"),
        (["compare", "quickstart", "--arms", "of"], "--arms of: no such arm; there are on, off"),
        (["compare", "quickstart", "--jobs", "0"], "--jobs 0: must be at least 1"),
        (["compare", "quickstart", "--seeds", "2", "1", "2"], "--seeds 2 1 2: a seed is there twice"),
        (["compare", "quickstart", "--seeds", "-1"], "seed -1: must be within 0 and"),
        (["compare", "quickstart", "run.stepss=1"], "run.steps"),
        (["compare", "quickstart", "run.name=x"], "run.name=x: the comparison sets this key"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    more = ["--root", str(tmp_path / "root")] if argv[0] == "compare" else []
    assert recipes.main([*argv, *more]) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and words in captured.err and not (tmp_path / "root").exists()
    if "run.stepss=1" not in argv:
        assert captured.err.count("\n") == 1


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    assert recipes.main([]) == 2
    for command in ("list", "show", "check", "compare"):
        assert f"\n  {command} " in capsys.readouterr().out or command != "list"
        with pytest.raises(SystemExit) as stopped:
            recipes.main([command, "--help"])
        assert stopped.value.code == 0
    assert "comparison.yaml" in capsys.readouterr().out


def test_worked_numbers_hold_fail_or_are_owed(walk: Path, tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "recipes"
    none = worked_numbers("walk", walk, tests)
    assert none.holds and "none are owed" in none.said
    (walk / "walk" / "credit.py").write_text("")
    owed = worked_numbers("walk", walk, tests)
    assert not owed.holds and "is not there" in owed.said
    (tests / "walk").mkdir(parents=True)
    (tests / "walk" / "test_numbers.py").write_text("def test_it():\n    assert 1 + 1 == 2\n")
    held = worked_numbers("walk", walk, tests)
    assert held.holds and "1 passed" in held.said
    (tests / "walk" / "test_numbers.py").write_text("def test_it():\n    assert 1 + 1 == 3\n")
    failed = worked_numbers("walk", walk, tests)
    assert not failed.holds and "1 failed" in failed.said and failed.lines


def test_presets_are_judged_for_the_machine_they_are_meant_for(walk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = "{expert: 4, pipeline: 2, tensor: 2, sequence: true}"
    paper = f"defaults: [recipe, _self_]\nbackend: {{device: cuda}}\nparallel: {layout}\n"
    (walk / "walk" / "paper.yaml").write_text(paper)
    found = check_preset("walk", "paper", walk)
    assert found.holds and "8 ranks" in found.said, found
    (walk / "walk" / "paper.yaml").write_text(paper.replace("expert: 4", "expert: 3").replace("cuda", "gpu"))
    bad = check_preset("walk", "paper", walk)
    assert not bad.holds and any("backend.device" in line for line in bad.lines) and len(bad.lines) >= 2


def test_the_smoke_run_is_made_of_the_smallest_preset(walk: Path) -> None:
    assert smallest("walk", walk) == "walk/micro"
    assert smaller("walk", walk) == ["tasks.test_tasks=4", "warm_start.gate_tasks=4"], "nothing is made larger"
    (walk / "walk" / "micro.yaml").unlink()
    assert smallest("walk", walk) == "walk"


@pytest.mark.slow
def test_two_steps_are_trained(walk: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(root)
    done = smoke("walk/micro", walk)
    assert done.holds and "2 steps" in done.said, done
    text = (walk / "walk" / "micro.yaml").read_text()
    (walk / "walk" / "micro.yaml").write_text(
        text + "environments:\n  walk: {_target_: tests.helpers.worlds.Walk, length: -5}\n"
    )
    broken = smoke("walk/micro", walk)
    assert not broken.holds and broken.lines, broken
