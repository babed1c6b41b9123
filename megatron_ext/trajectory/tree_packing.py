"""Packing of rows that share prefixes: rows -> micro-batches whose prefix trees fit under a token cap.

Invariants (``tests/trajectory/test_tree_packing.py`` asserts each):

1. Every row is in exactly one micro-batch, and the prefix tree of its rows holds at most ``cap`` tokens: what rows
   share is counted once in each micro-batch that holds it.
2. Every rank has the same number of micro-batches; those of a rank with less work are empty.
3. ``tokens`` and ``costs`` of the plan are those of the micro-batches' prefix trees, exactly.
4. A tree is kept together, split only at branches, each part repeating the prefix: where it is over the cap, or where
   the step gets cheaper because more ranks share the work.
5. Row order changes nothing, up to rows with equal tokens.

The cost of a tree counts its tokens, and its attended pairs as ``packing.row_cost`` counts those of a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.packing import QUADRATIC_TOKENS, Items, PackingError, PackPlan, check_cap, place, row_cost
from megatron_ext.trajectory.prefix_tree import Ints, PrefixTree

_SPLITS = (1, 2, 4, 8)  # parts of the cap that a piece of a tree may fill, tried in turn, and single rows last
_NEAR = 1.01  # a step this close to an even share of every token run once is not worth another try
_MANY = 4  # pieces a micro-batch from which on finer pieces balance no better


def tree_cost(
    tokens: ArrayLike, positions: ArrayLike, quadratic_tokens: float = QUADRATIC_TOKENS
) -> NDArray[np.float64]:
    """Cost of trees of ``tokens`` whose positions sum to ``positions``; one row of L tokens costs ``row_cost(L)``."""
    count = np.asarray(tokens, dtype=np.float64)
    pairs = np.asarray(positions, dtype=np.float64) + count / 2
    return count + 2 * pairs / quadratic_tokens


def pack_tree(tree: PrefixTree, *, cap: int, ranks: int = 1, quadratic_tokens: float = QUADRATIC_TOKENS) -> PackPlan:
    """Packs the rows of ``tree`` (built over the whole step, so that any rows may share) under ``cap`` flat tokens a
    micro-batch. Build each micro-batch's own tree from its rows, with the same ``separate_routing``. Raises
    ``PackingError`` on a row longer than the cap.

    Pieces of up to the cap, of a half, a quarter and an eighth of it, and single rows are tried; the cheapest step
    wins, the larger pieces on a tie. Trying stops near the ideal, and where finer pieces no longer help.
    """
    if cap < 1 or ranks < 1:
        raise PackingError(f"pack_tree needs cap >= 1 and ranks >= 1; got {cap}, {ranks}")
    check_cap(np.diff(tree.offsets), cap)
    shape = _Shape.of(tree)
    ideal = float(tree_cost(tree.num_tokens, tree.positions.sum(), quadratic_tokens)) / ranks
    best: PackPlan | None = None
    pieces = 0
    for limit in (*(cap // part for part in _SPLITS), 0):
        rows = shape.pieces(limit)
        if len(rows) == pieces:
            continue
        pieces = len(rows)
        plan = place(shape.items(rows, quadratic_tokens), cap, ranks, tree.num_tokens)
        cheaper = best is None or plan.step_cost < best.step_cost * 0.999
        if best is None or cheaper:
            best = plan
        many = pieces >= _MANY * ranks * plan.num_microbatches
        if best.step_cost <= _NEAR * ideal or (many and not cheaper):
            break
    return best if best is not None else place(shape.items([], quadratic_tokens), cap, ranks, 0)


@dataclass(frozen=True, eq=False)
class _Shape:
    """The tree's rows in depth-first order, by rank: ``order`` int64 [R], rows; ``ends`` int64 [R], the flat index of
    each one's last token, never falling (-1: no token); ``lengths`` int64 [R]; ``common`` int64 [R], tokens that each
    has in common with the one before. ``children`` of each node, and of the root of all at the end."""

    tree: PrefixTree
    order: Ints
    ends: Ints
    lengths: Ints
    common: Ints
    children: list[list[int]]

    @staticmethod
    def of(tree: PrefixTree) -> _Shape:
        lengths = np.diff(tree.offsets)
        ends = np.full(tree.num_rows, -1, dtype=np.int64)
        ends[lengths > 0] = tree.flat[tree.offsets[1:][lengths > 0] - 1]
        order = np.argsort(ends, kind="stable")
        # A row's own tokens are those behind the row before it; empty and repeated rows have none.
        own = np.diff(ends[order], prepend=-1)
        children: list[list[int]] = [[] for _ in range(len(tree.node_parent) + 1)]
        for node, parent in enumerate(tree.node_parent.tolist()):
            children[parent].append(node)
        return _Shape(tree, order, ends[order], lengths[order], lengths[order] - own, children)

    def _ranks(self, first: int, last: int) -> Ints:
        """Ranks of the rows that end in the flat tokens ``first .. last - 1``."""
        return np.arange(*np.searchsorted(self.ends, [first, last]).tolist(), dtype=np.int64)

    def pieces(self, limit: int) -> list[Ints]:
        """Ranks of the rows of each piece: whole subtrees, siblings together, that hold at most ``limit`` tokens with
        the path to them (or the rows of one node, which no branch can part)."""
        tree = self.tree
        start, end = tree.node_start[:-1], tree.node_start[1:]
        last = tree.until[start]
        below, depth = last - start, tree.positions[start] + end - start
        result = [ranks for ranks in [self._ranks(-1, 0)] if len(ranks)]
        stack = self.children[-1][::-1]
        while stack:
            node = stack.pop()
            if tree.positions[start[node]] + below[node] <= limit or not self.children[node]:
                result.append(self._ranks(start[node], last[node]))
                continue
            room = limit - int(depth[node])
            small = [child for child in self.children[node] if below[child] <= room]
            stack.extend(child for child in reversed(self.children[node]) if below[child] > room)
            bundles = [
                np.concatenate([self._ranks(start[child], last[child]) for child in part])
                for part in _first_fit(small, below, room)
            ]
            here = self._ranks(start[node], end[node])
            if bundles:  # the rows that end here are a prefix of the first bundle and cost it nothing
                bundles[0] = np.concatenate([here, bundles[0]])
            elif len(here):
                bundles = [here]
            result.extend(np.sort(bundle) for bundle in bundles)
        return sorted(result, key=lambda ranks: int(ranks[0]))

    def items(self, pieces: list[Ints], quadratic_tokens: float) -> Items:
        """Pieces with their tokens and costs, the path to them included, and what any two share.

        The rows of two pieces part at one node, whichever rows are compared: the first of each stands for it.
        """
        tokens, positions = np.zeros(len(pieces), dtype=np.int64), np.zeros(len(pieces), dtype=np.int64)
        for at, ranks in enumerate(pieces):
            length, seen = self.lengths[ranks], np.concatenate([[0], self._between(ranks)])
            tokens[at] = (length - seen).sum()
            positions[at] = (length * (length - 1) - seen * (seen - 1)).sum() // 2
        gap = self._between(np.array([ranks[0] for ranks in pieces], dtype=np.int64))

        def shared(piece: int) -> Ints:
            left, right = np.minimum.accumulate(gap[:piece][::-1])[::-1], np.minimum.accumulate(gap[piece:])
            return np.concatenate([left, tokens[piece : piece + 1], right])

        return Items(
            rows=[self.order[ranks] for ranks in pieces],
            tokens=tokens,
            costs=tree_cost(tokens, positions, quadratic_tokens),
            shared=shared,
            prefix_cost=lambda length: row_cost(length, quadratic_tokens),
        )

    def _between(self, ranks: Ints) -> Ints:
        """Tokens that each of ``ranks`` (rising) but the first has in common with the one before it in the list."""
        if len(ranks) < 2:
            return np.empty(0, dtype=np.int64)
        # What two rows share is the least that any neighbours between them share.
        return np.minimum.reduceat(self.common[: ranks[-1] + 1], ranks[:-1] + 1)


def _first_fit(nodes: list[int], size: Ints, room: int) -> list[list[int]]:
    """Nodes into as few bundles of at most ``room`` tokens as first fit finds, the largest first."""
    bundles: list[list[int]] = []
    free: list[int] = []
    for node in sorted(nodes, key=lambda n: (-int(size[n]), n)):
        need = int(size[node])
        at = next((b for b, left in enumerate(free) if left >= need), len(bundles))
        if at == len(bundles):
            bundles.append([])
            free.append(room)
        bundles[at].append(node)
        free[at] -= need
    return bundles
