"""A router policy with a routing loss of one's own: ``term`` and ``loss`` are left to write.

Invariants (``tests/moe/test_contract.py``): what is not said counts every token that the policy loss trains, each for
itself, measures and keeps nothing, has no gate and reports nothing. A router that does not learn is refused.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.moe.statistics import TokenStructure, every_trained_token
from megatron_ext.moe.view import BatchStatistics, Counts, RouterView
from megatron_ext.trajectory.record import TrajectoryBatch


@dataclass(frozen=True)
class PlainRoutingLoss(TrainedRouter, ABC):
    """Routers learn from the policy loss and from the loss that a subclass writes (``moe.protocol``).

    Args:
        detach_input: the loss reaches the routers alone, not the model below them.
        error_every: measures again after the update every so many steps, by one more forward; 0 never.
    """

    detach_input: bool = True
    error_every: int = 0

    def problems(self) -> list[str]:
        wrong = [f"error_every={self.error_every}: a number of steps, or 0 for never"] if self.error_every < 0 else []
        return super().problems() + wrong

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        super().apply(chunks)
        refuse_frozen(chunks)

    def tokens(self, batch: TrajectoryBatch) -> TokenStructure:
        return every_trained_token(batch)

    def sizes(self, experts: int) -> Mapping[str, tuple[int, ...]]:
        return {}

    def measure(self, view: RouterView, sums: Mapping[str, torch.Tensor]) -> None:
        return None

    def keep(self, view: RouterView) -> torch.Tensor | None:
        return None

    @abstractmethod
    def term(self, opened: BatchStatistics, counts: Counts) -> Any: ...

    @abstractmethod
    def loss(self, view: RouterView, term: Any) -> torch.Tensor: ...

    def metrics(self, opened: BatchStatistics) -> dict[str, float]:
        return {}

    def metrics_after(self, opened: BatchStatistics, after: BatchStatistics) -> dict[str, float]:
        return {}


def refuse_frozen(chunks: Sequence[torch.nn.Module]) -> None:
    """Raises ``ValueError`` when a router's weight does not learn: a routing loss would do nothing."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".router.weight") and not parameter.requires_grad:
                raise ValueError(
                    f"model.router: {name} is frozen, and a routing loss trains routers; choose "
                    "megatron_ext.moe.policies.FrozenRouter without routing losses, or let routers learn"
                )
