"""Reverse linear recurrence over ragged chains: what GAE, reward to go and discounted suffix sums have in common.

Invariants (``tests/credit/test_scan.py`` asserts each):

1. ``y[i] = x[i] + a[i] y[i + 1]`` within a chain, started from ``carry`` behind its last element.
2. A chain's result does not depend, in any bit, on the other chains of the call.
3. Any coefficient in -1..1 is safe, 0 and 1 included, at any length: products may vanish but never grow.
4. The block length changes nothing but the last digits of float64.

Each chain is cut into blocks that are aligned to its end. All blocks advance together, one position at a time, as one
vector; then the few block heads are linked; then every block takes up what came in from behind. The work is linear, and
the Python steps are a block's length plus the longest chain's number of blocks.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

BLOCK = 256
# A chain shorter than a rung is padded to that rung at most, so that one long chain among many short ones does not
# blow up the memory.
_RUNGS = (4, 16, 64)


def check_offsets(offsets: NDArray[Any], size: int) -> None:
    """Raises ``ValueError`` unless ``offsets`` [C+1] partition ``size`` elements."""
    if offsets.ndim != 1 or not len(offsets) or offsets[0] != 0 or offsets[-1] != size or np.any(np.diff(offsets) < 0):
        raise ValueError(f"offsets {offsets[:3]}..{offsets[-1:]}: must start at 0, never fall and end at {size}")


def linear_scan_reverse(
    values: NDArray[Any],
    coefficient: float | NDArray[Any],
    offsets: NDArray[Any],
    *,
    factor: NDArray[Any] | None = None,
    carry: NDArray[Any] | None = None,
    block: int = BLOCK,
) -> NDArray[np.float64]:
    """``y[i] = values[i] + coefficient * factor[i] * y[i + 1]`` within each chain, backwards; float64 [N].

    With one coefficient gamma this is the discounted suffix sum (reward to go, APPO's future value).

    Args:
        values: [N], finite.
        coefficient: one number, or one a chain [C]; within -1..1.
        offsets: [C+1], span of each chain in ``values``.
        factor: [N], multiplies the coefficient at each position, within -1..1; None = 1.
        carry: [C], ``y`` behind the last element of each chain; None = 0.
        block: elements of a block; changes speed, and results in the last digit only.

    Raises:
        ValueError: shapes that disagree, or a coefficient outside -1..1.
    """
    x = np.asarray(values, dtype=np.float64)
    if x.ndim != 1 or block < 1:
        raise ValueError(f"values {x.shape}, block {block}: expected [N] and at least 1")
    check_offsets(offsets, len(x))
    chains = len(offsets) - 1
    share = np.asarray(coefficient, dtype=np.float64)
    start = np.zeros(chains) if carry is None else np.asarray(carry, dtype=np.float64)
    scale = None if factor is None else np.asarray(factor, dtype=np.float64)
    if share.shape not in ((), (chains,)) or start.shape != (chains,) or (scale is not None and scale.shape != x.shape):
        shapes = f"coefficient {share.shape}, carry {start.shape}, factor {None if scale is None else scale.shape}"
        raise ValueError(f"{shapes}: expected one number or ({chains},), ({chains},) and {x.shape}")
    for name, array in (("coefficient", share), ("factor", scale)):
        if array is not None and array.size and not np.abs(array).max() <= 1:
            raise ValueError(f"{name} spans {array.min()}..{array.max()}: must lie within -1..1")
    share = np.broadcast_to(share, (chains,))

    lengths = np.diff(offsets)
    widths = np.array([*(rung for rung in _RUNGS if rung < block), block])
    width = np.minimum(np.searchsorted(widths, lengths), len(widths) - 1)
    width[lengths == 0] = -1
    rungs = np.unique(width[width >= 0])
    out = np.empty_like(x)
    for rung in rungs:
        chosen = width == rung
        element = slice(None) if len(rungs) == 1 else np.repeat(chosen, lengths)
        part = None if scale is None else scale[element]
        out[element] = _scan(x[element], share[chosen], lengths[chosen], part, start[chosen], int(widths[rung]))
    return out


def _scan(
    x: NDArray[np.float64],
    share: NDArray[np.float64],
    lengths: NDArray[np.int64],
    scale: NDArray[np.float64] | None,
    carry: NDArray[np.float64],
    width: int,
) -> NDArray[np.float64]:
    """The scan of chains that all have elements, in blocks of ``width``."""
    width = min(width, int(lengths.max()))
    blocks = -(-lengths // width)
    last = np.cumsum(blocks) - 1
    count = np.full(int(last[-1]) + 1, width)
    count[last - blocks + 1] = lengths - (blocks - 1) * width
    filled = None if np.all(count == width) else np.arange(width) >= (width - count)[:, None]
    y = _columns(x, filled, width)
    base = np.repeat(share, blocks)
    step: NDArray[np.float64] | None = None if scale is None else _columns(scale, filled, width) * base

    # Every block as if nothing came in from behind. The padding in front of a chain's first block is never read.
    ahead = np.empty(len(base))
    for i in range(width - 2, -1, -1):
        np.multiply(y[i + 1], base if step is None else step[i], out=ahead)
        y[i] += ahead
    through = base**width if step is None else np.multiply.reduce(step, axis=0)

    # What comes into each block: from the last block of each chain to its first, all chains at once.
    incoming = np.zeros(len(base))
    order = np.argsort(-blocks, kind="stable")
    tail, depth, running = last[order], -blocks[order], carry[order].copy()
    for j in range(int(blocks.max())):
        active = int(np.searchsorted(depth, -j))  # chains that have more than j blocks
        here = tail[:active] - j
        incoming[here] = running[:active]
        running[:active] = y[0, here] + through[here] * running[:active]
    for i in range(width - 1, -1, -1):
        incoming *= base if step is None else step[i]
        y[i] += incoming
    rows = np.ascontiguousarray(y.T)
    return rows.reshape(-1) if filled is None else rows[filled]


def _columns(x: NDArray[np.float64], filled: NDArray[np.bool_] | None, width: int) -> NDArray[np.float64]:
    """Blocks as columns [width, blocks], so that one position of all blocks lies together; a copy, 0 where padded."""
    if filled is None:
        return x.reshape(-1, width).T.copy()
    rows = np.zeros(filled.shape)
    rows[filled] = x
    return np.ascontiguousarray(rows.T)
