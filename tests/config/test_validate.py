from __future__ import annotations

import copy
from typing import Any

import pytest
from omegaconf import OmegaConf

from megatron_ext.config.schema import Config, ModelConfig, RunConfig, TasksConfig
from megatron_ext.config.validate import AT_LEAST, CHOICES, problems

HERE = "tests.helpers.plug_points"
HF: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 4,
    "max_position_embeddings": 2048,
}


def config(**overrides: Any) -> Config:
    """A good configuration with values changed; a double underscore stands for a dot."""
    cfg = Config(
        recipe="alpha",
        run=RunConfig(name="x"),
        model=ModelConfig(hf_config="x"),
        tasks=TasksConfig(environment="game"),
        environments={"game": {"_target_": f"{HERE}.Game", "level": 1}},
    )
    for path, value in overrides.items():
        at: Any = cfg
        *above, last = path.split("__")
        for part in above:
            at = getattr(at, part)
        setattr(at, last, value)
    return cfg


def test_a_good_configuration_has_no_problem() -> None:
    assert problems(config(), HF) == []
    assert problems(config(), None) == []
    layout = {"parallel__tensor": 2, "parallel__sequence": True, "parallel__pipeline": 2, "parallel__expert": 4}
    assert problems(config(**layout), HF, world_size=8) == []


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
TOOLS = "megatron_ext.harness.tools.ToolHarness"
BAD: list[tuple[dict[str, Any], int, list[str]]] = [
    ({"parallel__tensor": 3, "parallel__sequence": True}, 3, ["8 attention heads", "4 key-value groups"]),
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
    ({"credit__filter__draw_limit": 0.5}, 1, ["draw_limit=0.5"]),
    ({"credit__std_ddof": 2}, 1, ["std_ddof=2"]),
    ({"tokenizer__vocab_size": 4096}, 1, ["vocab_size=4096", "2048"]),
    ({"tokenizer__vocab_size": 200}, 1, ["vocab_size=200"]),
    ({"run__steps": -1}, 1, ["run.steps=-1"]),
    ({"model__max_context": 4096, "batch__tokens_per_microbatch": 4096}, 1, ["2048 positions"]),
    ({"optimizer__schedule": "step"}, 1, ["optimizer.schedule=step", "constant, cosine, linear"]),
    ({"loss__aggregation": "mean"}, 1, ["token_mean, row_mean, session_mean, turn_mean, trajectory_mean, prompt_mean"]),
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
    ({"optimizer__beta2": 1.0}, 1, ["optimizer.beta2=1.0"]),
    ({"optimizer__lr": 0.0}, 1, ["optimizer.lr=0.0"]),
    ({"environments": {}}, 1, ["environments: none"]),
    ({"run__name": ""}, 1, ["run.name=''", "run.root"]),
    ({"run__name": "a/b"}, 1, ["run.name='a/b'"]),
    ({"run__name": ".."}, 1, ["run.name='..'"]),
    ({"run__seed": -1}, 1, ["run.seed=-1"]),
    ({"run__seed": 2**40}, 1, ["run.seed=1099511627776", "at most 4294967295"]),
    ({"optimizer__lr": float("inf")}, 1, ["optimizer.lr=inf", "finite"]),
    ({"rollout__temperature": float("inf")}, 1, ["rollout.temperature=inf", "finite"]),
    ({"model__embedding_std": 0.0}, 1, ["embedding_std=0.0"]),
    ({"harness": {}}, 1, ["harness: needs _target_"]),
    ({"rollout__engine": {}}, 1, ["rollout.engine: needs _target_"]),
    ({"tasks__source": {"a": {"_target_": f"{HERE}.Game"}}}, 1, ["tasks.source: needs _target_"]),
    ({"harness": {"_target_": f"{HERE}.Refuses"}}, 1, ["harness: ", "Refuses: never"]),
    ({"rewards": {"a": {"_target_": f"{HERE}.Anything", "cap": -1}}}, 1, ["rewards.a.cap must be > 0"]),
    ({"rewards": {"a": {"_target_": f"{HERE}.Breaks"}}}, 1, ["rewards.a: ZeroDivisionError"]),
    ({"rewards": {"a": JUDGED | {"info": ["goals", "score"]}}}, 1, ["rewards.a: ", "'score'", "tells the outcome"]),
    ({"rewards": {"a": JUDGED | {"default": "X"}}}, 1, ["rewards.a: ", "default names 'X'"]),
    ({"rewards": {"a": JUDGED | {"judge": SERVED | {"attempts": 0}}}}, 1, ["rewards.a: ", "attempts=0"]),
    ({"rewards": {"a": JUDGED, "b": JUDGED}}, 1, ["rewards.a and rewards.b both label turns as 'role'"]),
    ({"loss__terms": {"p": {"_target_": f"{HERE}.Refuses", "order": 1}}}, 1, ["loss.terms.p: ", "never"]),
    ({"tracking": {"w": {"_target_": f"{HERE}.Refuses"}}}, 1, ["tracking.w: ", "never"]),
    ({"tasks__environment": "gmae"}, 1, ["tasks.environment=gmae", "game"]),
    ({"rewards": {}}, 1, ["rewards: none"]),
    ({"loss__terms": {}}, 1, ["loss.terms: none"]),
    (
        {"loss__terms": {"p": {"_target_": "megatron_ext.losses.policy.GSPO"}}, "batch__tokens_per_row": 256},
        1,
        ["batch.tokens_per_row=256", "loss.terms.p", "granularity"],
    ),
    ({"tasks__test_tasks": 0}, 1, ["tasks.test_tasks=0"]),
    ({"tasks__dev_tasks": 0, "evaluation__every": 5}, 1, ["tasks.dev_tasks=0"]),
    ({"warm_start__enabled": True, "tasks__dev_tasks": 10}, 1, ["gate_tasks=64"]),
    ({"warm_start__enabled": True, "warm_start__max_epochs": 0.5}, 1, ["max_epochs=0.5"]),
    (
        {"credit__edits": {"a": {"_target_": f"{HERE}.Whitening"}, "b": {"_target_": f"{HERE}.Whitening"}}},
        1,
        ["a and b each set the scale"],
    ),
    ({"rollout__replay_routing": True}, 1, ["replay_routing=true: nothing is recorded", "record_routing=true"]),
    (
        {"rollout__replay_routing": True, "rollout__record_routing": True, "rollout__replay_missing": "guess"},
        1,
        ["replay_missing=guess", "error", "live"],
    ),
    (
        {
            "model__router": {"_target_": "megatron_ext.moe.policies.FrozenRouter", "in_warm_start": True},
            "warm_start__enabled": True,
            "warm_start__aux_loss_coefficient": 0.01,
        },
        1,
        ["warm_start.aux_loss_coefficient=0.01: model.router.in_warm_start=true keeps the auxiliary loss off"],
    ),
    (
        {"model__router": {"_target_": f"{HERE}.ClosedRouter"}, "model__aux_loss_coefficient": 0.01},
        1,
        ["aux_loss_coefficient=0.01", "ClosedRouter"],
    ),
    (
        {"model__router": {"_target_": "megatron_ext.moe.policies.FrozenRouter", "consistency": 0.01}},
        1,
        ["model.router", "frozen", "consistency=0.01", "StructuredRouter"],
    ),
    (
        {
            "model__router": {"_target_": "megatron_ext.moe.policies.TrainedRouter", "bias_update_rate": 0.001},
            "loss__terms": {
                "p": {"_target_": "megatron_ext.losses.policy.ClipLoss"},
                "kl": {"_target_": "megatron_ext.losses.kl.KLToReference"},
            },
        },
        1,
        ["model.router.bias_update_rate=0.001", "loss.terms.kl", "reference policy"],
    ),
    (
        {"model__router": {"_target_": "megatron_ext.moe.structured.StructuredRouter", "pull": "none"}},
        1,
        ["model.router", "pull=none", "selective, all, off"],
    ),
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
    once = [case for case in BAD if len(case[0]) <= 1 and case[1] == 1]
    assert [c[0] for c in once if len(problems(config(**c[0]), HF, 1)) != 1] == []


def test_all_problems_come_at_once() -> None:
    wrong = {"rollout__temperature": 0.0, "optimizer__name": "lion", "tasks__train_tasks": 3, "run__steps": -4}
    assert len(problems(config(**wrong), HF)) == 4


def test_every_plug_point_that_refuses_is_named() -> None:
    terms = {name: {"_target_": f"{HERE}.Refuses"} for name in "abc"}
    found = problems(config(loss__terms=terms, rewards=terms), HF)
    assert len(found) == 6 and sum(line.startswith("loss.terms.") for line in found) == 3


def test_a_judge_is_checked_and_not_asked() -> None:
    assert problems(config(rewards={"a": JUDGED, "b": JUDGED | {"label": "kind"}}), HF) == []


def test_one_edit_may_set_the_scale() -> None:
    edits = {"a": {"_target_": f"{HERE}.Whitening", "order": 2}, "b": {"_target_": f"{HERE}.Keeping"}}
    assert problems(config(credit__edits=edits), HF) == []


def test_a_dense_model_has_no_experts() -> None:
    dense = {key: value for key, value in HF.items() if key not in ("num_experts", "moe_intermediate_size")}
    dense["intermediate_size"] = 256
    assert problems(config(), dense) == []
    assert problems(config(parallel__tensor=2), dense, 2) == []  # sequence parallelism is the experts' demand
    assert "no experts" in problems(config(parallel__expert=2), dense, 2)[0]
    assert "no experts" in problems(config(model__aux_loss_coefficient=0.1), dense)[0]
    assert "no routing to record" in problems(config(rollout__record_routing=True), dense)[0]


def test_judging_changes_nothing() -> None:
    cfg, hf = config(run__steps=-1), dict(HF)
    before = copy.deepcopy(cfg)
    problems(cfg, hf)
    assert cfg == before and hf == HF


def test_the_tables_name_keys_of_the_schema() -> None:
    schema = OmegaConf.structured(Config)
    for path in [*CHOICES, *AT_LEAST]:
        assert OmegaConf.select(schema, path, throw_on_missing=False) is not None
    for path, allowed in CHOICES.items():
        assert OmegaConf.select(schema, path) in allowed
