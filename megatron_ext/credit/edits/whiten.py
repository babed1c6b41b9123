"""Whitening over the whole step: one scale for all groups (REINFORCE++, GDPO's second stage, TRIAGE, StepPO).

Invariants:

1. Over the chosen unit the advantages have root mean square 1 (``center=False``) or mean 0 and standard deviation 1.
2. Without centring a zero stays exactly 0; with centring it may not, so invariants e and f are given up and declared.
3. How ranks share the groups out changes no bit of the moments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.exact import LIMBS, exact_parts, exact_value
from megatron_ext.credit.levels import Level, reduce_tokens, token_offsets
from megatron_ext.credit.protocol import CreditView, EditTraits, Reduce, Scale, ScoreRequest, Slot, Stat
from megatron_ext.credit.spans import Op, sums_and_squares, zero_unless
from megatron_ext.credit.turns import turn_reduce

OVER = ("tokens", "turns", "trajectories")


@dataclass(frozen=True, kw_only=True)
class Whiten:
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

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        count, total, squares = self._sums(view)
        counts = np.zeros((1, LIMBS))
        counts[0, 0] = count
        return {"moments": Stat(Reduce.SUM, np.concatenate([counts, exact_parts(total), exact_parts(squares)]))}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        count = float(reduced["moments"][0, 0])
        total, squares = (float(x) for x in exact_value(reduced["moments"][1:]))
        if count == 0:
            return view
        mean = total / count if self.center else 0.0
        spread = float(np.sqrt(max(squares - count * mean**2, 0.0) / max(count - self.ddof, 1.0)))
        # Below this the spread is the rounding error of equal values.
        if spread <= 1e-7 * float(np.sqrt(squares / count)):
            return replace(view, advantage=np.zeros_like(view.advantage))
        if not self.center:
            return replace(view, advantage=view.advantage / (spread + self.eps))
        whitened = view.advantage - mean
        whitened /= spread + self.eps
        zero_unless(whitened, view.trained)
        return replace(view, advantage=whitened)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"whitening keeps no state, got {sorted(state)}")

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
