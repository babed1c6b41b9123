"""What all policy losses share: a ratio, a surrogate of it, a correction, and the metrics. One subclass a method.

    loss = -sum_t weight_t * correction_t * gain_t(ratio, advantage)

Invariants (``tests/losses/test_contract.py`` asserts each for every subclass):

1. Keys are checked where the term is built; an error is one line that names the key and what is allowed.
2. The ratio's numerator is always the current policy; its denominator is named by the key ``denominator``.
3. A token that a bound or a mask stopped has gradient 0, and ``policy/stopped_*`` counts exactly these.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from megatron_ext.losses.correction import PUBLISHED_BOUNDS, Correction, CorrectionKind
from megatron_ext.losses.protocol import Granularity, LossInputs, LossOutput, Policy
from megatron_ext.losses.ratio import (
    LIMIT,
    Metric,
    Ratio,
    RatioValue,
    Reduce,
    active,
    k3,
    log_ratio,
    one_of,
    token_mean,
    weighted_sum,
)


@dataclass(frozen=True)
class Surrogate:
    """What a method makes of ratio and advantage, each [n]: ``gain`` is maximised; ``low`` and ``high`` are the tokens
    beyond the ratio's bounds in the method's own sense, ``stopped`` those without a gradient for it (bool). ``values``
    are more metrics, name -> [n], averaged over the tokens that count."""

    gain: torch.Tensor
    low: torch.Tensor
    high: torch.Tensor
    stopped: torch.Tensor
    values: Mapping[str, torch.Tensor] = field(default_factory=dict)


def finite_logp(inputs: LossInputs, on: torch.Tensor) -> torch.Tensor:
    """Current log-probs [n] for losses that are linear in them: 0 without a gradient where infinite or not counted."""
    return torch.where(on & ~torch.isinf(inputs.cur_logp), inputs.cur_logp, 0.0)


@dataclass(frozen=True, kw_only=True)
class PolicyTerm(ABC):
    """Keys of every policy loss.

    Ratio ``r = current / denominator``: ``denominator`` old | rollout | reference; ``granularity`` token | step (the
    trained tokens of a turn) | sequence (of a segment, as it entered one context; a trajectory of several segments has
    several); ``reduce`` geometric | product of a unit's tokens; ``gradient`` token | unit (``ratio.Gradient``);
    ``log_ratio_limit`` clamps the log-ratio before the exponent.

    Correction ``k = old / rollout`` multiplies the surrogate: ``correction`` none | truncate | icepop | mask
    (``correction.CorrectionKind``) between ``correction_low`` and ``correction_high`` (null: 0 and 2 for truncate, 0.5
    and 5 for the masks), of a ``correction_granularity`` token | step | sequence with ``correction_reduce`` product |
    geometric.

    Metrics, means over the tokens that count: ``policy/ratio_mean``, ``policy/clip_fraction_low`` and ``_high``,
    ``policy/stopped_positive`` and ``_negative`` (of the tokens with that sign of advantage, the share whose gradient a
    bound or mask removed), ``policy/log_ratio_clamped``, ``policy/kl_old`` (k3 of old || current, token by token),
    ``policy/entropy``, and those of ``correction.Correction`` when on.
    """

    coefficient: float = 1.0
    denominator: str = "old"
    granularity: str = "token"
    reduce: str = "geometric"
    gradient: str = "token"
    log_ratio_limit: float = LIMIT
    correction: str = "none"
    correction_low: float | None = None
    correction_high: float | None = None
    correction_granularity: str = "token"
    correction_reduce: str = "product"

    def __post_init__(self) -> None:
        self._ratio()
        one_of("correction", self.correction, CorrectionKind)
        one_of("correction_granularity", self.correction_granularity, Granularity)
        one_of("correction_reduce", self.correction_reduce, Reduce)
        if self.correction == CorrectionKind.NONE:
            for key in ("correction_low", "correction_high"):
                if getattr(self, key) is not None:
                    raise ValueError(f"{key} {getattr(self, key)}: correction is none; set correction too, or drop it")
        elif self.denominator == Policy.ROLLOUT:
            raise ValueError(
                f"correction {self.correction!r}: denominator rollout already divides by the sampling policy; set "
                "denominator to old, or correction to none"
            )
        self._correction()

    @property
    def needs_reference(self) -> bool:
        return self._ratio().needs_reference

    @property
    def needs_entropy(self) -> bool:
        return False

    @property
    def unit(self) -> Granularity:
        order = list(Granularity)
        corrected = self.correction_granularity if self.correction != CorrectionKind.NONE else Granularity.TOKEN
        return max(Granularity(self.granularity), Granularity(corrected), key=order.index)

    @abstractmethod
    def surrogate(self, ratio: RatioValue, logp: torch.Tensor, advantage: torch.Tensor) -> Surrogate:
        """The method. ``logp`` [n] are the current log-probs, ``advantage`` [n]; both are 0 on tokens that do not
        count, whose ratio is 1."""

    def __call__(self, inputs: LossInputs) -> LossOutput:
        on = active(inputs)
        ratio = self._ratio()(inputs, on)
        advantage = torch.where(on, inputs.advantage, 0.0)
        made = self.surrogate(ratio, finite_logp(inputs, on), advantage)
        drift, _ = log_ratio(inputs.cur_logp, inputs.old_logp, on, self.log_ratio_limit)
        metrics: dict[str, Metric] = {
            "policy/ratio_mean": token_mean(ratio.ratio, on),
            "policy/clip_fraction_low": token_mean(made.low.float(), on),
            "policy/clip_fraction_high": token_mean(made.high.float(), on),
            "policy/stopped_positive": token_mean(made.stopped.float(), on & (advantage > 0)),
            "policy/stopped_negative": token_mean(made.stopped.float(), on & (advantage < 0)),
            "policy/log_ratio_clamped": token_mean(ratio.clamped.float(), on),
            "policy/kl_old": token_mean(k3(drift), on),
            "policy/entropy": token_mean(inputs.entropy, on),
            **{name: token_mean(value, on) for name, value in made.values.items()},
        }
        gain = made.gain
        correction = self._correction()
        if correction is not None:
            weight, corrected = correction(inputs, on)
            gain = gain * weight
            metrics |= corrected
        return LossOutput(-weighted_sum(inputs, gain), metrics)

    def _ratio(self) -> Ratio:
        return Ratio(
            numerator=Policy.CURRENT,
            denominator=self.denominator,
            granularity=self.granularity,
            reduce=self.reduce,
            gradient=self.gradient,
            limit=self.log_ratio_limit,
        )

    def _correction(self) -> Correction | None:
        if self.correction == CorrectionKind.NONE:
            return None
        kind = CorrectionKind(self.correction)
        low, high = PUBLISHED_BOUNDS[kind]
        return Correction(
            kind=kind,
            low=low if self.correction_low is None else self.correction_low,
            high=high if self.correction_high is None else self.correction_high,
            granularity=self.correction_granularity,
            reduce=self.correction_reduce,
            limit=self.log_ratio_limit,
        )
