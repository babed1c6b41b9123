"""TRIAGE's credit (arXiv 2606.32017): a constant for the role that a judge gave each segment, then whitening.

    A_ik = A_i + w c[role_k],   then (A - mean) / (std + eps) over the segments of the step

``A_i`` is the group-relative advantage that the pipeline starts from; a segment is a model turn. The judge's labels are
in the record (``turn_labels``): decisive progress D, useful exploration E, no-progress infrastructure N, regression R.

Invariants (``tests/recipes/triage/test_numbers.py`` asserts each):

1. Weight 0 is the base advantage, whitened. The order in which labels are named changes nothing.
2. Exploration in a failure is worth more than the failure, regression in a success less than the success, whenever
   their constants say so.
3. A turn without a label has no constant; it is counted, never guessed.
4. Its off arm is ``Whiten`` over turns alone: the tokens it changed are counted against that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.edits.whiten import Whiten, moments_of
from megatron_ext.credit.groups import compose_keys, group_stats
from megatron_ext.credit.protocol import (
    Counter,
    CreditError,
    CreditView,
    EditTraits,
    PlainEdit,
    Scale,
    Slot,
    Stat,
)
from megatron_ext.credit.spans import Op
from megatron_ext.credit.turns import turn_broadcast, turn_reduce

UNLABELLED = -1


@dataclass(frozen=True, kw_only=True)
class RoleCredit(PlainEdit):
    """Adds ``weight * constants[role]`` to the advantage of every labelled model turn, and whitens over turns.

    Attributes:
        constants: role -> constant c. Roles that are not named have none.
        labels: role -> its number in the record, as the judge's reward has them.
        weight: w, within 0 and 1.
        label: the name of the labels in the record.
        eps: of the whitening, whose moments are those of the population.
    """

    constants: Mapping[str, float]
    labels: Mapping[str, int]
    weight: float = 1.0
    label: str = "role"
    eps: float = 1e-8
    whiten: Whiten = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "constants", dict(self.constants))
        object.__setattr__(self, "labels", dict(self.labels))
        object.__setattr__(self, "whiten", Whiten(over="turns", center=True, ddof=0, eps=self.eps))
        if not 0.0 <= self.weight <= 1.0:
            raise ValueError(f"weight {self.weight}: must be within 0 and 1")
        unknown = sorted(set(self.constants) - set(self.labels))
        if unknown:
            raise ValueError(f"constants name {', '.join(unknown)}, labels have {', '.join(self.labels) or 'none'}")
        if len(set(self.labels.values())) < len(self.labels) or min(self.labels.values(), default=0) < 0:
            raise ValueError(f"labels {self.labels}: each role needs a number of its own, 0 or more")

    @property
    def traits(self) -> EditTraits:
        """Gives up e and f: a constant tells turns of equal outcome apart. Where no constant acts, labels are counted
        and nothing more."""
        acts = self.weight != 0.0 and any(self.constants.values())
        return EditTraits(
            slot=Slot.ADVANTAGE,
            scale=Scale.SETS,
            breaks=frozenset("ef"),
            own_signal=True,
            labels=frozenset({self.label} if acts else ()),
        )

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        voting, base = view.turns.tokens > 0, turn_reduce(view.advantage, view.turns, Op.MEAN)
        return {"on": moments_of((base + self._constant(view))[voting]), "off": moments_of(base[voting])}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        constant = self._constant(view)
        on = self._whitened(view, constant, reduced["on"])
        off = self._whitened(view, np.zeros(len(constant)), reduced["off"])
        return replace(view, advantage=on, off=off, counters=self._counters(view, on, off))

    def _whitened(
        self, view: CreditView, constant: NDArray[np.float64], moments: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        """``(A + constant - mean) / (std + eps)`` of each trained token, float64 [T]."""
        mean, divisor = self.whiten.scale(moments)
        whitened = turn_broadcast(constant - mean, view.turns)
        whitened += view.advantage
        whitened /= divisor
        return whitened

    def _constant(self, view: CreditView) -> NDArray[np.float64]:
        """``w c[role]`` of each model turn, float64 [M]; 0 without a label."""
        constant = np.zeros(max(self.labels.values(), default=0) + 2)  # the last one is that of unlabelled turns
        for role, value in self.constants.items():
            constant[self.labels[role]] = value
        return self.weight * constant[self._roles(view)]

    def _roles(self, view: CreditView) -> NDArray[np.int64]:
        """The number of each model turn's role, int64 [M], ``UNLABELLED`` where it has none."""
        turns, labels = view.turns, view.batch.turn_labels
        if self.label not in labels:
            return np.full(len(turns), UNLABELLED)
        roles = turns.pick(labels[self.label]).astype(np.int64)
        known = np.isin(roles, [UNLABELLED, *self.labels.values()])
        if not known.all():
            at = int(np.argmin(known))
            raise CreditError(
                f"turn {turns.number[at]} of {view.batch.trajectory_id[turns.trajectory[at]]!r} has {self.label} "
                f"{roles[at]}, which is none of {self.labels}: give the edit the labels of the judge's reward"
            )
        return roles

    def _counters(self, view: CreditView, on: NDArray[np.float64], off: NDArray[np.float64]) -> dict[str, Counter]:
        """What the constants did. ``turns_<role>``: turns of a role; ``shift_<role>``: mean change of their advantage
        against whitening alone; ``in_success_<role>``: their share of the turns of successful trajectories;
        ``unlabelled``: share of the turns without a label; ``shift``: mean size of the change; ``flipped``: share of
        the turns whose sign it turned; ``turns_per_success``: model turns of a successful trajectory."""
        turns, roles = view.turns, self._roles(view)
        voting = turns.trainable & (turns.tokens > 0)
        with_it, without = (turn_reduce(values, turns, Op.MEAN) for values in (on, off))
        shift = with_it - without
        counters = {
            "unlabelled": Counter.share(roles == UNLABELLED, voting),
            "flipped": Counter.share(with_it * without < 0, voting),
            "shift": Counter.mean(np.abs(shift), voting),
            "turns_per_success": Counter.mean(np.diff(turns.offsets), view.batch.success & view.batch.trainable()),
        }
        for role, number in self.labels.items():
            here = voting & (roles == number)
            counters[f"turns_{role}"] = Counter.count(here)
            counters[f"shift_{role}"] = Counter.mean(shift, here)
            counters[f"in_success_{role}"] = Counter.share(here, voting & view.batch.success[turns.trajectory])
        return counters


