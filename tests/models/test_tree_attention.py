"""Invariants of ``megatron_ext/models/tree_attention.py``, and the same step through a whole model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from megatron_ext.models.causal_cpu import MAX_LENGTH
from megatron_ext.models.forward import packed_logits, record_routing
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.packing import SharedTokens
from megatron_ext.models.tree_attention import TreePlan, plan_tree, tree_attention
from megatron_ext.trajectory.prefix_tree import PrefixTree, build_prefix_tree
from tests.helpers.trees import ROWS, Row, branches, joined, nested

HEADS = [(4, 2), (4, 4), (6, 1)]


def draw(tokens: int, heads: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + heads)
    return torch.randn(tokens, heads, 8, generator=generator, dtype=dtype).requires_grad_()


def formula(tree: PrefixTree, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Dense, with the tree's mask written out."""
    tokens = np.arange(tree.num_tokens)
    mask = torch.from_numpy(tree.allowed(tokens[:, None], tokens[None]))
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def tree_of(rows: list[Row]) -> PrefixTree:
    return build_prefix_tree(*joined(rows))


def families() -> dict[str, list[Row]]:
    rng = np.random.default_rng(3)
    return {
        "branches": branches(rng, 60, [20] * 6),
        "ragged": [row for _ in range(3) for row in nested(rng, 3, 40)],
        "prefixes": [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3], [6, 7], []],
        "one": [[5]],
        "chain": [list(range(n)) for n in (3, 40, 90)],
        "many keys": branches(rng, 500, [100, 90, 7]),
        "many queries": branches(rng, 5, [700, 600]),
    }


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("family", list(families()))
def test_values_and_gradients_are_those_of_the_mask(family: str, heads: tuple[int, int]) -> None:  # invariant 1
    tree = tree_of(families()[family])
    plan = plan_tree(tree.parent)
    q, k, v = (draw(tree.num_tokens, h, seed=i) for i, h in enumerate((heads[0], heads[1], heads[1])))
    own, want = tree_attention(q, k, v, plan, 0.3), formula(tree, q, k, v, 0.3)
    torch.testing.assert_close(own, want, rtol=1e-12, atol=1e-12)
    up = draw(tree.num_tokens, heads[0], seed=9).detach()
    for a, b in zip(*(torch.autograd.grad(out, (q, k, v), up) for out in (own, want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)


@settings(max_examples=150)
@given(ROWS)
def test_any_tree_gives_what_its_rows_give_alone(rows: list[Row]) -> None:
    """Not with the mask of the tree: each row is attended to by itself, and shared gradients add up."""
    tree = tree_of(rows)
    q, k, v = (draw(tree.num_tokens, h, seed=i) for i, h in enumerate((2, 1, 1)))
    out = tree_attention(q, k, v, plan_tree(tree.parent), 0.5)
    flat = [torch.from_numpy(tree.row_flat(row).copy()) for row in range(tree.num_rows)]
    own = sum(((out[at] ** 3).sum() for at in flat), start=out.sum() * 0)
    want = out.sum().detach() * 0
    for at in flat:
        x, y, z = (t[at].transpose(0, 1)[None] for t in (q, k, v))
        alone = F.scaled_dot_product_attention(x, y, z, is_causal=True, scale=0.5, enable_gqa=True)
        want = want + (alone**3).sum()
    torch.testing.assert_close(own, want, rtol=1e-11, atol=1e-12)
    if tree.num_tokens:
        for a, b in zip(*(torch.autograd.grad(loss, (q, k, v)) for loss in (own, want)), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def queries_and_keys(plan: TreePlan) -> dict[int, list[int]]:
    """Keys that each token sees, read off the plan."""
    found: dict[int, list[int]] = {}
    for stack in plan.stacks:
        prefix = stack.key.shape[1] - stack.query.shape[1]
        for query, key in zip(stack.query.tolist(), stack.key.tolist(), strict=True):
            for at, token in enumerate(query):
                if token >= 0:
                    assert token not in found, "a query twice"
                    found[token] = [k for k in key[: prefix + at + 1] if k >= 0]
    return found


@settings(max_examples=150)
@given(ROWS)
def test_each_token_is_a_query_once_and_sees_its_root_path(rows: list[Row]) -> None:  # invariant 2
    tree = tree_of(rows)
    seen = queries_and_keys(plan_tree(tree.parent))
    tokens = np.arange(tree.num_tokens)
    assert sorted(seen) == tokens.tolist()
    for query, keys in seen.items():
        assert keys == np.flatnonzero(tree.allowed(query, tokens)).tolist()


def test_padding_is_bounded_and_calls_are_few() -> None:  # invariant 3
    rng = np.random.default_rng(0)
    even = plan_tree(tree_of([row for _ in range(8) for row in branches(rng, 24, [129] * 8)]).parent)
    assert len(even.stacks) == 2, "the first row of each group, and the others"
    rows = [
        row for _ in range(8) for row in branches(rng, int(rng.integers(20, 80)), rng.integers(40, 250, 8).tolist())
    ]
    tree = tree_of(rows)
    plan = plan_tree(tree.parent)
    padded = sum(s.query.shape[0] * s.query.shape[1] * (s.key.shape[1] - s.query.shape[1] / 2) for s in plan.stacks)
    assert len(plan.stacks) < 32 and padded < 1.3 * tree.attended_pairs


def test_padding_reaches_no_token() -> None:  # invariant 3
    """One stack with runs and prefixes of different lengths; what stands in other rows is set to NaN."""
    rows = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 8, 9], [1, 2, 3, 10], [20, 21]]
    tree = tree_of(rows)
    plan = plan_tree(tree.parent)
    assert len(plan.stacks) == 1
    q, k, v = (draw(tree.num_tokens, h, seed=i) for i, h in enumerate((2, 1, 1)))
    before = tree_attention(q, k, v, plan, 0.5)
    alone = torch.from_numpy(tree.row_flat(3).copy())
    others = torch.ones(tree.num_tokens, dtype=torch.bool)
    others[alone] = False
    grads = torch.autograd.grad(before[alone].sum(), (q, k, v))
    assert all(not bool(g[others].any()) and bool(g[alone].any()) for g in grads[1:])
    with torch.no_grad():
        for x in (q, k, v):
            x[others] *= 100.0
    torch.testing.assert_close(tree_attention(q, k, v, plan, 0.5)[alone], before[alone], rtol=0, atol=0)


class _Saved:
    """Bytes that autograd keeps, beyond the tensors given."""

    def __init__(self, *known: torch.Tensor) -> None:
        self.bytes, self.largest = 0, 0
        self._known = {x.untyped_storage().data_ptr() for x in known}

    def pack(self, x: torch.Tensor) -> torch.Tensor:
        if x.untyped_storage().data_ptr() not in self._known:
            self.bytes += x.numel() * x.element_size()
        return x


@pytest.mark.parametrize("prefix", [200, 2000, 8000])
def test_memory_is_linear(prefix: int) -> None:  # invariant 4
    """Probabilities are kept for few keys only; with many, nothing beyond the inputs is."""
    tree = tree_of(branches(np.random.default_rng(0), prefix, [50] * 16))
    q, k, v = (draw(tree.num_tokens, h, torch.float32) for h in (2, 1, 1))
    saved = _Saved(q, k, v)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
        plan = plan_tree(tree.parent)
        out = tree_attention(q, k, v, plan, 0.3)
    scores = 2 * 4 * tree.attended_pairs
    if prefix + 50 <= MAX_LENGTH:
        assert 0 < saved.bytes < 1.5 * scores
    else:
        few = 2 * 4 * MAX_LENGTH * 50 * 16
        assert saved.bytes <= few
    index = sum(stack.query.size + stack.key.size for stack in plan.stacks)
    assert index < 2.5 * len(tree.flat), "the plan is linear in the rows' tokens"
    # The largest tensor of a call is a block of scores, which is bounded.
    for part in plan.parts(1, 2, torch.float32):
        width = max(end - start for start, end in part.work.blocks())
        sequences = len(part.query) // part.work.queries
        block = sequences * 2 * width * (part.work.prefix + part.work.queries)
        assert block <= max(2**18, 2**22) and (sequences == 1 or block <= 2**18)
    out.sum().backward()


def test_nothing_is_kept_without_gradients() -> None:
    tree = tree_of(branches(np.random.default_rng(0), 30, [20] * 3))
    q, k, v = (draw(tree.num_tokens, h, torch.float32).detach() for h in (2, 1, 1))
    saved = _Saved()
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda x: x):
        tree_attention(q, k, v, plan_tree(tree.parent), 0.3)
    assert saved.bytes == 0


