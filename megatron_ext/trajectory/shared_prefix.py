"""Which places of a pack hold one and the same token: equal ids behind equal prefixes.

Invariants (``tests/trajectory/test_shared_prefix.py``):

1. Two places share a token exactly when their sequences agree up to and including it: as many distinct tokens remain
   as a trie of the sequences has nodes.
2. Tokens keep the order of their first place; nothing but ids is compared, text never.
3. Time is linear in tokens, but for sorting the sequences.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


def _common(a: NDArray[np.int64], b: NDArray[np.int64]) -> int:
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    at = int(differs.argmax()) if n else 0
    return at if n and differs[at] else n


def distinct_tokens(
    ids: NDArray[np.int64], offsets: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Distinct tokens of the sequences laid end to end in ``ids`` [T], ``offsets`` [S + 1].

    Returns ``distinct`` int64 [T], the token (0 to U - 1) of each place, and ``place`` int64 [U], its first place.
    """
    spans = [slice(int(a), int(b)) for a, b in zip(offsets[:-1], offsets[1:], strict=True)]
    # Big-endian bytes sort as the ids do: neighbours then have the longest prefixes in common.
    order = sorted(range(len(spans)), key=lambda row: ids[spans[row]].astype(">u8").tobytes())
    node = np.arange(len(ids))
    for before, row in zip(order, order[1:], strict=False):
        a, b = spans[before], spans[row]
        common = _common(ids[a], ids[b])
        node[b.start : b.start + common] = node[a.start : a.start + common]
    # A node is named by a place of whichever sequence sorted first; rename it by the first place in the pack.
    first = np.empty(len(ids), dtype=np.int64)
    first[node[::-1]] = np.arange(len(ids))[::-1]
    place = np.sort(first[np.unique(node)])
    number = np.empty(len(ids), dtype=np.int64)
    number[place] = np.arange(len(place))
    return number[first[node]], place
