"""Splits by content: which of train, dev and test a task belongs to is a function of what the task says.

Invariants (``tests/environments/test_contract.py``):

1. A fingerprint belongs to exactly one split, so no two splits can share a task, however many are drawn from each.
2. The assignment is the same in every process and needs no list of the other splits' tasks.
"""

from __future__ import annotations

from collections.abc import Iterator

from megatron_ext.environments.protocol import stable_hash

SPLITS = ("train", "dev", "test")
# Cumulative shares of the hash space. Generators scan seeds and keep those that fall into the wanted share, so the
# shares set the cost of drawing a split, not its size.
_BOUNDS = (0.6, 0.75, 1.0)
# Seeds of different splits are disjoint too: a test never plays a training seed.
_SEED_STRIDE = 100_000_000


class NotEnoughTasks(ValueError):
    """A generator has fewer distinct tasks than were asked for."""


def check_split(split: str) -> str:
    if split not in SPLITS:
        raise ValueError(f"unknown split {split!r}: use one of {', '.join(SPLITS)}")
    return split


def split_of(fingerprint: str) -> str:
    """The split that content with this fingerprint belongs to."""
    point = int(stable_hash("split", fingerprint)[:15], 16) / float(1 << 60)
    return next(name for name, bound in zip(SPLITS, _BOUNDS, strict=True) if point < bound)


def candidate_seeds(split: str) -> Iterator[int]:
    """Seeds of a split, 100 million of them: ``train`` from 0, ``dev`` from 1e8, ``test`` from 2e8."""
    first = SPLITS.index(check_split(split)) * _SEED_STRIDE
    return iter(range(first, first + _SEED_STRIDE))


class SplitScan:
    """Distinct tasks of one split in a fixed order, found by scanning seeds; remembers what it has seen."""

    def __init__(self, split: str, patience: int = 5000) -> None:
        """``patience``: give up after this many seeds in a row that bring no new task."""
        self.split = check_split(split)
        self.seeds: list[int] = []
        self._seen: set[str] = set()
        self._candidates = candidate_seeds(split)
        self._patience = patience

    def until(self, count: int) -> Iterator[int]:
        """Seeds still to be judged to reach ``count`` tasks; call ``offer`` with each before taking the next."""
        idle = 0
        while len(self.seeds) < count:
            known = len(self.seeds)
            yield next(self._candidates)
            idle = 0 if len(self.seeds) > known else idle + 1
            if idle >= self._patience:
                raise NotEnoughTasks(
                    f"split {self.split!r} has {len(self.seeds)} distinct tasks, {count} were asked for: "
                    "ask for fewer, or give the environment parameters with more variety"
                )

    def offer(self, seed: int, fingerprint: str, identity: str | None = None) -> bool:
        """Keeps the seed if its content belongs to this split and was not seen; says whether it did.

        ``fingerprint`` decides the split, ``identity`` (default: the same) whether the task was seen: tasks that differ
        in names alone share the first and stay in one split, but are two tasks.
        """
        identity = fingerprint if identity is None else identity
        if identity in self._seen or split_of(fingerprint) != self.split:
            return False
        self._seen.add(identity)
        self.seeds.append(seed)
        return True