def test_half_precision_is_computed_in_single() -> None:
    tree = tree_of(families()["ragged"])
    plan = plan_tree(tree.parent)
    q, k, v = (draw(tree.num_tokens, h, torch.float32, seed=i).bfloat16().detach() for i, h in enumerate((4, 2, 2)))
    q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    wide = [x.detach().float().requires_grad_() for x in (q, k, v)]
    own, want = tree_attention(q, k, v, plan, 0.3), tree_attention(wide[0], wide[1], wide[2], plan, 0.3)
    assert own.dtype == torch.bfloat16
    torch.testing.assert_close(own, want.bfloat16(), rtol=0, atol=0)
    up = torch.ones_like(own)
    for a, b in zip(torch.autograd.grad(own, (q, k, v), up), torch.autograd.grad(want, wide, up.float()), strict=True):
        torch.testing.assert_close(a, b.bfloat16(), rtol=0, atol=0)


def test_wrong_calls_are_refused() -> None:
    plan = plan_tree(tree_of([[1, 2], [1, 3]]).parent)
    with pytest.raises(ValueError, match="the tree has 3 tokens, the forward 4"):
        tree_attention(draw(4, 2), draw(4, 1), draw(4, 1), plan, 1.0)
    with pytest.raises(ValueError, match="3 query heads over 2"):
        tree_attention(draw(3, 3), draw(3, 2), draw(3, 2), plan, 1.0)


