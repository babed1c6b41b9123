"""Weights in inference layout, and the stage that fills them from (HF name, full tensor) pairs.

Invariants (``tests/rollout/test_embedded_model.py``):

1. A stage is complete when every HF weight came exactly once with its exact shape; a missing, unknown, repeated or
   misshapen one is an ``EngineError`` that names it.
2. Rows of q and k, their biases and norms, are permuted so that the two halves of a rotary pair lie side by side:
   rotation is then one complex product. Scores are unchanged, because q and k are permuted alike.
3. Every weight has the value that the stage's type gives it, but for the bias that a router chooses with; what fp32 is
   computed with (embedding and head, norms, router) is kept in fp32.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_tensors import expert_names, hf_shapes, is_bias_of_router
from megatron_ext.rollout.engine import EngineError


@dataclass
class LayerWeights:
    """One decoder layer, matrices stored input-major so that ``x @ w`` needs no transposition. Norms, router and its
    bias are fp32, the rest is of the stage's type.

    ``qkv`` [H, (heads + 2 kv_heads) D], ``qkv_bias`` of its columns or None; ``qk_norm`` [heads + kv_heads, D], the
    query part already times D^-0.5 (a model without these norms has ones); ``out`` [heads D, H]; ``router`` [H, E] or
    None, ``bias`` [E] that it chooses with or None; ``up`` [E, H, 2 F] (gate | up) and ``down`` [E, F, H], E = 1 in a
    dense layer; ``shared_up`` [H, 2 S] and ``shared_down`` [S, H] of what every token passes through besides, or None.
    """

    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor
    out: torch.Tensor
    ffn_norm: torch.Tensor
    router: torch.Tensor | None
    bias: torch.Tensor | None
    up: torch.Tensor
    down: torch.Tensor
    shared_up: torch.Tensor | None
    shared_down: torch.Tensor | None


@dataclass
class ModelWeights:
    """``embed`` [V, H], ``head`` [H, V] (a view of ``embed`` when tied), ``norm`` [H], fp32; ``dtype`` of matrices and
    activations in ``layers``."""

    embed: torch.Tensor
    head: torch.Tensor
    norm: torch.Tensor
    layers: list[LayerWeights]
    dtype: torch.dtype


def pair_order(head_dim: int, rotary_dim: int = 0) -> torch.Tensor:
    """Permutation int64 [D] that puts rotary partners i and i + r/2 side by side, of the first r values (0: of all)."""
    turned = rotary_dim or head_dim
    paired = torch.arange(turned).view(2, turned // 2).t().reshape(-1)
    return torch.cat([paired, torch.arange(turned, head_dim)])


class WeightStage:
    """Collects one publish. ``add`` each tensor, then ``finish``; the weights served before stay untouched.

    ``dtype`` float32 or bfloat16: of the matrices, and what every weight is rounded to.
    """

    def __init__(self, config: HFConfig, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._config, self._dtype = config, dtype
        g = config
        self._expected = hf_shapes(g)
        self._missing = set(self._expected)
        self._order = pair_order(g.head_dim, g.rotary_dim)
        self._names = expert_names(g)

        def empty(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=torch.float32, device=device)

        def matrix(*shape: int) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        embed = empty(g.vocab, g.hidden)
        head = embed.t() if g.tie_word_embeddings else empty(g.vocab, g.hidden).t()
        layers = []
        for moe in g.moe_pattern:
            blocks, width = (g.num_experts, g.moe_intermediate) if moe else (1, g.intermediate)
            shared = g.shared_intermediate if moe else 0
            layers.append(
                LayerWeights(
                    norm=empty(g.hidden),
                    qkv=matrix(g.hidden, (g.heads + 2 * g.kv_heads) * g.head_dim),
                    qkv_bias=matrix((g.heads + 2 * g.kv_heads) * g.head_dim) if g.qkv_bias else None,
                    qk_norm=self._norm_of_ones(device),
                    out=matrix(g.heads * g.head_dim, g.hidden),
                    ffn_norm=empty(g.hidden),
                    router=empty(g.hidden, g.num_experts) if moe else None,
                    bias=empty(g.num_experts) if moe and g.expert_bias else None,
                    up=matrix(blocks, g.hidden, 2 * width),
                    down=matrix(blocks, width, g.hidden),
                    shared_up=matrix(g.hidden, 2 * shared) if shared else None,
                    shared_down=matrix(shared, g.hidden) if shared else None,
                )
            )
        self._weights = ModelWeights(embed, head, empty(g.hidden), layers, dtype)

    def _norm_of_ones(self, device: torch.device) -> torch.Tensor:
        g = self._config
        ones = torch.ones(g.heads + g.kv_heads, g.head_dim, device=device)
        ones[: g.heads] *= g.head_dim**-0.5
        return ones

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
        # Engines keep the bias of a router's choice in fp32 whatever else they compute in.
        rounded = tensor if is_bias_of_router(name) else tensor.to(self._dtype)
        self._place(name, rounded)
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
            elif leaf == "gate" and parts[-1] == "weight":
                assert layer.router is not None
                layer.router.copy_(tensor.t())
            elif parts[-1] == "e_score_correction_bias":
                assert layer.bias is not None
                layer.bias.copy_(tensor)
            else:
                up, down = self._expert(layer, parts)
                width = down.shape[0]
                if leaf in (self._names.down, "down_proj"):
                    down.copy_(tensor.t())
                else:
                    half = slice(0, width) if leaf in (self._names.gate, "gate_proj") else slice(width, 2 * width)
                    up[:, half].copy_(tensor.t())

    @staticmethod
    def _expert(layer: LayerWeights, parts: list[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """The two matrices [H, 2 F] and [F, H] that a weight of a feed-forward block belongs to."""
        if "shared_experts" in parts:
            assert layer.shared_up is not None and layer.shared_down is not None
            return layer.shared_up, layer.shared_down
        block = int(parts[5]) if "experts" in parts else 0
        return layer.up[block], layer.down[block]

    def _place_attention(self, layer: LayerWeights, leaf: str, tensor: torch.Tensor) -> None:
        g, d = self._config, self._config.head_dim
        q_end, k_end = g.heads * d, (g.heads + g.kv_heads) * d
        if leaf == "o_proj":
            layer.out.copy_(tensor.t())
        elif leaf in ("q_norm", "k_norm"):
            rows = slice(0, g.heads) if leaf == "q_norm" else slice(g.heads, None)
            scale = d**-0.5 if leaf == "q_norm" else 1.0
            layer.qk_norm[rows].copy_(tensor.view(-1, d)[:, self._order].float() * scale)
        else:
            span = {"q_proj": slice(0, q_end), "k_proj": slice(q_end, k_end), "v_proj": slice(k_end, None)}[leaf]
            order = torch.arange(d) if leaf == "v_proj" else self._order
            if tensor.ndim == 1:
                assert layer.qkv_bias is not None
                layer.qkv_bias[span].copy_(tensor.view(-1, d)[:, order].reshape(-1))
            else:
                layer.qkv[:, span].copy_(tensor.view(-1, d, g.hidden)[:, order].reshape(-1, g.hidden).t())
