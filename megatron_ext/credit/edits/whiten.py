"""Whitening over the whole step: one scale for all groups (REINFORCE++, GDPO's second stage, TRIAGE, StepPO).

Invariants:

1. Over the chosen unit the advantages have root mean square 1 (``center=False``) or mean 0 and standard deviation 1.
2. Without centring a zero stays exactly 0; with centring it may not, so invariants e and f are given up and declared.
3. How ranks share the groups out changes no bit of the moments.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.exact import LIMBS, exact_parts, exact_value
from megatron_ext.credit.levels import Level, reduce_tokens, token_offsets
from megatron_ext.credit.protocol import CreditView, EditTraits, PlainEdit, Reduce, Scale, Slot, Stat
from megatron_ext.credit.spans import Op, sums_and_squares, zero_unless
from megatron_ext.credit.turns import turn_reduce

OVER = ("tokens", "turns", "trajectories")


@dataclass(frozen=True, kw_only=True)
class Whiten(PlainEdit):
    """``A / (rms + eps)``, or ``(A - mean) / (std + eps)`` when ``center``, over all trained tokens of the step.

    ``over='turns'`` and ``'trajectories'`` take the moments over the mean advantage of each model turn or trajectory,
    so that long ones do not weigh more. ``ddof``: 0 population, 1 sample moments. A batch whose spread is 0 (no signal
    at all) becomes all zeros.
    """

    over: str = "tokens"
    center: bool = False
    ddof: int = 0
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.over not in OVER:
            raise ValueError(f"over {self.over!r}: must be one of {', '.join(OVER)}")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof {self.ddof}: must be 0 (population) or 1 (sample)")

    @property
    def traits(self) -> EditTraits:
        return EditTraits(slot=Slot.ADVANTAGE, scale=Scale.SETS, breaks=frozenset("ef") if self.center else frozenset())

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return {"moments": _moments(*self._sums(view))}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        mean, divisor = self.scale(reduced["moments"])
        if np.isinf(divisor):
            return replace(view, advantage=np.zeros_like(view.advantage))
        if not self.center:
            return replace(view, advantage=view.advantage / divisor)
        whitened = view.advantage - mean
        whitened /= divisor
        zero_unless(whitened, view.trained)
        return replace(view, advantage=whitened)

    def scale(self, moments: NDArray[np.float64]) -> tuple[float, float]:
        """(mean, spread + eps) from the reduced moments of all ranks: what to take off (0 without centring) and to
        divide by, which is infinite where there is no spread."""
        count = float(moments[0, 0])
        if count == 0:
            return 0.0, np.inf
        total, squares = (float(x) for x in exact_value(moments[1:]))
        mean = total / count if self.center else 0.0
        spread = float(np.sqrt(max(squares - count * mean**2, 0.0) / max(count - self.ddof, 1.0)))
        # Below this the spread is the rounding error of equal values.
        return mean, np.inf if spread <= 1e-7 * float(np.sqrt(squares / count)) else spread + self.eps

    def _sums(self, view: CreditView) -> tuple[int, NDArray[np.float64], NDArray[np.float64]]:
        """How many units there are; sums and sums of squares that do not depend on who else is in the batch."""
        batch = view.batch
        if self.over == "tokens":
            return int(view.counts.sum()), *sums_and_squares(view.advantage, token_offsets(batch, Level.TRAJECTORY))
        if self.over == "trajectories":
            means = reduce_tokens(batch, view.advantage, Level.TRAJECTORY, Op.MEAN)[view.counts > 0]
        else:
            means = turn_reduce(view.advantage, view.turns, Op.MEAN)[view.turns.tokens > 0]
        return len(means), means, means**2


def moments_of(values: NDArray[np.float64]) -> Stat:
    """The moments of one value a unit [n], for ``Whiten.scale``: for edits that whiten what they make themselves."""
    return _moments(len(values), values, values**2)


def _moments(count: int, total: NDArray[np.float64], squares: NDArray[np.float64]) -> Stat:
    counts = np.zeros((1, LIMBS))
    counts[0, 0] = count
    return Stat(Reduce.SUM, np.concatenate([counts, exact_parts(total), exact_parts(squares)]))
