"""Packing: rows -> micro-batches under a token cap, and trajectories -> optimizer steps. Planning only; pure.

Invariants (``tests/trajectory/test_packing.py`` asserts each):

1. Every row is in exactly one micro-batch, and no micro-batch holds more than ``cap`` tokens a context-parallel rank.
2. Every rank has the same number of micro-batches; those of a rank with less work are empty.
3. The plan depends on its arguments alone.
4. Rows of one group of rows (a rollout) share a micro-batch when they fit into one together.
5. A trajectory is in exactly one optimizer step; counts of steps differ by at most one.

A *rank* here is a data-parallel rank: tensor, pipeline and expert ranks under it see the same micro-batch, and its
``context`` context-parallel ranks an equal share of every row each. Attention is causal, so a context-parallel rank
takes one piece from the front and one from the back: each row is padded to a multiple of ``2 * context``.

The cost of a row of L tokens is L + L^2 / ``quadratic_tokens``: the linear work of the layers plus causal attention.
Ranks run micro-batch m together, so a step costs ``sum over m of the slowest rank's cost``; ``PackPlan.lockstep`` is
that over a perfect split.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.trajectory.record import TrajectoryBatch

QUADRATIC_TOKENS = 16384.0  # row length whose attention costs as much as its layers; a default, models differ


class PackingError(ValueError):
    """A set of rows that cannot be packed; the message names the row and the configuration key."""


def row_cost(lengths: ArrayLike, quadratic_tokens: float = QUADRATIC_TOKENS) -> NDArray[np.float64]:
    """Cost of rows in token units: L + L^2 / ``quadratic_tokens``."""
    length = np.asarray(lengths, dtype=np.float64)
    return length + length * length / quadratic_tokens


@dataclass(frozen=True, eq=False)
class PackPlan:
    """``microbatches[rank][m]`` are the row indices, int64, that ``rank`` runs as its m-th micro-batch; ``tokens`` and
    ``costs``, int64 and float64 [ranks, micro-batches], are what it holds (padding included) and costs."""

    microbatches: tuple[tuple[NDArray[np.int64], ...], ...]
    tokens: NDArray[np.int64]
    costs: NDArray[np.float64]

    def __post_init__(self) -> None:
        for array in (self.tokens, self.costs, *(rows for rank in self.microbatches for rows in rank)):
            array.flags.writeable = False

    @property
    def num_ranks(self) -> int:
        return len(self.microbatches)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.microbatches[0])

    @property
    def step_cost(self) -> float:
        """Sum over micro-batches of the slowest rank's cost, token units."""
        return float(self.costs.max(axis=0).sum())

    @property
    def lockstep(self) -> float:
        """Cost of the step over that of a perfect split; 1.0 is perfect (and what an empty plan gives)."""
        ideal = float(self.costs.sum()) / self.num_ranks
        return self.step_cost / ideal if ideal > 0 else 1.0


@dataclass(frozen=True, eq=False)
class Items:
    """What is placed as one: ``rows[i]`` row indices; ``tokens`` int64 and ``costs`` float64 [I].

    ``shared``, where items can share tokens, gives for item i the tokens int64 [I] of the prefix that it and each item
    have in common; a micro-batch holds such tokens once. ``prefix_cost`` is what a prefix of so many tokens costs.
    """

    rows: list[NDArray[np.int64]]
    tokens: NDArray[np.int64]
    costs: NDArray[np.float64]
    shared: Callable[[int], NDArray[np.int64]] | None = None
    prefix_cost: Callable[[NDArray[np.int64]], NDArray[np.float64]] = row_cost


