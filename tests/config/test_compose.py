from __future__ import annotations

from pathlib import Path

import pytest

from megatron_ext.config.compose import ConfigError, compose, recipes
from tests.helpers.plug_points import Constants, Inner

HERE = "tests.helpers.plug_points"
FILES = {
    "base/common.yaml": "run: {threads: 7, steps: 5}\nmodel: {hf_config: base/tiny}\n",
    "alpha/recipe.yaml": f"""
defaults: [/base/common, _self_]
run: {{steps: 6}}
environments:
  game: {{_target_: {HERE}.Game, level: 1, rename: true}}
tasks: {{environment: game}}
rollout: {{engine: {{_target_: {HERE}.Anything, kept: 1}}}}
tracking: {{console: null, metrics: null, wandb: {{_target_: {HERE}.Anything}}}}
harness: {{_target_: {HERE}.Anything}}
""",
    "alpha/off.yaml": "defaults: [recipe, _self_]\nenvironments: {game: {level: 2}}\noptimizer: {lr: 0.5}\n",
    "alpha/other.yaml": f"""
defaults: [recipe, _self_]
rollout: {{engine: {{_target_: {HERE}.Whitening}}}}
loss: {{terms: {{policy: {{_target_: {HERE}.Anything}}}}}}
""",
    "alpha/method.yaml": f"""
defaults: [recipe, _self_]
method: {{_schema_: {HERE}.Constants, alpha: 0.25, inner: {{depth: 4}}}}
""",
    "alpha/broken.yaml": "defaults: [recipe, _self_]\nrun: {stpes: 3, seed: x}\n",
    "alpha/lost.yaml": "defaults: [nowhere, _self_]\n",
    "alpha/torn.yaml": "run: {steps: [3\n",
}


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        file = tmp_path / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8")
    return tmp_path


