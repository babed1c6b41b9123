"""Invariants of ``models/families.py``; GLM-4.5 and MiniMax-M2: published configurations, what is refused, and biased
sigmoid routing in Megatron."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_ext.models.families import FAMILIES, REQUIRED
from megatron_ext.models.flops import Work, forward_flops
from megatron_ext.models.hf_compare import compare_model
from megatron_ext.models.hf_config import HFConfig, HFConfigError, from_dict, load_hf_config
from megatron_ext.models.hf_io import SafetensorsReader
from megatron_ext.models.hf_tensors import WeightError, hf_shapes
from tests.helpers.hf_models import KINDS, saved_hf

# The architecture fields of two published checkpoints.
GLM_45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": [151329, 151336, 151338],
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "pad_token_id": 151329,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "initializer_range": 0.02,
    "intermediate_size": 1536,
    "max_position_embeddings": 196608,
    "model_type": "minimax_m2",
    "num_attention_heads": 48,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 62,
    "num_key_value_heads": 8,
    "num_local_experts": 256,
    "qk_norm_type": "per_layer",
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000,
    "rotary_dim": 64,
    "router_jitter_noise": 0.0,
    "scoring_func": "sigmoid",
    "shared_intermediate_size": 0,
    "tie_word_embeddings": False,
    "use_qk_norm": True,
    "use_routing_bias": True,
    "vocab_size": 200064,
}


def parameters(hf: HFConfig) -> int:
    total = 0
    for shape in hf_shapes(hf).values():
        size = 1
        for n in shape:
            size *= n
        total += size
    return total


def test_no_other_file_names_a_family(root: Path) -> None:  # invariant 1
    sources = sorted((root / "megatron_ext").rglob("*.py"))
    quoted = re.compile("|".join(f"[\"']{name}[\"']" for name in FAMILIES))
    named = [file.name for file in sources if quoted.search(file.read_text(encoding="utf-8"))]
    assert named == ["families.py"]


def test_entries_lead_to_fields_and_back(moe: HFConfig, dense: HFConfig) -> None:  # invariant 2
    described = {hf.family: hf for hf in (moe, dense, from_dict(GLM_45_AIR), from_dict(MINIMAX_M2))}
    assert described.keys() == FAMILIES.keys()
    for name, hf in described.items():
        raw = hf.to_dict()
        for key in FAMILIES[name].keys:
            assert key.decode(raw[key.name]) == getattr(hf, key.field), key.name


@pytest.mark.parametrize("name", list(FAMILIES))
def test_whatever_else_an_entry_may_say_is_refused(name: str, moe: HFConfig, dense: HFConfig) -> None:  # invariant 3
    described = {hf.family: hf for hf in (moe, dense, from_dict(GLM_45_AIR), from_dict(MINIMAX_M2))}
    raw, family = described[name].to_dict(), FAMILIES[name]
    for key, accepted in family.only.items():
        with pytest.raises(HFConfigError, match=f"{key}='other' is not supported"):
            from_dict(raw | {key: "other"})
        assert key not in family.written or family.written[key] in accepted


def test_published_configurations() -> None:
    air, m2 = from_dict(GLM_45_AIR), from_dict(MINIMAX_M2)
    assert (air.qk_norm, air.qkv_bias, air.rotary_dim, air.shared_intermediate) == ("none", True, 64, 1408)
    assert air.moe_pattern == (False, *[True] * 45) and air.score_function == "sigmoid" and air.expert_bias
    assert 104e9 < parameters(air) < 109e9  # 106 billion by its name
    assert (m2.qk_norm, m2.qkv_bias, m2.rotary_dim, m2.shared_experts) == ("layer", False, 64, 0)
    assert all(m2.moe_pattern) and 226e9 < parameters(m2) < 232e9  # 230 billion
    active = forward_flops(m2, Work(1, 1, 1)) / 2
    assert 9e9 < active < 11e9  # about 10 billion of them for a token


@pytest.mark.parametrize("kind", list(KINDS))
def test_round_trip_through_transformers(kind: str, tmp_path: Path) -> None:
    saved_hf(kind, tmp_path / "model")
    hf = load_hf_config(tmp_path / "model")
    assert from_dict(hf.to_dict()) == hf
    from transformers import AutoConfig

    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "config.json").write_text(json.dumps(hf.to_dict()))
    AutoConfig.from_pretrained(tmp_path / "own").save_pretrained(tmp_path / "again")
    assert load_hf_config(tmp_path / "again") == hf


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_file_leaves_out_is_what_transformers_takes(name: str) -> None:
    from transformers import AutoConfig

    numbers = {key.name: 4 for key in FAMILIES[name].keys if key.default is REQUIRED and key.kind is int}
    flags = {key.name: True for key in FAMILIES[name].keys if key.default is REQUIRED and key.kind is bool}
    said = {**numbers, **flags, "model_type": name, "hidden_size": 64, "rope_theta": 10000.0}
    ours, filled = from_dict(said), AutoConfig.for_model(**said).to_dict()
    # Ids that say nothing about what is computed.
    theirs = from_dict(filled | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None})
    assert ours == theirs and ours.rms_eps == filled["rms_norm_eps"]


@pytest.mark.parametrize(
    ("raw", "change", "message"),
    [
        (GLM_45_AIR, {"norm_topk_prob": False}, "weights are normalised"),
        (GLM_45_AIR, {"num_experts_per_tok": 1}, "num_experts_per_tok 1: .* needs 2 or more"),
        (GLM_45_AIR, {"n_group": 8, "topk_group": 3}, "num_experts_per_tok 8 must be twice topk_group 3"),
        (
            *(GLM_45_AIR, {"n_group": 3, "topk_group": 4}),
            "topk_group 4 is more than n_group 3; n_routed_experts 128 is not a multiple of n_group 3$",
        ),
        (GLM_45_AIR, {"n_group": 4, "topk_group": 5}, "HF config: topk_group 5 is more than n_group 4$"),
        (GLM_45_AIR, {"topk_group": 2}, "topk_group 2 is more than n_group 1$"),
        (GLM_45_AIR, {"n_group": 128, "topk_group": 4}, "n_group 128 leaves groups of one of n_routed_experts 128"),
        (GLM_45_AIR, {"n_routed_experts": 8, "n_group": 8, "topk_group": 4}, "needs the two that it ranks by"),
        (GLM_45_AIR, {"n_group": 0}, "n_group 0 must be >= 1"),
        (GLM_45_AIR, {"first_k_dense_replace": 47}, r"first_k_dense_replace: layers \[46\] lie outside 0..45"),
        (MINIMAX_M2, {"num_local_experts": 4}, "num_experts_per_tok 8 is more than num_local_experts 4"),
        (GLM_45_AIR, {"partial_rotary_factor": 0.3}, "no whole number"),
        (GLM_45_AIR, {"partial_rotary_factor": 1.5}, "must be one share"),
        (GLM_45_AIR, {"rope_parameters": {"rope_theta": 1000000, "partial_rotary_factor": 0.25}}, "must be one share"),
        (GLM_45_AIR, {"rope_scaling": {"rope_type": "yarn"}}, "yarn"),
        (MINIMAX_M2, {"rotary_dim": 63}, "must be even"),
        (MINIMAX_M2, {"scoring_func": "softmax"}, "scoring_func"),
        (MINIMAX_M2, {"qk_norm_type": "per_head"}, "qk_norm_type"),
        (MINIMAX_M2, {"router_jitter_noise": 0.1}, "router_jitter_noise"),
        (MINIMAX_M2, {"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
        (MINIMAX_M2, {"num_local_experts": None}, "num_experts is missing"),
    ],
)
def test_what_would_be_computed_differently_is_refused(
    raw: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    with pytest.raises(HFConfigError, match=message):
        from_dict(raw | change)


def router_of(build: Callable[..., Any], hf: HFConfig, logits: torch.Tensor, bias: list[float]) -> Any:
    """Probabilities and map of the chosen experts [n, E] of the first router, whose logits are given."""
    (chunk,) = build(hf)
    assert not compare_model(hf, chunk)
    router = next(m for name, m in chunk.named_modules() if name.endswith(".router"))
    router.expert_bias.copy_(torch.tensor(bias))
    return router.routing(logits[:, None])


TINY_M2 = HFConfig(
    family="minimax_m2",
    vocab=96,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    intermediate=24,
    max_position_embeddings=128,
    rope_theta=10000.0,
    num_experts=4,
    top_k=2,
    moe_intermediate=24,
    norm_topk_prob=True,
    qk_norm="layer",
    rotary_dim=4,
)


def test_the_bias_chooses_and_does_not_weigh(build: Callable[..., Any]) -> None:
    """MiniMax-M2 (arXiv 2605.26494), section 2.2.1: logits 2, 1, .5, -1 and biases -.3, 0, .2, 0 choose experts 2 and
    1 instead of 0 and 1; their weights are the sigmoids alone, normalised."""
    logits = torch.tensor([[2.0, 1.0, 0.5, -1.0]])
    probs, chosen = router_of(build, TINY_M2, logits, [-0.3, 0.0, 0.2, 0.0])
    assert chosen.tolist() == [[False, True, True, False]]
    torch.testing.assert_close(probs[0], torch.tensor([0.0, 0.540117, 0.459883, 0.0]), atol=1e-6, rtol=0)
    torch.testing.assert_close(
        torch.sigmoid(logits[0]), torch.tensor([0.880797, 0.731059, 0.622459, 0.268941]), atol=1e-6, rtol=0
    )
    _, unbiased = router_of(build, TINY_M2, logits, [0.0] * 4)
    assert unbiased.tolist() == [[True, True, False, False]]


def test_groups_are_chosen_by_their_best_two(build: Callable[..., Any]) -> None:
    hf = replace(
        TINY_M2,
        family="glm4_moe",
        qk_norm="none",
        num_experts=8,
        top_k=4,
        expert_groups=4,
        top_groups=2,
        routed_scaling=2.5,
    )
    logits = torch.tensor([[3.0, -3.0, 1.0, 1.0, 0.9, 0.9, 2.0, -3.0]])
    probs, chosen = router_of(build, hf, logits, [0.0] * 8)
    # The sums of sigmoids of the groups are 1.00, 1.46, 1.42, 0.93: the single best expert is in none that is chosen.
    assert chosen.tolist() == [[False, False, True, True, True, True, False, False]]
    assert float(probs.sum()) == pytest.approx(2.5)


def test_gradient_of_the_router_passes_its_bias_by(build: Callable[..., Any]) -> None:
    logits = torch.randn(6, 4, generator=torch.Generator().manual_seed(0), requires_grad=True)
    probs, _ = router_of(build, TINY_M2, logits, [-0.3, 0.0, 0.2, 0.0])
    (probs * torch.arange(4.0)).sum().backward()
    assert logits.grad is not None and bool((logits.grad != 0).any())


def test_modules_that_predict_several_tokens_are_left_aside(tmp_path: Path) -> None:
    saved_hf("glm4_moe", tmp_path / "model")
    hf, file = load_hf_config(tmp_path / "model"), tmp_path / "model" / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {f"model.layers.{hf.layers}.eh_proj.weight": torch.zeros(2, 2)}, file)
    SafetensorsReader(tmp_path / "model").check(hf)
    save_file(tensors | {"model.layers.1.extra.weight": torch.zeros(2, 2)}, file)
    with pytest.raises(WeightError, match="extra.weight is not part of this model"):
        SafetensorsReader(tmp_path / "model").check(hf)


def test_fresh_biases_are_zero(build: Callable[..., Any]) -> None:
    hf = replace(TINY_M2, family="glm4_moe", qk_norm="none", qkv_bias=True, shared_experts=1, mlp_only_layers=(0,))
    (chunk,) = build(hf)
    tensors = dict(chunk.named_parameters()) | dict(chunk.named_buffers())
    biases = [tensor for name, tensor in tensors.items() if name.endswith("bias")]
    assert len(biases) == 3 and not any(tensor.any() for tensor in biases)
    assert all(bool((tensor == 1).all()) for name, tensor in tensors.items() if name.endswith("layernorm.weight"))
