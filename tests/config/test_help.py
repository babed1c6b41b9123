from __future__ import annotations

from pathlib import Path

from megatron_ext.config import keys
from megatron_ext.config.compose import compose, recipes
from megatron_ext.config.help import render
from megatron_ext.config.keys import Kind
from megatron_ext.config.protocols import PLUG_POINTS
from megatron_ext.config.schema import Config
from megatron_ext.config.shipped import SHIPPED
from tests.helpers.configs import config
from tests.helpers.plug_points import Constants


def test_every_key_is_there_with_type_default_and_help() -> None:
    text = render(None, {"alpha": ["off", "recipe"]})
    flat = " ".join(text.split())
    for key in keys.walk(Config):
        if key.kind is Kind.SECTION:
            assert f"{key.path} ({key.type_name})" in flat
        else:
            what = PLUG_POINTS[key.path].what if key.kind is Kind.MAP else key.type_name
            assert f"{key.path}: {what} =" in flat or f"{key.path}: name -> {what} =" in flat
            assert " ".join(key.help.split()) in flat
    assert "optimizer.lr: float = 0.001" in flat
    assert "run.name: str = (needs a value)" in flat
    assert "loss.terms.policy.clip_high: float = 0.28" in flat
    assert "alpha/off" in text
    assert max(len(line) for line in text.splitlines()) <= 120


def test_the_arguments_of_plug_points_are_there_with_type_default_and_help(root: Path) -> None:
    flat = " ".join(render(None, {}).split())
    said = "model.router.bias_update_rate: float = 0.0 how far an expert bias moves after a step towards an even load"
    assert said in flat, "what an empty policy is"
    assert "rewards.success.weight: float = 1.0 what the part's value is multiplied by" in flat
    assert "rollout.engine.hf_config: Mapping[str, Any] = (set by the program)" in flat
    for key, targets in SHIPPED.items():
        assert all(f"{target}: " in flat for target in targets), key

    cfg = compose(["recipe=moe_expert_structuring", "tracking.wandb.group=g"], root / "recipes")
    flat = " ".join(render(cfg, recipes(root / "recipes")).split())
    assert "model.router._target_ = megatron_ext.moe.structured.StructuredRouter" in flat
    assert "model.router.consistency: float = 0.1 (default 0.01) coefficient of the token loss (lambda 2)" in flat
    assert 'model.router.fields: Sequence[str] = ["thinking", "tool_use"] the fields whose tokens' in flat
    assert "tracking.wandb.group: str | null = 'g' (default null) groups runs in the interface" in flat
    assert "environments.store.hasty: float = 0.4 (default 0.5) how often" in flat


def test_plug_points_inside_plug_points_are_there() -> None:
    judge = {"_target_": "megatron_ext.rewards.rule_judge.NoveltyJudge", "new": "E", "repeated": "R", "unchanged": "R"}
    part = {"_target_": "megatron_ext.rewards.judge_reward.JudgeReward", "judge": judge, "labels": {"E": 0}, "cap": 2}
    own = {"_target_": "tests.helpers.plug_points.Anything", "given": 3}
    flat = " ".join(render(config(rewards={"roles": part, "own": own}), {}).split())
    assert "rewards: name -> reward part = roles, own" in flat
    assert 'rewards.roles.labels: Mapping[str, int] = {"E": 0} label -> the number it has in the record' in flat
    assert "rewards.roles.judge._target_ = megatron_ext.rewards.rule_judge.NoveltyJudge" in flat
    assert "rewards.roles.judge.new: str = 'E'" in flat
    assert "rewards.roles.cap: float | null = 2 the weighted value is kept within [-cap, cap]" in flat
    assert "rewards.own._target_ = tests.helpers.plug_points.Anything As a reward part: worth" in flat
    assert "rewards.own.given = 3" in flat


def test_values_of_a_recipe_are_shown(root: Path) -> None:
    cfg = compose(["recipe=quickstart", "run.steps=77"], root / "recipes")
    cfg.method = Constants(alpha=0.75)
    text = render(cfg, recipes(root / "recipes"))
    assert "run.steps: int = 77" in text
    assert "method.alpha: float = 0.75" in text and "the paper's alpha" in text
    assert "method.inner.depth: int = 2" in text
