"""The invariants of ``megatron_ext/moe/describe.py``."""

from __future__ import annotations

from typing import Any

import pytest

from launch.prepare import prepare
from megatron_ext.config.schema import Config
from megatron_ext.moe.describe import routers_line


@pytest.mark.parametrize(
    ("node", "line"),
    [
        ({}, "trained"),
        ({"_target_": "megatron_ext.moe.policies.TrainedRouter"}, "trained"),
        (
            {"_target_": "megatron_ext.moe.policies.TrainedRouter", "bias_update_rate": 0.001},
            "trained, expert biases move by 0.001 a step",
        ),
        ({"_target_": "megatron_ext.moe.policies.FrozenRouter"}, "frozen"),
        (
            {"_target_": "megatron_ext.moe.policies.FrozenRouter", "in_warm_start": True},
            "frozen, in the warm start too",
        ),
        ({"_target_": "megatron_ext.moe.structured.StructuredRouter"}, "structured"),
        (
            {
                "_target_": "megatron_ext.moe.structured.StructuredRouter",
                "consistency": 0.1,
                "entropy_low": 0,
                "entropy_high": 0.2,
                "bias_update_rate": 0.01,
            },
            "structured: consistency 0.1, while entropy is 0 to 0.2 nats, expert biases move by 0.01 a step",
        ),
        ({"_target_": "nowhere.any_more.Balanced", "x": 1}, "Balanced"),
    ],
)
def test_a_policy_in_a_line(node: dict[str, Any], line: str) -> None:
    config = Config()
    config.model.router = node
    assert routers_line(config) == line


def test_what_else_acts_on_routers_is_named() -> None:
    config = Config()
    config.rollout.replay_routing, config.model.aux_loss_coefficient = True, 0.01
    assert routers_line(config) == "trained, replayed, load-balancing loss 0.01"


def test_the_recipe_and_its_arms() -> None:
    said = {
        arm: routers_line(prepare([f"recipe=moe_expert_structuring/micro{arm}"])) for arm in ("", "_off", "_frozen")
    }
    assert said == {
        "": "structured: mutual information 0.1, consistency 0.1, pull selective, while entropy is 0 to 0.2 nats",
        "_off": "trained",
        "_frozen": "frozen",
    }
