"""Attention over a prefix tree on a CPU: every distinct token is a query once and sees exactly its root path.

Depth first, the tokens that a row adds to the rows before it are one contiguous *run*; the run's keys are its prefix
(the path to the token it hangs on) and itself, causally. Runs of similar shape are stacked, prefixes padded at the
front and runs at the end, so that one rectangle with a causal end serves all; ``models.causal_cpu`` works on it in
slices. One softmax covers prefix and run together, so nothing has to be merged afterwards.

Invariants (``tests/models/test_tree_attention.py``):

1. Outputs and gradients are those of every row attended to alone; a shared token's gradient is the sum over its rows.
2. Each token is a query of exactly one run, and a run's keys are its root path (``PrefixTree.allowed``).
3. Padding reaches no valid token, forward or backward, and is bounded: a run joins a stack only while the padding costs
   less than a call of its own.
4. Memory is linear in the tokens of the rows: keys are gathered slice by slice, no mask has queries x keys entries, and
   probabilities are kept where there are at most ``causal_cpu.MAX_LENGTH`` keys, else computed again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.models.causal_cpu import Slice, slice_size

Ints = NDArray[np.int64]

# A stack of its own costs a run about as much as this many padded (query, key) pairs.
_CALL_PAIRS = 2**13
_NOTHING: Ints = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class Stack:
    """N runs of at most n queries behind prefixes of at most A keys, as tree tokens, -1 where there is padding.

    ``query`` int64 [N, n], padded at the end; ``key`` int64 [N, A + n], prefixes padded in front, runs at the end.
    """

    query: Ints
    key: Ints

    def parts(self, tokens: int, heads: int, groups: int, dtype: torch.dtype) -> Iterator[Part]:
        """In slices; ``heads`` key heads with ``groups`` query heads each."""
        queries, prefix = self.query.shape[1], self.key.shape[1] - self.query.shape[1]
        runs = max(1, slice_size(queries, prefix, groups) // heads)
        head = np.arange(heads)[None, :, None]
        for first in range(0, len(self.query), runs):
            query, key = self.query[first : first + runs], self.key[first : first + runs]
            padded = np.broadcast_to((query < 0)[:, None], (len(query), heads, queries))
            # Padding repeats some token: its outputs are dropped, its keys hidden.
            rows = np.where(query < 0, query[:, :1], query)[:, None] * heads + head
            hidden = key[:, :prefix] < 0
            hidden = hidden[:, : int(hidden.sum(1).max(initial=0))]
            bias = torch.from_numpy(np.where(hidden, -np.inf, 0.0)).to(dtype) if hidden.size else None
            yield Part(
                Slice(queries, prefix, groups, None if bias is None else bias.repeat_interleave(heads, 0)[:, None]),
                torch.from_numpy(rows.reshape(-1)),
                torch.from_numpy(np.where(padded, tokens * heads, rows).reshape(-1)),
                torch.from_numpy((np.maximum(key, 0)[:, None] * heads + head).reshape(-1)),
                torch.from_numpy(np.flatnonzero(padded)),
            )


@dataclass(frozen=True, eq=False)
class Part:
    """One slice of a stack: which rows of [U * heads, ...] it reads and writes, int64.

    ``query`` [B * n] and ``key`` [B * (A + n)] are read; ``target`` [B * n] is ``query`` with padding sent to row
    U * heads, which nothing reads; ``padding`` lists the padded queries of ``query``.
    """

    work: Slice
    query: torch.Tensor
    target: torch.Tensor
    key: torch.Tensor
    padding: torch.Tensor


@dataclass(frozen=True, eq=False)
class TreePlan:
    """Where each of ``tokens`` tree tokens is a query and a key; made once a micro-batch, used by every layer."""

    tokens: int
    stacks: tuple[Stack, ...]
    _parts: dict[tuple[int, int, torch.dtype], tuple[Part, ...]] = field(default_factory=dict)

    def parts(self, heads: int, groups: int, dtype: torch.dtype) -> tuple[Part, ...]:
        """The work for ``heads`` key heads with ``groups`` query heads each."""
        at = (heads, groups, dtype)
        if at not in self._parts:
            self._parts[at] = tuple(part for stack in self.stacks for part in stack.parts(self.tokens, *at))
        return self._parts[at]


def plan_tree(parent: Ints) -> TreePlan:
    """The plan of a tree in depth-first order: ``parent`` int64 [U] is the token before each one, -1 at a root."""
    size = len(parent)
    if not size:
        return TreePlan(0, ())
    begins = np.union1d([0], np.flatnonzero(parent != np.arange(-1, size - 1)))
    ends = np.append(begins[1:], size)
    paths: list[Ints] = []  # of each run: its prefix and itself
    lengths: list[tuple[int, int]] = []  # tokens of its own, tokens of its prefix
    stem = (np.searchsorted(begins, parent[begins], side="right") - 1).tolist()  # the run that each one hangs on
    for begin, end, before, run in zip(begins.tolist(), ends.tolist(), parent[begins].tolist(), stem, strict=True):
        prefix = paths[run][: lengths[run][1] + before + 1 - int(begins[run])] if before >= 0 else _NOTHING
        paths.append(np.concatenate([prefix, np.arange(begin, end)]))
        lengths.append((end - begin, len(prefix)))
    return TreePlan(size, tuple(_stack(paths, lengths, group) for group in _grouped(lengths)))


def _pairs(count: int, queries: int, prefix: int) -> float:
    """(query, key) pairs of a stack, half of those of a causal square."""
    return count * queries * (prefix + queries / 2)


def _grouped(lengths: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Runs of similar shape, as lists of their numbers: the cheaper of two greedy passes."""
    best: tuple[float, list[list[int]]] | None = None
    for order in (lambda run: lengths[run], lambda run: lengths[run][::-1]):
        groups: list[list[int]] = []
        total, held = 0.0, (0, 0)
        for run in sorted(range(len(lengths)), key=order, reverse=True):
            queries, prefix = lengths[run]
            both = max(queries, held[0]), max(prefix, held[1])
            count = len(groups[-1]) if groups else 0
            joined = _pairs(count + 1, *both) - _pairs(count, *held)
            alone = _pairs(1, queries, prefix) + _CALL_PAIRS
            if groups and joined <= alone:
                groups[-1].append(run)
                held = both
            else:
                groups.append([run])
                held = lengths[run]
            total += min(joined, alone) if groups else alone
        if best is None or total < best[0]:
            best = total, groups
    return [] if best is None else best[1]


