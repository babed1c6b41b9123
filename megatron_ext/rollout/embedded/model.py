"""The decoder in inference layout: embedding -> (attention, mixture or dense feed-forward) x layers -> logits.

Invariants (``tests/rollout/test_embedded_model.py``):

1. Log-probs equal those of transformers' models of the family to 1e-5 in fp32, however the tokens are cut into prefill
   chunks and decode steps, and the experts chosen are the same.
2. The router's scores, top-k and renormalisation, all norms and the logits are fp32.
3. Under ``arithmetic.INVARIANT`` a token's logits depend on the tokens before it alone, bit for bit.
4. With bfloat16 weights every product but the router's and the head's has bfloat16 factors and a bfloat16 result; the
   residual stream, cached keys and values and what attention makes of them are bfloat16 values. 2 holds all the same.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.embedded.arithmetic import FAST, Arithmetic
from megatron_ext.rollout.embedded.cache import Attention
from megatron_ext.rollout.embedded.weights import LayerWeights, ModelWeights

# Multiply-adds of one layer below which a forward runs on one CPU thread. Measured on two cores: at 10 M (64 tokens of
# a model of width 128) a second thread gains 20 % on an idle machine, and costs a factor of 10 and more as soon as
# another process takes a share of one core, because every small operation ends in a barrier.
THREADED_WORK = 100_000_000


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, fp32."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
    power = norm.square_().div_(x.shape[-1]).add_(eps)
    return (x * power.rsqrt_()).mul_(weight)


class Decoder:
    """Forward passes over packed tokens; holds the weights and the rotary table, no request state.

    ``threads``: CPU threads of a large forward; small ones take one, and so do all under invariant arithmetic. It sets
    the thread count of the process.
    """

    def __init__(
        self,
        config: HFConfig,
        weights: ModelWeights,
        max_context: int,
        device: torch.device,
        threads: int,
        arithmetic: Arithmetic = FAST,
    ) -> None:
        self.config, self.weights = config, weights
        self._arithmetic, self._threads = arithmetic, 1 if arithmetic.invariant else threads
        attention = 2 * (config.heads + config.kv_heads) * config.head_dim
        ffn = config.top_k * config.moe_intermediate if any(config.moe_pattern) else config.intermediate
        self._work = config.hidden * (attention + 3 * ffn)  # multiply-adds of one token in one layer
        turned = config.rotary_dim or config.head_dim
        exponent = torch.arange(0, turned, 2, dtype=torch.float32, device=device) / turned
        angle = torch.outer(torch.arange(max_context, device=device).float(), 1.0 / config.rope_theta**exponent)
        angle = F.pad(angle, (0, (config.head_dim - turned) // 2))  # the rest of a head does not turn
        self._rotation = torch.polar(torch.ones_like(angle), angle)[:, None]  # [context, 1, D/2] complex

    def forward(
        self, ids: torch.Tensor, attention: Attention, last: torch.Tensor | None, record: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Runs N packed tokens.

        Args:
            ids: int64 [N].
            attention: their places in the cache, which receives their keys and values.
            last: int64 [B], the tokens whose logits are wanted; None wants all.
            record: return the experts too.

        Returns:
            logits float32 [B, V]; experts int64 [N, MoE layers, k] or None.
        """
        g, w, a = self.config, self.weights, self._arithmetic
        torch.set_num_threads(self._threads if self._work * len(ids) >= THREADED_WORK else 1)
        rotation = self._rotation[attention.positions]
        x = F.embedding(ids, w.embed).to(w.dtype)
        routed: list[torch.Tensor] = []
        for index, layer in enumerate(w.layers):
            context = self._attention(index, layer, x, rotation, attention)
            if last is not None and not record and index == g.layers - 1:
                # Only the cache needs the other tokens of the last layer, and it has them.
                context, x, last = context[last], x[last], None
            x = a.add_product(x, context, layer.out)
            h = rms_norm(x, layer.ffn_norm, g.rms_eps).to(w.dtype)
            if layer.router is None:
                gate, up = a.product(h, layer.up[0]).chunk(2, dim=-1)
                x = a.add_product(x, a.gated(gate, up), layer.down[0])
                continue
            weight, expert = self._route(h.float(), layer.router, layer.bias)
            if record:
                routed.append(expert)
            x = x + mixture(h, weight, expert, layer.up, layer.down, a)
            if layer.shared_up is not None and layer.shared_down is not None:
                gate, up = a.product(h, layer.shared_up).chunk(2, dim=-1)
                x = a.add_product(x, a.gated(gate, up), layer.shared_down)
        if last is not None:
            x = x[last]
        logits = a.product(rms_norm(x, w.norm, g.rms_eps).to(w.dtype).float(), w.head)
        return logits, torch.stack(routed, dim=1) if record else None

    def _attention(
        self, index: int, layer: LayerWeights, x: torch.Tensor, rotation: torch.Tensor, attention: Attention
    ) -> torch.Tensor:
        g, dtype = self.config, self.weights.dtype
        a = self._arithmetic
        qkv = a.product(rms_norm(x, layer.norm, g.rms_eps).to(dtype), layer.qkv)
        if layer.qkv_bias is not None:
            qkv = qkv + layer.qkv_bias
        qkv = qkv.view(len(x), -1, g.head_dim)
        turned = g.heads + g.kv_heads
        qk = a.rotated(self._normed(qkv[:, :turned], layer.qk_norm), rotation).to(dtype).float()
        # Scores and their softmax are fp32, as in the attention kernels of engines.
        context = attention.attend(index, qk[:, : g.heads], qk[:, g.heads :], qkv[:, turned:].float())
        return context.to(dtype)

    def _normed(self, qk: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """q and k [N, heads + kv_heads, D] under the model's norm, q scaled."""
        g = self.config
        if g.qk_norm == "head":
            return rms_norm(qk, weight, g.rms_eps)
        if g.qk_norm == "none":
            return qk * weight
        parts = [
            rms_norm(part.flatten(1), weights.flatten(), g.rms_eps)
            for part, weights in zip(
                qk.split([g.heads, g.kv_heads], 1), weight.split([g.heads, g.kv_heads]), strict=True
            )
        ]
        return torch.cat(parts, dim=1).view(qk.shape)

    def _route(
        self, h: torch.Tensor, router: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Weights float32 [N, k] and experts int64 [N, k] of the model's router."""
        g = self.config
        logits = self._arithmetic.product(h, router)
        if g.score_function == "softmax":
            weight, expert = logits.softmax(-1).topk(g.top_k, dim=-1)
            if g.norm_topk_prob:
                weight = weight / weight.sum(-1, keepdim=True)
            return weight, expert
        scores = logits.sigmoid()
        choice = scores if bias is None else scores + bias
        if g.expert_groups > 1:
            grouped = choice.view(len(h), g.expert_groups, -1)
            best = grouped.topk(2, dim=-1).values.sum(-1).topk(g.top_groups, dim=-1).indices
            closed = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, best, False)
            choice = grouped.masked_fill(closed[..., None], float("-inf")).view(choice.shape)
        expert = choice.topk(g.top_k, dim=-1).indices
        weight = scores.gather(1, expert)
        return weight / (weight.sum(-1, keepdim=True) + 1e-20) * g.routed_scaling, expert


def mixture(
    h: torch.Tensor,
    weight: torch.Tensor,
    expert: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    arithmetic: Arithmetic = FAST,
) -> torch.Tensor:
    """Sum over the chosen experts, [N, H]: assignments are sorted by expert, so that each expert is one product.

    Measured on one CPU thread (8 experts, top 2, 128 x 128) against every expert on every token as one wide product:
    even at 1 token, 1.3 x faster at 4 to 16, 2.7 x at 128, and the gap widens with the number of experts.
    """
    tokens, k = expert.shape
    flat = expert.reshape(-1)
    order = flat.argsort(stable=True)
    counts = torch.bincount(flat, minlength=len(up)).tolist()
    x = h.index_select(0, order // k if k > 1 else order)
    width = down.shape[1]
    wide, out = h.new_empty(len(flat), 2 * width), h.new_empty(len(flat), h.shape[1])
    start, spans = 0, []
    for index, count in enumerate(counts):
        if count:
            spans.append((index, slice(start, start + count)))
            start += count
    for index, span in spans:
        arithmetic.product_into(wide[span], x[span], up[index])
    inner = arithmetic.gated(wide[:, :width], wide[:, width:]).mul_(weight.reshape(-1)[order, None])
    for index, span in spans:
        arithmetic.product_into(out[span], inner[span], down[index])
    # Back in token order the k contributions of a token are neighbours: summed in a fixed order, no atomics.
    back = torch.empty_like(out).index_copy_(0, order, out)
    return back.view(tokens, k, -1).sum(1) if k > 1 else back
