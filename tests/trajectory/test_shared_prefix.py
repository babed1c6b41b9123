"""Invariants of ``megatron_ext/trajectory/shared_prefix.py``."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_ext.trajectory.shared_prefix import distinct_tokens

SEQUENCES = st.lists(st.lists(st.integers(0, 2), max_size=6), max_size=8)


def flat(sequences: list[list[int]]) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array([i for s in sequences for i in s], dtype=np.int64)
    return ids, np.cumsum([0, *map(len, sequences)])


@settings(max_examples=200)
@given(SEQUENCES)
def test_places_share_a_token_exactly_when_their_sequences_agree_so_far(sequences: list[list[int]]) -> None:
    ids, offsets = flat(sequences)
    distinct, place = distinct_tokens(ids, offsets)
    prefixes = [tuple(s[: at + 1]) for s in sequences for at in range(len(s))]
    trie: dict[tuple[int, ...], int] = {}
    for prefix in prefixes:  # invariants 1 and 2: numbered by first place
        trie.setdefault(prefix, len(trie))
    assert distinct.tolist() == [trie[p] for p in prefixes]
    assert place.tolist() == [prefixes.index(p) for p in trie]


def test_sixteen_branches_that_share_three_quarters() -> None:
    stem = np.arange(300)
    sequences = [[*stem, *(1000 * branch + np.arange(100))] for branch in range(1, 17)]
    _, place = distinct_tokens(*flat(sequences))
    assert 16 * 400 / len(place) == pytest.approx(16 / 4.75)


def test_ids_that_differ_by_more_than_a_byte_keep_their_order() -> None:
    sequences = [[256, 1], [1, 256], [256, 2], [1, 1]]
    distinct, _ = distinct_tokens(*flat(sequences))
    assert distinct.tolist() == [0, 1, 2, 3, 0, 4, 2, 5]
