"""What the engine must know of a model: its HF configuration and the tensors it expects. No torch here.

Invariants (``tests/rollout/test_embedded_weights.py``):

1. ``weight_shapes`` lists every tensor of the HF checkpoint once, with its shape, and nothing else.
2. A configuration that the engine would compute differently from ``transformers`` is an ``EngineError``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_ext.models.hf_config import HFConfig, HFConfigError, from_dict
from megatron_ext.rollout.engine import EngineError


def read_config(hf_config: Mapping[str, Any], max_context: int) -> HFConfig:
    """The architecture behind the dict of a ``config.json``, checked against the context that will be served."""
    try:
        config = from_dict(hf_config, "embedded engine: hf_config")
    except HFConfigError as error:
        raise EngineError(str(error)) from None
    if not 2 <= max_context <= config.max_position_embeddings:
        raise EngineError(
            f"embedded engine: max_context {max_context} must lie in 2..{config.max_position_embeddings} "
            "(max_position_embeddings of the HF config)"
        )
    return config


def weight_shapes(config: HFConfig) -> dict[str, tuple[int, ...]]:
    """HF name -> shape of every tensor of the checkpoint (experts one by one, as HF files keep them)."""
    h, d = config.hidden, config.head_dim
    out: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab, h), "model.norm.weight": (h,)}
    if not config.tie_word_embeddings:
        out["lm_head.weight"] = (config.vocab, h)
    for layer, moe in enumerate(config.moe_pattern):
        at = f"model.layers.{layer}"
        out[f"{at}.input_layernorm.weight"] = (h,)
        out[f"{at}.post_attention_layernorm.weight"] = (h,)
        out[f"{at}.self_attn.q_proj.weight"] = (config.heads * d, h)
        out[f"{at}.self_attn.k_proj.weight"] = (config.kv_heads * d, h)
        out[f"{at}.self_attn.v_proj.weight"] = (config.kv_heads * d, h)
        out[f"{at}.self_attn.o_proj.weight"] = (h, config.heads * d)
        out[f"{at}.self_attn.q_norm.weight"] = (d,)
        out[f"{at}.self_attn.k_norm.weight"] = (d,)
        blocks, width = [f"{at}.mlp"], config.intermediate
        if moe:
            out[f"{at}.mlp.gate.weight"] = (config.num_experts, h)
            blocks, width = [f"{at}.mlp.experts.{e}" for e in range(config.num_experts)], config.moe_intermediate
        for block in blocks:
            out[f"{block}.gate_proj.weight"] = (width, h)
            out[f"{block}.up_proj.weight"] = (width, h)
            out[f"{block}.down_proj.weight"] = (h, width)
    return out
