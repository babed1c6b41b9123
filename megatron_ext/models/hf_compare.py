"""Where an HF configuration differs from another one, and from what Megatron was told and built.

Invariants (``tests/models/test_hf_compare.py``):

1. Every architecture field that differs is named, one line each; equal ones give no line.
2. What does not decide what the weights compute (special ids, initial values, longest text) is no difference.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron_ext.models.hf_config import HFConfig

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import TransformerConfig

# What two descriptions of one checkpoint may differ in: which ids mean what, how fresh weights are drawn, how long a
# text may be. The rest decides what the weights compute.
_NOT_ARCHITECTURE = ("bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "max_position_embeddings")


def differences(hf: HFConfig, other: HFConfig) -> list[str]:
    """Architecture fields in which two HF configurations differ, ``field: value and value``."""
    names = [field.name for field in dataclasses.fields(HFConfig) if field.name not in _NOT_ARCHITECTURE]
    pairs = {name: (getattr(hf, name), getattr(other, name)) for name in names}
    return [f"{name}: {ours!r} and {theirs!r}" for name, (ours, theirs) in pairs.items() if ours != theirs]


def compare(hf: HFConfig, config: TransformerConfig) -> list[str]:
    """Mismatches between the HF configuration and a Megatron one, one line a field; empty when they agree."""
    pattern = config.moe_layer_freq
    if isinstance(pattern, int):
        pattern = [int(i % pattern == 0) for i in range(config.num_layers)]
    if config.num_moe_experts is None:
        pattern = [0] * config.num_layers
    activation = getattr(config.activation_func, "__name__", str(config.activation_func))
    pairs: dict[str, tuple[object, object]] = {
        "num_layers": (hf.layers, config.num_layers),
        "hidden_size": (hf.hidden, config.hidden_size),
        "num_attention_heads": (hf.heads, config.num_attention_heads),
        "num_query_groups": (hf.kv_heads, config.num_query_groups),
        "kv_channels": (hf.head_dim, config.kv_channels),
        "ffn_hidden_size": (hf.intermediate, config.ffn_hidden_size),
        "layernorm_epsilon": (hf.rms_eps, config.layernorm_epsilon),
        "normalization": ("RMSNorm", config.normalization),
        "layernorm_zero_centered_gamma": (False, config.layernorm_zero_centered_gamma),
        "qk_layernorm": (hf.qk_norm != "none", config.qk_layernorm),
        "gated_linear_unit": (True, config.gated_linear_unit),
        "activation_func": ("silu", activation),
        "add_bias_linear": (False, config.add_bias_linear),
        "add_qkv_bias": (hf.qkv_bias, config.add_qkv_bias),
        "rotary_interleaved": (False, config.rotary_interleaved),
        "window_size": (None, config.window_size),
        "softmax_type": ("vanilla", config.softmax_type),
        "attention_dropout": (0.0, config.attention_dropout),
        "hidden_dropout": (0.0, config.hidden_dropout),
        "moe_layer_freq": ([int(moe) for moe in hf.moe_pattern], list(pattern)),
        "num_moe_experts": (hf.num_experts if any(hf.moe_pattern) else None, config.num_moe_experts),
        "multi_latent_attention": (False, config.multi_latent_attention),
        "mtp_num_layers": (None, config.mtp_num_layers or None),
    }
    if any(hf.moe_pattern):
        pairs |= {
            "moe_router_topk": (hf.top_k, config.moe_router_topk),
            "moe_ffn_hidden_size": (hf.moe_intermediate, config.moe_ffn_hidden_size),
            "moe_router_score_function": (hf.score_function, config.moe_router_score_function),
            # Softmax before top-k keeps raw probabilities; after top-k it is normalised over the chosen experts.
            "moe_router_pre_softmax": (not hf.norm_topk_prob, config.moe_router_pre_softmax),
            "moe_router_topk_scaling_factor": (hf.routed_scaling, config.moe_router_topk_scaling_factor or 1.0),
            "moe_router_num_groups": (hf.expert_groups, config.moe_router_num_groups or 1),
            "moe_router_group_topk": (hf.top_groups, config.moe_router_group_topk or 1),
            "moe_router_enable_expert_bias": (hf.expert_bias, config.moe_router_enable_expert_bias),
            "moe_shared_expert_intermediate_size": (
                hf.shared_intermediate,
                config.moe_shared_expert_intermediate_size or 0,
            ),
            "moe_expert_capacity_factor": (None, config.moe_expert_capacity_factor),
        }
    return [f"{name}: HF {want!r}, Megatron {got!r}" for name, (want, got) in pairs.items() if want != got]


def compare_model(hf: HFConfig, chunk: GPTModel) -> list[str]:
    """``compare`` plus what lives on the model itself: vocabulary, tied embeddings and the rotary base."""
    pairs: dict[str, tuple[object, object]] = {
        "vocab_size": (hf.vocab, chunk.vocab_rows.true),
        "share_embeddings_and_output_weights": (hf.tie_word_embeddings, chunk.share_embeddings_and_output_weights),
        "rotary_base": (hf.rope_theta, float(chunk.rotary_base)),
        "rotary_percent": (hf.rotary_share, float(chunk.rotary_percent)),
    }
    lines = [f"{name}: HF {want!r}, Megatron {got!r}" for name, (want, got) in pairs.items() if want != got]
    return compare(hf, chunk.config) + lines
