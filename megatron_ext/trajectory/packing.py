"""Packing: rows -> micro-batches under a token cap, and trajectories -> optimizer steps. Planning only; pure.

Invariants (``tests/trajectory/test_packing.py`` asserts each):

1. Every row is in exactly one micro-batch, and no micro-batch holds more than ``cap`` tokens.
2. Every rank has the same number of micro-batches; those of a rank with less work are empty.
3. The plan depends on its arguments alone.
4. Rows of one group of rows (a rollout) share a micro-batch when they fit into one together.
5. A trajectory is in exactly one optimizer step; counts of steps differ by at most one.

The cost of a row of L tokens is L + L^2 / 16384: the linear work of the layers plus causal attention. Ranks run
micro-batch m together, so a step costs ``sum over m of the slowest rank's cost``; ``PackPlan.lockstep`` is that over a
perfect split.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.record import TrajectoryBatch

QUADRATIC_TOKENS = 16384.0


class PackingError(ValueError):
    """A set of rows that cannot be packed; the message names the row and the configuration key."""


def row_cost(lengths: ArrayLike) -> NDArray[np.float64]:
    """Cost of rows in token units: L + L^2 / 16384."""
    length = np.asarray(lengths, dtype=np.float64)
    return length + length * length / QUADRATIC_TOKENS


@dataclass(frozen=True, eq=False)
class PackPlan:
    """``microbatches[rank][m]`` are the row indices, int64, that ``rank`` runs as its m-th micro-batch."""

    microbatches: tuple[tuple[NDArray[np.int64], ...], ...]
    lengths: NDArray[np.int64]
    cap: int

    @property
    def num_ranks(self) -> int:
        return len(self.microbatches)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.microbatches[0])

    @cached_property
    def costs(self) -> NDArray[np.float64]:
        """Cost of each micro-batch, float64 [ranks, micro-batches]."""
        cost = row_cost(self.lengths)
        return np.array([[cost[rows].sum() for rows in rank] for rank in self.microbatches])

    @property
    def lockstep(self) -> float:
        """Cost of the step over that of a perfect split; 1.0 is perfect (and what an empty plan gives)."""
        ideal = float(self.costs.sum()) / self.num_ranks
        return float(self.costs.max(axis=0).sum()) / ideal if ideal > 0 else 1.0


def pack(lengths: ArrayLike, *, cap: int, ranks: int = 1, groups: ArrayLike | None = None) -> PackPlan:
    """Packs rows of ``lengths`` int [R] tokens under ``cap`` tokens a micro-batch.

    ``groups`` int [R] names the rollout of each row (None: each row is its own). Raises ``PackingError`` on a row
    longer than the cap. The fewest micro-batches that the tokens allow are tried first, then one more; the better
    balanced wins.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if cap < 1 or ranks < 1 or sizes.ndim != 1:
        raise PackingError(f"pack needs cap >= 1, ranks >= 1 and lengths [R]; got {cap}, {ranks}, {sizes.shape}")
    if np.any(sizes > cap):
        row = int(np.argmax(sizes > cap))
        raise PackingError(
            f"row {row} has {sizes[row]} tokens, more than batch.tokens_per_microbatch={cap}; raise that key or lower "
            "model.max_context"
        )
    items = _items(sizes, cap, groups)
    item_size = np.array([sizes[rows].sum() for rows in items], dtype=np.int64)
    cost = row_cost(sizes)
    item_cost = np.array([cost[rows].sum() for rows in items])
    # One micro-batch even without rows: every rank enters the step's collectives the same number of times.
    fewest = max(1, -(-int(item_size.sum()) // (cap * ranks)))
    best: tuple[float, list[list[int]]] | None = None
    for count in range(fewest, fewest + len(items) + 1):
        bins = _fill(item_size, item_cost, cap, count * ranks)
        if bins is None:
            continue
        total = _lockstep(bins, item_cost, ranks)
        if best is None or total < best[0] * 0.999:
            best = (total, bins)
        if count > fewest:
            break
    assert best is not None  # with a bin for each item every item fits
    return _plan(best[1], items, item_cost, sizes, cap, ranks)


def _items(sizes: NDArray[np.int64], cap: int, groups: ArrayLike | None) -> list[NDArray[np.int64]]:
    """What is placed as one: a rollout that fits the cap, else its rows in as few parts as first fit finds."""
    if groups is None:
        return [np.array([row], dtype=np.int64) for row in range(len(sizes))]
    keys = np.asarray(groups)
    if keys.shape != sizes.shape:
        raise PackingError(f"groups has shape {keys.shape}, lengths {sizes.shape}")
    order = np.argsort(keys, kind="stable")
    edges = np.flatnonzero(np.diff(keys[order])) + 1
    items: list[NDArray[np.int64]] = []
    for rows in np.split(order, edges) if len(order) else []:
        if sizes[rows].sum() <= cap:
            items.append(rows)
            continue
        parts: list[list[int]] = []
        room: list[int] = []
        for row in rows[np.argsort(-sizes[rows], kind="stable")].tolist():
            size = int(sizes[row])
            at = next((p for p, free in enumerate(room) if free >= size), len(parts))
            if at == len(parts):
                parts.append([])
                room.append(cap)
            parts[at].append(row)
            room[at] -= size
        items.extend(np.array(part, dtype=np.int64) for part in parts)
    return items


def _fill(size: NDArray[np.int64], cost: NDArray[np.float64], cap: int, bins: int) -> list[list[int]] | None:
    """Items into ``bins`` bins under the cap: the dearest first, each to the cheapest bin with room; None if it fails.

    Cost alone can strand tokens; then best fit by tokens, which packs tighter, is tried.
    """
    order = np.lexsort((np.arange(len(size)), -size))
    for by_cost in (True, False):
        load, room = np.zeros(bins), np.full(bins, cap, dtype=np.int64)
        content: list[list[int]] = [[] for _ in range(bins)]
        for item in order.tolist():
            fits = room >= size[item]
            key = np.where(fits, load if by_cost else room, np.inf)
            at = int(key.argmin())
            if not fits[at]:
                break
            content[at].append(item)
            load[at] += cost[item]
            room[at] -= size[item]
        else:
            return content
    return None


def _bin_costs(bins: list[list[int]], cost: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.array([cost[content].sum() if content else 0.0 for content in bins])


def _lockstep(bins: list[list[int]], cost: NDArray[np.float64], ranks: int) -> float:
    """Sum over micro-batches of the dearest bin, when bins of similar cost run together."""
    return float(np.sort(_bin_costs(bins, cost))[::-1][::ranks].sum())


def _plan(
    bins: list[list[int]],
    items: list[NDArray[np.int64]],
    cost: NDArray[np.float64],
    sizes: NDArray[np.int64],
    cap: int,
    ranks: int,
) -> PackPlan:
    """Bins of similar cost become the same micro-batch of different ranks, dearest first; ranks alternate direction, so
    that their totals even out."""
    order = np.argsort(-_bin_costs(bins, cost), kind="stable")
    table: list[list[NDArray[np.int64]]] = [[] for _ in range(ranks)]
    for m, start in enumerate(range(0, len(order), ranks)):
        together = order[start : start + ranks].tolist()
        for rank, at in enumerate(together if m % 2 == 0 else reversed(together)):
            rows = [items[item] for item in bins[at]]
            table[rank].append(np.sort(np.concatenate(rows)) if rows else np.empty(0, dtype=np.int64))
    return PackPlan(tuple(tuple(rank) for rank in table), sizes, cap)


def split_optimizer_steps(batch: TrajectoryBatch, steps: int, seed: int) -> list[NDArray[np.int64]]:
    """Trajectory indices of each of ``steps`` optimizer steps, each sorted.

    Trajectories are ranked by tokens with some noise from ``seed`` and dealt out in rounds of ``steps``, the longest of
    a round to the step with the fewest tokens so far: random composition, even counts and even tokens. Trajectories
    without a trained token are dealt last. Raises when a step would have nothing to train.
    """
    if steps < 1:
        raise PackingError(f"batch.optimizer_steps_per_batch must be >= 1, got {steps}")
    tokens = np.diff(batch.trajectory_tokens())
    prefix = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    trained = np.diff(prefix[batch.trajectory_tokens()]) > 0
    if steps == 1:
        return [np.arange(batch.num_trajectories, dtype=np.int64)]
    count = int(np.count_nonzero(trained))
    if count < steps:
        raise PackingError(
            f"batch.optimizer_steps_per_batch={steps}, but only {count} trajectories have trained tokens"
        )
    noise = np.exp(np.random.default_rng(seed).normal(0.0, 0.25, size=len(tokens)))
    order = np.lexsort((-tokens * noise, ~trained))
    load = np.zeros(steps)
    content: list[list[int]] = [[] for _ in range(steps)]
    for start in range(0, len(order), steps):
        deal = order[start : start + steps]
        deal = deal[np.argsort(-tokens[deal], kind="stable")]
        for at, trajectory in zip(np.argsort(load, kind="stable").tolist(), deal.tolist(), strict=False):
            content[at].append(trajectory)
            load[at] += tokens[trajectory]
    return [np.array(sorted(part), dtype=np.int64) for part in content]
