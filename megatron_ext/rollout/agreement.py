"""Step agreement: which finished groups make a step, which are dropped, and which rank is home to which group. Pure.

Invariants (``tests/rollout/test_agreement.py`` asserts each):

1. Same arguments, same answer, on every rank; groups are taken in the order given.
2. Only trainable trajectories vote: a group whose trainable rewards differ by no more than the tolerance is filtered
   (``constant reward``), unless an edit brings a signal of its own; one without a trainable trajectory always is.
3. Never more than ``tasks_per_step`` groups train; what stands behind the last one needed is left for later steps.
4. Every trained group is at home on exactly one rank, and ranks are balanced by tokens.
5. Permuted rewards are the same rewards on other trajectories; those that cannot be trained keep theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from megatron_ext.rollout.events import GroupMeta

if TYPE_CHECKING:
    from megatron_ext.config.schema import FilterConfig

UNTRAINABLE = "untrainable"
CONSTANT = "constant reward"


@dataclass(frozen=True)
class Agreement:
    """``train`` group ids in order; ``filtered`` (group id, reason); ``missing`` groups short of a full step; ``draw``
    tasks to draw for them now; ``exhausted``: short, nothing in flight and nothing more may be drawn, so the step
    trains what it has; ``assignment[rank]`` the group ids at home there, in training order."""

    train: tuple[str, ...]
    filtered: tuple[tuple[str, str], ...]
    missing: int
    draw: int
    exhausted: bool
    assignment: tuple[tuple[str, ...], ...]


def agree(
    finished: Sequence[GroupMeta],
    *,
    tasks_per_step: int,
    filters: FilterConfig,
    own_signal: bool,
    draws_so_far: int,
    in_flight: int,
    ranks: int,
) -> Agreement:
    """Agrees on a step.

    Args:
        finished: finished groups not yet consumed, in FIFO order.
        filters: ``constant_groups`` and ``tolerance``, and ``draw_limit`` in multiples of ``tasks_per_step``.
        own_signal: an edit declares a signal in constant groups, which are then kept.
        draws_so_far: groups drawn for this step, finished or not.
        in_flight: groups that will still be offered: queued, leased, or finished behind one that is not.
        ranks: data-parallel ranks.
    """
    if tasks_per_step < 1 or ranks < 1:
        raise ValueError(f"agree needs tasks_per_step >= 1 and ranks >= 1, got {tasks_per_step} and {ranks}")
    train: list[GroupMeta] = []
    filtered: list[tuple[str, str]] = []
    for meta in finished:
        if len(train) == tasks_per_step:
            break
        reason = _reason(meta, filters, own_signal)
        if reason:
            filtered.append((meta.group_id, reason))
        else:
            train.append(meta)
    missing = tasks_per_step - len(train)
    # Rounded down, but a step may always draw what it trains.
    limit = max(tasks_per_step, int(filters.draw_limit * tasks_per_step))
    draw = min(max(0, missing - in_flight), max(0, limit - draws_so_far))
    exhausted = missing > 0 and draw == 0 and in_flight == 0
    names = tuple(meta.group_id for meta in train)
    return Agreement(names, tuple(filtered), missing, draw, exhausted, assign(train, ranks))


def _reason(meta: GroupMeta, filters: FilterConfig, own_signal: bool) -> str:
    """Why a group is filtered; empty when it is not."""
    votes = [reward for reward, use in zip(meta.rewards, meta.trainable, strict=True) if use]
    if not votes:
        return UNTRAINABLE
    if filters.constant_groups and not own_signal and max(votes) - min(votes) <= filters.tolerance:
        return CONSTANT
    return ""


def assign(train: Sequence[GroupMeta], ranks: int) -> tuple[tuple[str, ...], ...]:
    """Home rank of each group: the longest first, each to the rank with the fewest tokens; ties to the lower index."""
    load = [0] * ranks
    homes: list[list[int]] = [[] for _ in range(ranks)]
    for index in sorted(range(len(train)), key=lambda i: (-train[i].total_tokens, i)):
        rank = min(range(ranks), key=lambda r: (load[r], r))
        homes[rank].append(index)
        load[rank] += train[index].total_tokens
    return tuple(tuple(train[index].group_id for index in sorted(home)) for home in homes)


def permute_rewards(finished: Sequence[GroupMeta], seed: int, step: int) -> list[GroupMeta]:
    """Control experiment: the step's rewards dealt anew over all its trainable trajectories, before filtering.

    The batch must be given the same rewards (``TrajectoryBatch.with_rewards``), read from the metadata returned here.
    """
    places = [(g, t) for g, meta in enumerate(finished) for t, use in enumerate(meta.trainable) if use]
    order = np.random.default_rng((seed, step)).permutation(len(places)).tolist()
    rewards = [list(meta.rewards) for meta in finished]
    for (group, trajectory), source in zip(places, order, strict=True):
        from_group, from_trajectory = places[source]
        rewards[group][trajectory] = finished[from_group].rewards[from_trajectory]
    return [replace(meta, rewards=tuple(row)) for meta, row in zip(finished, rewards, strict=True)]
