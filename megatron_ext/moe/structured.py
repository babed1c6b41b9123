"""The router policy that trains routers on the policy loss and on how they use their experts.

Source: arXiv 2610.07332 as summarised by third parties. Experts are drawn apart by operation (turns) and held together
from token to token, while the policy's entropy is in a band (``moe.gate``). Statistics and entropy come from the
forward that scores the batch under the weights that open it; the loss is linearised around them
(``moe.routing_losses``) and attached to the router's probabilities as Megatron attaches its own auxiliary losses
(``training.routing``).

Invariants (``tests/moe/test_structured.py``, over layouts ``tests/integration/test_routing_layouts.py``):

1. With the gate closed, or both coefficients 0, the parameters after a step are those of the trained router, bit for
   bit.
2. No gradient reaches an expert; none reaches anything but routers while ``detach_input``.
3. A router that does not learn is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron_ext.moe.gate import EntropyGate
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.moe.routing_losses import Pull
from megatron_ext.moe.statistics import RoutingStatistics
from megatron_ext.trajectory.record import Field

_FIELDS = {field.name.lower(): field for field in Field if field is not Field.OTHER}


@dataclass(frozen=True, eq=False)
class RoutingTerm:
    """The routing loss of one optimizer step: ``turn`` [L, F * O, E] weighs a token's probabilities times its share,
    ``token`` a pulled pair's loss; coefficients and the step's denominators are in both. None: not asked for."""

    turn: torch.Tensor | None
    token: float | None


@dataclass(frozen=True)
class StructuredRouter(TrainedRouter):
    """Routers learn from the policy loss, from the turn's operation and from the token before.

    Args:
        mutual_information: coefficient of the turn loss (lambda 1).
        consistency: coefficient of the token loss (lambda 2).
        threshold: Jaccard distance of two tokens' experts below which the second is pulled to the first's (delta).
        pull: ``selective``, ``all`` pairs, or ``off``.
        entropy_low, entropy_high: band of the policy's entropy, in nats, in which the losses act.
        detach_input: the losses reach the routers alone, not the model below them.
        label: the turn label that holds the operation.
        operations: how many operations there are; labels are below it.
        fields: the fields whose tokens are told apart by operation, each by itself: thinking, tool_use, text.
        error_every: measures what the linearisation missed every so many steps, by one more forward; 0 never.
    """

    mutual_information: float = 0.01
    consistency: float = 0.01
    threshold: float = 0.5
    pull: str = "selective"
    entropy_low: float = 0.0
    entropy_high: float = 0.2
    detach_input: bool = True
    label: str = "op"
    operations: int = 8
    fields: Sequence[str] = ("thinking", "tool_use")
    error_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = []
        for name in ("mutual_information", "consistency"):
            if not 0 <= getattr(self, name) < float("inf"):
                problems.append(f"{name}={getattr(self, name)}: a coefficient is finite and at least 0")
        if not 0 <= self.threshold <= 1:
            problems.append(f"threshold={self.threshold}: a Jaccard distance is from 0 to 1")
        if self.pull not in tuple(Pull):
            problems.append(f"pull={self.pull}: one of {', '.join(Pull)}")
        if self.operations < 1 or self.error_every < 0:
            problems.append(f"operations={self.operations} needs 1, error_every={self.error_every} 0 or more")
        unknown = [name for name in self.fields if name not in _FIELDS]
        if unknown or not self.fields or len(set(self.fields)) < len(self.fields):
            problems.append(f"fields={list(self.fields)}: different ones of {', '.join(_FIELDS)}")
        if problems:
            raise ValueError("; ".join(problems))
        object.__setattr__(self, "fields", tuple(self.fields))
        _ = self.gate

    @property
    def reads_labels(self) -> frozenset[str]:
        return frozenset({self.label} if self.mutual_information > 0 else ())

    @property
    def gate(self) -> EntropyGate:
        return EntropyGate(self.entropy_low, self.entropy_high)

    @property
    def measured_fields(self) -> tuple[Field, ...]:
        return tuple(_FIELDS[name] for name in self.fields)

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        super().apply(chunks)
        _refuse_frozen(chunks)

    def term(self, opened: RoutingStatistics, units: torch.Tensor, pairs: int) -> RoutingTerm | None:
        """The loss of an optimizer step with ``units`` fp64 [F, O] and ``pairs`` of the batch that ``opened`` is of;
        None when nothing acts (gate closed, coefficients 0, nothing to act on)."""
        if not self.gate.is_open(opened.entropy):
            return None
        turn, token = None, None
        if self.mutual_information > 0 and bool(units.sum() > 0):
            turn = (self.mutual_information * opened.weights(units)).float()
        if self.consistency > 0 and self.pull != Pull.OFF and pairs > 0:
            token = self.consistency / (pairs * len(opened.sums))
        return None if turn is None and token is None else RoutingTerm(turn, token)


def _refuse_frozen(chunks: Sequence[torch.nn.Module]) -> None:
    """Raises ``ValueError`` when a router's weight does not learn: a routing loss would do nothing."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".router.weight") and not parameter.requires_grad:
                raise ValueError(
                    f"model.router: {name} is frozen, and a routing loss trains routers; choose "
                    "megatron_ext.moe.policies.FrozenRouter without routing losses, or let routers learn"
                )
