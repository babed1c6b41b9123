"""AdaStep's credit (arXiv 2610.03223): GiGPO's step advantage, shrunk by what actions explain of a state's spread.

    A(s, a) = A_E + w(s) A_S(s, a)
    A_S(s, a) = R - mean_s R,   R_t = sum_{k >= t} discount^(k - t) r_k
    w(s) = 1 - sum_a p(a|s) v_sa / v_s                                       (eq. 17)

``A_E`` is the group-relative advantage that the pipeline starts from. States are compared inside their group; a state
that a rollout visits twice counts twice, as in GiGPO. Variances are of raw returns; with ``ddof`` 0 the law of total
variance is exact.

Invariants (``tests/recipes/adastep/test_numbers.py`` asserts each):

1. w lies in [0, 1]. A constant added to all returns, or a positive scale, leaves it as it is.
2. The step advantages of a state sum to 0; where its returns are all equal they are 0.
3. Weight 1 everywhere is GiGPO; weight 0 everywhere is the advantage that came in.
4. A state whose w cannot be estimated (one action, an action tried once) has the fallback. Turns without a state key
   and masked trajectories do not vote and get no step advantage.
5. Under pure noise E[w] = (actions - 1) / (visits - 1), not 0: a small-sample bias that the method has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.exact import Moments
from megatron_ext.credit.groups import compose_keys, group_normalize, group_stats
from megatron_ext.credit.protocol import Counter, CreditView, EditTraits, PlainEdit, Scale, Slot, Stat
from megatron_ext.credit.turns import returns_to_go, turn_broadcast
from megatron_ext.credit.variance import VarianceShares, variance_shares

WEIGHTS = ("adaptive", "fixed")
FALLBACKS = ("one", "zero", "mean")
RETURNS = ("steps", "outcome", "both")
ESTIMATORS = ("returns", "action_means")
VISITS = (2, 4, 8, 16, 32)  # lower ends of the bins that counters are kept for


@dataclass(frozen=True, kw_only=True)
class StepShrinkage(PlainEdit):
    """Adds ``w(s) A_S(s, a)`` to the advantage of every model turn.

    Attributes:
        discount: of the step returns.
        returns: ``steps`` sums the rewards of the turns, ``outcome`` discounts the trajectory's reward from its last
            turn, ``both`` adds them.
        weight: ``adaptive`` is w(s); ``fixed`` is ``coefficient`` in all states.
        coefficient: of ``fixed``; 1 is GiGPO.
        fallback: w where it cannot be estimated: ``one``, ``zero``, or the ``mean`` of those that can (one if none).
        step_std: divide A_S by the state's standard deviation (a GiGPO option); w is of raw returns all the same.
        estimator: ``returns`` takes the return R itself; ``action_means`` takes the mean return of the action, drawn
            to the state's mean mu as ``(n mean + kappa mu) / (n + kappa)`` (ECPO, arXiv 2606.05885).
        kappa: of ``action_means``.
        ddof: of the variances in w: 0 population, 1 sample (w is then cut off at 0 and 1).
    """

    discount: float = 0.95
    returns: str = "outcome"
    weight: str = "adaptive"
    coefficient: float = 1.0
    fallback: str = "one"
    step_std: bool = False
    estimator: str = "returns"
    kappa: float = 2.0
    ddof: int = 0

    def __post_init__(self) -> None:
        for name, allowed in (
            ("weight", WEIGHTS),
            ("fallback", FALLBACKS),
            ("returns", RETURNS),
            ("estimator", ESTIMATORS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} {getattr(self, name)!r}: must be one of {', '.join(allowed)}")
        if not 0.0 <= self.discount <= 1.0:
            raise ValueError(f"discount {self.discount}: must be within 0 and 1")
        if self.ddof not in (0, 1):
            raise ValueError(f"ddof {self.ddof}: must be 0 (population) or 1 (sample)")
        if self.kappa < 0.0:
            raise ValueError(f"kappa {self.kappa}: must be >= 0")

    @property
    def traits(self) -> EditTraits:
        """Gives up e (rollouts of one reward and unequal lengths differ in discounted return) and f (a lone rollout can
        visit a state twice)."""
        return EditTraits(
            slot=Slot.ADVANTAGE, scale=Scale.KEEPS, breaks=frozenset("ef"), own_signal=True, states=self._acts
        )

    @property
    def _acts(self) -> bool:
        return self.weight != "fixed" or self.coefficient != 0.0

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        if self.fallback != "mean" or self.weight == "fixed":
            return {}
        shares = _Steps.of(self, view).shares
        return Moments.of(shares.share[shares.estimable()]).stats("shares")

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        steps = _Steps.of(self, view)
        weight = self._weight(steps, reduced)
        advantage = view.advantage + turn_broadcast(weight * self._step_advantage(steps), view.turns)
        return replace(view, advantage=advantage, counters=_counters(steps, weight, view.turns.trainable))

    def _step_advantage(self, steps: _Steps) -> NDArray[np.float64]:
        """A_S of each turn, float64 [M]."""
        value = steps.value
        if self.estimator == "action_means":
            value = action_means(value, steps.state, steps.action, self.kappa, steps.present)
        return group_normalize(value, steps.state, present=steps.present, std=self.step_std)

    def _weight(self, steps: _Steps, reduced: Mapping[str, NDArray[Any]]) -> NDArray[np.float64]:
        """w of each turn's state, float64 [M]."""
        if self.weight == "fixed":
            return np.full(len(steps.value), self.coefficient)
        fallback = 0.0 if self.fallback == "zero" else 1.0
        if self.fallback == "mean":
            moments = Moments.reduced(reduced, "shares")
            fallback = float(moments.mean[0]) if moments.count[0] else 1.0
        return steps.shares.explained(fallback)


