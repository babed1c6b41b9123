"""Causal attention on a CPU in blocks of queries that skip the keys they may not see, behind a prefix that all may see.

torch's CPU flash kernel works through the whole square of a short sequence. Here a block of queries meets only the
keys up to its own end: with four blocks 62 % of the square, forward and backward. Work goes through in slices small
enough for the processor's cache. ``models.tree_attention`` runs on the same slices, with a prefix.

Invariants (``tests/models/test_causal_cpu.py``):

1. Values and gradients are those of ``scaled_dot_product_attention(..., is_causal=True, enable_gqa=True)``.
2. Grouped-query heads are not repeated: the queries of a group are rows of one product with their common keys.
3. Probabilities are kept for the backward pass where there are at most ``MAX_LENGTH`` keys, and computed again where
   there are more: what is kept is linear in the queries, and so is what one block needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

MAX_LENGTH = 512
_BLOCKS = 4
_MIN_BLOCK, _MAX_BLOCK = 16, 128
_BLOCK_SCORES = 2**22  # of one key head; blocks of long sequences get narrower to stay below
_SLICE_SCORES = 2**18  # of one product: 1 MiB in fp32


@dataclass(frozen=True)
class Slice:
    """Sequences that are worked on together: ``queries`` behind ``prefix`` keys that they all see, then a key of each.

    Tensors are q [B, queries * groups, d], already scaled, the ``groups`` heads of a query side by side; k and v
    [B, prefix + queries, d]. ``bias`` [B, 1, n] is added to the scores of the first n keys: -inf hides padding.
    """

    queries: int
    prefix: int
    groups: int
    bias: torch.Tensor | None = None

    @property
    def keeps(self) -> bool:
        """Whether the forward's probabilities are kept for the backward."""
        return self.prefix + self.queries <= MAX_LENGTH

    def blocks(self) -> Iterator[tuple[int, int]]:
        """First and last query (exclusive) of each block."""
        narrow = _BLOCK_SCORES // (self.groups * (self.prefix + self.queries))
        width = max(_MIN_BLOCK, min(_MAX_BLOCK, narrow))
        count = max(1, min(_BLOCKS, self.queries // _MIN_BLOCK), -(-self.queries // width))
        edges = [self.queries * i // count for i in range(count + 1)]
        return zip(edges, edges[1:], strict=False)

    def probabilities(self, q: torch.Tensor, k: torch.Tensor, start: int, end: int) -> torch.Tensor:
        """[B, (end - start) * groups, prefix + end] of one block of queries."""
        scores = torch.bmm(q[:, start * self.groups : end * self.groups], k[:, : self.prefix + end].transpose(1, 2))
        above = scores.new_full((end - start, end - start), -torch.inf).triu_(1)
        scores[:, :, self.prefix + start :] += above.repeat_interleave(self.groups, 0)
        if self.bias is not None:
            scores[:, :, : self.bias.size(-1)] += self.bias
        return torch.softmax(scores, -1, out=scores)

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, keep: bool
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Output, shaped as q, and with ``keep`` the blocks' probabilities, as far as they are kept at all."""
        out, kept = torch.empty_like(q), []
        for start, end in self.blocks():
            probability = self.probabilities(q, k, start, end)
            out[:, start * self.groups : end * self.groups] = torch.bmm(probability, v[:, : self.prefix + end])
            if keep and self.keeps:
                kept.append(probability)
        return out, kept

    def backward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad: torch.Tensor, kept: Iterator[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Gradients of q (as it came: scaled), k and v. ``kept`` yields what ``forward`` kept."""
        dq, dk, dv = torch.empty_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for start, end in self.blocks():
            probability = next(kept) if self.keeps else self.probabilities(q, k, start, end)
            rows, keys = slice(start * self.groups, end * self.groups), self.prefix + end
            above = grad[:, rows]
            dv[:, :keys] += torch.bmm(probability.transpose(1, 2), above)
            inner = torch.bmm(above, v[:, :keys].transpose(1, 2))
            # Gradient of the softmax: p * (g - sum(p * g)).
            torch._softmax_backward_data(inner, probability, -1, inner.dtype, grad_input=inner)
            dq[:, rows] = torch.bmm(inner, k[:, :keys])
            dk[:, :keys] += torch.bmm(inner.transpose(1, 2), q[:, rows])
        return dq, dk, dv


def slice_size(queries: int, prefix: int, groups: int) -> int:
    """Sequences (times key heads) of one slice: what its largest block of scores leaves room for."""
    widest = max(end - start for start, end in Slice(queries, prefix, groups).blocks())
    return max(1, _SLICE_SCORES // (groups * widest * (prefix + queries)))


class _Causal(torch.autograd.Function):
    """q [N, T * G, d], k and v [N, T, d] -> [N, T * G, d]."""

    @staticmethod
    def forward(ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ctx.slice = Slice(k.size(1), 0, q.size(1) // k.size(1))
        size = slice_size(k.size(1), 0, ctx.slice.groups)
        keep = any(ctx.needs_input_grad)
        parts = [ctx.slice.forward(*part, keep=keep) for part in zip(*(x.split(size) for x in (q, k, v)), strict=True)]
        ctx.save_for_backward(q, k, v, *(p for _, kept in parts for p in kept))
        ctx.size = size
        return torch.cat([out for out, _ in parts])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        q, k, v, *probabilities = ctx.saved_tensors
        kept = iter(probabilities)
        parts = zip(*(x.split(ctx.size) for x in (q, k, v, grads[0])), strict=True)
        dq, dk, dv = zip(*(ctx.slice.backward(*part, kept) for part in parts), strict=True)
        return torch.cat(dq), torch.cat(dk), torch.cat(dv)


def causal_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """``q`` [b, h, s, d], ``k`` and ``v`` [b, h_kv, s, d] (h a multiple of h_kv) -> [b, h, s, d]."""
    batch, heads, length, dim = q.shape
    kv = k.size(1)
    if heads % kv or length > MAX_LENGTH:
        raise ValueError(
            f"{heads} query heads over {kv} key heads, {length} tokens: need a multiple, at most {MAX_LENGTH}"
        )
    groups = heads // kv
    rows = (q * scale).view(batch, kv, groups, length, dim).transpose(2, 3).reshape(batch * kv, length * groups, dim)
    out = _Causal.apply(rows, k.reshape(batch * kv, length, dim), v.reshape(batch * kv, length, dim))
    result: torch.Tensor = out.view(batch, kv, length, groups, dim).transpose(2, 3).reshape(batch, heads, length, dim)
    return result
