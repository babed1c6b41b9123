"""Random tiny checkpoints of every family, as ``transformers`` makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from megatron_ext.models.families import FAMILIES

SIZES: dict[str, Any] = {
    "vocab_size": 109,  # no multiple of anything: Megatron's rows are padded
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "rope_theta": 10000.0,
    "num_experts_per_tok": 2,
    "initializer_range": 0.15,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
QWEN: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 48,
    "num_experts": 4,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
GLM: dict[str, Any] = {
    **SIZES,
    "intermediate_size": 48,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 0,
}
MINIMAX: dict[str, Any] = {**SIZES, "intermediate_size": 24, "num_local_experts": 4, "rotary_dim": 4}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3_moe": ("Qwen3Moe", QWEN),
    "qwen3_moe_tied": ("Qwen3Moe", QWEN | {"tie_word_embeddings": True}),
    # GLM-4.5-Air: biases of q, k and v, half of a head turned, no norm of q and k, a dense layer first.
    "glm4_moe": ("Glm4Moe", GLM | {"attention_bias": True}),
    # GLM-4.5 has q and k norms; DeepSeek-V3's router chooses groups first and scales its weights.
    "glm4_moe_groups": (
        "Glm4Moe",
        GLM
        | {
            "use_qk_norm": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 4,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 2.5,
            "n_shared_experts": 2,
        },
    ),
    "minimax_m2": ("MiniMaxM2", MINIMAX),
}


def config_of(kind: str) -> dict[str, Any]:
    """The ``config.json`` of a kind, with no more than it has to say."""
    family = next(name for name in sorted(FAMILIES, key=len, reverse=True) if kind.startswith(name))
    return {"model_type": family, "architectures": [FAMILIES[family].architecture], **KINDS[kind][1]}


def random_hf(kind: str, seed: int = 5) -> torch.nn.Module:
    """A model in eval mode; its routers choose with random biases where the family has any."""
    import transformers

    family, fields = KINDS[kind]
    torch.manual_seed(seed)
    config = getattr(transformers, f"{family}Config")(**fields)
    model: torch.nn.Module = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("norm.weight", "layernorm.weight", "bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


def saved_hf(kind: str, folder: Path, seed: int = 5) -> torch.nn.Module:
    """The same, also written to ``folder``."""
    model: Any = random_hf(kind, seed)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def token_logp(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """log p(id_t | ids before t) for t >= 1, float64 [n - 1]."""
    logp = model(ids[None]).logits[0].double().log_softmax(-1)
    return logp[:-1].gather(1, ids[1:, None])[:, 0]
