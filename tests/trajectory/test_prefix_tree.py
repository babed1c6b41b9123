"""The prefix tree's numbered invariants, against a trie made one prefix at a time."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megatron_ext.trajectory.packing import PackingError
from megatron_ext.trajectory.prefix_tree import PrefixTree, _hash, _words, build_prefix_tree
from tests.helpers.trees import ROWS, Row, branches, joined, nested, trie_size


def tree_of(rows: list[Row]) -> PrefixTree:
    return build_prefix_tree(*joined(rows))


def check(tree: PrefixTree, rows: list[list[tuple[int, ...]]]) -> None:
    """Invariants 1-3 for rows of tokens (an id, or an id with its routing)."""
    assert tree.num_tokens == len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})
    name: dict[int, tuple[tuple[int, ...], ...]] = {}
    attends = np.zeros((tree.num_tokens, tree.num_tokens), dtype=np.bool_)
    held = np.zeros(tree.num_tokens, dtype=np.int64)
    for r, row in enumerate(rows):
        flat = tree.row_flat(r)
        assert len(flat) == len(row) and np.all(np.diff(flat) > 0)
        assert tree.ids[flat].tolist() == [token[0] for token in row]
        assert tree.positions[flat].tolist() == list(range(len(row)))
        assert tree.parent[flat].tolist() == [-1, *flat.tolist()][: len(row)]
        for at, f in enumerate(flat.tolist()):
            assert name.setdefault(f, tuple(row[: at + 1])) == tuple(row[: at + 1])
            attends[f, flat[: at + 1]] = True
        held[flat] += 1
    tokens = np.arange(tree.num_tokens)
    assert np.array_equal(tree.allowed(tokens[:, None], tokens[None]), attends)
    assert tree.attended_pairs == attends.sum()
    assert np.array_equal(tree.multiplicity, held)
    assert np.array_equal(tree.flat[tree.source], tokens)
    assert np.all(np.diff(tree.node_start) > 0) and len(tree.node) == tree.num_tokens
    for node, parent in enumerate(tree.node_parent.tolist()):
        above = tree.parent[tree.node_start[node]]
        assert parent == (tree.node[above] if above >= 0 else -1)


@settings(max_examples=100, deadline=None)
@given(ROWS)
def test_the_tree_is_the_trie_of_the_rows(rows: list[Row]) -> None:
    tree = tree_of(rows)
    check(tree, [[(token,) for token in row] for row in rows])
    assert tree.token_ratio == (len(tree.flat) / trie_size(rows) if any(rows) else 1.0)


@settings(max_examples=100, deadline=None)
@given(ROWS, st.randoms(use_true_random=False))
def test_row_order_changes_nothing(rows: list[Row], random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    tree, other = tree_of(rows), tree_of([rows[r] for r in order])
    for name in ("ids", "positions", "parent", "until", "multiplicity", "node_start", "node_parent"):
        assert np.array_equal(getattr(tree, name), getattr(other, name)), name
    for at, row in enumerate(order):
        assert np.array_equal(tree.row_flat(row), other.row_flat(at))


def test_the_layout_of_the_reference_example() -> None:
    """MiniMax-M2: a prompt of 4 tokens and leaves of 3, 3 and 2 run 12 tokens instead of 20."""
    tree = tree_of([[0, 1, 2, 3, *leaf] for leaf in ([10, 11, 12], [20, 21, 22], [30, 31])])
    assert (tree.num_tokens, len(tree.flat)) == (12, 20)
    assert tree.node_start.tolist() == [0, 4, 7, 10, 12] and tree.node_parent.tolist() == [-1, 0, 0, 0]
    assert tree.positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 4, 5, 6, 4, 5]
    assert tree.parent[[4, 7, 10]].tolist() == [3, 3, 3]
    assert tree.multiplicity.tolist() == [3] * 4 + [1] * 8


def test_token_ratios_are_the_tries() -> None:
    rng = np.random.default_rng(0)
    rows = branches(rng, 300, [100] * 16)
    assert tree_of(rows).token_ratio == 16 / 4.75
    for seed in range(5):
        rng = np.random.default_rng(seed)
        rows = [row for _ in range(4) for row in nested(rng, 4, 40, vocabulary=50)]
        rng.shuffle(rows)
        assert tree_of(rows).token_ratio == sum(map(len, rows)) / trie_size(rows)


@pytest.mark.parametrize("rows", [[], [[]], [[], []]])
def test_nothing_to_run(rows: list[Row]) -> None:
    tree = tree_of(rows)
    assert tree.num_tokens == 0 and tree.token_ratio == 1.0 and tree.attended_pairs == 0
    assert tree.num_rows == len(rows) and tree.node_start.tolist() == [0] and len(tree.node_parent) == 0


def test_text_is_never_compared() -> None:
    """Ids that would decode alike stay apart; the largest id is an id like any other."""
    largest = 2**31 - 1
    tree = tree_of([[1, largest], [1, largest - 1], [1, 0]])
    assert tree.num_tokens == 4 and sorted(tree.ids.tolist()) == [0, 1, largest - 1, largest]


def test_bad_rows_are_one_clear_line() -> None:
    for ids, offsets, text in (
        ([1, 2], [0, 1], "offsets must rise from 0 to the 2 ids"),
        ([1, 2], [0, 2, 1, 2], "offsets must rise"),
        ([1, -2], [0, 2], "token ids must be"),
        ([1, 2**31], [0, 2], "token ids must be"),
        ([1.0, 2.0], [0, 2], "integer ids"),
    ):
        with pytest.raises(PackingError, match=text):
            build_prefix_tree(ids, offsets)
    with pytest.raises(PackingError, match="together"):
        build_prefix_tree([1], [0, 1], routed_valid=np.array([True]))
    with pytest.raises(PackingError, match="needs the recorded routing"):
        build_prefix_tree([1], [0, 1], separate_routing=True)
    with pytest.raises(PackingError, match="routed has 2 entries"):
        build_prefix_tree([1], [0, 1], routed=np.zeros((2, 1, 1), np.uint8), routed_valid=np.array([True]))


def test_the_arrays_cannot_be_written() -> None:
    with pytest.raises(ValueError, match="read-only"):
        tree_of([[1, 2]]).until[0] = 0


# -- routing ---------------------------------------------------------------------------------------------------------
@settings(max_examples=80, deadline=None)
@given(ROWS, st.integers(0, 2**32 - 1), st.sampled_from([np.uint8, np.uint16]))
def test_tokens_routed_apart_are_kept_apart(rows: list[Row], seed: int, dtype: type) -> None:
    ids, offsets = joined(rows)
    rng = np.random.default_rng(seed)
    routed: NDArray[np.unsignedinteger] = rng.integers(0, 2, (len(ids), 3, 1)).astype(dtype) * np.array(
        [[[1], [0], [0]]], dtype=dtype
    )
    valid = rng.random(len(ids)) < 0.8
    tree = build_prefix_tree(ids, offsets, routed=routed, routed_valid=valid, separate_routing=True)
    token = [(int(i), bool(v), *(r.ravel().tolist() if v else [])) for i, v, r in zip(ids, valid, routed, strict=True)]
    split = [token[a:b] for a, b in zip(offsets, offsets[1:], strict=False)]
    check(tree, split)
    # Exact: the source's routing is the routing of every row position that runs as this token.
    stands = tree.source[tree.flat]
    assert np.array_equal(valid[stands], valid)
    assert np.array_equal(routed[stands][valid], routed[valid])
    order = rng.permutation(len(rows))
    spans = [np.arange(offsets[r], offsets[r + 1]) for r in order]
    index = np.concatenate([np.empty(0, dtype=np.int64), *spans])
    cuts = np.cumsum([0, *np.diff(offsets)[order]])
    other = build_prefix_tree(ids[index], cuts, routed=routed[index], routed_valid=valid[index], separate_routing=True)
    assert np.array_equal(tree.until, other.until) and np.array_equal(tree.ids, other.ids)


def test_the_source_is_the_first_recorded_routing() -> None:
    ids, offsets = joined([[5, 6, 7], [5, 6, 8], [5, 6, 7]])
    routed = np.arange(9, dtype=np.uint8).reshape(9, 1, 1)
    valid = np.array([1, 0, 0, 1, 1, 1, 1, 1, 1], dtype=np.bool_)
    tree = build_prefix_tree(ids, offsets, routed=routed, routed_valid=valid)
    assert tree.num_tokens == 4
    assert tree.source.tolist() == [0, 4, 8, 5]
    assert build_prefix_tree(ids, offsets).source.tolist() == [0, 1, 2, 5]


def test_routing_that_collides_is_found_out() -> None:
    """Two routings made to have one hash under the first salt: they are compared, and stay apart."""
    one = np.zeros((1, 16), dtype=np.uint8)
    other = one.copy()
    other[0, 0] = 1
    words = [_words(row.reshape(1, 2, 8), np.array([True])) for row in (one, other)]
    before = [_hash(w[:, :2], 0) for w in words]
    other[0, 8:] = (before[0] ^ before[1]).view(np.uint8)
    routed = np.concatenate([one, other]).reshape(2, 2, 8)
    valid = np.ones(2, dtype=np.bool_)
    key = _hash(_words(routed, valid), 0)
    assert key[0] == key[1] and not np.array_equal(routed[0], routed[1])
    tree = build_prefix_tree([4, 4], [0, 1, 2], routed=routed, routed_valid=valid, separate_routing=True)
    assert tree.num_tokens == 2


# -- time ------------------------------------------------------------------------------------------------------------
def test_time_is_linear_in_tokens() -> None:
    """128 rows of 512 and of 32k tokens, three quarters shared by 16: 64 times the tokens; 64^2 would be quadratic.

    The wide margin is for caches and fresh pages, which cost the longer one up to five times as much a token; the time
    is the processor's own, which other processes do not lengthen.
    """

    def seconds(length: int) -> float:
        rng = np.random.default_rng(0)
        rows = [row for _ in range(8) for row in branches(rng, length * 3 // 4, [length // 4] * 16)]
        ids, offsets = joined(rows)
        taken = []
        for _ in range(3):
            start = time.process_time()
            assert build_prefix_tree(ids, offsets).token_ratio == 16 / 4.75
            taken.append(time.process_time() - start)
        return min(taken)

    short, long = seconds(512), seconds(32768)
    print(f"{128 * 512} tokens {1e3 * short:.1f} ms, {128 * 32768} tokens {1e3 * long:.0f} ms")
    assert long < 12 * 64 * short
