"""Invariants of ``megatron_ext/config/plug_points.py``."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_ext.config import plug_points
from tests.helpers.configs import HERE, config

SERVED = {
    "_target_": "megatron_ext.rewards.model_judge.ModelJudge",
    "base_url": "http://localhost:30000/v1",
    "model": "judge",
}
JUDGED = {
    "_target_": "megatron_ext.rewards.judge_reward.JudgeReward",
    "judge": SERVED,
    "labels": {"D": 0, "N": 1},
    "default": "N",
}
BAD: list[tuple[dict[str, Any], list[str]]] = [
    ({"harness": {}}, ["harness: needs _target_"]),
    ({"rollout__engine": {}}, ["rollout.engine: needs _target_"]),
    ({"tasks__source": {"a": {"_target_": f"{HERE}.Game"}}}, ["tasks.source: needs _target_"]),
    ({"harness": {"_target_": f"{HERE}.RefusingHarness"}}, ["harness: ", "RefusingHarness: never"]),
    ({"rewards": {"a": {"_target_": f"{HERE}.Anything", "cap": -1}}}, ["rewards.a.cap must be > 0"]),
    ({"rewards": {"a": {"_target_": f"{HERE}.Breaks"}}}, ["rewards.a: ZeroDivisionError"]),
    ({"rewards": {"a": JUDGED | {"info": ["goals", "score"]}}}, ["rewards.a: ", "'score'", "tells the outcome"]),
    ({"rewards": {"a": JUDGED | {"default": "X"}}}, ["rewards.a: ", "default names 'X'"]),
    ({"rewards": {"a": JUDGED | {"judge": SERVED | {"attempts": 0}}}}, ["rewards.a: ", "attempts=0"]),
    ({"rewards": {"a": JUDGED, "b": JUDGED}}, ["rewards.a and rewards.b both label turns as 'role'"]),
    ({"loss__terms": {"p": {"_target_": f"{HERE}.RefusingTerm", "order": 1}}}, ["loss.terms.p: ", "never"]),
    ({"tracking": {"w": {"_target_": f"{HERE}.RefusingTracker"}}}, ["tracking.w: ", "never"]),
    (
        {"loss__terms": {"p": {"_target_": "megatron_ext.losses.policy.GSPO"}}, "batch__tokens_per_row": 256},
        ["batch.tokens_per_row=256", "loss.terms.p", "granularity"],
    ),
    (
        {"credit__edits": {"a": {"_target_": f"{HERE}.Whitening"}, "b": {"_target_": f"{HERE}.Whitening"}}},
        ["a and b each set the scale"],
    ),
    (
        {
            "model__router": {"_target_": "megatron_ext.moe.policies.FrozenRouter", "in_warm_start": True},
            "warm_start__enabled": True,
            "warm_start__aux_loss_coefficient": 0.01,
        },
        ["warm_start.aux_loss_coefficient=0.01: the router policy", "FrozenRouter acts in the warm start too"],
    ),
    (
        {"model__router": {"_target_": f"{HERE}.ClosedRouter"}, "model__aux_loss_coefficient": 0.01},
        ["aux_loss_coefficient=0.01", "ClosedRouter"],
    ),
    (
        {"model__router": {"_target_": "tests.helpers.routing_policies.FrozenWithLoss"}},
        ["model.router=tests.helpers.routing_policies.FrozenWithLoss", "frozen", "a routing loss trains routers"],
    ),
    (
        {"model__router": {"_target_": "tests.helpers.routing_policies.HalfALoss"}},
        ["model.router: HalfALoss has a loss, and lacks detach_input", "PlainRoutingLoss"],
    ),
    (
        {
            "model__router": {"_target_": "megatron_ext.moe.policies.TrainedRouter", "bias_update_rate": 0.001},
            "loss__terms": {
                "p": {"_target_": "megatron_ext.losses.policy.ClipLoss"},
                "kl": {"_target_": "megatron_ext.losses.kl.KLToReference"},
            },
        },
        ["model.router.bias_update_rate=0.001", "loss.terms.kl", "reference policy"],
    ),
    (
        {"model__router": {"_target_": "megatron_ext.moe.structured.StructuredRouter", "entropy_low": -1}},
        ["model.router", "entropy_low=-1", "0 <= low <= high"],
    ),
    (
        {"model__router": {"_target_": "megatron_ext.moe.structured.StructuredRouter", "pull": "none"}},
        ["model.router", "pull=none", "selective, all, off"],
    ),
]


@pytest.mark.parametrize(("overrides", "words"), BAD)
def test_what_a_plug_point_refuses_is_one_line(overrides: dict[str, Any], words: list[str]) -> None:
    found = list(plug_points.problems(config(**overrides)))
    assert found and all("\n" not in line for line in found)
    for word in words:
        assert word in "\n".join(found)


def test_every_plug_point_that_refuses_is_named() -> None:
    terms, rewards = (
        {name: {"_target_": f"{HERE}.{what}"} for name in "abc"} for what in ("RefusingTerm", "RefusingReward")
    )
    found = list(plug_points.problems(config(loss__terms=terms, rewards=rewards)))
    assert len(found) == 6 and sum(line.startswith("loss.terms.") for line in found) == 3


def test_a_plug_point_says_all_that_it_refuses() -> None:  # invariant 1
    wrong = {"threshold": 1.5, "entropy_low": 0.5, "consistency": -1.0, "pull": "some", "operations": 0}
    wrong |= {"bias_update_rate": -1.0, "error_every": -2}
    target = "megatron_ext.moe.structured.StructuredRouter"
    found = list(plug_points.problems(config(model__router={"_target_": target, **wrong})))
    assert len(found) == len(wrong) and all(line.startswith(f"model.router: {target}: ") for line in found)
    for name, value in wrong.items():
        assert sum(f"{name}={value}" in line for line in found) == 1, name


def test_a_judge_is_checked_and_not_asked() -> None:
    assert list(plug_points.problems(config(rewards={"a": JUDGED, "b": JUDGED | {"label": "kind"}}))) == []


def test_one_edit_may_set_the_scale() -> None:
    edits = {"a": {"_target_": f"{HERE}.Whitening", "order": 2}, "b": {"_target_": f"{HERE}.Keeping"}}
    assert list(plug_points.problems(config(credit__edits=edits))) == []
