"""Predictions of a prefix tree: the numbered invariants, and a small attention model in fp64 that trains the tree as it
trains the rows apart."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.trajectory.packing import PackingError
from megatron_ext.trajectory.prefix_tree import PrefixTree, build_prefix_tree
from megatron_ext.trajectory.tree_packing import pack_tree
from megatron_ext.trajectory.tree_targets import TreeTargets, tree_targets
from tests.helpers.trees import ROWS, Row, branches, joined, nested

VOCABULARY = 40
WIDTH = 16


def some(ids: NDArray[np.int64], offsets: NDArray[np.int64], seed: int) -> NDArray[np.bool_]:
    """A random selection without first tokens, different from row to row."""
    select = np.random.default_rng(seed).random(len(ids)) < 0.6
    select[offsets[:-1][np.diff(offsets) > 0]] = False
    return select


@settings(max_examples=100, deadline=None)
@given(ROWS, st.integers(0, 1000), st.lists(st.integers(0, 2), min_size=9, max_size=9))
def test_every_selected_position_is_predicted(rows: list[Row], seed: int, owners: list[int]) -> None:
    ids, offsets = joined(rows)
    tree, select = build_prefix_tree(ids, offsets), some(*joined(rows), seed)
    for owner in (None, owners[: len(rows)]):
        targets = tree_targets(tree, select, owner)
        seen: set[tuple[int, int]] = set()
        expected = []
        for entry in np.flatnonzero(select).tolist():
            row = int(np.searchsorted(offsets, entry, side="right")) - 1
            key = (row if owner is None else owner[row], int(tree.flat[entry]))
            if key not in seen:
                expected.append((entry, row))
                seen.add(key)
        assert list(zip(targets.entry.tolist(), targets.row.tolist(), strict=True)) == expected
        assert targets.repeats == select.sum() - len(expected)
        assert np.array_equal(targets.logit_index[targets.index], tree.flat[targets.entry - 1])
        assert np.array_equal(targets.target[targets.index], ids[targets.entry])
        assert np.array_equal(targets.flat[targets.index], tree.flat[targets.entry])
        assert np.all(np.diff(targets.flat) > 0)
        assert np.array_equal(targets.count, targets.sum(np.ones(len(expected))))
        order, cuts = targets.groups
        for p in range(len(targets.flat)):
            assert np.all(targets.index[order[cuts[p] : cuts[p + 1]]] == p)
        assert sorted(order.tolist()) == list(range(len(expected)))


def test_one_position_predicts_several_tokens() -> None:
    rows = [[0, 1, 2, 3, *leaf] for leaf in ([10, 11, 12], [20, 21, 22], [30, 31])]
    ids, offsets = joined(rows)
    tree = build_prefix_tree(ids, offsets)
    position = np.concatenate([np.arange(len(row)) for row in rows])
    targets = tree_targets(tree, position >= 3)
    assert targets.logit_index.tolist() == [2, 3, 4, 5, 3, 7, 8, 3, 10]
    assert targets.target.tolist() == [3, 10, 11, 12, 20, 21, 22, 30, 31]
    assert targets.count.tolist() == [3, 1, 1, 1, 1, 1, 1, 1, 1]
    advantage = np.repeat([1.0, -0.25, 0.5], [4, 4, 3])
    assert targets.sum(advantage)[:2].tolist() == [1.25, 1.0]


def test_a_shared_token_counts_once_an_owner() -> None:
    """Rows 0 and 1 are one trajectory, row 2 another; all three train the token 7. A tree as owner trains it once."""
    tree = build_prefix_tree(*joined([[1, 7, 2], [1, 7, 3], [1, 7, 4]]))
    select = np.tile([False, True, True], 3)
    assert tree_targets(tree, select).count.tolist() == [3, 1, 1, 1]
    targets = tree_targets(tree, select, owner=[4, 4, 9])
    assert targets.count.tolist() == [2, 1, 1, 1] and targets.repeats == 1
    assert targets.row.tolist() == [0, 0, 1, 2, 2]
    assert tree_targets(tree, select, owner=[0, 0, 0]).count.tolist() == [1, 1, 1, 1]


def test_what_cannot_be_predicted_is_refused() -> None:
    tree = build_prefix_tree(*joined([[1, 2], [3]]))
    with pytest.raises(PackingError, match="row 1 selects its first token"):
        tree_targets(tree, [False, True, True])
    with pytest.raises(PackingError, match="select has shape"):
        tree_targets(tree, [True])
    with pytest.raises(PackingError, match="owner has shape"):
        tree_targets(tree, [False, True, False], owner=[0])
    nothing = tree_targets(tree, [False] * 3, owner=[0, 0])
    assert len(nothing.entry) == len(nothing.flat) == nothing.repeats == 0
    assert nothing.sum([]).shape == (0,) and nothing.groups[1].tolist() == [0]


# -- the same step as the rows apart ---------------------------------------------------------------------------------
class Model(torch.nn.Module):
    """Two layers of rotary attention and two routed experts, fp64; ``load`` are the router's choices of a forward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)

        def matrix(*shape: int) -> torch.nn.Parameter:
            return torch.nn.Parameter(torch.randn(*shape, dtype=torch.float64) / shape[-2] ** 0.5)

        self.embed = matrix(VOCABULARY, WIDTH)
        self.qkv = torch.nn.ParameterList([matrix(WIDTH, 3 * WIDTH) for _ in range(2)])
        self.router = torch.nn.ParameterList([matrix(WIDTH, 2) for _ in range(2)])
        self.experts = torch.nn.ParameterList([matrix(2, WIDTH, WIDTH) for _ in range(2)])
        self.head = matrix(WIDTH, VOCABULARY)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits [T, V], and the expert of each token and layer [T, 2]."""
        x, load = self.embed[ids], []
        angle = positions[:, None] / 10 ** torch.arange(WIDTH // 2, dtype=torch.float64)
        sin, cos = angle.sin(), angle.cos()

        def rotate(y: torch.Tensor) -> torch.Tensor:
            a, b = y.chunk(2, dim=-1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)

        for qkv, router, experts in zip(self.qkv, self.router, self.experts, strict=True):
            q, k, v = (x @ qkv).chunk(3, dim=-1)
            scores = rotate(q) @ rotate(k).T / WIDTH**0.5
            x = x + scores.masked_fill(~mask, -torch.inf).softmax(-1) @ v
            probability, chosen = (x @ router).softmax(-1).max(-1)
            x = x + probability[:, None] * torch.einsum("td,tde->te", x, experts[chosen]).tanh()
            load.append(chosen)
        return x @ self.head, torch.stack(load, dim=1)


Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def linear(logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    return -(advantage * logp).sum()


def clipped(logp: torch.Tensor, old: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    ratio = (logp - old).exp()
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum()


def logp_of(logits: torch.Tensor, index: NDArray[np.int64], target: NDArray[np.int64]) -> torch.Tensor:
    return logits.log_softmax(-1)[torch.tensor(index), torch.tensor(target)]


def rows_apart(model: Model, rows: list[Row]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and experts of every row position, each row in a forward of its own."""
    parts = [
        model(torch.tensor(row), torch.arange(len(row)), torch.ones(len(row), len(row)).tril().bool()) for row in rows
    ]
    return torch.cat([logits for logits, _ in parts]), torch.cat([load for _, load in parts])


