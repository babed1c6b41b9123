"""Credit edit protocol: one step of the pipeline from a base advantage to the one that the loss sees.

An edit is three pure functions, so that a batch held by one rank or by four gives the same result:

* ``requests(view)``: the scores it needs (forwards under another context or other weights);
* ``local_stats(view)``: named partial statistics of this rank's groups;
* ``apply(view, reduced)``: the edited view, given the statistics reduced over all ranks.

Invariants of every edit (specs, section 7; the contract test reads ``EditTraits`` and checks what is declared):
a. masked tokens keep advantage 0;  b. splitting a trajectory into segments changes nothing;  c. declared sums hold;
d. permuting rollouts permutes the output;  e. a group of identical rewards gives exactly 0;  f. a group of one gives 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.record import TrajectoryBatch


class Reduce(StrEnum):
    SUM = "sum"
    MAX = "max"
    GATHER = "gather"  # concatenated over ranks, in rank order


@dataclass(frozen=True)
class Stat:
    """One partial statistic: a float64 or int64 array and how ranks combine theirs."""

    op: Reduce
    value: NDArray[Any]


class Scale(StrEnum):
    KEEPS = "keeps"  # multiplies or adds on the scale it was given
    SETS = "sets"  # rescales (whitens); two edits that set the scale are refused


class Slot(StrEnum):
    """Reward-side edits change R before centring; advantage-side edits change A after it (specs, section 6)."""

    REWARD = "reward"
    ADVANTAGE = "advantage"


@dataclass(frozen=True)
class EditTraits:
    """What an edit declares. ``breaks`` lists the invariants (letters of section 7) that its own formula gives up;
    ``conserves`` names what is equal before and after: ``sum`` (of A over trained tokens), ``positive_mass``,
    ``negative_mass``, or nothing. ``own_signal`` edits keep constant groups from being filtered."""

    slot: Slot = Slot.ADVANTAGE
    scale: Scale = Scale.KEEPS
    breaks: frozenset[str] = frozenset()
    conserves: frozenset[str] = frozenset()
    own_signal: bool = False


@dataclass(frozen=True)
class ScoreRequest:
    """One scoring forward: row ``segment`` under another context or other weights.

    ``context_ids`` int32 [C] replaces what stood before ``positions`` (None = as recorded); ``positions`` int64 [P] are
    token indices of the batch; ``weights_ref`` names the weights (``current``, ``reference``, a snapshot or teacher);
    ``outputs`` are names among ``logp``, ``entropy``, ``value``, ``topk``, ``hidden``. The reply aligns to them.
    """

    segment: int
    context_ids: NDArray[np.int32] | None
    positions: NDArray[np.int64]
    weights_ref: str = "current"
    outputs: tuple[str, ...] = ("logp",)


@dataclass(frozen=True)
class CreditView:
    """What edits read and replace.

    ``reward`` float64 [J] (reward-side), ``advantage`` float64 [T] (advantage-side; 0 where the loss mask is 0),
    ``scores`` name -> array aligned to tokens or to a request's positions, ``step`` the optimizer-step batch.
    """

    batch: TrajectoryBatch
    reward: NDArray[np.float64]
    advantage: NDArray[np.float64]
    scores: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    step: int = 0


class CreditEdit(Protocol):
    @property
    def traits(self) -> EditTraits: ...

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]: ...

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]: ...

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
