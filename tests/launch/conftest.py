"""A finished run, small enough to make in seconds, that the commands on runs are tried on."""

from __future__ import annotations

from pathlib import Path

import pytest

from launch.prepare import prepare
from megatron_ext.training.run import RunResult, train

RECIPE = """
defaults:
  - /base/cpu
  - _self_
run: {steps: 2, threads: 1, name: walk}
model: {hf_config: MODEL, max_context: 96}
environments:
  walk: {_target_: tests.helpers.worlds.Walk, length: 2}
tasks: {environment: walk, train_tasks: 16, dev_tasks: 8, test_tasks: 12}
tokenizer: {vocab_size: 300, corpus_tasks: 4}
batch: {tasks_per_step: 4, trajectories_per_task: 8, tokens_per_microbatch: 1024}
rollout: {max_turns: 4, max_new_tokens: 4, concurrency: 32}
warm_start:
  {enabled: true, demonstrations: 64, max_epochs: 3, min_epochs: 0, target_success: 0, trajectories_per_step: 8}
evaluation: {samples: 2}
checkpoint: {every: 1, keep: 5}
tracking: {wandb: null}
"""


@pytest.fixture(scope="session")
def walk_recipes(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Path:
    """A recipes folder that holds the recipe ``walk``: an environment of two steps, learned in seconds."""
    recipes = tmp_path_factory.mktemp("recipes")
    (recipes / "walk").mkdir()
    model = root / "recipes" / "base" / "models" / "tiny_qwen3_moe"
    (recipes / "walk" / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(model)))
    (recipes / "base").mkdir()
    (recipes / "base" / "cpu.yaml").write_text((root / "recipes" / "base" / "cpu.yaml").read_text())
    return recipes


@pytest.fixture(scope="session")
def walk_run(walk_recipes: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """Two steps of ``walk`` after its warm start, with checkpoints of both."""
    return train(prepare(["recipe=walk", f"run.root={tmp_path_factory.mktemp('runs')}"], walk_recipes))