# -- are fixed constants worth adding? ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class RoleFit:
    """How well constants ``c`` [M] explain residuals ``A* - A`` [M]: ``covariance`` (they help where it is above 0) and
    ``best`` weight, ``E[c d] / E[c^2]``; any weight between 0 and twice the best lowers the error."""

    covariance: float
    best: float
    constant: NDArray[np.float64]
    residual: NDArray[np.float64]

    def error(self, weight: float) -> float:
        """Mean squared error of ``A + weight c`` as an estimate of A*."""
        return float(np.mean((self.residual - weight * self.constant) ** 2))


def role_fit(constant: NDArray[Any], residual: NDArray[Any]) -> RoleFit:
    """Of the constants of some turns and their residuals, [M] each."""
    c, d = np.asarray(constant, dtype=np.float64), np.asarray(residual, dtype=np.float64)
    if c.ndim != 1 or c.shape != d.shape or not len(c):
        raise ValueError(f"constants {c.shape} and residuals {d.shape}: both must be [M], M >= 1")
    square = float(np.mean(c**2))
    return RoleFit(
        covariance=float(np.mean((c - c.mean()) * (d - d.mean()))),
        best=float(np.mean(c * d)) / square if square else 0.0,
        constant=c,
        residual=d,
    )


def held_out_advantage(
    value: NDArray[Any], state: NDArray[Any], action: NDArray[Any], held_out: NDArray[np.bool_]
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Monte-Carlo ``Q(s, a) - V(s)`` of each turn from the returns of held-out turns; float64 [M], and where it is.

    ``value`` [M] return from each turn on; ``state``, ``action`` [M] keys (the state's hold its task); ``held_out``
    bool [M]: turns of rollouts that the advantage was not computed from. A turn has an estimate if it is not held out
    and its action was taken in its state in a held-out rollout.
    """
    states, actions = compose_keys(state), compose_keys(state, action)
    around, own = group_stats(value, states, held_out), group_stats(value, actions, held_out)
    at, action_at = around.index(states), own.index(actions)
    there = ~held_out & (action_at >= 0)
    out = np.zeros(len(states))
    out[there] = own.mean[action_at[there]] - around.mean[at[there]]
    return out, there
