"""Invariants of ``megatron_ext/models/flex_attention.py``. On a CPU FlexAttention runs uncompiled."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings

from megatron_ext.models import flex_attention, tree_attention
from megatron_ext.trajectory.prefix_tree import PrefixTree, build_prefix_tree
from tests.helpers.trees import ROWS, Row, branches, joined, nested


def wide_tree() -> PrefixTree:
    """Several mask blocks of every kind, and a short last one."""
    rng = np.random.default_rng(1)
    rows = [*branches(rng, 300, [200, 150, 90]), *(row for _ in range(3) for row in nested(rng, 3, 60))]
    return build_prefix_tree(*joined(rows))


@settings(max_examples=60)
@given(ROWS)
def test_the_mask_function_is_the_trees(rows: list[Row]) -> None:  # invariant 1
    tree = build_prefix_tree(*joined(rows))
    token = torch.arange(tree.num_tokens)
    zero = torch.zeros((), dtype=torch.int64)
    found = flex_attention.mask_mod(torch.from_numpy(tree.until.copy()))(zero, zero, token[:, None], token[None])
    at = np.arange(tree.num_tokens)
    assert np.array_equal(found.numpy(), tree.allowed(at[:, None], at[None]))


def test_visited_blocks_are_those_with_pairs() -> None:  # invariant 1
    tree = wide_tree()
    mask = flex_attention.block_mask(tree.until, torch.device("cpu"))
    side = flex_attention.BLOCK
    count = -(-tree.num_tokens // side)
    assert count > 6 and tree.num_tokens % side
    at = np.arange(count * side)
    inside = at < tree.num_tokens
    allowed = np.zeros((len(at), len(at)), dtype=bool)
    allowed[np.ix_(inside, inside)] = tree.allowed(at[inside][:, None], at[inside][None])
    blocks = allowed.reshape(count, side, count, side).transpose(0, 2, 1, 3).reshape(count, count, -1)
    # A short last block is full when its real pairs are.
    pairs = np.outer(inside, inside).reshape(count, side, count, side).transpose(0, 2, 1, 3).reshape(count, count, -1)
    kinds = np.where(blocks.any(2), 1 + (blocks | ~pairs).all(2), 0)
    assert set(kinds.flatten().tolist()) == {0, 1, 2}
    assert mask.full_kv_num_blocks is not None and mask.full_kv_indices is not None
    lists = {1: (mask.kv_num_blocks, mask.kv_indices), 2: (mask.full_kv_num_blocks, mask.full_kv_indices)}
    for kind, (number, index) in lists.items():
        for query in range(count):
            found = index[0, 0, query, : int(number[0, 0, query])].tolist()
            assert found == np.flatnonzero(kinds[query] == kind).tolist()


def compared(tree: PrefixTree, device: torch.device, heads: tuple[int, int], tolerance: float) -> None:
    """With gradients where the device has them."""
    generator = torch.Generator().manual_seed(0)
    ours = [torch.randn(tree.num_tokens, h, 16, generator=generator) for h in (heads[0], heads[1], heads[1])]
    theirs = [x.clone().requires_grad_() for x in ours]
    on_gpu = device.type == "cuda"
    ours = [x.to(device).requires_grad_(on_gpu) for x in ours]
    kernel = flex_attention.compiled if on_gpu else flex_attention.flex_attention
    mask = flex_attention.block_mask(tree.until, device)
    own = flex_attention.tree_attention(ours[0], ours[1], ours[2], mask, 0.3, kernel)
    plan = tree_attention.plan_tree(tree.parent)
    want = tree_attention.tree_attention(theirs[0], theirs[1], theirs[2], plan, 0.3)
    torch.testing.assert_close(own.cpu(), want, rtol=tolerance, atol=tolerance)
    if on_gpu:
        up = torch.randn(want.shape, generator=generator)
        grads = torch.autograd.grad(own, ours, up.to(device))
        for a, b in zip(grads, torch.autograd.grad(want, theirs, up), strict=True):
            torch.testing.assert_close(a.cpu(), b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
@pytest.mark.filterwarnings("ignore:.*flex_attention called without torch.compile.*")
def test_outputs_are_those_of_the_tree(heads: tuple[int, int]) -> None:  # invariant 2
    compared(wide_tree(), torch.device("cpu"), heads, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(4, 2), (2, 2)])
def test_outputs_and_gradients_compiled_on_a_gpu(heads: tuple[int, int]) -> None:  # invariant 2
    compared(wide_tree(), torch.device("cuda"), heads, 3e-3)