def pack(
    lengths: ArrayLike,
    *,
    cap: int,
    ranks: int = 1,
    groups: ArrayLike | None = None,
    context: int = 1,
    quadratic_tokens: float = QUADRATIC_TOKENS,
) -> PackPlan:
    """Packs rows of ``lengths`` int [R] tokens under ``cap`` tokens a micro-batch and context-parallel rank.

    ``groups`` int [R] names the rollout of each row (None: each row is its own); ``context`` is the context-parallel
    size. Raises ``PackingError`` on a row longer than the cap. The fewest micro-batches that the tokens allow and one
    more are tried, and the better balanced wins; rows that fit into neither get as many as best fit needs.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if cap < 1 or ranks < 1 or context < 1 or sizes.ndim != 1 or np.any(sizes < 0):
        raise PackingError(
            f"pack needs cap, ranks and context >= 1 and lengths [R] >= 0; got {cap}, {ranks}, {context}, {sizes.shape}"
        )
    multiple = 2 * context if context > 1 else 1
    sizes = -(-sizes // multiple) * multiple
    check_cap(sizes, cap, context)
    rows = _whole_rollouts(sizes, cap * context, groups)
    cost = row_cost(sizes, quadratic_tokens)
    tokens = np.array([sizes[r].sum() for r in rows], dtype=np.int64)
    return place(Items(rows, tokens, np.array([cost[r].sum() for r in rows])), cap * context, ranks, int(sizes.sum()))


def check_cap(lengths: NDArray[np.int64], cap: int, context: int = 1) -> None:
    """Raises ``PackingError`` naming the first row that no micro-batch can hold."""
    over = lengths > cap * context
    if np.any(over):
        row = int(np.argmax(over))
        ranks = f" x context-parallel size {context}" if context > 1 else ""
        raise PackingError(
            f"row {row} has {lengths[row]} tokens, more than batch.tokens_per_microbatch={cap}{ranks}; raise that key "
            "or lower model.max_context"
        )


def place(items: Items, cap: int, ranks: int, total_tokens: int) -> PackPlan:
    """The better balanced of the fewest micro-batches that the tokens allow and one more, none over ``cap`` tokens;
    where neither holds ``items``, as few as best fit needs.

    ``total_tokens`` bounds the count from below. One micro-batch even without rows: every rank enters the step's
    collectives the same number of times.
    """
    fewest = max(1, -(-total_tokens // (cap * ranks)))
    best: PackPlan | None = None
    for count in (fewest, fewest + 1):
        bins = _fill(items, cap, count * ranks)
        if bins is None:
            continue
        plan = _plan(bins, items, ranks)
        if best is None or plan.step_cost < best.step_cost * 0.999:
            best = plan
    if best is None:
        bins = _fill(items, cap, -(-_best_fit(items, cap, (fewest + 1) * ranks) // ranks) * ranks)
        assert bins is not None  # best fit with as many bins as it took fills them again
        best = _plan(bins, items, ranks)
    return best


def _best_fit(items: Items, cap: int, bins: int) -> int:
    """How many bins best fit uses when there is always another one; ``bins`` are known to be too few."""
    if np.any(items.tokens > cap):
        raise PackingError(f"an item of {int(items.tokens.max())} tokens is larger than the cap of {cap}")
    filled: _Bins | None = None
    while filled is None:
        bins *= 2
        filled = _fit(items, cap, bins, by_cost=False)
    return sum(1 for content in filled.content if content)


def _whole_rollouts(sizes: NDArray[np.int64], cap: int, groups: ArrayLike | None) -> list[NDArray[np.int64]]:
    """Rows placed as one: a rollout that fits the cap, else its rows in as few parts as first fit finds."""
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


@dataclass(frozen=True, eq=False)
class _Bins:
    """``content[b]`` items; ``tokens`` and ``costs`` [B] of each bin."""

    content: list[list[int]]
    tokens: NDArray[np.int64]
    costs: NDArray[np.float64]


def _fill(items: Items, cap: int, bins: int) -> _Bins | None:
    """Items into ``bins`` bins under the cap: the largest first, each to the bin that it leaves cheapest; None if that
    fails.

    Cost alone can strand tokens; then best fit by tokens, which packs tighter, is tried.
    """
    filled = _fit(items, cap, bins, by_cost=True)
    return _fit(items, cap, bins, by_cost=False) if filled is None else filled


def _fit(items: Items, cap: int, bins: int, *, by_cost: bool) -> _Bins | None:
    """One try of ``_fill``: each item to the bin that it leaves cheapest, or fullest."""
    size, cost = items.tokens, items.costs
    order = np.lexsort((np.arange(len(size)), -size))
    load, held = np.zeros(bins), np.zeros(bins, dtype=np.int64)
    content: list[list[int]] = [[] for _ in range(bins)]
    # common[b, i]: tokens of item i's prefix that bin b holds already
    common = None if items.shared is None else np.zeros((bins, len(size)), dtype=np.int64)
    for item in order.tolist():
        if common is None:
            after, dearer = held + size[item], load + cost[item]
        else:
            after = held + size[item] - common[:, item]
            dearer = load + cost[item] - items.prefix_cost(common[:, item])
        key = np.where(after <= cap, dearer if by_cost else -after, np.inf)
        at = int(key.argmin())
        if after[at] > cap:
            return None
        content[at].append(item)
        held[at], load[at] = after[at], dearer[at]
        if common is not None and items.shared is not None:
            np.maximum(common[at], items.shared(item), out=common[at])
    return _Bins(content, held, load)


def _plan(bins: _Bins, items: Items, ranks: int) -> PackPlan:
    """Bins of similar cost become the same micro-batch of different ranks, dearest first; ranks alternate direction, so
    that their totals even out."""
    order = np.argsort(-bins.costs, kind="stable").reshape(-1, ranks)
    order[1::2] = order[1::2, ::-1]
    table = [
        tuple(
            np.sort(np.concatenate([np.empty(0, dtype=np.int64), *(items.rows[item] for item in bins.content[at])]))
            for at in column
        )
        for column in order.T.tolist()
    ]
    return PackPlan(tuple(table), bins.tokens[order.T], bins.costs[order.T])


def split_optimizer_steps(batch: TrajectoryBatch, steps: int, seed: int) -> list[NDArray[np.int64]]:
    """``deal_trajectories`` of a batch that is whole here."""
    prefix = np.concatenate([[0], np.cumsum(batch.loss_mask, dtype=np.int64)])
    offsets = batch.trajectory_tokens()
    return deal_trajectories(np.diff(offsets), np.diff(prefix[offsets]) > 0, steps, seed)


def deal_trajectories(
    tokens: NDArray[np.int64], trained: NDArray[np.bool_], steps: int, seed: int
) -> list[NDArray[np.int64]]:
    """Trajectory indices of each of ``steps`` optimizer steps, each sorted, from every trajectory's ``tokens`` [J] and
    whether any of them are ``trained`` [J]: metadata, so that ranks that hold parts of a batch deal alike.

    Trajectories are ranked by tokens with some noise from ``seed`` and dealt out in rounds of ``steps``, the longest of
    a round to the step with the fewest tokens so far: random composition, even counts and even tokens. Trajectories
    without a trained token are dealt last. Raises when a step would have nothing to train.
    """
    if steps < 1:
        raise PackingError(f"batch.optimizer_steps_per_batch must be >= 1, got {steps}")
    if steps == 1:
        return [np.arange(len(tokens), dtype=np.int64)]
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
