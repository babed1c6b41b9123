from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.config.validate import problems
from megatron_ext.models.hf_config import HFConfig
from tests.helpers.configs import HERE, config

HF = HFConfig(
    family="qwen3_moe",
    vocab=1024,
    hidden=64,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=8,
    intermediate=256,
    max_position_embeddings=2048,
    rope_theta=10000.0,
    num_experts=8,
    top_k=2,
    moe_intermediate=64,
)
DENSE = replace(HF, family="qwen3", num_experts=0, top_k=0, moe_intermediate=0)


def test_a_good_configuration_has_no_problem() -> None:
    assert problems(config(), HF) == []
    assert problems(config(), None) == []
    layout = {"parallel__tensor": 2, "parallel__sequence": True, "parallel__pipeline": 2, "parallel__expert": 4}
    assert problems(config(**layout), HF, world_size=8) == []


TOOLS = "megatron_ext.harness.tools.ToolHarness"
SOME_OF_OTHERS: list[dict[str, Any]] = [  # of ranges and plug points, which have tests of their own
    {"run__steps": -1},
    {"optimizer__beta2": 1.0},
    {"run__seed": 2**40},
    {"optimizer__lr": float("inf")},
    {"harness": {}},
    {"rollout__engine": {}},
    {"rewards": {"a": {"_target_": f"{HERE}.Breaks"}}},
    {"tracking": {"w": {"_target_": f"{HERE}.RefusingTracker"}}},
    {"credit__edits": {name: {"_target_": f"{HERE}.Whitening"} for name in "ab"}},
    {"credit__edits": {"a": {"_target_": f"{HERE}.ReadsRoles"}}},
    {"credit__edits": {"a": {"_target_": f"{HERE}.ReadsAnswers"}}},
]
BAD: list[tuple[dict[str, Any], int, list[str]]] = [
    (
        {"parallel__tensor": 3, "parallel__sequence": True},
        3,
        ["8 attention heads", "4 key-value groups", "set model.vocab_multiple=24"],
    ),
    (
        {"parallel__tensor": 4, "parallel__sequence": True, "model__vocab_multiple": 2},
        4,
        ["model.vocab_multiple=2", "set model.vocab_multiple=4"],
    ),
    (
        {"parallel__tensor": 4, "parallel__sequence": True, "model__vocab_multiple": 18, "model__weights": "folder"},
        4,
        ["vocabulary of 1024 up to 1026 rows", "set model.vocab_multiple=36"],
    ),
    ({"parallel__tensor": 8, "parallel__sequence": True}, 8, ["4 key-value groups"]),
    ({"parallel__expert": 3}, 3, ["8 experts", "data-parallel ranks"]),
    ({"parallel__expert_tensor": 5}, 5, ["64 columns of an expert", "data-parallel ranks"]),
    ({"parallel__pipeline": 3}, 3, ["4 layers"]),
    ({"parallel__pipeline": 2, "parallel__virtual_pipeline": 4}, 2, ["2 x 4 = 8", "4 layers"]),
    ({"parallel__virtual_pipeline": 2}, 1, ["virtual_pipeline=2", "pipeline above 1"]),
    ({"parallel__tensor": 2}, 2, ["parallel.sequence=true"]),
    ({"run__deterministic": True, "backend__device": "cuda"}, 1, ["run.deterministic=true", "backend.device=cpu only"]),
    (
        {"run__deterministic": True, "rollout__engine": {"_target_": f"{HERE}.Game", "level": 1}},
        1,
        ["run.deterministic=true", "takes no batch_invariant"],
    ),
    ({"checkpoint__best": "eval/dev/greedy_pass"}, 1, ["checkpoint.best", "nearest"]),
    ({"profile__steps": [2]}, 1, ["profile.steps=[2]", "first and the last step"]),
    ({"profile__steps": [3, 2]}, 1, ["profile.steps=[3,2]", "must not come after"]),
    ({"profile__steps": [0, 2]}, 1, ["profile.steps=[0,2]", "count from 1"]),
    ({"profile__steps": [2, 101]}, 1, ["profile.steps=[2,101]", "step 100 (run.steps)"]),
    ({"checkpoint__best": "train/lr"}, 1, ["checkpoint.best=train/lr", "neither better nor worse"]),
    ({"parallel__sequence": True}, 1, ["parallel.sequence=true", "tensor above 1"]),
    ({"parallel__tensor": 2, "parallel__sequence": True}, 3, ["does not divide the 3 training ranks"]),
    ({"parallel__expert": 4}, 2, ["expert", "does not divide the 2 training ranks"]),
    ({"parallel__context": 2, "model__max_context": 510}, 2, ["multiple of 2 x parallel.context = 4"]),
    ({"batch__trajectories_per_task": 1}, 1, ["trajectories_per_task=1", "at least 2"]),
    ({"batch__optimizer_steps_per_batch": 3}, 1, ["16 x 8 = 128", "optimizer_steps_per_batch=3"]),
    ({}, 5, ["128", "5 data-parallel ranks"]),
    ({"tasks__train_tasks": 3}, 1, ["shorter than a step"]),
    ({"batch__tokens_per_microbatch": 100}, 1, ["tokens_per_microbatch=100", "512 tokens"]),
    ({"rollout__max_new_tokens": 512}, 1, ["max_new_tokens=512", "max_context=512"]),
    ({"harness": {"_target_": TOOLS, "context_budget": 512}}, 1, ["harness.context_budget=512", "max_context=512"]),
    ({"rollout__temperature": 0.0}, 1, ["temperature=0.0", "above 0"]),
    ({"rollout__temperature": float("nan")}, 1, ["temperature=nan"]),
    ({"rollout__top_p": 0.0}, 1, ["top_p"]),
    ({"model__max_context": 4096, "batch__tokens_per_microbatch": 4096}, 1, ["2048 positions"]),
    (
        {"batch__share_prefixes": True, "parallel__context": 2},
        2,
        ["batch.share_prefixes=true", "parallel.context=2 cuts rows over ranks"],
    ),
    (
        {"batch__share_prefixes": True, "model__aux_loss_coefficient": 0.01},
        1,
        ["batch.share_prefixes=true", "aux_loss_coefficient=0.01"],
    ),
    (
        {"batch__share_prefixes": True, "backend__layer_spec": "te"},
        1,
        ["batch.share_prefixes=true", "layer_spec=te is Transformer Engine", "layer_spec=local"],
    ),
    (
        {"batch__share_prefixes": True, "backend__device": "cuda"},
        1,
        ["batch.share_prefixes=true", "layer_spec=auto is Transformer Engine", "layer_spec=local"],
    ),
    ({"environments": {}}, 1, ["environments: none"]),
    ({"run__name": ""}, 1, ["run.name=''", "run.root"]),
    ({"run__name": "a/b"}, 1, ["run.name='a/b'"]),
    ({"run__name": ".."}, 1, ["run.name='..'"]),
    ({"tasks__environment": "gmae"}, 1, ["tasks.environment=gmae", "game"]),
    ({"rewards": {}}, 1, ["rewards: none"]),
    ({"loss__terms": {}}, 1, ["loss.terms: none"]),
    ({"tasks__test_tasks": 0}, 1, ["tasks.test_tasks=0"]),
    ({"tasks__dev_tasks": 0, "evaluation__every": 5}, 1, ["tasks.dev_tasks=0"]),
    ({"warm_start__enabled": True, "tasks__dev_tasks": 10}, 1, ["gate_tasks=64"]),
    ({"warm_start__enabled": True, "warm_start__max_epochs": 0.5}, 1, ["max_epochs=0.5"]),
    ({"rollout__replay_routing": True}, 1, ["replay_routing=true: nothing is recorded", "record_routing=true"]),
]


