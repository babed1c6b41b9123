"""Causal attention over many short sequences on a CPU, in blocks of queries that skip the keys they may not see.

torch's CPU flash kernel works through the whole square of a short sequence. Here a block of queries meets only the
keys up to its own end: with four blocks 62 % of the square, forward and backward. The probabilities are kept for the
backward pass, so this is for short sequences (``MAX_LENGTH``); long ones are better served by the flash kernel.

Invariants (``tests/models/test_causal_cpu.py``):

1. Values and gradients are those of ``scaled_dot_product_attention(..., is_causal=True, enable_gqa=True)``.
2. Grouped-query heads are not repeated: the queries of a group are rows of one product with their common keys.
"""

from __future__ import annotations

from typing import Any

import torch

MAX_LENGTH = 512
_BLOCKS = 4
_MIN_BLOCK = 16


def _edges(length: int) -> list[int]:
    blocks = max(1, min(_BLOCKS, length // _MIN_BLOCK))
    return [length * i // blocks for i in range(blocks + 1)]


class _Causal(torch.autograd.Function):
    """q [N, G, T, d], k and v [N, T, d] -> [N, G, T, d]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
        n, groups, length, dim = q.shape
        edges = _edges(length)
        out, kept = torch.empty_like(q), []
        for start, end in zip(edges, edges[1:], strict=False):
            width = end - start
            rows = q[:, :, start:end].reshape(n, groups * width, dim)
            mask = q.new_zeros(width, end)
            mask[:, start:] = mask.new_full((width, width), -torch.inf).triu(1)
            scores = torch.baddbmm(mask.repeat(groups, 1)[None], rows, k[:, :end].transpose(1, 2), alpha=scale)
            probability = scores.softmax(-1)
            kept.append(probability)
            out[:, :, start:end] = torch.bmm(probability, v[:, :end]).view(n, groups, width, dim)
        ctx.save_for_backward(q, k, v, *kept)
        ctx.edges, ctx.scale = edges, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, None]:
        (grad,) = grads
        q, k, v, *kept = ctx.saved_tensors
        n, groups, length, dim = q.shape
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for probability, start, end in zip(kept, ctx.edges, ctx.edges[1:], strict=False):
            width = end - start
            above = grad[:, :, start:end].reshape(n, groups * width, dim)
            rows = q[:, :, start:end].reshape(n, groups * width, dim)
            dv[:, :end] += torch.bmm(probability.transpose(1, 2), above)
            inner = torch.bmm(above, v[:, :end].transpose(1, 2))
            # Gradient of the softmax: p * (g - sum(p * g)).
            inner = torch._softmax_backward_data(inner, probability, -1, probability.dtype)
            dq[:, :, start:end] = torch.bmm(inner, k[:, :end]).view(n, groups, width, dim)
            dk[:, :end] += torch.bmm(inner.transpose(1, 2), rows)
        return dq.mul_(ctx.scale), dk.mul_(ctx.scale), dv, None


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """``q`` [b, h, s, d], ``k`` and ``v`` [b, h_kv, s, d] (h a multiple of h_kv) -> [b, h, s, d]."""
    batch, heads, length, dim = q.shape
    kv = k.size(1)
    if heads % kv or length > MAX_LENGTH:
        raise ValueError(
            f"{heads} query heads over {kv} key heads, {length} tokens: need a multiple, at most {MAX_LENGTH}"
        )
    rows = q.reshape(batch * kv, heads // kv, length, dim)
    out = _Causal.apply(rows, k.reshape(batch * kv, length, dim), v.reshape(batch * kv, length, dim), scale)
    result: torch.Tensor = out.view(batch, heads, length, dim)
    return result
