"""Credit edit protocol: one step of the pipeline from a base advantage to the one that the loss sees.

An edit is three pure functions, so that a batch held by one rank or by four gives the same result:

* ``requests(view)``: the scores it needs (forwards under another context or other weights);
* ``local_stats(view)``: named partial statistics of this rank's groups;
* ``apply(view, reduced)``: the edited view, given the statistics reduced over all ranks.

Invariants of every edit (specs, section 7; the contract test reads ``EditTraits`` and checks what is declared):
a. masked tokens keep advantage 0;  b. splitting a trajectory into segments changes nothing;  c. declared sums hold;
d. permuting rollouts permutes the output;  e. a group of identical rewards gives exactly 0;  f. a group of one gives 0;
g. rows of one turn each and merged rows give each turn the same.

What an edit wants to be seen of its work it puts on the view that it returns: ``counters``, which become metrics, and
``off``, the advantage of its own off arm, where that is not simply what it was given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.scoring import ScoreReply, ScoreRequest
from megatron_ext.credit.turns import Layout, Turns
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


class Kind(StrEnum):
    COUNT = "count"
    MEAN = "mean"
    SHARE = "share"


@dataclass(frozen=True, eq=False)
class Counter:
    """One number about an edit's work over all ranks: a sum of values, their mean, or the share of things that hold.

    It becomes the metric ``credit/<edit>/<kind>/<name>``; a mean or share of nothing is left out. ``values`` float64
    [n], this rank's (at most 2^23); ``size`` what their sum is divided by, added over ranks (unused for a count).
    """

    kind: Kind
    values: NDArray[np.float64]
    size: int

    @classmethod
    def count(cls, values: NDArray[Any]) -> Counter:
        """The sum of ``values`` [n] (of a mask: how many hold)."""
        if values.dtype == np.bool_:
            values = np.array([np.count_nonzero(values)])
        return cls(Kind.COUNT, np.asarray(values, dtype=np.float64), 1)

    @classmethod
    def mean(cls, values: NDArray[Any], where: NDArray[np.bool_] | None = None) -> Counter:
        """The mean of ``values`` [n] (where ``where`` [n])."""
        chosen = np.asarray(values, dtype=np.float64) if where is None else np.asarray(values, dtype=np.float64)[where]
        return cls(Kind.MEAN, chosen, len(chosen))

    @classmethod
    def share(cls, holds: NDArray[np.bool_], where: NDArray[np.bool_] | None = None) -> Counter:
        """How many of ``holds`` bool [n] hold (of those ``where`` [n])."""
        size = len(holds) if where is None else np.count_nonzero(where)
        number = np.count_nonzero(holds if where is None else holds & where)
        return cls(Kind.SHARE, np.array([number], dtype=np.float64), int(size))


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
    ``conserves`` names what is equal before and after (``conservation.CONSERVED`` says what each is), or nothing;
    ``own_signal`` edits keep constant groups from being filtered; ``sessions`` edits speak of sessions, so that cutting
    one in two changes what they say (cutting it into segments must not); ``reference`` edits ask for scores under the
    reference policy, so that a run keeps one.

    Of the record, and without which the edit does nothing of what it is for: ``labels`` names the turn labels that it
    reads, ``prepared`` the ids that a harness makes ready, ``states`` whether it compares turns by their state key. A
    configuration in which nothing writes them is refused (``config/needs.py``), a step without states by credit."""

    slot: Slot = Slot.ADVANTAGE
    scale: Scale = Scale.KEEPS
    breaks: frozenset[str] = frozenset()
    conserves: frozenset[str] = frozenset()
    own_signal: bool = False
    sessions: bool = False
    reference: bool = False
    labels: frozenset[str] = frozenset()
    prepared: frozenset[str] = frozenset()
    states: bool = False


@dataclass(frozen=True)
class CreditView:
    """What edits read and replace.

    ``reward`` float64 [J] (reward-side), ``advantage`` float64 [T] (advantage-side; 0 where the loss mask is 0),
    ``scores`` name -> array aligned to tokens, ``step`` the optimizer-step batch, ``replies`` to the requests of the
    edit that sees the view, in their order. An edit returns ``counters`` by name, the same names on every rank, and
    ``off`` float64 [T], what its off arm gives where that differs from what it was given (an edit that whitens: the
    advantage whitened without it), so that the tokens it changed are counted against that. ``trained`` bool [T],
    ``counts`` int64 [J] of them, and the model ``turns`` follow from the batch; views made from one another share them.
    """

    batch: TrajectoryBatch
    reward: NDArray[np.float64]
    advantage: NDArray[np.float64]
    scores: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    step: int = 0
    replies: Sequence[ScoreReply] = ()
    counters: Mapping[str, Counter] = field(default_factory=dict)
    off: NDArray[np.float64] | None = None
    layout: Layout | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.layout is None or self.layout.batch is not self.batch:
            object.__setattr__(self, "layout", Layout(self.batch))

    @property
    def _layout(self) -> Layout:
        assert self.layout is not None, "set when the view is made"
        return self.layout

    @property
    def trained(self) -> NDArray[np.bool_]:
        return self._layout.trained

    @property
    def counts(self) -> NDArray[np.int64]:
        return self._layout.counts

    @property
    def turns(self) -> Turns:
        return self._layout.turns


class CreditError(ValueError):
    """An edit that breaks what it declared, or edits that do not go together; the message names them."""


class PlainEdit:
    """An edit that asks for no scores, needs nothing of other ranks and keeps no state: what it inherits says so, and
    ``traits`` and ``apply`` are left to write. An edit that does one of these overrides it."""

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return {}

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"{type(self).__name__} keeps no state, got {sorted(state)}")


class CreditEdit(Protocol):
    @property
    def traits(self) -> EditTraits: ...

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]: ...

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]: ...

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...
