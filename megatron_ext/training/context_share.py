"""Which places of packed rows a context-parallel rank runs: its zigzag share of every row. Pure numpy.

Attention is causal, so a rank takes one piece from the front of a row and one from its back: rank r of c holds pieces r
and 2c - 1 - r of 2c equal ones, and every row is padded at its end to a multiple of 2c.

Invariants (``tests/training/test_context_share.py``):

1. Every place of the padded rows is on exactly one rank; all ranks hold equally many.
2. A rank's places stand row after row, each row's front piece before its back piece: what ``models.attention`` expects.
3. A single rank holds every place in order, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, eq=False)
class ContextShare:
    """P places of R padded rows, U = P / size of them on this rank, all int64.

    ``offsets`` [R+1] bound the padded rows; ``entry`` [P] is the place of each in the rows without padding, -1 where it
    is padding; ``place`` [U], the places that this rank runs, in its order; ``local`` [P], where each place stands on
    this rank, -1 where another rank runs it.
    """

    offsets: NDArray[np.int64]
    entry: NDArray[np.int64]
    place: NDArray[np.int64]
    local: NDArray[np.int64]


def context_share(lengths: ArrayLike, size: int = 1, rank: int = 0) -> ContextShare:
    """The share of context-parallel rank ``rank`` of ``size`` in rows of ``lengths`` int [R] tokens."""
    length = np.asarray(lengths, dtype=np.int64)
    if size < 1 or not 0 <= rank < size:
        raise ValueError(f"context-parallel rank {rank} of {size}: there is no such rank")
    pieces = 2 * size if size > 1 else 1
    padded = -(-length // pieces) * pieces
    offsets = np.concatenate([[0], np.cumsum(padded)]).astype(np.int64)
    start = np.repeat(offsets[:-1], padded)
    within = np.arange(offsets[-1], dtype=np.int64) - start
    real = within < np.repeat(length, padded)
    entry = np.where(real, np.cumsum(real) - 1, -1)
    if size == 1:
        everything = np.arange(offsets[-1], dtype=np.int64)
        return ContextShare(offsets, entry, everything, everything)
    piece = within // np.repeat(padded // pieces, padded)
    place = np.flatnonzero((piece == rank) | (piece == pieces - 1 - rank))
    local = np.full(len(within), -1, dtype=np.int64)
    local[place] = np.arange(len(place))
    return ContextShare(offsets, entry, place, local)
