"""Model turns of a batch: tokens to turns, turns to tokens, rewards to the tokens they speak about (specs, P2).

A turn is what ``(trajectory, turn number)`` names, wherever its tokens stand: rows of one turn each and merged rows of
many, segments and sessions cut anywhere, give the same table, in the same order.

Invariants (``tests/credit/test_turns.py`` asserts each):

1. The table lists the model turns of each trajectory by their number, which is the order in which they happened. What
   repeats a turn as context is off turn in the record, so a turn is listed once however many rows show it.
2. The layout of a batch (segments, sessions, rows of one turn, order of trajectories) changes no turn's statistics.
3. Only trained tokens enter a reduction or receive a value; a turn without one (masked, of no tokens) gives 0.
4. ``route``: a token gets the value of the one target that claims it; tokens claimed twice are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.levels import Level, trained_counts, trained_tokens
from megatron_ext.credit.scan import linear_scan_reverse
from megatron_ext.credit.spans import Op, count_spans, reduce_spans, spread_spans, zero_unless
from megatron_ext.trajectory.record import Field, Role, SessionKind, TrajectoryBatch


@dataclass(frozen=True, eq=False)
class Turns:
    """The M model turns of ``batch``, by trajectory and number.

    ``trajectory`` int64 [M]; ``number`` int64 [M], the record's turn number; ``entry`` int64 [M], index into the
    batch's turn arrays; ``tokens`` int64 [M], trained tokens; ``offsets`` int64 [J+1], turns of each trajectory;
    ``of_entry`` int64 [N], the table's turn for each of the batch's, -1 for others.
    """

    batch: TrajectoryBatch
    trajectory: NDArray[np.int64]
    number: NDArray[np.int64]
    entry: NDArray[np.int64]
    tokens: NDArray[np.int64]
    offsets: NDArray[np.int64]
    of_entry: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.entry)

    def pick(self, values: NDArray[Any]) -> NDArray[Any]:
        """The table's part of one of the record's turn arrays (rewards, keys, labels) [N], as [M]."""
        if len(values) != self.batch.num_turns:
            raise ValueError(f"turn values {np.shape(values)}: the batch holds {self.batch.num_turns} turns")
        return np.asarray(values)[self.entry]

    @property
    def trainable(self) -> NDArray[np.bool_]:
        """bool [M]: turns of trajectories whose end says something about the policy; the others do not vote."""
        result: NDArray[np.bool_] = self.batch.trainable()[self.trajectory]
        return result

    @cached_property
    def whole(self) -> bool:
        """Every token of every listed turn is trained: a turn's span needs no mask."""
        entry = self.entry
        return bool(np.all(self.tokens == self.batch.turn_end[entry] - self.batch.turn_start[entry]))

    @property
    def last(self) -> NDArray[np.bool_]:
        """bool [M]: the last turn of its trajectory that has a trained token (a summary, a final answer)."""
        found = np.zeros(len(self), dtype=bool)
        place = np.where(self.tokens > 0, np.arange(len(self)), -1)
        final = reduce_spans(place, self.offsets[:-1], self.offsets[1:], Op.MAX).astype(np.int64)
        count = np.diff(self.offsets)
        found[final[(count > 0) & (final >= 0)]] = True
        return found & (self.tokens > 0)


def model_turns(batch: TrajectoryBatch) -> Turns:
    """The table of a batch."""
    entry = np.flatnonzero(batch.turn_role == Role.MODEL)
    owner = batch.turn_trajectory()[entry].astype(np.int64)
    number = batch.turn_number[entry].astype(np.int64)
    tokens = count_spans(trained_tokens(batch), batch.turn_start[entry], batch.turn_end[entry])
    if np.any((owner[1:] == owner[:-1]) & (number[1:] < number[:-1])):
        order = np.lexsort((number, owner))
        entry, owner, number, tokens = entry[order], owner[order], number[order], tokens[order]
    of_entry = np.full(batch.num_turns, -1, dtype=np.int64)
    of_entry[entry] = np.arange(len(entry))
    offsets = np.searchsorted(owner, np.arange(batch.num_trajectories + 1)).astype(np.int64)
    return Turns(batch, owner, number, entry, tokens, offsets, of_entry)


@dataclass(frozen=True, eq=False)
class Layout:
    """What follows from a batch alone, worked out when it is first asked for and then kept."""

    batch: TrajectoryBatch

    @cached_property
    def trained(self) -> NDArray[np.bool_]:
        """bool [T]: trained tokens."""
        return trained_tokens(self.batch)

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """int64 [J]: trained tokens of each trajectory."""
        return trained_counts(self.batch, Level.TRAJECTORY)

    @cached_property
    def turns(self) -> Turns:
        """The model turns."""
        return model_turns(self.batch)


def _in_place(turns: Turns) -> tuple[NDArray[np.int64], NDArray[np.int64] | None]:
    """The turns' entries in the order of the batch's tokens, and the permutation that takes them there."""
    if np.all(turns.entry[1:] > turns.entry[:-1]):
        return turns.entry, None
    order = np.argsort(turns.entry, kind="stable")
    return turns.entry[order], order


