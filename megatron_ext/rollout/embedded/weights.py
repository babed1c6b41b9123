"""Weights in inference layout, and the stage that fills them from (HF name, full tensor) pairs.

Invariants (``tests/rollout/test_embedded_model.py``):

1. A stage is complete when every HF weight came exactly once with its exact shape; a missing, unknown, repeated or
   misshapen one is an ``EngineError`` that names it.
2. Rows of q and k, and their norms, are permuted so that the two halves of a rotary pair lie side by side: rotation is
   then one complex product. Scores are unchanged, because q and k are permuted alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import hf_shapes
from megatron_ext.rollout.engine import EngineError


@dataclass
class LayerWeights:
    """One decoder layer, fp32, matrices stored input-major so that ``x @ w`` needs no transposition.

    ``qkv`` [H, (heads + 2 kv_heads) D]; ``qk_norm`` [heads + kv_heads, D], the query part already times D^-0.5;
    ``out`` [heads D, H]; ``router`` [H, E] or None; ``up`` [E, H, 2 F] (gate | up) and ``down`` [E, F, H], E = 1 in a
    dense layer.
    """

    norm: torch.Tensor
    qkv: torch.Tensor
    qk_norm: torch.Tensor
    out: torch.Tensor
    ffn_norm: torch.Tensor
    router: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor


@dataclass
class ModelWeights:
    """``embed`` [V, H], ``head`` [H, V] (a view of ``embed`` when tied), ``norm`` [H]."""

    embed: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: list[LayerWeights]


def pair_order(head_dim: int) -> torch.Tensor:
    """Permutation int64 [D] that puts rotary partners i and i + D/2 side by side."""
    return torch.arange(head_dim).view(2, head_dim // 2).t().reshape(-1)


class WeightStage:
    """Collects one publish. ``add`` each tensor, then ``finish``; the weights served before stay untouched."""

    def __init__(self, config: HFConfig, device: torch.device) -> None:
        self._config = g = config
        self._expected = hf_shapes(g)
        self._missing = set(self._expected)
        self._order = pair_order(g.head_dim)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        embed = empty(g.vocab, g.hidden)
        head = embed.t() if g.tie_word_embeddings else empty(g.vocab, g.hidden).t()
        layers = []
        for moe in g.moe_pattern:
            blocks, width = (g.num_experts, g.moe_intermediate) if moe else (1, g.intermediate)
            layers.append(
                LayerWeights(
                    norm=empty(g.hidden),
                    qkv=empty(g.hidden, (g.heads + 2 * g.kv_heads) * g.head_dim),
                    qk_norm=empty(g.heads + g.kv_heads, g.head_dim),
                    out=empty(g.heads * g.head_dim, g.hidden),
                    ffn_norm=empty(g.hidden),
                    router=empty(g.hidden, g.num_experts) if moe else None,
                    up=empty(blocks, g.hidden, 2 * width),
                    down=empty(blocks, width, g.hidden),
                )
            )
        self._weights = ModelWeights(embed, head, empty(g.hidden), layers)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one tensor, any float type, any device."""
        shape = self._expected.get(name)
        if shape is None:
            raise EngineError(f"publish: unknown weight {name!r} of shape {tuple(tensor.shape)}")
        if name not in self._missing:
            raise EngineError(f"publish: weight {name!r} came twice")
        if tuple(tensor.shape) != shape:
            raise EngineError(f"publish: weight {name!r} has shape {tuple(tensor.shape)}, the model needs {shape}")
        if not tensor.is_floating_point():
            raise EngineError(f"publish: weight {name!r} has type {tensor.dtype}, a float type is needed")
        self._place(name, tensor)
        self._missing.remove(name)

    def finish(self) -> ModelWeights:
        if self._missing:
            first = sorted(self._missing)[:3]
            raise EngineError(f"publish: {len(self._missing)} weight(s) missing: {', '.join(first)}")
        return self._weights

    def _place(self, name: str, tensor: torch.Tensor) -> None:
        w = self._weights
        parts = name.split(".")
        if parts[0] == "lm_head":
            w.head.t().copy_(tensor)
        elif parts[1] == "embed_tokens":
            w.embed.copy_(tensor)
        elif parts[1] == "norm":
            w.norm.copy_(tensor)
        else:
            layer, kind, leaf = w.layers[int(parts[2])], parts[3], parts[-2]
            if kind == "input_layernorm":
                layer.norm.copy_(tensor)
            elif kind == "post_attention_layernorm":
                layer.ffn_norm.copy_(tensor)
            elif kind == "self_attn":
                self._place_attention(layer, leaf, tensor)
            elif leaf == "gate":
                assert layer.router is not None
                layer.router.copy_(tensor.t())
            else:
                block = int(parts[5]) if len(parts) == 8 else 0
                width = layer.down.shape[1]
                if leaf == "down_proj":
                    layer.down[block].copy_(tensor.t())
                else:
                    half = slice(0, width) if leaf == "gate_proj" else slice(width, 2 * width)
                    layer.up[block, :, half].copy_(tensor.t())

    def _place_attention(self, layer: LayerWeights, leaf: str, tensor: torch.Tensor) -> None:
        g, d = self._config, self._config.head_dim
        q_end, k_end = g.heads * d, (g.heads + g.kv_heads) * d
        if leaf == "o_proj":
            layer.out.copy_(tensor.t())
        elif leaf == "q_norm":
            layer.qk_norm[: g.heads].copy_(tensor[self._order].float() * d**-0.5)
        elif leaf == "k_norm":
            layer.qk_norm[g.heads :].copy_(tensor[self._order])
        elif leaf == "v_proj":
            layer.qkv[:, k_end:].copy_(tensor.t())
        else:
            paired = tensor.view(-1, d, g.hidden)[:, self._order].reshape(-1, g.hidden)
            span = slice(0, q_end) if leaf == "q_proj" else slice(q_end, k_end)
            layer.qkv[:, span].copy_(paired.t())