def as_tree(model: Model, tree: PrefixTree) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = np.arange(tree.num_tokens)
    mask = torch.from_numpy(tree.allowed(tokens[:, None], tokens[None]))
    return model(torch.from_numpy(tree.ids.copy()), torch.from_numpy(tree.positions.copy()), mask)


def gradients(model: Model, loss: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def families() -> list[list[Row]]:
    rng = np.random.default_rng(7)
    ragged = [row for _ in range(2) for row in nested(rng, 3, 5, vocabulary=VOCABULARY)][:12]
    return [branches(rng, 12, [4] * 6, VOCABULARY), ragged, [[1, 2, 3], [1, 2, 3, 4, 5], [1, 2, 3], [6, 7]]]


@pytest.mark.parametrize("rows", families(), ids=["branches", "ragged", "prefixes"])
@pytest.mark.parametrize("loss", [linear, clipped])
def test_tree_and_rows_give_the_same_step(rows: list[Row], loss: Loss) -> None:
    """MiniMax-M2: logits, loss and gradients of the merged run equal the separate ones to 1e-10, with advantages, old
    log-probs and masks that differ from row to row also where the tokens are shared."""
    model, rng = Model(), np.random.default_rng(1)
    ids, offsets = joined(rows)
    tree, select = build_prefix_tree(ids, offsets), some(ids, offsets, 3)
    targets = tree_targets(tree, select)
    assert targets.count.max() > 1
    apart, load_apart = rows_apart(model, rows)
    merged, load = as_tree(model, tree)
    flat = torch.from_numpy(tree.flat.copy())
    torch.testing.assert_close(merged[flat], apart, rtol=0, atol=1e-10)

    advantage = torch.from_numpy(rng.normal(size=len(targets.entry)))
    logp = logp_of(apart, targets.entry - 1, ids[targets.entry])
    old = logp.detach() + torch.from_numpy(rng.normal(0, 0.3, len(targets.entry)))
    expected = loss(logp, old, advantage)
    once = logp_of(merged, targets.logit_index, targets.target)
    found = loss(once[torch.from_numpy(targets.index.copy())], old, advantage)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    wanted = gradients(model, expected)
    for a, b in zip(gradients(model, found), wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
    # The router chose once a shared token; weighted by how many rows hold it the load is the rows'.
    count = torch.from_numpy(tree.multiplicity.copy())
    for layer in range(2):
        weighted = torch.bincount(load[:, layer], weights=count.double(), minlength=2)
        assert weighted.tolist() == torch.bincount(load_apart[:, layer], minlength=2).tolist()

    if loss is linear:
        merged, _ = as_tree(model, tree)
        once = logp_of(merged, targets.logit_index, targets.target)
        summed = -(torch.from_numpy(targets.sum(advantage.numpy())) * once).sum()
        for a, b in zip(gradients(model, summed), wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


def test_a_shared_trained_token_that_counts_once_is_another_step() -> None:
    """The multiplicity trap: without it the gradient differs, so the test above can fail."""
    rows = families()[0]
    model, (ids, offsets) = Model(), joined(rows)
    tree = build_prefix_tree(ids, offsets)
    targets = tree_targets(tree, some(ids, offsets, 3))
    merged, _ = as_tree(model, tree)
    once = logp_of(merged, targets.logit_index, targets.target)
    counted = gradients(model, -(torch.from_numpy(targets.count.copy()) * once).sum())
    merged, _ = as_tree(model, tree)
    flat = gradients(model, -logp_of(merged, targets.logit_index, targets.target).sum())
    assert max(float((a - b).abs().max()) for a, b in zip(counted, flat, strict=True)) > 1e-3


@pytest.mark.parametrize("cap", [20, 40, 1000])
def test_microbatches_of_trees_give_the_same_step(cap: int) -> None:
    """slime 365 and 2090, miles 1931: how rows are cut into micro-batches and ranks weighs no token differently."""
    rng = np.random.default_rng(5)
    rows = [row for _ in range(3) for row in branches(rng, 8, [3, 5, 2, 4], VOCABULARY)]
    model, (ids, offsets) = Model(), joined(rows)
    select = some(ids, offsets, 1)
    advantage = rng.normal(size=len(ids))
    apart, _ = rows_apart(model, rows)
    at = np.flatnonzero(select)
    expected = linear(logp_of(apart, at - 1, ids[at]), torch.zeros(()), torch.from_numpy(advantage[at]))
    plan = pack_tree(build_prefix_tree(ids, offsets), cap=cap, ranks=2)
    total = torch.zeros((), dtype=torch.float64)
    entries = 0
    for members in (m for rank in plan.microbatches for m in rank):
        place = np.concatenate([np.empty(0, int), *(np.arange(offsets[r], offsets[r + 1]) for r in members)]).astype(
            int
        )
        tree = build_prefix_tree(*joined([rows[r] for r in members.tolist()]))
        targets: TreeTargets = tree_targets(tree, select[place])
        merged, _ = as_tree(model, tree)
        once = logp_of(merged, targets.logit_index, targets.target)
        total = total - (torch.from_numpy(targets.sum(advantage[place][targets.entry])) * once).sum()
        entries += len(targets.entry)
    assert entries == len(at)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=1e-12)
    for a, b in zip(gradients(model, total), gradients(model, expected), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)
