"""Every family of models composes with what there is for experts, and its own sizes are what a layout must divide."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest

from launch.prepare import prepare
from megatron_ext.config.compose import compose
from megatron_ext.config.schema import Config
from megatron_ext.config.validate import problems
from megatron_ext.models.families import FAMILIES
from megatron_ext.models.hf_config import HFConfig, from_dict, load_hf_config
from tests.helpers.hf_models import KINDS, config_of

MOE = [kind for kind in KINDS if not kind.endswith("tied")]
FROZEN = "model.router={_target_: megatron_ext.moe.policies.FrozenRouter}"
REPLAY = ("rollout.record_routing=true", "rollout.replay_routing=true")
STRUCTURED = "moe_expert_structuring/micro"
GOOD: list[tuple[str, tuple[str, ...], int]] = [
    ("quickstart", (), 1),
    ("quickstart", REPLAY, 1),
    ("quickstart", (FROZEN,), 1),
    ("quickstart", (FROZEN, *REPLAY), 1),
    (STRUCTURED, (), 1),
    (STRUCTURED, REPLAY, 1),
    ("quickstart", ("parallel.expert=2",), 2),
    ("quickstart", ("parallel.expert_tensor=2",), 2),
    ("quickstart", ("parallel.tensor=2", "parallel.sequence=true"), 2),
    (STRUCTURED, (*REPLAY, "parallel.tensor=2", "parallel.sequence=true", "parallel.expert=2"), 2),
    ("quickstart", (FROZEN, "parallel.expert=2", "parallel.expert_tensor=2"), 4),
]
EXPERTS = {"qwen3_moe": "num_experts", "glm4_moe": "n_routed_experts", "minimax_m2": "num_local_experts"}
COLUMNS = {"qwen3_moe": "moe_intermediate_size", "glm4_moe": "moe_intermediate_size", "minimax_m2": "intermediate_size"}
BIAS = "model.router={_target_: megatron_ext.moe.policies.TrainedRouter, bias_update_rate: 0.001}"


def model(kind: str, **fields: Any) -> HFConfig:
    return from_dict(config_of(kind) | {"max_position_embeddings": 4096} | fields)


@functools.cache
def composed(root: Path, recipe: str, overrides: tuple[str, ...]) -> Config:
    return compose([f"recipe={recipe}", *overrides], root / "recipes")


def found(root: Path, hf: HFConfig, recipe: str, overrides: tuple[str, ...], world: int = 1) -> list[str]:
    return problems(composed(root, recipe, overrides), hf, world)


def test_every_family_with_experts_is_here() -> None:
    assert {model(kind).family for kind in MOE} == {name for name, f in FAMILIES.items() if f.experts} == set(EXPERTS)


@pytest.mark.parametrize("kind", MOE)
@pytest.mark.parametrize(("recipe", "overrides", "world"), GOOD)
def test_what_there_is_for_experts_is_accepted(
    root: Path, kind: str, recipe: str, overrides: tuple[str, ...], world: int
) -> None:
    assert found(root, model(kind), recipe, overrides, world) == []


@pytest.mark.parametrize("kind", MOE)
def test_a_layout_must_divide_the_familys_own_sizes(root: Path, kind: str) -> None:
    hf = model(kind)
    (line,) = found(root, hf, "quickstart", ("parallel.expert=16",), 16)
    assert line == f"parallel.expert=16: does not divide the model's {hf.num_experts} experts ({EXPERTS[hf.family]})"
    (line,) = found(root, hf, "quickstart", ("parallel.expert_tensor=16",), 16)
    assert line.endswith(f"does not divide the model's 24 columns of an expert ({COLUMNS[hf.family]})")
    (line,) = found(root, hf, "quickstart", ("parallel.tensor=2",), 2)
    assert line.startswith("parallel.tensor=2: ") and line.endswith("needs parallel.sequence=true")


def test_what_tensor_parallelism_cuts_besides(root: Path) -> None:
    cut = ("parallel.tensor=2", "parallel.sequence=true")
    (line,) = found(root, model("glm4_moe", moe_intermediate_size=25), "quickstart", cut, 2)
    assert line == "parallel.tensor=2: does not divide the model's 25 columns of the shared experts (n_shared_experts)"
    (line,) = found(root, model("glm4_moe", intermediate_size=49), "quickstart", cut, 2)
    assert line == "parallel.tensor=2: does not divide the model's 49 columns of the MLP (intermediate_size)"
    assert found(root, model("glm4_moe", first_k_dense_replace=0, intermediate_size=49), "quickstart", cut, 2) == []


@pytest.mark.parametrize("kind", MOE)
def test_only_a_router_with_biases_can_move_them(root: Path, kind: str) -> None:
    hf, kl = model(kind), "loss.terms.kl={_target_: megatron_ext.losses.kl.KLToReference}"
    alone, beside_kl = found(root, hf, "quickstart", (BIAS,)), found(root, hf, "quickstart", (BIAS, kl))
    if hf.expert_bias:
        assert alone == [] and "the reference policy" in beside_kl[0] and len(beside_kl) == 1
    else:
        assert alone == beside_kl and len(alone) == 1
        assert alone[0].startswith("model.router.bias_update_rate=0.001: routers of qwen3_moe have no expert biases")
        assert "glm4_moe, minimax_m2" in alone[0]


@pytest.mark.parametrize("kind", MOE)
def test_the_command_line_takes_it(root: Path, tmp_path: Path, kind: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_of(kind) | {"max_position_embeddings": 4096}))
    cfg = prepare(["recipe=quickstart", f"model.hf_config={tmp_path}"], root / "recipes")
    assert load_hf_config(cfg.model.hf_config) == model(kind)


def test_a_model_without_a_layer_of_experts_is_dense(root: Path) -> None:
    hf = model("glm4_moe", first_k_dense_replace=4)
    (line,) = found(root, hf, "quickstart", ("parallel.expert=2",), 2)
    assert "parallel.expert=2" in line and "rollout.record_routing=true" in line and "no experts" in line
