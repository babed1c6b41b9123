"""What a routing loss sees: one router's tokens on this rank, and what was measured of the whole batch.

Invariants (``tests/moe/test_structured.py``, ``tests/moe/test_contract.py``):

1. Over the ranks and micro-batches of a pass the views of a layer hold each token that counts, and each pair, once.
2. ``BatchStatistics`` and ``Counts`` are over all ranks, and equal on each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron_ext.moe.routing_losses import log_probabilities


@dataclass(frozen=True, eq=False)
class RouterView:
    """One call of one router: n rows over E experts, of which m tokens and p pairs count here.

    ``layer``: its number among the model's MoE layers. ``logits`` fp32 [n, E], with their graph in the update;
    ``score_function`` softmax or sigmoid; ``chosen`` bool [n, E], the experts that run.

    Tokens that count (``TokenStructure.cell`` at least 0): their rows ``at`` int64 [m], numbers in the batch ``token``
    int64 [m], ``cell`` int64 [m] and ``share`` fp32 [m]; ``kept`` fp32 [m, K] is what ``keep`` said of them, once it
    has. Pairs: the rows ``now`` int64 [p] of their second tokens.
    """

    layer: int
    logits: torch.Tensor
    score_function: str
    chosen: torch.Tensor
    token: torch.Tensor
    at: torch.Tensor
    cell: torch.Tensor
    share: torch.Tensor
    now: torch.Tensor
    kept: torch.Tensor | None
    ask_before: Callable[[], torch.Tensor]

    @cached_property
    def log_p(self) -> torch.Tensor:
        """Log of the router's distribution over all experts, fp32 [n, E]."""
        return log_probabilities(self.logits, self.score_function)

    @cached_property
    def before(self) -> torch.Tensor:
        """Experts of the token before each pair's second one, bool [p, E]. It may stand on another rank: a collective,
        so that whether it is asked for must not depend on the tokens here."""
        return self.ask_before()


@dataclass(frozen=True, eq=False)
class Counts:
    """Of a batch or of an optimizer step: ``units`` fp64 [C], sums of the shares of each cell's tokens; ``pairs``."""

    units: torch.Tensor
    pairs: int


@dataclass(frozen=True, eq=False)
class BatchStatistics:
    """Of a whole batch under one set of weights: ``sums`` fp64 [L, ...] by name, as ``RoutingLossPolicy.sizes`` says of
    a layer; its ``counts``; ``entropy`` of the policy in nats, mean over the trained tokens; L ``layers`` with routers,
    of so many ``experts``."""

    sums: Mapping[str, torch.Tensor]
    counts: Counts
    entropy: float
    layers: int
    experts: int
