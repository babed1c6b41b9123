"""What a prefix tree predicts: each distinct prediction once, and the row positions that use it.

A trained row position is an *entry*; the *prediction* it uses is (the flat token before it, its id). The hidden state
of a branch point predicts several different next tokens, so predictions are listed apart from flat tokens. A loss that
needs ratios, clips or per-branch advantages computes log-probs once a prediction and gathers them once an entry
(``logp[index]``); one that is linear in the log-prob may sum its coefficients instead (``sum``).

Invariants (``tests/trajectory/test_tree_targets.py`` asserts each):

1. Every selected row position that its owner has not trained yet is one entry; the others are counted in ``repeats``.
2. ``logit_index`` of an entry is the flat index of the token before it in its own row, ``target`` its id.
3. ``count`` is how many entries use a prediction: a shared trained token counts once per owner that trains it.
4. For any per-entry coefficients c: ``sum(c) . logp == c . logp[index]``, and both equal the loss over unpacked rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.packing import PackingError
from megatron_ext.trajectory.prefix_tree import Bools, Ints, PrefixTree


@dataclass(frozen=True, eq=False)
class TreeTargets:
    """n entries, P predictions. Everything int64.

    ``entry`` [n], index into the tree's row positions [M], rising; ``row`` [n]; ``index`` [n], the prediction of each.
    ``logit_index`` [P], flat token whose hidden state predicts; ``target`` [P], id; ``flat`` [P], flat token predicted,
    rising; ``count`` [P], entries that use it. ``repeats``: selected positions left out, their owner has them already.
    """

    entry: Ints
    row: Ints
    index: Ints
    logit_index: Ints
    target: Ints
    flat: Ints
    count: Ints
    repeats: int

    def __post_init__(self) -> None:
        for array in (self.entry, self.row, self.index, self.logit_index, self.target, self.flat, self.count):
            array.flags.writeable = False

    def sum(self, values: ArrayLike) -> NDArray[np.float64]:
        """Sum over the entries of each prediction, float64 [P], of ``values`` [n]: weights, or weight x advantage."""
        summed = np.bincount(self.index, weights=np.asarray(values, dtype=np.float64), minlength=len(self.flat))
        return summed.astype(np.float64)

    @cached_property
    def groups(self) -> tuple[Ints, Ints]:
        """``(order, offsets)``: prediction p is used by the entries ``order[offsets[p]:offsets[p+1]]``."""
        offsets = np.concatenate([[0], np.cumsum(self.count)]).astype(np.int64)
        return np.argsort(self.index, kind="stable").astype(np.int64), offsets


def tree_targets(tree: PrefixTree, select: ArrayLike, owner: ArrayLike | None = None) -> TreeTargets:
    """Predictions for the row positions ``select`` bool [M].

    ``owner`` int [R] names who each row belongs to, and an owner trains a flat token once, in its first row that
    selects it: pass the trajectory of each row, or its tree for node-deduplicated losses (TreeOPSD). None: each row
    owns itself. Raises ``PackingError`` when a row's first token is selected: nothing predicts it.
    """
    chosen: Bools = np.asarray(select, dtype=np.bool_)
    if chosen.shape != tree.flat.shape:
        raise PackingError(f"select has shape {chosen.shape}, the tree's rows {tree.flat.shape}")
    row_of = np.repeat(np.arange(tree.num_rows, dtype=np.int64), np.diff(tree.offsets))
    entry = np.flatnonzero(chosen).astype(np.int64)
    row, flat = row_of[entry], tree.flat[entry]
    if np.any(tree.parent[flat] < 0):
        raise PackingError(f"row {row[tree.parent[flat] < 0][0]} selects its first token: nothing predicts it")
    repeats = 0
    if owner is not None:
        owners = np.asarray(owner)
        if owners.shape != (tree.num_rows,):
            raise PackingError(f"owner has shape {owners.shape}, the tree {tree.num_rows} rows")
        # Only a token that several rows select can be its owner's a second time.
        again = np.flatnonzero(np.bincount(flat, minlength=tree.num_tokens)[flat] > 1)
        _, name = np.unique(owners, return_inverse=True)
        key = name.astype(np.int64)[row[again]] * tree.num_tokens + flat[again]
        kept = np.ones(len(entry), dtype=np.bool_)
        kept[again] = False
        kept[again[np.unique(key, return_index=True)[1]]] = True
        repeats = len(entry) - int(np.count_nonzero(kept))
        entry, row, flat = entry[kept], row[kept], flat[kept]
    uses = np.bincount(flat, minlength=tree.num_tokens)
    predicted = np.flatnonzero(uses)
    place = np.cumsum(uses > 0) - 1
    return TreeTargets(
        entry=entry,
        row=row,
        index=place[flat].astype(np.int64),
        logit_index=tree.parent[predicted],
        target=tree.ids[predicted],
        flat=predicted.astype(np.int64),
        count=uses[predicted].astype(np.int64),
        repeats=repeats,
    )
