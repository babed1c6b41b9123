"""GAE of a whole batch: which tokens and turns are chained, in which order, and where rewards are paid.

Invariants (``tests/credit/test_batch_gae.py`` asserts each):

1. Advantages and the value mask are 0 on untrained tokens, and a trajectory's numbers are its own: neither the order of
   the batch nor the ranks that split it change a bit.
2. Cutting a trajectory into segments or sessions changes nothing while the chain is the trajectory.
3. Units are linked in the order in which they happened, also where a subagent's session lies inside its parent's.
4. A reward is paid at the last unit up to it; one that no unit precedes is counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.gae import Floats, GAEOutput, Ints, Links, Unit, length_adaptive_lambda, runs, solve
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.trajectory.record import Status, TrajectoryBatch, owners


class Chain(StrEnum):
    TRAJECTORY = "trajectory"
    SESSION = "session"
    SEGMENT = "segment"


class Outcome(StrEnum):
    """Where a trajectory's reward is paid when its chains are shorter than itself."""

    TRAJECTORY_END = "trajectory_end"
    CHAIN_END = "chain_end"


@dataclass(frozen=True, kw_only=True)
class GAE:
    """GAE of a whole batch: how its units are chained and paid.

    ``lam``: one lambda; with ``lam_alpha`` each chain's is ``length_adaptive_lambda`` of its number of units (of its
    trained tokens for unit ``token``). ``return_lam``: lambda of the critic's targets, None = the policy's.
    ``turn_rewards``: pay each turn's own reward at its last linked token (else only the trajectory's, at the end).
    ``outcome``: matters only for chains shorter than the trajectory. ``bootstrap``: ends at which the trajectory was
    cut off rather than finished, so that ``last_value`` stands in for what would have come.
    """

    unit: Unit = Unit.ACTION_TOKEN
    chain: Chain = Chain.TRAJECTORY
    outcome: Outcome = Outcome.TRAJECTORY_END
    gamma: float = 1.0
    lam: float = 1.0
    lam_alpha: float | None = None
    return_lam: float | None = None
    turn_rewards: bool = False
    bootstrap: Sequence[Status | str] = ()

    def __post_init__(self) -> None:
        for name, kind in (("unit", Unit), ("chain", Chain), ("outcome", Outcome)):
            value = getattr(self, name)
            if value not in list(kind):
                raise ValueError(f"{name} {value!r}: must be one of {', '.join(kind)}")
            object.__setattr__(self, name, kind(value))
        if self.unit is Unit.SEGMENT and self.chain is Chain.SEGMENT:
            raise ValueError("unit and chain are both segment: every chain would hold one unit")
        ends = {status.name: status for status in Status if status.trainable}
        names = [end.name if isinstance(end, Status) else end for end in self.bootstrap]
        if unknown := [name for name in names if name not in ends]:
            raise ValueError(f"bootstrap {unknown}: must be ends of trained trajectories, {', '.join(ends)}")
        object.__setattr__(self, "bootstrap", tuple(ends[name] for name in names))

    def __call__(
        self,
        batch: TrajectoryBatch,
        values: NDArray[Any],
        *,
        reward: NDArray[Any] | None = None,
        last_value: NDArray[Any] | None = None,
        lam: NDArray[Any] | None = None,
    ) -> GAEOutput:
        """Advantages of a batch of T tokens and J trajectories.

        Args:
            values: [T], V of the state in which each token was sampled; read only where a unit starts.
            reward: [J], instead of the batch's own.
            last_value: [J], V after the last token; needed when ``bootstrap`` names an end, read where it happened.
            lam: [J], one lambda a trajectory, instead of the configured one.
        """
        outcome = batch.reward if reward is None else np.asarray(reward)
        for name, array, size in (
            ("values", values, batch.num_tokens),
            ("reward", outcome, batch.num_trajectories),
            ("last_value", last_value, batch.num_trajectories),
            ("lam", lam, batch.num_trajectories),
        ):
            if array is not None and np.shape(array) != (size,):
                raise ValueError(f"{name} {np.shape(array)}: expected ({size},)")
        if bool(self.bootstrap) != (last_value is not None):
            raise ValueError("last_value goes with `bootstrap`, the ends that it is read at: give both or neither")
        segment_chain, trajectory = self._chains(batch)
        turn_order = self._turn_order(batch)
        links, number = self._links(batch, segment_chain, len(trajectory), turn_order)
        # Chains that hold a link, by trajectory and then by what happened last: the last of each trajectory ends it.
        filled = np.flatnonzero(np.diff(links.offsets) > 0)
        last = links.offsets[filled + 1] - 1
        order = np.lexsort((number[last], trajectory[filled]))
        final = order[np.diff(trajectory[filled][order], append=-1) != 0]
        paid = final if self.outcome is Outcome.TRAJECTORY_END else order
        amount = np.zeros(len(links.token))
        amount[last[paid]] = outcome[trajectory[filled][paid]]
        without = batch.trainable() & (np.bincount(trajectory[filled], minlength=batch.num_trajectories) == 0)
        unclaimed = int(np.count_nonzero(outcome[without]))
        if self.turn_rewards:
            unclaimed += _pay_turns(batch, segment_chain, turn_order, links, number, amount)
        cut = None
        if last_value is not None:
            cut = np.zeros(len(trajectory))
            owner = trajectory[filled[final]]
            here = np.isin(batch.status[owner], np.array(self.bootstrap, dtype=np.int8))
            cut[filled[final][here]] = last_value[owner[here]]
        share = self._lambda(links) if lam is None else np.asarray(lam)[trajectory]
        return solve(links, values, amount, unclaimed, self.gamma, share, self.return_lam, cut)

    def _chains(self, batch: TrajectoryBatch) -> tuple[Ints, Ints]:
        """Chain of each segment [S], and trajectory of each chain [C]."""
        if self.chain is Chain.TRAJECTORY:
            return batch.segment_trajectory(), np.arange(batch.num_trajectories)
        if self.chain is Chain.SESSION:
            return batch.segment_session(), batch.session_trajectory()
        return np.arange(batch.num_segments), batch.segment_trajectory()

    def _turn_order(self, batch: TrajectoryBatch) -> Ints:
        """When each turn happened within its trajectory [N]; for unit ``segment``, when its segment began."""
        number = batch.turn_number.astype(np.int64)
        if self.unit is not Unit.SEGMENT:
            return number
        return number[batch.segment_turns[batch.turn_segment()]]

    def _links(self, batch: TrajectoryBatch, segment_chain: Ints, chains: int, turn_order: Ints) -> tuple[Links, Ints]:
        """The links, and when each happened."""
        trained = trained_tokens(batch)
        # Tokens off turn repeat what an earlier segment holds.
        linked = (
            trained if self.unit is not Unit.TOKEN else (batch.turn >= 0) & batch.trainable()[batch.token_trajectory()]
        )
        token = np.flatnonzero(linked)
        segment = owners(batch.segment_tokens)[token]
        chain, number = segment_chain[segment], turn_order[batch.turn[token]]
        if np.any((np.diff(number) < 0) & (np.diff(chain) == 0)):
            order = np.lexsort((number, chain))
            token, segment, chain, number = token[order], segment[order], chain[order], number[order]
        offsets = np.searchsorted(chain, np.arange(chains + 1))
        unit = None
        if self.unit is Unit.STEP:
            unit = runs(batch.turn[token], offsets, token)
        elif self.unit is Unit.SEGMENT:
            unit = runs(segment, offsets, token)
        return Links(token, offsets, unit, trained[token] if self.unit is Unit.TOKEN else None), number

    def _lambda(self, links: Links) -> float | Floats:
        if self.lam_alpha is None:
            return self.lam
        counted = links.trained
        if links.unit is not None:
            counted = np.diff(links.unit, prepend=-1) != 0
        if counted is None:
            return length_adaptive_lambda(np.diff(links.offsets), self.lam_alpha)
        running = np.concatenate([[0], np.cumsum(counted)])
        return length_adaptive_lambda(np.diff(running[links.offsets]), self.lam_alpha)


def _pay_turns(
    batch: TrajectoryBatch, segment_chain: Ints, turn_order: Ints, links: Links, number: Ints, amount: Floats
) -> int:
    """Adds each turn's reward to the last link up to its end; returns how many rewards no link preceded."""
    turn = np.flatnonzero((batch.turn_reward != 0) & batch.trainable()[batch.turn_trajectory()])
    chain = segment_chain[batch.turn_segment()[turn]]
    stride = int(turn_order.max(initial=0)) + 1
    at = np.searchsorted(owners(links.offsets) * stride + number, chain * stride + turn_order[turn], side="right") - 1
    claimed = at >= links.offsets[chain]
    np.add.at(amount, at[claimed], batch.turn_reward[turn[claimed]])
    return int(np.sum(~claimed))
