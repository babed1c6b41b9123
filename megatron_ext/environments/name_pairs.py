"""Names of two words, split so that every word is trained and no held-out pair is.

Invariants (``tests/environments/test_search.py`` and ``test_textworld.py``):

1. The pairs of train, dev and test are disjoint and make up the whole square of words.
2. Every first and every second word occurs in a training pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from megatron_ext.environments.splits import SPLITS, check_split


def split_pairs(
    firsts: Sequence[str], seconds: Sequence[str], seed: int, train: float, dev: float, split: str
) -> tuple[str, ...]:
    """``"first second"`` pairs of one split, in a fixed order.

    Args:
        firsts, seconds: equally many words, n; there are n * n pairs.
        seed: of the split.
        train, dev: shares of the pairs; test gets the rest.
    """
    words = len(firsts)
    if len(seconds) != words:
        raise ValueError(f"split_pairs: {words} first words but {len(seconds)} second words; give equally many")
    # A diagonal holds every word once; taking a whole one first keeps every word in training by construction.
    diagonals = list(range(words))
    rng = Random(seed)
    rng.shuffle(diagonals)
    first = [f"{firsts[i]} {seconds[(i + diagonals[0]) % words]}" for i in range(words)]
    rest = [f"{firsts[i]} {seconds[(i + d) % words]}" for d in diagonals[1:] for i in range(words)]
    rng.shuffle(rest)
    pairs = first + rest
    ends = [0, int(len(pairs) * train), int(len(pairs) * (train + dev)), len(pairs)]
    at = SPLITS.index(check_split(split))
    return tuple(pairs[ends[at] : ends[at + 1]])
