"""The tensors of an HF checkpoint: their names and shapes.

Invariants (``tests/models/test_hf_tensors.py``):

1. Names and shapes are those under which ``transformers`` saves a model of the same configuration.
2. They are a function of the HF configuration alone.
"""

from __future__ import annotations

from megatron_ext.models.families import DENSE, ExpertNames
from megatron_ext.models.hf_config import HFConfig


class WeightError(ValueError):
    """Weights that do not fit the model; one line per reason."""


def expert_names(hf: HFConfig) -> ExpertNames:
    """The names of a model's experts; those of a dense layer where it has none."""
    return hf.traits.experts or DENSE


def is_bias_of_router(name: str) -> bool:
    """Whether an HF tensor is a router's bias, which stays fp32 whatever the parameters are."""
    return name.endswith("e_score_correction_bias")


def is_next_token_module(name: str, hf: HFConfig) -> bool:
    """Whether an HF tensor belongs to a module behind the decoder that predicts several tokens ahead."""
    parts = name.split(".")
    behind = len(parts) > 2 and parts[:2] == ["model", "layers"] and parts[2].isdigit() and int(parts[2]) >= hf.layers
    return hf.traits.next_tokens and behind


def hf_shapes(hf: HFConfig) -> dict[str, tuple[int, ...]]:
    """HF name -> full shape of every tensor of the checkpoint, in the order of the model."""
    q, kv = hf.heads * hf.head_dim, hf.kv_heads * hf.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (hf.vocab, hf.hidden)}
    for i, moe in enumerate(hf.moe_pattern):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.input_layernorm.weight": (hf.hidden,),
            f"{at}.self_attn.q_proj.weight": (q, hf.hidden),
            f"{at}.self_attn.k_proj.weight": (kv, hf.hidden),
            f"{at}.self_attn.v_proj.weight": (kv, hf.hidden),
        }
        if hf.qkv_bias:
            shapes |= {f"{at}.self_attn.{n}_proj.bias": (size,) for n, size in (("q", q), ("k", kv), ("v", kv))}
        if hf.qk_norm != "none":
            sizes = (hf.head_dim, hf.head_dim) if hf.qk_norm == "head" else (q, kv)
            shapes |= {f"{at}.self_attn.{n}_norm.weight": (size,) for n, size in zip("qk", sizes, strict=True)}
        shapes |= {
            f"{at}.self_attn.o_proj.weight": (hf.hidden, q),
            f"{at}.post_attention_layernorm.weight": (hf.hidden,),
        }
        names = expert_names(hf) if moe else DENSE
        blocks, width = [f"{at}.mlp"], hf.intermediate
        if moe:
            moe_at = f"{at}.{names.block}"
            shapes[f"{moe_at}.gate.weight"] = (hf.num_experts, hf.hidden)
            if names.bias:
                shapes[f"{at}.{names.bias}"] = (hf.num_experts,)
            blocks, width = [f"{moe_at}.experts.{e}" for e in range(hf.num_experts)], hf.moe_intermediate
        widths = dict.fromkeys(blocks, width)
        if moe and hf.shared_experts:
            widths[f"{moe_at}.shared_experts"] = hf.shared_intermediate
        for block, width in widths.items():
            shapes[f"{block}.{names.gate}.weight"] = (width, hf.hidden)
            shapes[f"{block}.{names.up}.weight"] = (width, hf.hidden)
            shapes[f"{block}.{names.down}.weight"] = (hf.hidden, width)
    shapes["model.norm.weight"] = (hf.hidden,)
    if not hf.tie_word_embeddings:
        shapes["lm_head.weight"] = (hf.vocab, hf.hidden)
    return shapes