@pytest.mark.parametrize(("overrides", "world", "words"), BAD)
def test_an_impossible_combination_is_one_line(overrides: dict[str, Any], world: int, words: list[str]) -> None:
    found = problems(config(**overrides), HF, world)
    assert found and all("\n" not in line for line in found)
    for word in words:
        assert word in "\n".join(found)


def test_prefixes_may_be_shared_by_local_layers() -> None:
    for backend in ({"device": "cpu"}, {"device": "cuda", "layer_spec": "local"}):
        overrides = {f"backend__{key}": value for key, value in backend.items()}
        assert problems(config(batch__share_prefixes=True, **overrides), HF) == []


def test_single_mistakes_are_not_reported_twice() -> None:
    """Whichever of the three modules finds it."""
    cases = [overrides for overrides, world, _ in BAD if world == 1]
    once = [overrides for overrides in [*cases, *SOME_OF_OTHERS] if len(overrides) <= 1]
    assert [overrides for overrides in once if len(problems(config(**overrides), HF, 1)) != 1] == []


def test_all_problems_come_at_once() -> None:
    wrong = {"rollout__temperature": 0.0, "optimizer__name": "lion", "tasks__train_tasks": 3, "run__steps": -4}
    assert len(problems(config(**wrong), HF)) == 4


