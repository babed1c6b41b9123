"""Prefix tree: rows that share a prefix laid out so that the shared tokens are run once (MiniMax-M2, section 6.2.5).

The rows of a micro-batch, a group or a batch become one flat sequence: the nodes of their trie of token ids, depth
first. Row r's token at position p stands at ``flat[offsets[r] + p]``; a query sees exactly the keys on its root path.
Planning only, in numpy; nothing here is as large as tokens x tokens.

Invariants (``tests/trajectory/test_prefix_tree.py`` asserts each):

1. A flat token is a distinct prefix: two row positions share one if and only if their ids (and, where ``routed`` is
   given, their routing) are equal there and everywhere before. ``num_tokens`` is the trie's exact size.
2. Along a row flat indices rise and positions count 0, 1, 2, ...: rotary embeddings and causal order are the row's own.
3. Query q may attend key k if and only if ``k <= q < until[k]``, and if and only if some row holds k at or before q.
   Rectangles and block ranges say the same.
4. Row order, and where the rows came from, change nothing of the layout; ``source`` alone prefers earlier rows.
5. Building takes work linear in the tokens (sorting compares prefixes at memory speed); no Python loop over tokens.

Which routing a shared token replays is the caller's choice. With ``routed`` given, tokens that were routed differently
(or of which one has no recorded routing) are kept apart, and so is all that follows them: every row replays its own
routing exactly. Without it sharing goes by ids, and the entry ``source`` names supplies the routing for all.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.packing import PackingError

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_HASH_ATTEMPTS = 8
_HASH_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio: odd, bits well mixed


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """R rows of M tokens in all, F flat tokens, N nodes. Everything int64.

    Flat: ``ids``, ``positions``, ``parent`` (flat index of the token before, -1 at a root), ``until`` (token f is seen
    by the flat queries ``f .. until[f] - 1``), ``multiplicity`` (rows that hold the token) and ``source`` (the entry of
    [M] whose per-token data stand for it), all [F].

    Rows: ``offsets`` [R+1]; ``flat`` [M], the flat index of each row position (un-merge: ``x[flat]``).

    Nodes, depth first: maximal runs of flat tokens held by the same rows, ``node_start`` [N+1] and ``node_parent`` [N]
    (-1 at a root). A forest has several roots.
    """

    ids: Ints
    positions: Ints
    parent: Ints
    until: Ints
    multiplicity: Ints
    source: Ints
    offsets: Ints
    flat: Ints
    node_start: Ints
    node_parent: Ints

    def __post_init__(self) -> None:
        for array in vars(self).values():
            array.flags.writeable = False

    @property
    def num_tokens(self) -> int:
        """Flat tokens F, each run once."""
        return len(self.ids)

    @property
    def num_rows(self) -> int:
        return len(self.offsets) - 1

    @property
    def token_ratio(self) -> float:
        """Tokens of the rows over tokens that are run; 1.0 without rows."""
        return len(self.flat) / self.num_tokens if self.num_tokens else 1.0

    @property
    def attended_pairs(self) -> int:
        """(query, key) pairs of the mask."""
        return int(self.positions.sum()) + self.num_tokens

    def row_flat(self, row: int) -> Ints:
        """Flat indices of the tokens of one row."""
        return self.flat[self.offsets[row] : self.offsets[row + 1]]

    @cached_property
    def node(self) -> Ints:
        """Node of each flat token, int64 [F]."""
        return np.repeat(np.arange(len(self.node_parent), dtype=np.int64), np.diff(self.node_start))

    def allowed(self, query: ArrayLike, key: ArrayLike) -> Bools:
        """Whether ``query`` may attend ``key`` (flat indices, broadcast): the mask, one pair at a time."""
        q, k = np.asarray(query), np.asarray(key)
        result: Bools = (k <= q) & (q < self.until[k])
        return result


def build_prefix_tree(
    ids: ArrayLike,
    offsets: ArrayLike,
    *,
    routed: NDArray[np.unsignedinteger[Any]] | None = None,
    routed_valid: Bools | None = None,
    separate_routing: bool = False,
) -> PrefixTree:
    """The tree of R rows: ``ids`` int [M], row r being ``ids[offsets[r]:offsets[r+1]]``; rows may be empty.

    ``routed`` unsigned [M, L, k] and ``routed_valid`` bool [M] are the recorded routing of every row position. With
    ``separate_routing`` they must be equal to share a token; otherwise they only make ``source`` prefer an entry whose
    routing was recorded. Raises ``PackingError``.
    """
    tokens, cuts = _checked(ids, offsets)
    if (routed is None) != (routed_valid is None):
        raise PackingError("a prefix tree needs routed and routed_valid together, or neither")
    if routed is None and separate_routing:
        raise PackingError("separate_routing needs the recorded routing: pass routed and routed_valid")
    if routed is not None and routed_valid is not None:
        if len(routed) != len(tokens) or routed_valid.shape != tokens.shape:
            raise PackingError(f"routed has {len(routed)} entries, routed_valid {len(routed_valid)}, ids {len(tokens)}")
        if separate_routing:
            return _separated(tokens, cuts, routed, routed_valid)
    return _build(tokens, cuts, None, routed_valid)


def _checked(ids: ArrayLike, offsets: ArrayLike) -> tuple[NDArray[np.int32], Ints]:
    tokens, cuts = np.asarray(ids), np.asarray(offsets, dtype=np.int64)
    if tokens.ndim != 1 or (tokens.size and tokens.dtype.kind not in "iu"):
        raise PackingError(f"a prefix tree needs integer ids [M]; got {tokens.dtype} {tokens.shape}")
    if cuts.ndim != 1 or not len(cuts) or cuts[0] != 0 or cuts[-1] != len(tokens) or np.any(np.diff(cuts) < 0):
        raise PackingError(f"row offsets must rise from 0 to the {len(tokens)} ids; got {cuts[:4]} .. {cuts[-1:]}")
    if tokens.size and (tokens.min() < 0 or tokens.max() > np.iinfo(np.int32).max):
        raise PackingError(f"token ids must be in 0 .. 2^31 - 1; got {tokens.min()} .. {tokens.max()}")
    return tokens.astype(np.int32), cuts


def _separated(
    ids: NDArray[np.int32], offsets: Ints, routed: NDArray[np.unsignedinteger[Any]], valid: Bools
) -> PrefixTree:
    """Sharing by ids and routing: sorted by a hash of the routing, then every share is compared byte for byte."""
    words = _words(routed, valid)
    for salt in range(_HASH_ATTEMPTS):
        tree = _build(ids, offsets, _hash(words, salt), valid)
        stands_for = tree.source[tree.flat]
        shared = np.flatnonzero(stands_for != np.arange(len(ids)))
        same = valid[shared] == valid[stands_for[shared]]
        if np.all(same) and np.array_equal(words[shared], words[stands_for[shared]]):
            return tree
    raise PackingError(f"{_HASH_ATTEMPTS} hashes of the recorded routing all collide; is routed a real recording?")


def _words(routed: NDArray[np.unsignedinteger[Any]], valid: Bools) -> NDArray[np.uint64]:
    """The routing of each token as 64-bit words [M, W], all 0 where none was recorded; the first word says which."""
    raw = np.ascontiguousarray(routed).reshape(len(routed), int(np.prod(routed.shape[1:]))).view(np.uint8)
    width = 1 + -(-raw.shape[1] // 8)
    padded = np.zeros((len(raw), 8 * width), dtype=np.uint8)
    padded[:, 0] = valid
    padded[:, 8 : 8 + raw.shape[1]] = np.where(valid[:, None], raw, 0)
    return padded.view(np.uint64)


def _hash(words: NDArray[np.uint64], salt: int) -> NDArray[np.uint64]:
    """One 64-bit hash a token, by content alone: no order of rows changes it."""
    value = np.full(len(words), salt + 1, dtype=np.uint64) * _HASH_FACTOR
    for word in words.T:
        value = (value ^ word) * _HASH_FACTOR
        value ^= value >> np.uint64(29)
    return value


def _build(ids: NDArray[np.int32], offsets: Ints, key: NDArray[np.uint64] | None, valid: Bools | None) -> PrefixTree:
    """The tree of rows whose tokens are equal when id and ``key`` are."""
    order, common = sort_rows(ids, offsets, key)
    lengths = np.diff(offsets)
    flat = np.empty(len(ids), dtype=np.int64)
    # Depth first is sorted order: a row repeats the path of the row before it as far as they agree, then goes on alone.
    starts, above, size, previous = [], [], 0, 0
    for row, depth in zip(order.tolist(), common.tolist(), strict=True):
        begin, own = int(offsets[row]), int(lengths[row]) - depth
        flat[begin : begin + depth] = flat[previous : previous + depth]
        flat[begin + depth : begin + depth + own] = np.arange(size, size + own)
        if own:
            starts.append(size)
            above.append(int(flat[begin + depth - 1]) if depth else -1)
        size += own
        previous = begin
    parent = np.arange(-1, size - 1, dtype=np.int64)
    parent[starts] = above
    # Reversed writes: of several entries the earliest is the last to be written; a recorded routing goes before none.
    source = np.empty(size, dtype=np.int64)
    entries = np.arange(len(ids), dtype=np.int64)[::-1]
    source[flat[entries]] = entries
    if valid is not None:
        entries = entries[valid[entries]]
        source[flat[entries]] = entries
    within = np.arange(len(ids), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
    positions = within[source]
    node_start, node_parent = _nodes(parent, np.array(starts, dtype=np.int64), flat[offsets[1:][lengths > 0] - 1])
    until = node_start[1:].copy()
    for node in range(len(until) - 1, -1, -1):
        if node_parent[node] >= 0:
            until[node_parent[node]] = max(until[node_parent[node]], until[node])
    return PrefixTree(
        ids=ids[source].astype(np.int64),
        positions=positions,
        parent=parent,
        until=np.repeat(until, np.diff(node_start)),
        multiplicity=np.bincount(flat, minlength=size).astype(np.int64),
        source=source,
        offsets=offsets.copy(),
        flat=flat,
        node_start=node_start,
        node_parent=node_parent,
    )


def sort_rows(ids: NDArray[np.int32], offsets: Ints, key: NDArray[np.uint64] | None = None) -> tuple[Ints, Ints]:
    """Row indices in lexicographic order of tokens, and how many tokens each row has in common with the one before."""
    # Big-endian tokens compare like their bytes, so that Python's sort runs on memcmp.
    if key is None:
        data, width = ids.astype(">u4").tobytes(), 4
    else:
        token = np.empty(len(ids), dtype=[("id", ">u4"), ("key", ">u8")])
        token["id"], token["key"] = ids, key
        data, width = token.tobytes(), token.itemsize
    cuts = (offsets * width).tolist()
    names = [data[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]
    order = sorted(range(len(names)), key=names.__getitem__)
    common = [0] * len(order)
    for at, (one, two) in enumerate(zip(order, order[1:], strict=False), start=1):
        a, b = int(offsets[one]), int(offsets[two])
        size = min(int(offsets[one + 1]) - a, int(offsets[two + 1]) - b)
        differs = ids[a : a + size] != ids[b : b + size]
        if key is not None:
            differs |= key[a : a + size] != key[b : b + size]
        common[at] = int(differs.argmax()) if differs.any() else size
    return np.array(order, dtype=np.int64), np.array(common, dtype=np.int64)


def _nodes(parent: Ints, starts: Ints, ends: Ints) -> tuple[Ints, Ints]:
    """Node offsets and parents: flat order is cut where a run starts, behind the token it hangs on, and behind a row's
    last token."""
    size = len(parent)
    cuts = np.unique(np.concatenate([starts, parent[starts] + 1, ends + 1, [0, size]]))
    first = cuts[:-1]
    node_parent = np.searchsorted(cuts, parent[first], side="right").astype(np.int64) - 1
    return cuts.astype(np.int64), node_parent
