"""Keyed group statistics: scores of the members of a group, centred and optionally scaled (specs, P3).

Invariants (``tests/credit/test_groups.py`` asserts each):

1. A group whose scores agree within ``tolerance`` gives exactly 0, not the quotient of two rounding errors.
2. A group of one gives 0 (``singleton='zero'``); the raw score only when asked for.
3. Members that are not present do not vote on mean, spread or size, and get exactly 0.
4. Members of a group need not be neighbours, groups need not be equal in size, and order does not matter.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

SINGLETON = ("zero", "raw")


def compose_keys(*keys: NDArray[Any]) -> NDArray[np.int64]:
    """One int64 key [J] for the tuple of the given keys (prompt and role, uid and kind, ...)."""
    combined = np.unique(keys[0], return_inverse=True)[1].astype(np.int64)
    for key in keys[1:]:
        values, index = np.unique(key, return_inverse=True)
        combined = np.unique(combined * len(values) + index, return_inverse=True)[1].astype(np.int64)
    return combined


def group_normalize(
    scores: NDArray[Any],
    key: NDArray[Any],
    *,
    present: NDArray[np.bool_] | None = None,
    std: bool,
    ddof: int = 0,
    eps: float = 1e-6,
    singleton: str = "zero",
    tolerance: float = 1e-6,
) -> NDArray[np.float64]:
    """``(score - mean) / (std + eps)`` within each group, or ``score - mean`` when ``std`` is False (GRPO).

    Args:
        scores: [J], finite where present.
        key: [J], equal for members of one group; any sortable dtype (see ``compose_keys``).
        present: bool [J]; None = all.
        std: divide by the group's standard deviation.
        ddof: 0 population, 1 sample standard deviation.
        eps: added to the standard deviation.
        singleton: what a group of one present member gets: ``zero``, or its ``raw`` score.
        tolerance: a group whose highest and lowest score differ by no more than this is constant.

    Returns:
        float64 [J].
    """
    if singleton not in SINGLETON:
        raise ValueError(f"singleton {singleton!r}: must be one of {', '.join(SINGLETON)}")
    if ddof not in (0, 1):
        raise ValueError(f"ddof {ddof}: must be 0 (population) or 1 (sample)")
    values = np.asarray(scores, dtype=np.float64)
    here = np.ones(len(values), dtype=bool) if present is None else np.asarray(present, dtype=bool)
    if values.ndim != 1 or not values.shape == np.shape(key) == here.shape:
        raise ValueError(f"scores {values.shape}, key {np.shape(key)}, present {here.shape}: all must be [J]")
    if not np.all(np.isfinite(values[here])):
        at = int(np.flatnonzero(here)[np.argmax(~np.isfinite(values[here]))])
        raise ValueError(f"score {at} is {values[at]}: mask members without a valid score through `present`")

    out = np.zeros(len(values))
    if not here.any():
        return out
    member, score = np.unique(np.asarray(key)[here], return_inverse=True)[1], values[here]
    size = np.bincount(member)
    low, high = np.full(len(size), np.inf), np.full(len(size), -np.inf)
    np.minimum.at(low, member, score)
    np.maximum.at(high, member, score)
    # Measured from the lowest score, so that a large common offset costs no precision.
    shifted = score - low[member]
    centred = shifted - (np.bincount(member, weights=shifted) / size)[member]
    if std:
        variance = np.bincount(member, weights=centred**2) / np.maximum(size - ddof, 1)
        spread = (np.sqrt(variance) + eps)[member]
        centred = np.divide(centred, spread, out=np.zeros_like(centred), where=spread > 0)
    result = np.where((high - low <= tolerance)[member], 0.0, centred)
    if singleton == "raw":
        result = np.where((size == 1)[member], score, result)
    out[here] = result
    return out
