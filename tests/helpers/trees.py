"""Rows that share prefixes, and the trie that says what they share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

Row = list[int]

# Few different ids: rows agree for a while by chance, repeat, and are prefixes of each other; some are empty.
ROWS: st.SearchStrategy[list[Row]] = st.lists(st.lists(st.integers(0, 2), max_size=9), max_size=9)


def joined(rows: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Ids [M] and offsets [R+1]."""
    ids = np.array([token for row in rows for token in row], dtype=np.int64)
    return ids, np.cumsum([0, *(len(row) for row in rows)])


def trie_size(rows: Sequence[Sequence[int]]) -> int:
    """Distinct prefixes, counted one by one."""
    return len({tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)})


def branches(rng: np.random.Generator, trunk: int, leaves: Sequence[int], vocabulary: int = 150_000) -> list[Row]:
    """A trunk with a branch for each of ``leaves``, which differ from their first token on."""
    first = rng.choice(vocabulary, len(leaves), replace=False)
    shared = rng.integers(0, vocabulary, trunk).tolist()
    return [
        [*shared, int(head), *rng.integers(0, vocabulary, size - 1).tolist()] if size else shared
        for head, size in zip(first, leaves, strict=True)
    ]


def nested(rng: np.random.Generator, depth: int, length: int, vocabulary: int = 150_000) -> list[Row]:
    """Rows of a ragged tree: every node is a run of random length and has 0 to 4 children; some rows end inside."""
    run = rng.integers(0, vocabulary, int(rng.integers(1, length))).tolist()
    children = int(rng.integers(0, 5)) if depth else 0
    rows = [[*run, *row] for _ in range(children) for row in nested(rng, depth - 1, length, vocabulary)]
    if not children or rng.random() < 0.2:
        rows.append(run)
    return rows