ROUTERS = "megatron_ext.moe.policies"
STRUCTURED = {"_target_": "megatron_ext.moe.structured.StructuredRouter"}
FOR_EXPERTS: list[tuple[dict[str, Any], str, str]] = [
    ({"parallel__expert": 2}, "parallel.expert=2", "parallel.expert=1"),
    ({"parallel__expert_tensor": 2}, "parallel.expert_tensor=2", "parallel.expert_tensor=1"),
    ({"model__aux_loss_coefficient": 0.1}, "model.aux_loss_coefficient=0.1", "model.aux_loss_coefficient=0"),
    ({"rollout__record_routing": True}, "rollout.record_routing=true", "rollout.record_routing=false"),
    ({"rollout__replay_routing": True}, "rollout.replay_routing=true", "rollout.replay_routing=false"),
    (
        {"rollout__replay_routing": True, "rollout__record_routing": True},
        "rollout.record_routing=true, rollout.replay_routing=true",
        "rollout.record_routing=false rollout.replay_routing=false",
    ),
    (
        {"warm_start__enabled": True, "warm_start__aux_loss_coefficient": 0.01},
        "warm_start.aux_loss_coefficient=0.01",
        "warm_start.aux_loss_coefficient=0",
    ),
    (
        {"model__router": {"_target_": f"{ROUTERS}.FrozenRouter"}},
        f"model.router={ROUTERS}.FrozenRouter",
        "model.router={}",
    ),
    ({"model__router": STRUCTURED}, f"model.router={STRUCTURED['_target_']}", "model.router={}"),
    (
        {"model__router": {"_target_": f"{ROUTERS}.TrainedRouter", "bias_update_rate": 0.001}},
        f"model.router={ROUTERS}.TrainedRouter",
        "model.router={}",
    ),
]


@pytest.mark.parametrize(("overrides", "said", "fix"), FOR_EXPERTS)
def test_what_is_for_experts_is_one_line_on_a_dense_model(overrides: dict[str, Any], said: str, fix: str) -> None:
    (line,) = problems(config(**overrides), DENSE, 2 if "parallel" in said else 1)
    assert line.startswith(f"{said}: the model has no experts (model_type qwen3); set {fix}, or ")
    assert "qwen3_moe" in line and "glm4_moe" in line and "minimax_m2" in line


def test_all_that_is_for_experts_is_one_line() -> None:
    """One cause, one line: with every key to set."""
    everything: dict[str, Any] = {}
    for overrides, _, _ in FOR_EXPERTS:
        everything |= overrides
    (line,) = problems(config(**everything), DENSE, 4)
    assert all(fix in line for _, _, fix in FOR_EXPERTS)


def test_a_dense_model_is_fine_as_it_is() -> None:
    assert problems(config(), DENSE) == []
    assert problems(config(parallel__tensor=2), DENSE, 2) == []  # sequence parallelism is the experts' demand
    for router in (
        {},
        {"_target_": f"{ROUTERS}.TrainedRouter"},
        {"_target_": f"{ROUTERS}.TrainedRouter", "bias_update_rate": 0},
    ):
        assert problems(config(model__router=router), DENSE) == []


def test_judging_changes_nothing() -> None:
    cfg = config(run__steps=-1)
    before = copy.deepcopy(cfg)
    problems(cfg, HF)
    assert cfg == before
