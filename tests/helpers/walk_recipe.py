"""A job of seconds: the walk (``worlds.py``), learned by a tiny MoE model after a short warm start."""

from __future__ import annotations

from pathlib import Path

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


def write_recipes(folder: Path, root: Path) -> Path:
    """``folder`` as a recipes folder that holds the recipe ``walk``; ``root`` is the repository's."""
    (folder / "walk").mkdir()
    model = root / "recipes" / "base" / "models" / "tiny_qwen3_moe"
    (folder / "walk" / "recipe.yaml").write_text(RECIPE.replace("MODEL", str(model)))
    (folder / "base").mkdir()
    (folder / "base" / "cpu.yaml").write_text((root / "recipes" / "base" / "cpu.yaml").read_text())
    return folder
