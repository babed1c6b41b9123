"""Length penalty: a reward-side price on what a trajectory spends beyond a free allowance.

Invariants:

1. Nothing is charged up to ``free``, ``coefficient`` at ``limit`` and beyond, and a straight line between.
2. It tells trajectories of equal reward apart, so it gives up invariant e and is a signal of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.protocol import CreditView, EditTraits, PlainEdit, Scale, Slot

UNITS = ("tokens", "turns")


@dataclass(frozen=True, kw_only=True)
class LengthPenalty(PlainEdit):
    """``R - coefficient * clip((n - free) / (limit - free), 0, 1)``; the ramp is DAPO's (Yu et al. 2025, eq. 13).

    n counts the trained ``tokens`` or the model ``turns`` of the trajectory over all its sessions.
    ``successes_only``: charge trajectories that solved the task, and leave the others as they are.
    """

    coefficient: float
    free: int
    limit: int
    unit: str = "tokens"
    successes_only: bool = False

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"unit {self.unit!r}: must be one of {', '.join(UNITS)}")
        if not 0 <= self.free < self.limit:
            raise ValueError(f"free {self.free} and limit {self.limit}: need 0 <= free < limit")

    @property
    def traits(self) -> EditTraits:
        return EditTraits(slot=Slot.REWARD, scale=Scale.KEEPS, breaks=frozenset("e"), own_signal=True)

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        batch = view.batch
        spent = view.counts if self.unit == "tokens" else np.diff(view.turns.offsets)
        charge = np.clip((spent - self.free) / (self.limit - self.free), 0.0, 1.0)
        if self.successes_only:
            charge = np.where(batch.success, charge, 0.0)
        return replace(view, reward=view.reward - self.coefficient * charge)
