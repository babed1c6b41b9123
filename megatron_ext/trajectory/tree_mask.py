"""The attention mask of a prefix tree in the forms that kernels take: rectangles, and ranges of blocks.

Invariants (``tests/trajectory/test_tree_mask.py`` asserts each):

1. The rectangles of either form cover each allowed (query, key) pair exactly once and no other pair; a causal one is
   square and covers its lower triangle.
2. Sizes depend on nodes and blocks: two rectangles a node by keys, one a node and unmerged ancestor by queries.
3. A block pair is skipped, full or partial exactly as the mask says.

A FlexAttention ``mask_mod`` needs ``PrefixTree.until`` alone: ``(k <= q) & (q < until[k])``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.packing import PackingError
from megatron_ext.trajectory.prefix_tree import Ints, PrefixTree


@dataclass(frozen=True, eq=False)
class Rectangles:
    """Z rectangles: queries ``query[z, 0] .. query[z, 1] - 1`` by keys ``key[z, 0] .. key[z, 1] - 1`` (int64 [Z, 2]),
    whole, or their lower triangle where ``causal`` (bool [Z])."""

    query: Ints
    key: Ints
    causal: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.causal)

    @property
    def pairs(self) -> int:
        """(query, key) pairs covered."""
        q, k = np.diff(self.query)[:, 0], np.diff(self.key)[:, 0]
        return int(np.where(self.causal, q * (q + 1) // 2, q * k).sum())


def key_rectangles(tree: PrefixTree) -> Rectangles:
    """By keys: a node attends itself causally, and all of its descendants, which follow it, attend the whole of it."""
    start, end = tree.node_start[:-1], tree.node_start[1:]
    last = tree.until[start]
    inner = last > end
    own = np.stack([start, end], axis=1)
    below = np.stack([end, last], axis=1)[inner]
    causal = np.arange(len(own) + len(below)) < len(own)
    return Rectangles(np.concatenate([own, below]), np.concatenate([own, own[inner]]), causal)


def query_rectangles(tree: PrefixTree) -> Rectangles:
    """By queries: each node attends its ancestors wholly (adjacent ones as one), root first, then itself causally."""
    query: list[tuple[int, int]] = []
    key: list[tuple[int, int]] = []
    causal: list[bool] = []
    spans: list[list[tuple[int, int]]] = []  # of each node's path, itself included
    starts, parents = tree.node_start.tolist(), tree.node_parent.tolist()
    for node, parent in enumerate(parents):
        own = (starts[node], starts[node + 1])
        path = spans[parent] if parent >= 0 else []
        query.extend([own] * (len(path) + 1))
        key.extend([*path, own])
        causal.extend([False] * len(path) + [True])
        adjacent = path and path[-1][1] == own[0]
        spans.append([*path[:-1], (path[-1][0], own[1])] if adjacent else [*path, own])
    return Rectangles(
        np.array(query, dtype=np.int64).reshape(-1, 2),
        np.array(key, dtype=np.int64).reshape(-1, 2),
        np.array(causal, dtype=np.bool_),
    )


@dataclass(frozen=True, eq=False)
class BlockRanges:
    """The mask in blocks of ``block`` tokens, B of them: key block j is attended by query blocks ``j .. stop[j] - 1``
    (int64 [B]); of those ``j + 1 .. full[j] - 1`` (int64 [B]) attend all of it, the others are partial.

    The last block may be short; its missing tokens count as allowed, as kernels mask them by length.
    """

    block: int
    stop: Ints
    full: Ints

    def kinds(self) -> NDArray[np.int8]:
        """int8 [B, B] by query and key block: 0 skipped, 1 partial, 2 full."""
        query, key = np.indices((len(self.stop), len(self.stop)), sparse=True)
        seen = (query >= key) & (query < self.stop[key])
        whole = (query > key) & (query < self.full[key])
        return np.where(seen, 1 + whole, 0).astype(np.int8)


def block_ranges(until: Ints, block: int) -> BlockRanges:
    """Which blocks of ``block`` x ``block`` tokens a block-sparse kernel must visit, and which without masking, for the
    tree of ``PrefixTree.until`` [F]."""
    if block < 1:
        raise PackingError(f"a mask block must hold at least one token, got {block}")
    if not len(until):
        return BlockRanges(block, np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64))
    edges = np.arange(0, len(until), block)
    longest = np.maximum.reduceat(until, edges)
    shortest = np.minimum.reduceat(until, edges)
    # A short last query block is full when its real queries are.
    whole = np.where(shortest == len(until), len(edges), shortest // block)
    return BlockRanges(block, -(-longest // block), whole)
