"""Model FLOPs of forwards and backwards, from the HF configuration and what was run. Pure: no torch.

Counted are the matrix products that the model's definition asks for, a product of [m, k] and [k, n] as 2 m k n: the
projections of attention, the (query, key) pairs that a causal mask lets through, the chosen experts and the router, the
dense layers, the head. What an implementation adds (masked pairs of a rectangle, recomputation, padding) is not model
work, and elementwise operations, norms and the embedding are left out, so that a share of the machine's peak is never
flattered. https://arxiv.org/abs/2204.02311, appendix B, counts alike but for the causal mask, whose half it keeps.

Invariants (``tests/models/test_flops.py``):

1. The count equals one by hand, and torch's ``FlopCounterMode`` over the Megatron model, forward and backward, where
   the model's kernels run no masked pair.
2. It is linear in ``Work``: what was run in parts adds up, and tokens that rows share count once.
3. A backward is twice its forward (a gradient for each of a product's two sides).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_ext.models.hf_config import HFConfig


@dataclass(frozen=True)
class Work:
    """What forwards ran over: ``tokens`` through the layers, ``pairs`` of a query and a key that it attends to (itself
    included), ``predicted`` tokens that the head ran on."""

    tokens: int = 0
    pairs: int = 0
    predicted: int = 0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.pairs + other.pairs, self.predicted + other.predicted)


@dataclass(frozen=True)
class Passes:
    """Work of forwards, and that of backwards."""

    forward: Work = Work()
    backward: Work = Work()

    def __add__(self, other: Passes) -> Passes:
        return Passes(self.forward + other.forward, self.backward + other.backward)


def rows_work(lengths: ArrayLike, predicted: int | None = None) -> Work:
    """A forward over causal rows of ``lengths`` int [R]; the head on ``predicted`` tokens (None: on all)."""
    rows = np.asarray(lengths, dtype=np.int64)
    tokens = int(rows.sum())
    return Work(tokens, int((rows * (rows + 1) // 2).sum()), tokens if predicted is None else predicted)


def tree_work(positions: ArrayLike, predicted: int | None = None) -> Work:
    """A forward over distinct tokens of rows that share prefixes: ``positions`` int [U], each token's place in its rows
    (it attends to as many tokens, and to itself)."""
    depth = np.asarray(positions, dtype=np.int64)
    return Work(len(depth), int(depth.sum()) + len(depth), len(depth) if predicted is None else predicted)


def forward_flops(hf: HFConfig, work: Work) -> int:
    """FLOPs of the whole model over ``work``, however many ranks share it."""
    queries, keys = hf.heads * hf.head_dim, hf.kv_heads * hf.head_dim
    attention = hf.hidden * (queries + 2 * keys) + queries * hf.hidden
    per_token = hf.layers * attention + sum(_mlp(hf, moe) for moe in hf.moe_pattern)
    per_pair = hf.layers * 2 * queries  # its score, and its share of the output
    return 2 * (work.tokens * per_token + work.pairs * per_pair + work.predicted * hf.hidden * hf.vocab)


def _mlp(hf: HFConfig, moe: bool) -> int:
    """Multiplications a token: gate, up and down projections of the dense layer, or of chosen and shared experts."""
    if not moe:
        return 3 * hf.hidden * hf.intermediate
    return hf.hidden * hf.num_experts + (hf.top_k + hf.shared_experts) * 3 * hf.hidden * hf.moe_intermediate


def total_flops(hf: HFConfig, passes: Passes) -> int:
    """FLOPs of forwards and backwards. A frozen part of the model is counted as if it were trained."""
    return forward_flops(hf, passes.forward) + 2 * forward_flops(hf, passes.backward)


def added(parts: Iterable[Passes]) -> Passes:
    """The sum; of nothing, no work."""
    return sum(parts, Passes())
