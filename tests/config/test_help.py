from __future__ import annotations

from pathlib import Path

from megatron_ext.config import keys
from megatron_ext.config.compose import compose, recipes
from megatron_ext.config.help import render
from megatron_ext.config.keys import Kind
from megatron_ext.config.schema import Config
from tests.helpers.plug_points import Constants


def test_every_key_is_there_with_type_default_and_help() -> None:
    text = render(None, {"alpha": ["off", "recipe"]})
    flat = " ".join(text.split())
    for key in keys.walk(Config):
        if key.kind is Kind.SECTION:
            assert f"{key.path} ({key.type_name})" in flat
        else:
            assert f"{key.path}: {key.type_name} =" in flat
            assert " ".join(key.help.split()) in flat
    assert "optimizer.lr: float = 0.001" in flat
    assert "run.name: str = (needs a value)" in flat
    assert "loss.terms.policy.clip_high = 0.28" in flat
    assert "alpha/off" in text
    assert max(len(line) for line in text.splitlines()) <= 130


def test_values_of_a_recipe_are_shown(root: Path) -> None:
    cfg = compose(["recipe=quickstart", "run.steps=77"], root / "recipes")
    cfg.method = Constants(alpha=0.75)
    text = render(cfg, recipes(root / "recipes"))
    assert "run.steps: int = 77" in text
    assert "method.alpha: float = 0.75" in text and "the paper's alpha" in text
    assert "method.inner.depth: int = 2" in text