def problems(tree: Path, *argv: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        compose(argv, tree)
    assert all("\n" not in line for line in caught.value.problems)
    return list(caught.value.problems)


def test_a_recipe_inherits_and_holds_what_differs(tree: Path) -> None:
    cfg = compose(["recipe=alpha"], tree)
    assert (cfg.recipe, cfg.run.name, cfg.run.threads, cfg.run.steps) == ("alpha", "alpha", 7, 6)
    assert cfg.model.hf_config == str(tree / "base/tiny")
    assert cfg.environments["game"] == {"_target_": f"{HERE}.Game", "level": 1, "rename": True}
    assert list(cfg.tracking) == ["wandb"]  # entries set to null are gone


def test_presets_change_single_arguments(tree: Path) -> None:
    cfg = compose(["recipe=alpha/off", "environments.game.rate=2.5"], tree)
    assert (cfg.recipe, cfg.run.name, cfg.optimizer.lr) == ("alpha/off", "alpha-off", 0.5)
    assert cfg.environments["game"] == {"_target_": f"{HERE}.Game", "level": 2, "rename": True, "rate": 2.5}


def test_another_target_starts_afresh(tree: Path) -> None:
    cfg = compose(["recipe=alpha/other"], tree)
    assert cfg.rollout.engine == {"_target_": f"{HERE}.Whitening"}
    assert cfg.loss.terms == {"policy": {"_target_": f"{HERE}.Anything"}}
    cfg = compose(["recipe=alpha", f"environments.game={{_target_: {HERE}.Anything, a: 1}}"], tree)
    assert cfg.environments["game"] == {"_target_": f"{HERE}.Anything", "a": 1}


def test_another_target_alone_drops_nothing_in_silence(tree: Path) -> None:
    game, target = "recipe=alpha", f"environments.game._target_={HERE}.Anything"
    (line,) = problems(tree, game, target)
    assert line.startswith(f"{target}: would drop what {HERE}.Game was given (level, rename); ")
    assert line.endswith(f"'environments.game={{_target_: {HERE}.Anything}}'")
    (line,) = problems(tree, game, target, "environments.game.level=3")
    assert "(rename)" in line and line.endswith(f"'environments.game={{_target_: {HERE}.Anything, level: ...}}'")
    (line,) = problems(tree, game, f"environments.game._target_={HERE}.Anythin")  # one mistake, one line
    assert line.startswith("environments.game: _target_ ") and "did you mean Anything" in line
    for argv in (
        [f"environments.game._target_={HERE}.Game"],  # the one that it has
        [target, "environments.game.level=3", "environments.game.rename=false"],
        [target, f"environments.game={{_target_: {HERE}.Game, level: 4}}"],
        [f"harness._target_={HERE}.Game"],  # had no arguments
        [f"credit.edits.new._target_={HERE}.Keeping"],
        [f"harness={{_target_: {HERE}.Game}}", f"harness._target_={HERE}.Anything"],
    ):
        compose([game, *argv], tree)


def test_null_is_told_how_to_reset(tree: Path) -> None:
    said = {
        "model.router": "model.router: needs a map, got null; model.router={} sets the default",
        "credit.edits": "credit.edits: needs a map, got null; credit.edits={} empties it, credit.edits.NAME=null "
        "removes an entry",
        "harness": "harness: needs a map, got null; its default is "
        "'harness={_target_: megatron_ext.harness.text.TextHarness}'",
    }
    for key, line in said.items():
        assert problems(tree, "recipe=alpha", f"{key}=null") == [line]
    assert compose(["recipe=alpha", f"model.router={{_target_: {HERE}.Anything}}", "model.router={}"], tree)


def test_overrides_come_last_and_in_order(tree: Path) -> None:
    argv = ["run.steps=8", "recipe=alpha", "run.steps=9", "run.name='a b'", "tokenizer.phrases=[x,'y z']"]
    cfg = compose(argv, tree)
    assert (cfg.run.steps, cfg.run.name, cfg.tokenizer.phrases) == (9, "a b", ["x", "y z"])


def test_entries_are_deleted_and_added(tree: Path) -> None:
    cfg = compose(["recipe=alpha", "~tracking.wandb", f"credit.edits.k._target_={HERE}.Keeping"], tree)
    assert cfg.tracking == {}
    assert cfg.credit.edits == {"k": {"_target_": f"{HERE}.Keeping"}}
    assert problems(tree, "recipe=alpha", "~tracking.wadnb")[0].endswith("nothing to delete; there is: wandb")
    assert "only an entry of a map" in problems(tree, "recipe=alpha", "~run.steps")[0]


def test_an_empty_map_is_empty_and_an_empty_section_says_nothing(tree: Path) -> None:
    cfg = compose(["recipe=alpha", "tracking={}", "harness={}", "loss.terms={}", "run={}"], tree)
    assert cfg.tracking == cfg.harness == cfg.loss.terms == {}
    assert (cfg.run.steps, cfg.environments["game"]["level"]) == (6, 1)
    (tree / "alpha/bare.yaml").write_text("defaults: [recipe, _self_]\ntracking: {}\nrun: {}\n")
    cfg = compose(["recipe=alpha/bare"], tree)
    assert cfg.tracking == {} and cfg.run.steps == 6


def test_interpolations_are_resolved_and_typed(tree: Path) -> None:
    cfg = compose(["recipe=alpha", "run.seed=${run.threads}", "environments.game.level=${run.seed}"], tree)
    assert (cfg.run.seed, cfg.environments["game"]["level"]) == (7, 7)
    assert "run.seed" in problems(tree, "recipe=alpha", "run.seed=${nowhere}")[0]
    assert "run.seed" in problems(tree, "recipe=alpha", "run.seed=${run.name}", "run.name=x")[0]


def test_a_recipes_own_dataclass(tree: Path) -> None:
    cfg = compose(["recipe=alpha/method", "method.limit=3"], tree)
    assert cfg.method == Constants(alpha=0.25, limit=3, inner=Inner(depth=4))
    assert compose(["recipe=alpha/method", "method.limit=null"], tree).method == Constants(0.25, None, Inner(4))
    lines = problems(tree, "recipe=alpha/method", "method.alhpa=1", "method.inner.depth=x")
    assert "method.alhpa: no such key; nearest: method.alpha" in lines
    assert "method.inner.depth: needs int, got 'x'" in lines
    assert "_schema_" in problems(tree, "recipe=alpha", "method.alpha=1")[0]


def test_all_problems_come_at_once(tree: Path) -> None:
    lines = problems(
        tree,
        "recipe=alpha",
        "run.stepss=3",
        "optimizer.lr=abc",
        "environments.game.levl=2",
        "run=4",
        "nonsense",
        "run.seed=1,2",
        "environments=3",
    )
    assert len(lines) == 7
    text = "\n".join(lines)
    for words in ("run.steps", "optimizer.lr: needs float", "nearest: level", "run: is a section", "nonsense"):
        assert words in text
    assert "write a list as [a,b]" in text and "environments: needs a map" in text


def test_presets_are_not_for_the_command_line(tree: Path) -> None:
    (line,) = problems(tree, "recipe=alpha", "defaults=[/base/frozen_router,mine]")
    assert line.startswith("defaults=[/base/frozen_router,mine]: presets are listed in a recipe's YAML file")
    assert "each key that base/frozen_router.yaml, mine.yaml sets" in line and "'model.router={_target_: " in line
    assert "that base/cpu.yaml sets" in problems(tree, "recipe=alpha", "defaults=/base/cpu")[0]


def test_overrides_are_judged_even_without_a_recipe(tree: Path) -> None:
    lines = problems(tree, "recipe=alhpa", "run.stepss=3")
    assert lines[0] == "recipe=alhpa: no such recipe; nearest: alpha"
    assert lines[1].startswith("run.stepss: no such key; nearest: run.steps")
    assert "no recipe given" in problems(tree)[0] and "alpha" in problems(tree)[0]
    assert "given 2 times" in problems(tree, "recipe=alpha", "recipe=alpha/off")[0]
    assert "alpha/off" in problems(tree, "recipe=alpha/of")[0]


def test_a_broken_file_is_named(tree: Path) -> None:
    lines = problems(tree, "recipe=alpha/broken")
    assert lines == [
        "alpha/broken.yaml: run.stpes: no such key; nearest: run.steps, profile.steps",
        "alpha/broken.yaml: run.seed: needs int, got 'x'",
    ]
    assert "nowhere" in problems(tree, "recipe=alpha/lost")[0]
    assert "torn.yaml" in problems(tree, "recipe=alpha/torn")[0]


def test_values_that_nobody_gave_are_named(tree: Path) -> None:
    (tree / "bare").mkdir()
    (tree / "bare/recipe.yaml").write_text("run: {steps: 1}\n")
    assert problems(tree, "recipe=bare") == ["model.hf_config: needs a value", "tasks.environment: needs a value"]


def test_composing_leaves_no_state_behind(tree: Path) -> None:
    first = compose(["recipe=alpha"], tree)
    compose(["recipe=alpha", "~tracking.wandb", "loss.terms.policy.clip_high=0.5"], tree)
    assert compose(["recipe=alpha"], tree) == first


def test_recipes_lists_presets(tree: Path) -> None:
    listed = recipes(tree)
    assert list(listed) == ["alpha"]
    assert {"recipe", "off", "method"} <= set(listed["alpha"])


def test_every_recipe_of_the_repository_composes(root: Path) -> None:
    for slug, presets in recipes(root / "recipes").items():
        for preset in presets:
            cfg = compose([f"recipe={slug}/{preset}"], root / "recipes")
            assert Path(cfg.model.hf_config).exists()