# -- the whole model -------------------------------------------------------------------------------------------------
def model_rows() -> list[Row]:
    """Three ragged nested trees, rows that repeat or end inside another, and a row alone."""
    rng = np.random.default_rng(5)
    trees = [nested(rng, 3, 12, vocabulary=96) for _ in range(8)]
    rows = [row for tree in sorted(trees, key=len)[-3:] for row in tree]
    return [*rows, rows[0], rows[1][:5], rng.integers(0, 96, 9).tolist()]


@pytest.mark.parametrize("kind", ["moe", "dense"])
def test_the_whole_model_gives_the_same_loss_and_gradients(
    build: Any, request: pytest.FixtureRequest, kind: str
) -> None:
    """Rows apart (packed, nothing shared) against their tree: a loss in which each row weighs every token differently,
    also the shared ones."""
    hf: HFConfig = request.getfixturevalue(kind)
    chunk = build(hf, overrides={"moe_router_load_balancing_type": "none"})[0]
    rows = model_rows()
    ids, offsets = joined(rows)
    tree = build_prefix_tree(ids, offsets)
    assert len(rows) > 20 and tree.token_ratio > 1.5 and len({len(row) for row in rows}) > 5
    cu, flat = torch.from_numpy(offsets), torch.from_numpy(tree.flat.copy())
    positions = torch.cat([torch.arange(len(row)) for row in rows])
    weight = torch.randn(len(ids), generator=torch.Generator().manual_seed(2))
    target = torch.from_numpy(np.roll(ids, -1))

    def step(shared: SharedTokens | None) -> tuple[torch.Tensor, dict[str, torch.Tensor], list[torch.Tensor]]:
        chunk.zero_grad()
        run = torch.arange(len(ids)) if shared is None else torch.from_numpy(tree.source.copy())
        with record_routing([chunk]) as routing:
            logits = packed_logits(chunk, torch.from_numpy(ids)[run], positions[run], cu, shared=shared)
        each = logits if shared is None else logits[flat]
        loss = (weight * F.log_softmax(each, -1).gather(1, target[:, None]).squeeze(1)).sum() / len(ids)
        loss.backward()
        grads = {name: p.grad.clone() for name, p in chunk.named_parameters() if p.grad is not None}
        by_layer = routing.by_layer.values() if isinstance(routing.by_layer, dict) else [[x] for x in routing.by_layer]
        return loss.detach(), grads, [forward for forwards in by_layer for forward in forwards]

    loss, grads, experts = step(None)
    tree_loss, tree_grads, tree_experts = step(SharedTokens.of(tree))
    torch.testing.assert_close(tree_loss, loss, rtol=1e-5, atol=1e-6)
    assert grads.keys() == tree_grads.keys() and len(grads) > 10
    for name, want in grads.items():
        gap = float((tree_grads[name] - want).abs().max() / want.abs().max())
        assert gap <= 1e-5, f"{name}: {gap:.1e}"
    assert len(experts) == len(tree_experts) == sum(hf.moe_pattern)
    for a, b in zip(tree_experts, experts, strict=True):
        assert torch.equal(a[flat], b), "routed as in the rows apart"
