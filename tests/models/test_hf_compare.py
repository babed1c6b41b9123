"""Invariants of ``models/hf_compare.py``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from megatron_ext.models.hf_compare import compare, compare_model, differences
from megatron_ext.models.hf_config import HFConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", 64),
        ("num_query_groups", 4),
        ("kv_channels", 8),
        ("ffn_hidden_size", 50),
        ("layernorm_epsilon", 1e-5),
        ("qk_layernorm", False),
        ("moe_router_topk", 3),
        ("moe_ffn_hidden_size", 20),
        ("moe_router_pre_softmax", True),
        ("moe_layer_freq", [1, 1, 1, 1]),
        ("add_qkv_bias", True),
        ("window_size", (8, 0)),
    ],
)
def test_compare_names_the_field(build: Any, moe: HFConfig, field: str, value: object) -> None:
    config = build(moe)[0].config
    assert compare(moe, config) == []
    setattr(config, field, value)
    lines = compare(moe, config)
    assert len(lines) == 1 and lines[0].startswith(f"{field}:")


def test_compare_model_sees_vocabulary_tying_and_rope(build: Any, moe: HFConfig) -> None:
    chunk = build(moe)[0]
    other = replace(moe, vocab=100, tie_word_embeddings=True, rope_theta=1e6)
    assert [line.split(":")[0] for line in compare_model(other, chunk)] == [
        "vocab_size",
        "share_embeddings_and_output_weights",
        "rotary_base",
    ]


def test_two_descriptions_of_one_architecture(moe: HFConfig) -> None:
    assert differences(moe, replace(moe, pad_token_id=3, initializer_range=0.1, max_position_embeddings=64)) == []
    assert differences(moe, replace(moe, top_k=3, rope_theta=5.0)) == ["rope_theta: 10000.0 and 5.0", "top_k: 2 and 3"]