@dataclass(frozen=True, eq=False)
class _Steps:
    """The M model turns as visits of states: ``value`` return, ``state`` key (group and anchor), ``action`` key,
    whether the visit is ``present``, and the ``shares`` of the states' variances."""

    value: NDArray[np.float64]
    state: NDArray[np.int64]
    action: NDArray[np.int64]
    present: NDArray[np.bool_]
    shares: VarianceShares

    @classmethod
    def of(cls, edit: StepShrinkage, view: CreditView) -> _Steps:
        turns, batch = view.turns, view.batch
        reward = turns.pick(batch.turn_reward) if edit.returns != "outcome" else np.zeros(len(turns))
        value = returns_to_go(turns, reward, edit.discount, None if edit.returns == "steps" else view.reward)
        anchor, action = turns.pick(batch.turn_state_key), turns.pick(batch.turn_action_key)
        state = compose_keys(batch.trajectory_group()[turns.trajectory], anchor)
        present = turns.trainable & (anchor != 0)
        shares = variance_shares(value, state, action, present, ddof=edit.ddof)
        return cls(value, state, action, present, shares)


def action_means(
    value: NDArray[np.float64],
    state: NDArray[np.int64],
    action: NDArray[np.int64],
    kappa: float,
    present: NDArray[np.bool_],
) -> NDArray[np.float64]:
    """``(n mean_sa + kappa mean_s) / (n + kappa)`` of each visit, float64 [M] (its own value where not present)."""
    out = value.copy()
    key = compose_keys(state, action)
    actions, states = group_stats(value, key, present), group_stats(value, state, present)
    own, around = actions.member[present], states.member[present]
    count = actions.count[own]
    out[present] = (count * actions.mean[own] + kappa * states.mean[around]) / (count + kappa)
    return out


def _counters(steps: _Steps, weight: NDArray[np.float64], trainable: NDArray[np.bool_]) -> dict[str, Counter]:
    """How much was shrunk, by how often a state was visited. ``estimable``: share of the states whose w could be
    estimated; ``weight``: mean w over states; ``weight_if_noise``: what those estimable would show if nothing but noise
    told their actions apart; ``unkeyed_turns``: share of the turns without a state."""
    shares, known = steps.shares, steps.shares.estimable()
    of_state = np.zeros(len(known))
    of_state[shares.index[steps.present]] = weight[steps.present]
    noise = (shares.parts - 1) / np.maximum(shares.count - 1, 1)
    counters = {
        "states": Counter.count(np.ones(len(known))),
        "estimable": Counter.share(known),
        "estimable_turns": Counter.share(shares.of_member(known, False), steps.present),
        "unkeyed_turns": Counter.share(~steps.present, trainable),
        "weight": Counter.mean(of_state),
        "weight_estimable": Counter.mean(of_state, known),
        "weight_if_noise": Counter.mean(noise, known),
    }
    for low, high in zip(VISITS, (*VISITS[1:], None), strict=True):
        here = (shares.count >= low) & (True if high is None else shares.count < high)
        visits = f"{low}_up" if high is None else f"{low}_{high - 1}"
        counters[f"weight_visits_{visits}"] = Counter.mean(of_state, here)
        counters[f"estimable_visits_{visits}"] = Counter.share(known, here)
    return counters