def turn_reduce(
    values: NDArray[Any], turns: Turns, op: Op | str = Op.SUM, where: NDArray[np.bool_] | None = None
) -> NDArray[np.float64]:
    """One number a turn, float64 [M], from ``values`` [T] on its trained tokens (those of ``where``, bool [T])."""
    batch = turns.batch
    if np.shape(values) != (batch.num_tokens,):
        raise ValueError(f"token values {np.shape(values)}: the batch holds {batch.num_tokens} tokens")
    entry, order = _in_place(turns)
    op = Op(op)
    if op == Op.COUNT and where is None:
        return turns.tokens.astype(np.float64)
    mask = None if turns.whole else trained_tokens(batch)
    if where is not None:
        mask = where if mask is None else mask & where
    mean = op == Op.MEAN and where is None
    placed = reduce_spans(values, batch.turn_start[entry], batch.turn_end[entry], Op.SUM if mean else op, mask)
    result = placed
    if order is not None:
        result = np.empty(len(turns))
        result[order] = placed
    return result / np.maximum(turns.tokens, 1) if mean else result


def turn_broadcast(values: NDArray[Any], turns: Turns) -> NDArray[np.float64]:
    """A value for each turn [M], on each of its trained tokens and 0 elsewhere; float64 [T]."""
    if np.shape(values) != (len(turns),):
        raise ValueError(f"turn values {np.shape(values)}: the table holds {len(turns)} turns")
    batch = turns.batch
    entry, order = _in_place(turns)
    placed = np.asarray(values, dtype=np.float64) if order is None else np.asarray(values, dtype=np.float64)[order]
    spread = spread_spans(placed, batch.turn_start[entry], batch.turn_end[entry], batch.num_tokens)
    if not turns.whole:
        zero_unless(spread, trained_tokens(batch))
    return spread


def returns_to_go(
    turns: Turns, reward: NDArray[Any], discount: float = 1.0, terminal: NDArray[Any] | None = None
) -> NDArray[np.float64]:
    """``sum_{j >= k} discount^(j-k) r_j`` of each turn, float64 [M], from ``reward`` [M]; ``terminal`` [J], the outcome
    of each trajectory, counts as reward of its last turn (GiGPO's step return, the reward-to-go of process rewards)."""
    each = np.array(reward, dtype=np.float64)
    if terminal is not None:
        some = np.flatnonzero(np.diff(turns.offsets) > 0)
        each[turns.offsets[some + 1] - 1] += np.asarray(terminal, dtype=np.float64)[some]
    return linear_scan_reverse(each, discount, turns.offsets)


# -- which tokens a reward speaks about --------------------------------------------------------------------------------
def in_field(batch: TrajectoryBatch, *kinds: Field) -> NDArray[np.bool_]:
    """bool [T]: tokens that are part of the given fields (thinking, tool use, text)."""
    return np.isin(batch.field, [int(kind) for kind in kinds])


def in_session(batch: TrajectoryBatch, *kinds: SessionKind) -> NDArray[np.bool_]:
    """bool [T]: tokens of sessions of the given kinds."""
    chosen = np.isin(batch.session_kind, [int(kind) for kind in kinds])
    lengths = np.diff(batch.segment_tokens[batch.session_segments])
    return np.repeat(chosen, lengths)


def in_turns(turns: Turns, chosen: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """bool [T]: trained tokens of the chosen turns (bool [M], e.g. of a label, or ``turns.last``)."""
    return turn_broadcast(chosen, turns) != 0.0


def route(
    batch: TrajectoryBatch,
    targets: Mapping[str, tuple[NDArray[np.bool_], NDArray[Any]]],
    default: NDArray[Any] | None = None,
) -> NDArray[np.float64]:
    """Each target's values on the tokens it claims, float64 [T], 0 on tokens that are not trained.

    ``targets``: name -> (tokens, bool [T]; values [T], as ``levels.broadcast`` and ``turn_broadcast`` make them).
    ``default`` [T] is for trained tokens that no target claims.
    """
    trained = trained_tokens(batch)
    for name, arrays in {**targets, **({} if default is None else {"default": (trained, default)})}.items():
        if any(np.shape(array) != (batch.num_tokens,) for array in arrays):
            shapes = ", ".join(str(np.shape(array)) for array in arrays)
            raise ValueError(f"route {name!r}: mask and values {shapes}, the batch holds {batch.num_tokens} tokens")
    out = np.zeros(batch.num_tokens)
    claimed = np.zeros(batch.num_tokens, dtype=bool)
    for name, (tokens, values) in targets.items():
        own = trained & tokens
        clash = claimed & own
        if clash.any():
            others = [other for other, (mask, _) in targets.items() if other != name and np.any(mask & clash)]
            raise ValueError(f"route {name!r}: token {int(np.argmax(clash))} also belongs to {', '.join(others)}")
        claimed |= own
        np.copyto(out, values, where=own)
    if default is not None:
        np.copyto(out, default, where=trained & ~claimed)
    return out
