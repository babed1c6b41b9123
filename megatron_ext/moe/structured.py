"""The router policy that trains routers on the policy loss and on how they use their experts.

Source: arXiv 2610.07332 as summarised by third parties. Experts are drawn apart by operation (turns) and held together
from token to token, while the policy's entropy is in a band (``moe.gate``). Statistics and entropy come from the
forward that scores the batch under the weights that open it; the loss is linearised around them
(``moe.routing_losses``). How a routing loss is measured and attached is in ``moe.protocol``.

Invariants (``tests/moe/test_structured.py``, over layouts ``tests/integration/test_routing_layouts.py``):

1. With the gate closed, or both coefficients 0, the parameters after a step are those of the trained router, bit for
   bit.
2. No gradient reaches an expert; none reaches anything but routers while ``detach_input``.
3. A router that does not learn is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.moe.gate import EntropyGate
from megatron_ext.moe.loss_policy import PlainRoutingLoss
from megatron_ext.moe.routing_losses import Pull, consistency, pulled
from megatron_ext.moe.statistics import RoutingStatistics, TokenStructure, token_structure
from megatron_ext.moe.view import BatchStatistics, Counts, RouterView
from megatron_ext.trajectory.record import Field, TrajectoryBatch

_FIELDS = {field.name.lower(): field for field in Field if field is not Field.OTHER}


@dataclass(frozen=True, eq=False)
class RoutingTerm:
    """The routing loss of one optimizer step: ``turn`` [L, F * O, E] weighs a token's probabilities times its share,
    ``token`` a pulled pair's loss; coefficients and the step's denominators are in both. None: not asked for."""

    turn: torch.Tensor | None
    token: float | None


@dataclass(frozen=True)
class StructuredRouter(PlainRoutingLoss):
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
    operations: int = 8
    fields: Sequence[str] = ("thinking", "tool_use")
    error_every: int = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "fields", tuple(self.fields))

    def problems(self) -> list[str]:
        problems = super().problems()
        for name in ("mutual_information", "consistency"):
            if not 0 <= getattr(self, name) < float("inf"):
                problems.append(f"{name}={getattr(self, name)}: a coefficient is finite and at least 0")
        if not 0 <= self.threshold <= 1:
            problems.append(f"threshold={self.threshold}: a Jaccard distance is from 0 to 1")
        if self.pull not in tuple(Pull):
            problems.append(f"pull={self.pull}: one of {', '.join(Pull)}")
        if self.pull == Pull.SELECTIVE and self.consistency > 0 and self.threshold == 0:
            problems.append("threshold=0: no distance is below it, so that no pair is pulled; raise it or set pull=off")
        if self.operations < 1:
            problems.append(f"operations={self.operations}: needs 1 or more")
        unknown = [name for name in self.fields if name not in _FIELDS]
        if unknown or not self.fields or len(set(self.fields)) < len(self.fields):
            problems.append(f"fields={list(self.fields)}: different ones of {', '.join(_FIELDS)}")
        try:
            _ = self.gate
        except ValueError as error:
            problems.append(str(error))
        return problems

    @property
    def reads_labels(self) -> frozenset[str]:
        return frozenset({self.label} if self.mutual_information > 0 else ())

    @property
    def label_room(self) -> Mapping[str, tuple[str, int]]:
        return {self.label: ("operations", self.operations)}

    @property
    def gate(self) -> EntropyGate:
        return EntropyGate(self.entropy_low, self.entropy_high)

    @property
    def measured_fields(self) -> tuple[Field, ...]:
        return tuple(_FIELDS[name] for name in self.fields)

    def statistics(self, found: BatchStatistics) -> RoutingStatistics:
        """The sums of a batch by field and operation."""
        fields = len(self.measured_fields)
        local, pull = found.sums["pairs"].unbind(1)
        return RoutingStatistics(
            sums=found.sums["turns"].view(found.layers, fields, self.operations, found.experts),
            turns=found.counts.units.view(fields, self.operations),
            local=local,
            pulled=pull,
            pairs=found.counts.pairs,
            entropy=found.entropy,
        )

    def tokens(self, batch: TrajectoryBatch) -> TokenStructure:
        return token_structure(batch, self.measured_fields, self.label, self.operations)

    def sizes(self, experts: int) -> Mapping[str, tuple[int, ...]]:
        """``turns``: probabilities times shares; ``pairs``: token losses of pairs, and how many are pulled."""
        return {"turns": (len(self.measured_fields) * self.operations, experts), "pairs": (2,)}

    def measure(self, view: RouterView, sums: Mapping[str, torch.Tensor]) -> None:
        parts = view.log_p[view.at].double().exp() * view.share.unsqueeze(1)
        sums["turns"].index_add_(0, view.cell, parts)
        losses, pull = self._token_losses(view)
        sums["pairs"].add_(torch.stack([losses.double().sum(), pull.double().sum()]))

    def is_open(self, opened: BatchStatistics) -> bool:
        return self.gate.is_open(opened.entropy)

    def term(self, opened: BatchStatistics, counts: Counts) -> RoutingTerm | None:
        """None when nothing acts: coefficients 0, or nothing to act on."""
        found = self.statistics(opened)
        turn, token = None, None
        if self.mutual_information > 0 and bool(counts.units.sum() > 0):
            turn = (self.mutual_information * found.weights(counts.units.view_as(found.turns))).float()
        if self.consistency > 0 and self.pull != Pull.OFF and counts.pairs > 0:
            token = self.consistency / (counts.pairs * opened.layers)
        return None if turn is None and token is None else RoutingTerm(turn, token)

    def loss(self, view: RouterView, term: RoutingTerm) -> torch.Tensor:
        loss = view.log_p.new_zeros(())
        if term.turn is not None:
            weights = term.turn[view.layer][view.cell] * view.share.unsqueeze(1)
            loss = loss + (weights * view.log_p[view.at].exp()).sum()
        if term.token is not None:
            loss = loss + term.token * self._token_losses(view)[0].sum()
        return loss

    def _token_losses(self, view: RouterView) -> tuple[torch.Tensor, torch.Tensor]:
        """Of each pair [p], 0 where it is not pulled; and which ones are, bool [p]."""
        pull = pulled(view.before, view.chosen[view.now], self.pull, self.threshold)
        return torch.where(pull, consistency(view.log_p[view.now], view.before), 0.0), pull

    def metrics(self, opened: BatchStatistics) -> dict[str, float]:
        found = self.statistics(opened)
        information, local = found.information(), found.local_loss()
        acts = self.is_open(opened)
        return {
            "moe/turn_mi": information,
            "moe/token_loss": local,
            "moe/loss/turn": -self.mutual_information * information if acts else 0.0,
            "moe/loss/token": self.consistency * local if acts else 0.0,
            "moe/pulled_fraction": found.pulled_fraction(),
            "moe/labelled_turns": float(found.turns.sum(-1).max()),
            "moe/unlabelled_batch": float(not found.turns.any()),
        }

    def metrics_after(self, opened: BatchStatistics, after: BatchStatistics) -> dict[str, float]:
        """What the linearisation missed: the exact information less what the tangent at the start takes it for."""
        found = self.statistics(after)
        exact = found.information()
        missed = exact - found.linear_information(self.statistics(opened))
        return {"moe/turn_mi_after": exact, "moe/mi_linear_error": missed}
