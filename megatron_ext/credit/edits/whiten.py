"""Whitening over the whole step: one scale for all groups (REINFORCE++, GDPO's second stage).

Invariants:

1. Over the chosen unit the advantages have root mean square 1 (``center=False``) or mean 0 and standard deviation 1.
2. Without centring a zero stays exactly 0; with centring it may not, so invariants e and f are given up and declared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.base import trained_tokens
from megatron_ext.credit.protocol import CreditView, EditTraits, Reduce, Scale, ScoreRequest, Slot, Stat

OVER = ("tokens", "trajectories")


@dataclass(frozen=True, kw_only=True)
class Whiten:
    """``A / (rms + eps)``, or ``(A - mean) / (std + eps)`` when ``center``, over all trained tokens of the step.

    ``over='trajectories'`` takes the moments over the mean advantage of each trajectory, so that long ones do not
    weigh more. Population moments. A batch whose spread is 0 (no signal at all) becomes all zeros.
    """

    over: str = "tokens"
    center: bool = False
    eps: float = 1e-8

    def __post_init__(self) -> None:
        if self.over not in OVER:
            raise ValueError(f"over {self.over!r}: must be one of {', '.join(OVER)}")

    @property
    def traits(self) -> EditTraits:
        return EditTraits(slot=Slot.ADVANTAGE, scale=Scale.SETS, breaks=frozenset("ef") if self.center else frozenset())

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        values = self._values(view)
        moments = np.array([len(values), values.sum(), np.square(values).sum()], dtype=np.float64)
        return {"moments": Stat(Reduce.SUM, moments)}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        count, total, squares = (float(x) for x in reduced["moments"])
        if count == 0:
            return view
        mean = total / count if self.center else 0.0
        spread = float(np.sqrt(max(squares / count - mean**2, 0.0)))
        # Below this the spread is the rounding error of equal values.
        if spread <= 1e-7 * float(np.sqrt(squares / count)):
            return replace(view, advantage=np.zeros_like(view.advantage))
        whitened = (view.advantage - mean) / (spread + self.eps)
        return replace(view, advantage=np.where(trained_tokens(view.batch), whitened, 0.0))

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"whitening keeps no state, got {sorted(state)}")

    def _values(self, view: CreditView) -> NDArray[np.float64]:
        trained = trained_tokens(view.batch)
        if self.over == "tokens":
            return view.advantage[trained]
        owner = view.batch.token_trajectory()[trained]
        size = np.bincount(owner, minlength=view.batch.num_trajectories)
        sums = np.bincount(owner, weights=view.advantage[trained], minlength=view.batch.num_trajectories)
        means: NDArray[np.float64] = sums[size > 0] / size[size > 0]
        return means
