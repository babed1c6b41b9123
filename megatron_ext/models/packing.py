"""Packed sequences: where each token of a packed micro-batch sits, computed once and used by every layer.

A packed micro-batch is ``T`` tokens of ``S`` sequences laid end to end, ``cu_seqlens`` [S + 1]. Attention over many
short sequences is fast when sequences of similar length are stacked to [B, Tmax] and attended to in one call; the plan
of that stacking belongs to the micro-batch, not to the layer.

Invariants (``tests/models/test_packing.py``):

1. Every token of the pack lies in exactly one bucket at exactly one place; ``flat`` lists the buckets' rows by token.
2. Positions restart at 0 with every sequence.
3. Within a bucket the padding is at the end of each row, so that a causal mask alone keeps it from valid tokens.
4. Sequences that begin alike may pass what they share once (``SharedTokens``): the forward then works on the distinct
   tokens alone, and ``distinct`` says which of them stands at each place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.models import cpu_platform
from megatron_ext.models.tree_attention import TreePlan, plan_tree
from megatron_ext.trajectory.prefix_tree import PrefixTree

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.packed_seq_params import PackedSeqParams

# A bucket ends where a row would be padded by more than this share of its longest row (and more than a few tokens):
# wasted projections are linear in the padding, a further call costs about as much as a few hundred padded tokens.
_WASTE = 0.15
_WASTE_TOKENS = 8


@dataclass(frozen=True)
class Bucket:
    """``rows`` sequences stacked to ``width``; its padded rows are ``start .. start + rows * width`` of the gather.

    ``view`` is the first token when the bucket is a plain view of the pack (equal lengths, adjacent sequences), or -1.
    """

    rows: int
    width: int
    start: int
    view: int


@dataclass(frozen=True)
class AttentionPlan:
    """``gather`` int64 [P]: the token of each padded place (padding repeats its sequence's last token); ``flat`` int64
    [T]: the padded place of each token; ``positions`` int64 [T]: position of each token in its sequence."""

    tokens: int
    buckets: tuple[Bucket, ...]
    gather: torch.Tensor
    flat: torch.Tensor
    positions: torch.Tensor

    @property
    def is_view(self) -> bool:
        """Whether stacking needs no copy at all."""
        return len(self.buckets) == 1 and self.buckets[0].view == 0


@dataclass(frozen=True, eq=False)
class SharedTokens:
    """The pack's T places as a prefix tree of U distinct tokens: equal ids behind equal prefixes are one token.

    ``distinct`` int64 [T]: the distinct token, 0 to U - 1, of each place; ``positions`` int64 [U]. ``parent`` and
    ``until`` int64 [U] say who sees whom, as in ``PrefixTree``.
    """

    distinct: torch.Tensor
    positions: torch.Tensor
    parent: NDArray[np.int64]
    until: NDArray[np.int64]

    @staticmethod
    def of(tree: PrefixTree) -> SharedTokens:
        """Of the tree of the pack's sequences, in the pack's order."""
        distinct, positions = (torch.from_numpy(x.copy()) for x in (tree.flat, tree.positions))
        return SharedTokens(distinct, positions, tree.parent, tree.until)

    @property
    def tokens(self) -> int:
        """Distinct tokens U."""
        return len(self.parent)

    @cached_property
    def plan(self) -> TreePlan:
        """Where the tree's tokens meet as queries and keys on a CPU; every forward over the micro-batch uses it."""
        return plan_tree(self.parent)

    def to(self, device: torch.device) -> SharedTokens:
        return SharedTokens(self.distinct.to(device), self.positions.to(device), self.parent, self.until)

    def extended(self, tokens: int) -> SharedTokens:
        """With a sequence of ``tokens`` more places behind the others, each a token of its own."""
        more, first = torch.arange(tokens, device=self.distinct.device), self.tokens
        return SharedTokens(
            torch.cat([self.distinct, first + more]),
            torch.cat([self.positions, more]),
            np.concatenate([self.parent, [-1], np.arange(first, first + tokens - 1)]),
            np.concatenate([self.until, np.full(tokens, first + tokens)]),
        )


@dataclass
class PackedBatch(PackedSeqParams):
    """Megatron's packed-sequence parameters with the attention plan of the micro-batch: ``plan``, or ``shared`` where
    the forward carries the distinct tokens only. ``block_mask`` is kept by ``models.flex_attention``; ``run`` names the
    forward for who listens at the layers (``moe.tap.MicroRun``), recomputed ones included."""

    plan: AttentionPlan | None = None
    shared: SharedTokens | None = None
    lengths: tuple[int, ...] = ()
    rotary: dict[tuple[float, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    block_mask: object = None
    run: object = None


def plan_attention(lengths: Sequence[int], device: torch.device) -> AttentionPlan:
    """Buckets of similar length for sequences of ``lengths`` packed in this order. Empty sequences are allowed."""
    starts = [0]
    for n in lengths:
        starts.append(starts[-1] + n)
    order = sorted((i for i, n in enumerate(lengths) if n), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        longest = lengths[groups[-1][0]] if groups else -1
        if longest - lengths[i] <= max(_WASTE_TOKENS, _WASTE * longest) and groups:
            groups[-1].append(i)
        else:
            groups.append([i])
    buckets: list[Bucket] = []
    gathers: list[torch.Tensor] = []
    flat = torch.empty(starts[-1], dtype=torch.int64)
    positions = torch.empty(starts[-1], dtype=torch.int64)
    at = 0
    for group in groups:
        group.sort()
        width = max(lengths[i] for i in group)
        first = torch.tensor([starts[i] for i in group])[:, None]
        length = torch.tensor([lengths[i] for i in group])[:, None]
        column = torch.arange(width)[None]
        token = first + torch.minimum(column, length - 1)
        valid = column < length
        place = at + torch.arange(len(group) * width).view(len(group), width)
        flat[token[valid]] = place[valid]
        positions[token[valid]] = column.expand_as(valid)[valid]
        gathers.append(token.flatten())
        adjacent = bool(valid.all()) and all(b == a + 1 for a, b in zip(group, group[1:], strict=False))
        buckets.append(Bucket(len(group), width, at, starts[group[0]] if adjacent else -1))
        at += len(group) * width
    gather = torch.cat(gathers) if gathers else torch.empty(0, dtype=torch.int64)
    return AttentionPlan(starts[-1], tuple(buckets), gather.to(device), flat.to(device), positions.to(device))


def pack(cu_seqlens: torch.Tensor, shared: SharedTokens | None = None) -> PackedBatch:
    """Packed-sequence parameters of a micro-batch, with its attention plan.

    ``cu_seqlens`` [S + 1] are the global offsets (under context parallelism each length is a multiple of twice its
    size, and a rank holds its zigzag share of every sequence). Make it once per micro-batch and pass it to every
    forward over that micro-batch: all layers share the plan.
    """
    offsets = cu_seqlens.tolist()
    lengths = tuple(b - a for a, b in zip(offsets, offsets[1:], strict=False))
    if not offsets or offsets[0] != 0 or any(n < 0 for n in lengths):
        raise ValueError(f"cu_seqlens must start at 0 and never fall; got {offsets[:8]}")
    if shared is not None and len(shared.distinct) != offsets[-1]:
        raise ValueError(f"shared tokens cover {len(shared.distinct)} places, the pack has {offsets[-1]}")
    cu = cu_seqlens.to(torch.int32)
    longest = max(lengths, default=0)
    return PackedBatch(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        plan=plan_attention(lengths, cu_seqlens.device) if shared is None else None,
        shared=shared,
        lengths=lengths,
    )
