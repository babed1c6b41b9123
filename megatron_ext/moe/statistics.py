"""What routing losses know of a batch: which tokens make which turn, and what the routers thought of them all.

A *unit* is the trained tokens of one field (thinking, tool use) of one labelled turn; its *cell* is the pair (field,
operation). A unit's mean is a sum over its tokens, each with the share ``1 / tokens of the unit``, so that sums over
ranks, micro-batches and pieces of a turn are the sums over whole turns.

Invariants (``tests/moe/test_statistics.py``):

1. A unit's shares add up to 1; prompts, observations, unlabelled turns and other fields have no cell.
2. A pair is a trained token and the trained one before it in the same turn and field.
3. What the policy loss leaves out (mask or weight 0, a trajectory that its environment broke) is left out of all this.
4. Statistics are those of the whole batch, however it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.credit import levels
from megatron_ext.moe.routing_losses import direction, linearised, mutual_information
from megatron_ext.trajectory.record import Field, TrajectoryBatch


@dataclass(frozen=True, eq=False)
class TokenStructure:
    """Per token of a batch: ``cell`` int64 [T], below ``cells``, or -1 for one that does not count; ``share`` float64
    [T], 0 without a cell; ``pair`` bool [T], whether it and the token before it are a pair; ``trained`` bool [T]."""

    cell: NDArray[np.int64]
    share: NDArray[np.float64]
    pair: NDArray[np.bool_]
    trained: NDArray[np.bool_]
    cells: int

    def counts(self, tokens: NDArray[np.bool_] | None = None) -> NDArray[np.float64]:
        """Units of each cell [C], and the number of pairs behind them, among ``tokens`` bool [T] (None: all). Whole
        units only, whose shares add up to 1. Counts of parts add."""
        chosen = np.ones(len(self.cell), dtype=bool) if tokens is None else tokens
        inside = chosen & (self.cell >= 0)
        units = np.bincount(self.cell[inside], weights=self.share[inside], minlength=self.cells)
        return np.append(np.rint(units), np.count_nonzero(self.pair & chosen)).astype(np.float64)


def every_trained_token(batch: TrajectoryBatch) -> TokenStructure:
    """Each token that the policy loss trains is a unit of its own, in one cell."""
    trained = trained_tokens(batch)
    return TokenStructure(np.where(trained, 0, -1), trained.astype(np.float64), pairs(batch), trained, 1)


def token_structure(batch: TrajectoryBatch, fields: Sequence[Field], label: str, operations: int) -> TokenStructure:
    """Cells ``field * operations + operation``, shares and pairs of a batch. ``label`` names the turn label that holds
    the operation, from 0 to ``operations - 1``, -1 where there is none; a batch in which no turn has one may lack it.

    Raises ``ValueError`` for a larger one.
    """
    size = batch.num_tokens
    if size == 0:
        nothing = np.zeros(0, dtype=np.int64)
        none = nothing.astype(bool)
        return TokenStructure(nothing, nothing.astype(np.float64), none, none, len(fields) * operations)
    operation = np.asarray(batch.turn_labels.get(label, np.full(batch.num_turns, -1)), dtype=np.int64)
    if operation.max(initial=-1) >= operations:
        raise ValueError(
            f"turn label {label}={operation.max()}: model.router.operations={operations} leaves room for "
            f"0 to {operations - 1}; raise it"
        )
    turn = batch.turn.astype(np.int64)
    trained = trained_tokens(batch)
    number = np.full(len(Field), -1, dtype=np.int64)
    number[[int(field) for field in fields]] = np.arange(len(fields))
    which = number[batch.field]
    of_turn = np.where(trained & (turn >= 0), operation[np.maximum(turn, 0)], -1)
    inside = (which >= 0) & (of_turn >= 0)
    cell = np.where(inside, which * operations + of_turn, -1)
    unit = turn * len(fields) + which
    tokens_of = np.bincount(unit[inside], minlength=1)
    share = np.zeros(size)
    share[inside] = 1.0 / tokens_of[unit[inside]]
    return TokenStructure(cell, share, pairs(batch), trained, len(fields) * operations)


def trained_tokens(batch: TrajectoryBatch) -> NDArray[np.bool_]:
    """bool [T]: tokens that the policy loss trains."""
    found: NDArray[np.bool_] = levels.trained_tokens(batch) & (batch.weight > 0)
    return found


def pairs(batch: TrajectoryBatch) -> NDArray[np.bool_]:
    """bool [T]: trained tokens behind a trained token of the same turn and field."""
    trained = trained_tokens(batch) & (batch.turn >= 0)
    found = np.zeros(batch.num_tokens, dtype=bool)
    same = (batch.turn[1:] == batch.turn[:-1]) & (batch.field[1:] == batch.field[:-1])
    found[1:] = trained[1:] & trained[:-1] & same
    return found


@dataclass(frozen=True, eq=False)
class RoutingStatistics:
    """Of a whole batch, fp64, over L layers, F fields, O operations and E experts.

    ``sums`` [L, F, O, E]: mean probabilities of units, summed over the units of a cell; ``turns`` [F, O]: their
    numbers. ``local`` [L]: token losses of the pairs that are pulled, summed; ``pulled`` [L]: how many are; ``pairs``:
    of so many. ``entropy``: of the policy in nats, mean over the trained tokens.
    """

    sums: torch.Tensor
    turns: torch.Tensor
    local: torch.Tensor
    pulled: torch.Tensor
    pairs: int
    entropy: float

    @property
    def fields(self) -> torch.Tensor:
        """bool [F]: those of which there are units; means are over these."""
        return self.turns.sum(-1) > 0

    def _mean(self, information: torch.Tensor) -> float:
        occurring = information[:, self.fields]
        return float(occurring.mean()) if occurring.numel() else 0.0

    def layer_information(self) -> torch.Tensor:
        """Mutual information in nats [L], mean over fields."""
        exact = mutual_information(self.sums, self.turns)[:, self.fields]
        return exact.mean(-1) if exact.numel() else exact.new_zeros(len(exact))

    def information(self) -> float:
        """Mutual information in nats, mean over fields and layers."""
        return self._mean(mutual_information(self.sums, self.turns))

    def linear_information(self, opened: RoutingStatistics) -> float:
        """The same in the linearisation around the statistics that opened the batch."""
        return self._mean(linearised(self.sums, self.turns, opened.sums))

    def local_loss(self) -> float:
        """Token loss in nats, mean over pairs and layers; a pair that is not pulled counts 0."""
        return float(self.local.mean()) / self.pairs if self.pairs else 0.0

    def pulled_fraction(self) -> float:
        """Share of the pairs that are pulled, mean over layers."""
        return float(self.pulled.mean()) / self.pairs if self.pairs else 0.0

    def weights(self, units: torch.Tensor) -> torch.Tensor:
        """``-log(P_o/P)`` [L, F * O, E] over what the mean over layers, fields and the step's ``units`` [F, O] divides
        by: times a token's share and probabilities it is the token's part of the linearised loss -I.

        Statistics are of the whole batch, ``units`` of the optimizer step that the loss is for.
        """
        layers, fields, operations, experts = self.sums.shape
        occurring = units.sum(-1) > 0
        number = units.sum(-1).clamp_min(1) * occurring.sum().clamp_min(1) * layers
        scaled = -direction(self.sums, self.turns) / number[None, :, None, None]
        return scaled.reshape(layers, fields * operations, experts)
