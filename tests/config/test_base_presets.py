"""What recipes inherit of routing: a frozen router, recorded experts replayed (``recipes/base/``)."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from megatron_ext.config.compose import compose
from megatron_ext.config.instantiate import instantiate
from megatron_ext.config.validate import problems
from megatron_ext.models.hf_config import load_hf_config
from megatron_ext.moe.policies import FrozenRouter

RECIPE = """
defaults:
  - /base/cpu
  - /base/frozen_router
  - /base/replay_routing
  - _self_
run: {name: x}
environments:
  walk: {_target_: tests.helpers.worlds.Walk, length: 2}
tasks: {environment: walk}
"""


@pytest.fixture
def recipes(tmp_path: Path, root: Path) -> Path:
    shutil.copytree(root / "recipes" / "base", tmp_path / "base")
    (tmp_path / "frozen").mkdir()
    (tmp_path / "frozen" / "recipe.yaml").write_text(RECIPE)
    return tmp_path


def test_a_recipe_may_freeze_its_routers_and_replay(recipes: Path, root: Path) -> None:
    cfg = compose(["recipe=frozen"], recipes)
    hf = load_hf_config(root / "recipes" / "base" / "models" / "tiny_qwen3_moe")
    assert problems(cfg, hf) == []
    assert isinstance(instantiate(cfg.model.router), FrozenRouter)
    assert cfg.rollout.replay_routing and cfg.rollout.record_routing and cfg.rollout.replay_missing == "error"
    wrong = compose(["recipe=frozen", "model.aux_loss_coefficient=0.01", "rollout.record_routing=false"], recipes)
    lines = "\n".join(problems(wrong, hf))
    assert "FrozenRouter keeps the auxiliary loss off" in lines and "set rollout.record_routing=true" in lines
    dense = replace(hf, family="qwen3", num_experts=0, top_k=0, moe_intermediate=0)
    (line,) = problems(cfg, dense)
    assert (
        "the model has no experts" in line and "set rollout.record_routing=false rollout.replay_routing=false" in line
    )
