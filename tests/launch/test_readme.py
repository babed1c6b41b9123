"""What the README tells a newcomer to type works: commands, keys, paths, and its example of an environment."""

from __future__ import annotations

import importlib
import re
import shlex
from pathlib import Path

import pytest

from launch import cli
from launch.prepare import prepare
from megatron_ext.environments.protocol import Demonstrator, Environment
from megatron_ext.training.run import RunResult, train

DOCS = ("README.md", "docs/architecture.md")
# Made by the reader, by following the README.
OWN = ("recipe=repeat",)


def blocks(root: Path, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (root / "README.md").read_text(), flags=re.DOTALL)


def commands(root: Path) -> list[list[str]]:
    """Words of every shell command, comments dropped and continued lines joined."""
    lines = "".join(blocks(root, "bash")).replace("\\\n", " ").splitlines()
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def example(root: Path) -> tuple[str, str]:
    """The environment's module and its recipe."""
    return next(b for b in blocks(root, "python") if "class Repeat" in b), next(
        b for b in blocks(root, "yaml") if "Repeat" in b
    )


def test_the_table_of_a_run_s_folder_names_what_is_in_it(root: Path, walk_run: RunResult) -> None:
    text = (root / "README.md").read_text().partition("| in it | what |")[2].partition("\n\n")[0]
    table = {Path(name).parts[0] for name in re.findall(r"`([\w./]+)`", text)}
    found = {file.name for file in walk_run.run_dir.iterdir()} - {".lock"}
    assert found <= table and {"routing.jsonl", "journal.jsonl"} <= found


def test_what_freezes_routers_freezes_those_of_any_recipe(root: Path) -> None:
    override = "model.router={_target_: megatron_ext.moe.policies.FrozenRouter}"
    assert f"`'{override}'`" in (root / "README.md").read_text()
    for recipe in ("quickstart", "moe_expert_structuring"):
        config = prepare([f"recipe={recipe}", override])
        assert config.model.router == {"_target_": "megatron_ext.moe.policies.FrozenRouter"}


def test_every_command_is_there_and_every_override_is_right(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short.py").write_text(next(b for b in blocks(root, "python") if "def short" in b))
    seen = set()
    for words in commands(root):
        module = next((word for word in words if word.startswith("launch.")), None)
        if module is None:
            assert words[0] in ("bash", "python") and (words[0] == "python" or (root / words[1]).is_file()), words
            continue
        seen.add(module)
        importlib.import_module(module)
        overrides = [w for w in words[words.index(module) + 1 :] if "=" in w and not w.startswith("-")]
        ranks = words[words.index("--nproc-per-node") + 1] if "--nproc-per-node" in words else "1"
        monkeypatch.setenv("WORLD_SIZE", ranks)  # as the launcher does
        if module == "launch.train" and overrides[0] not in OWN:
            prepare(overrides)
    assert seen == {
        *("launch.train", "launch.eval", "launch.export", "launch.table", "launch.bench"),
        *("launch.report", "launch.inspect", "launch.recipes"),
    }
    assert {f"launch.{name}" for name in cli.COMMANDS} - {"launch.quickstart"} == seen


@pytest.mark.parametrize("doc", DOCS)
def test_every_path_that_is_named_exists(doc: str, root: Path) -> None:
    text = (root / doc).read_text()
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.(?:py|yaml|md|txt))?)`", text)
    named += re.findall(r"\]\(([^):]+)\)", text)
    in_a_run = ("wandb/", "store/", "logs/", "tokenizer/", "warm_start/", "evaluations/", "profile/", "export/")
    made = ("recipes/repeat/", "runs/", *in_a_run)
    assert named
    for path in named:
        if path.startswith(made):
            continue
        places = (root / path, root / "megatron_ext" / path, (root / doc).parent / path)
        assert any(place.exists() for place in places), path


def test_plug_points_of_the_map_exist(root: Path) -> None:
    source = "\n".join(path.read_text() for path in (root / "megatron_ext").rglob("*.py"))
    rows = [line for line in (root / "docs/architecture.md").read_text().splitlines() if "protocol.py`" in line]
    assert len(rows) >= 7
    for row in rows:
        for name in re.findall(r"`([A-Z]\w+)`", row.split("|")[-2]):
            assert f"class {name}" in source, name


def test_the_example_environment_plays_and_trains(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, recipe = example(root)
    (tmp_path / "readme_repeat.py").write_text(module)
    monkeypatch.syspath_prepend(str(tmp_path))
    environment = importlib.import_module("readme_repeat").Repeat()
    assert isinstance(environment, Environment) and isinstance(environment, Demonstrator)
    splits = [{environment.reset(t.seed).text for t in environment.tasks(s, 50)} for s in ("train", "dev", "test")]
    assert [len(texts) for texts in splits] == [50, 50, 50] and not splits[0] & splits[2]

    recipes = tmp_path / "recipes"
    (recipes / "repeat").mkdir(parents=True)
    target = "recipes.repeat.environment.Repeat"
    assert target in recipe
    (recipes / "repeat" / "recipe.yaml").write_text(recipe.replace(target, "readme_repeat.Repeat"))
    (recipes / "base").symlink_to(root / "recipes" / "base")
    tiny = [
        f"run.root={tmp_path / 'runs'}",
        "run.threads=1",
        "run.steps=1",
        "tasks.test_tasks=8",
        "tracking.wandb=null",
    ]
    tiny += ["warm_start.max_epochs=0.3", "warm_start.target_success=0", "batch.tasks_per_step=2"]
    result = train(prepare(["recipe=repeat", *tiny], recipes))
    assert result.steps == 1 and result.success_after is not None
