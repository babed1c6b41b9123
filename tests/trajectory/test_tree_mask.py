"""The forms of the tree mask against the mask itself, one pair at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.trajectory.packing import PackingError
from megatron_ext.trajectory.prefix_tree import PrefixTree, build_prefix_tree
from megatron_ext.trajectory.tree_mask import Rectangles, block_ranges, key_rectangles, query_rectangles
from tests.helpers.trees import ROWS, Row, joined


def dense(tree: PrefixTree) -> NDArray[np.bool_]:
    tokens = np.arange(tree.num_tokens)
    return tree.allowed(tokens[:, None], tokens[None])


def covered(rectangles: Rectangles, size: int) -> NDArray[np.int64]:
    times = np.zeros((size, size), dtype=np.int64)
    for (q0, q1), (k0, k1), causal in zip(rectangles.query, rectangles.key, rectangles.causal, strict=True):
        assert q0 < q1 and k0 < k1 and (not causal or (q0, q1) == (k0, k1))
        times[q0:q1, k0:k1] += np.tri(q1 - q0, dtype=np.int64) if causal else 1
    return times


@settings(max_examples=80, deadline=None)
@given(ROWS)
def test_rectangles_cover_the_mask_once(rows: list[Row]) -> None:
    tree = build_prefix_tree(*joined(rows))
    mask, nodes = dense(tree), len(tree.node_parent)
    for rectangles in (key_rectangles(tree), query_rectangles(tree)):
        assert np.array_equal(covered(rectangles, tree.num_tokens), mask)
        assert rectangles.pairs == tree.attended_pairs and rectangles.causal.sum() == nodes
    assert len(key_rectangles(tree)) <= 2 * nodes


@settings(max_examples=80, deadline=None)
@given(ROWS, st.integers(1, 6))
def test_blocks_are_what_the_mask_says(rows: list[Row], block: int) -> None:
    tree = build_prefix_tree(*joined(rows))
    mask = dense(tree)
    blocks = -(-tree.num_tokens // block)
    expected = np.zeros((blocks, blocks), dtype=np.int8)
    for q in range(blocks):
        for k in range(blocks):
            part = mask[q * block : (q + 1) * block, k * block : (k + 1) * block]
            # A pair on the diagonal is masked by order, also where one token would not need it.
            expected[q, k] = 0 if not part.any() else 2 if part.all() and q != k else 1
    assert np.array_equal(block_ranges(tree.until, block).kinds(), expected)


def test_rectangles_of_the_reference_example() -> None:
    """MiniMax-M2: a prompt of 4 tokens and leaves of 3, 3 and 2."""
    tree = build_prefix_tree(*joined([[0, 1, 2, 3, *leaf] for leaf in ([10, 11, 12], [20, 21, 22], [30, 31])]))
    found = query_rectangles(tree)
    assert found.query.tolist() == [[0, 4], [4, 7], [4, 7], [7, 10], [7, 10], [10, 12], [10, 12]]
    assert found.key.tolist() == [[0, 4], [0, 4], [4, 7], [0, 4], [7, 10], [0, 4], [10, 12]]
    assert "".join("C" if causal else "F" for causal in found.causal) == "CFCFCFC"


def test_a_comb_needs_two_rectangles_a_node() -> None:
    """Turns of a conversation with an end after each: 400 rows, 399 branch points."""
    spine = list(range(400))
    tree = build_prefix_tree(*joined([[*spine[: n + 1], 1000 + n] for n in range(400)]))
    assert len(key_rectangles(tree)) <= 2 * len(tree.node_parent) <= 4 * 400
    # Depth first along the spine the ancestors are adjacent: they are one rectangle each.
    assert len(query_rectangles(tree)) <= 3 * len(tree.node_parent)


def test_a_block_without_tokens_is_refused() -> None:
    with pytest.raises(PackingError, match="mask block"):
        block_ranges(build_prefix_tree([], [0]).until, 0)
