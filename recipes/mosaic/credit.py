"""Mosaic's credit for trajectories of several sessions: fewer sessions win ties, sessions that add answer likelihood
get more. No paper of it could be read: beta, eta, the rank and the direction for failures are completions of ours.

    A_ij = A_i (1 - beta c_i) + eta z_ij
    c_i  = (rank of n_i - (m + 1) / 2) / (m - 1)         within the group's m trajectories of the same outcome
    z_ij = (IG_ij - mean) / (std + eps)                  within the group's sessions of the same type

``n_i`` counts the sessions of trajectory i, ``IG_ij`` is what session j adds to the likelihood of the right answer
(``gain.py``). Successes with fewer sessions get more. For failures ``relax`` makes many sessions count as less of a
failure, ``harden`` as more.

The weight of a token is that of its trajectory, whatever session it stands in: ``loss.aggregation=trajectory_mean``
(``session_mean`` is the mistake that is compared with).

Invariants (``tests/recipes/mosaic/test_numbers.py`` asserts each):

1. Where |A| is equal within an outcome, the rank moves advantage between trajectories of that outcome and adds none.
   beta < 2 keeps every sign.
2. z sums to 0 over the sessions of a type in a group; a type of one session, or of equal gains, gives 0.
3. Without an answer, or with eta 0, nothing is asked and z is 0.
4. Cutting sessions into segments changes nothing; masked tokens keep 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.groups import centred_rank, gathered, group_normalize, group_size, group_stats
from megatron_ext.credit.levels import Level, broadcast, trained_counts
from megatron_ext.credit.protocol import (
    Counter,
    CreditError,
    CreditView,
    EditTraits,
    PlainEdit,
    Scale,
    ScoreRequest,
    Slot,
    Stat,
)
from megatron_ext.credit.scoring import SPACE
from megatron_ext.trajectory.record import SessionKind
from recipes.mosaic.gain import ANSWER, PREFIX, Places, gains, likelihood_requests, places

DIRECTIONS = ("relax", "harden")
TYPES = ("type", "pooled")
FALLBACKS = ("batch", "zero")
SHOWN = 4  # sessions of a trajectory that counters tell apart; more are counted together


@dataclass(frozen=True, kw_only=True)
class SessionCredit(PlainEdit):
    """Weighs trajectories by their session count, and adds each session's normalised information gain.

    Attributes:
        beta: strength of the session-count rank, within 0 and 2; 0 leaves the trajectory's advantage as it is.
        eta: strength of the gain; 0 asks for no forwards.
        fail_direction: ``relax`` or ``harden``.
        space: of the likelihood, ``log`` or ``prob`` (IGPO, arXiv 2510.14967).
        normalize: gains by session ``type``, or all types ``pooled``.
        fallback: of a type with one session in the group: the ``batch``'s sessions of that type, or ``zero``.
        eps: added to the standard deviation.
        max_tokens: no forward is longer than this; 0 = no limit. A session whose forwards would be has no gain.
    """

    beta: float = 0.5
    eta: float = 0.2
    fail_direction: str = "relax"
    space: str = "log"
    normalize: str = "type"
    fallback: str = "batch"
    eps: float = 1e-6
    max_tokens: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("fail_direction", DIRECTIONS),
            ("space", SPACE),
            ("normalize", TYPES),
            ("fallback", FALLBACKS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if not 0.0 <= self.beta < 2.0:
            raise ValueError(f"beta {self.beta}: must be at least 0, and below 2 to keep the sign of advantages")
        if self.max_tokens < 0:
            raise ValueError(f"max_tokens {self.max_tokens}: must be >= 0")

    @property
    def traits(self) -> EditTraits:
        """With eta above 0 it gives up e and f: gains differ where rewards do not."""
        own = self.eta != 0.0
        return EditTraits(
            slot=Slot.ADVANTAGE,
            scale=Scale.KEEPS,
            breaks=frozenset("ef") if own else frozenset(),
            own_signal=own,
            sessions=True,
            prepared=frozenset({PREFIX, ANSWER} if own else ()),
        )

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return likelihood_requests(view.batch, self._places(view)) if self.eta != 0.0 else ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        if self.eta == 0.0 or self.fallback != "batch":
            return {}
        at = self._places(view)
        return gathered("gain", self._gains(view, at), self._types(view), at.measured)

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        batch = view.batch
        factor = self._factor(view)
        at = self._places(view)
        gain = self._gains(view, at)
        z = self._normalized(view, at, gain, reduced)
        advantage = broadcast(batch, factor)
        advantage *= view.advantage
        if self.eta != 0.0:
            advantage += broadcast(batch, self.eta * z, Level.SESSION)
        return replace(view, advantage=advantage, counters=self._counters(view, factor, at, gain, z))

    # -- trajectories --------------------------------------------------------------------------------------------------
    def _factor(self, view: CreditView) -> NDArray[np.float64]:
        """``1 - beta c`` of each trajectory, float64 [J]."""
        batch = view.batch
        key = (batch.trajectory_group(), batch.success)
        rank = centred_rank(np.diff(batch.trajectory_sessions), key, batch.trainable())
        turned = ~batch.success if self.fail_direction == "harden" else np.zeros(len(rank), dtype=bool)
        return 1.0 - self.beta * np.where(turned, -rank, rank)

    # -- sessions ------------------------------------------------------------------------------------------------------
    def _places(self, view: CreditView) -> Places:
        return places(view.batch, self.max_tokens)

    def _types(self, view: CreditView) -> NDArray[np.int64]:
        kind = view.batch.session_kind.astype(np.int64)
        return kind if self.normalize == "type" else np.zeros(len(kind), dtype=np.int64)

    def _gains(self, view: CreditView, at: Places) -> NDArray[np.float64]:
        """IG of each session, float64 [Q]."""
        if self.eta == 0.0:
            return np.zeros(view.batch.num_sessions)
        if len(view.replies) != len(at.cut):
            raise CreditError(f"{len(view.replies)} answer likelihoods for {len(at.cut)} places of the batch")
        return gains(at, view.replies, self.space)

    def _normalized(
        self, view: CreditView, at: Places, gain: NDArray[np.float64], reduced: Mapping[str, NDArray[Any]]
    ) -> NDArray[np.float64]:
        """z of each session, float64 [Q]."""
        if self.eta == 0.0:
            return gain
        batch, types = view.batch, self._types(view)
        key = (batch.trajectory_group()[batch.session_trajectory()], types)
        z = group_normalize(gain, key, present=at.measured, eps=self.eps)
        if self.fallback == "batch":
            lone = at.measured & (group_size(key, at.measured) < 2)
            everyone = group_stats(reduced["gain/score"], reduced["gain/key"])
            z += group_normalize(gain, types, present=lone, eps=self.eps, stats=everyone)
        return z

    # -- counters ------------------------------------------------------------------------------------------------------
    def _counters(
        self,
        view: CreditView,
        factor: NDArray[np.float64],
        at: Places,
        gain: NDArray[np.float64],
        z: NDArray[np.float64],
    ) -> dict[str, Counter]:
        """The weight by session. ``weight_<success|failure>_<n>``: mean of ``1 - beta c`` over the trajectories of n
        sessions; ``gain_<type>`` and ``size_<type>``: mean IG and mean ``|eta z|`` of the sessions of a type;
        ``measured``: share of the sessions that have a gain; ``sessions_per_<success|failure>``; ``tokens_<type>``:
        the trained tokens in sessions of a type."""
        batch = view.batch
        many, trainable = np.diff(batch.trajectory_sessions), batch.trainable()
        voting = trainable[batch.session_trajectory()]
        counters = {"measured": Counter.share(at.measured, voting)}
        for outcome, chosen in (("success", batch.success), ("failure", ~batch.success)):
            counters[f"sessions_per_{outcome}"] = Counter.mean(many, trainable & chosen)
            for n in range(1, SHOWN + 1):
                here = trainable & chosen & ((many >= n) if n == SHOWN else (many == n))
                counters[f"weight_{outcome}_{n}{'_up' if n == SHOWN else ''}"] = Counter.mean(factor, here)
        tokens = trained_counts(batch, Level.SESSION)
        for kind in SessionKind:
            own = batch.session_kind == kind
            name = kind.name.lower()
            counters[f"sessions_{name}"] = Counter.count(own & voting)
            counters[f"gain_{name}"] = Counter.mean(gain, own & at.measured)
            counters[f"size_{name}"] = Counter.mean(np.abs(self.eta * z), own & at.measured)
            counters[f"tokens_{name}"] = Counter.count(np.where(own, tokens, 0))
        return counters