def _stack(paths: Sequence[Ints], lengths: Sequence[tuple[int, int]], group: Sequence[int]) -> Stack:
    group = sorted(group)
    queries, prefix = (max(lengths[run][at] for run in group) for at in (0, 1))
    query = np.full((len(group), queries), -1, dtype=np.int64)
    key = np.full((len(group), prefix + queries), -1, dtype=np.int64)
    for row, run in enumerate(group):
        own, before = lengths[run]
        query[row, :own] = paths[run][before:]
        key[row, prefix - before : prefix + own] = paths[run]
    return Stack(query, key)


class _TreeAttention(torch.autograd.Function):
    """q [U, h, d], k and v [U, h_kv, d] -> [U, h, d]. Products are in fp32 where the tensors are in less."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TreePlan, scale: float
    ) -> torch.Tensor:
        rows = _Rows(q, k, v, plan, scale)
        out, kept = rows.new_queries(q.dtype), []
        for part in rows.parts:
            values, probabilities = part.work.forward(*rows.read(part), keep=any(ctx.needs_input_grad))
            out.index_copy_(0, part.target, values.view(len(part.target), -1).to(q.dtype))
            kept += probabilities
        ctx.save_for_backward(q, k, v, *kept)
        ctx.plan, ctx.scale = plan, scale
        return out[:-1].view(q.shape)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, *probabilities = ctx.saved_tensors
        rows, kept = _Rows(q, k, v, ctx.plan, ctx.scale), iter(probabilities)
        above = grads[0].reshape(rows.q.shape)
        dq = rows.new_queries(q.dtype)
        dk, dv = (torch.zeros_like(x, dtype=rows.dtype) for x in (rows.k, rows.v))
        for part in rows.parts:
            mine = above.index_select(0, part.query).index_fill_(0, part.padding, 0.0)
            part_q, part_k, part_v = part.work.backward(*rows.read(part), rows.stacked(mine, part), kept)
            dq.index_copy_(0, part.target, part_q.mul_(ctx.scale).view(len(part.target), -1).to(q.dtype))
            dk.index_add_(0, part.key, part_k.view(-1, dk.size(1)))
            dv.index_add_(0, part.key, part_v.view(-1, dv.size(1)))
        return dq[:-1].view(q.shape), dk.view(k.shape).to(k.dtype), dv.view(v.shape).to(v.dtype), None, None


class _Rows:
    """The tensors of a call as rows of [U * h_kv, ...]: a row of queries holds the heads that share a key head."""

    def __init__(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TreePlan, scale: float) -> None:
        heads, self.dim = k.shape[1:]
        groups = q.size(1) // heads
        self.dtype = torch.promote_types(q.dtype, torch.float32)
        self.scale = scale
        self.q = q.reshape(-1, groups * self.dim)
        self.k, self.v = k.reshape(-1, self.dim), v.reshape(-1, self.dim)
        self.parts = plan.parts(heads, groups, self.dtype)

    def new_queries(self, dtype: torch.dtype) -> torch.Tensor:
        """Rows for what belongs to the queries, and one more for their padding."""
        return self.q.new_empty(len(self.q) + 1, self.q.size(1), dtype=dtype)

    def stacked(self, rows: torch.Tensor, part: Part) -> torch.Tensor:
        """Query rows [B * n, groups * d] as [B, n * groups, d]."""
        return rows.to(self.dtype).view(-1, part.work.queries * part.work.groups, self.dim)

    def read(self, part: Part) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What ``Slice`` takes: q (scaled), k and v of the part."""
        q = self.stacked(self.q.index_select(0, part.query), part).mul_(self.scale)
        shape = (-1, part.work.prefix + part.work.queries, self.dim)
        k, v = (x.index_select(0, part.key).to(self.dtype).view(shape) for x in (self.k, self.v))
        return q, k, v


def tree_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: TreePlan, scale: float) -> torch.Tensor:
    """``q`` [U, h, d], ``k`` and ``v`` [U, h_kv, d] (h a multiple of h_kv) of the tree's tokens -> [U, h, d]."""
    if len(q) != plan.tokens or q.size(1) % k.size(1):
        raise ValueError(
            f"the tree has {plan.tokens} tokens, the forward {len(q)}; {q.size(1)} query heads over {k.size(1)}"
        )
    out: torch.Tensor = _TreeAttention.apply(q, k, v, plan, scale)
    return out
