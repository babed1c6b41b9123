"""Routing losses of one's own, as somebody who uses the library would write them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megatron_ext.moe.loss_policy import PlainRoutingLoss
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter
from megatron_ext.moe.view import BatchStatistics, Counts, RouterView


@dataclass(frozen=True)
class SampledEntropy(PlainRoutingLoss):
    """Minus the entropy of the router, mean over sampled tokens and layers: nothing has to be known beforehand."""

    coefficient: float = 0.1
    entropy_high: float = 100.0  # of the policy, in nats

    def is_open(self, opened: BatchStatistics) -> bool:
        return opened.entropy <= self.entropy_high

    def term(self, opened: BatchStatistics, counts: Counts) -> float | None:
        return self.coefficient / float(counts.units.sum() * opened.layers) if self.coefficient else None

    def loss(self, view: RouterView, term: float) -> torch.Tensor:
        log_p = view.log_p[view.at]
        return term * (log_p.exp() * log_p).sum()


@dataclass(frozen=True)
class StayNear(PlainRoutingLoss):
    """KL of the router to its distribution at the start of the batch, mean over sampled tokens and layers: it acts from
    the batch's second optimizer step on."""

    coefficient: float = 0.1
    error_every: int = 1

    def sizes(self, experts: int) -> Mapping[str, tuple[int, ...]]:
        return {"kl": ()}

    def keep(self, view: RouterView) -> torch.Tensor:
        return view.log_p[view.at]

    def measure(self, view: RouterView, sums: Mapping[str, torch.Tensor]) -> None:
        if view.kept is not None:
            sums["kl"].add_(self._kl(view, view.kept).double().sum())

    def term(self, opened: BatchStatistics, counts: Counts) -> float | None:
        return self.coefficient / float(counts.units.sum() * opened.layers) if self.coefficient else None

    def loss(self, view: RouterView, term: float) -> torch.Tensor:
        assert view.kept is not None
        return term * self._kl(view, view.kept).sum()

    def metrics_after(self, opened: BatchStatistics, after: BatchStatistics) -> dict[str, float]:
        return {"moe/own/kl": float(after.sums["kl"].mean() / after.counts.units.sum().clamp_min(1))}

    @staticmethod
    def _kl(view: RouterView, kept: torch.Tensor) -> torch.Tensor:
        log_p = view.log_p[view.at]
        return (log_p.exp() * (log_p - kept)).sum(-1)


@dataclass(frozen=True)
class PairsTogether(PlainRoutingLoss):
    """-log of a token's probability on the experts of the token before, which may stand on another rank."""

    coefficient: float = 0.1

    def sizes(self, experts: int) -> Mapping[str, tuple[int, ...]]:
        return {"load": (experts,), "same": (2,)}

    def measure(self, view: RouterView, sums: Mapping[str, torch.Tensor]) -> None:
        sums["load"].add_(view.chosen[view.at].double().sum(0))
        same = (view.before & view.chosen[view.now]).sum(-1).double()
        sums["same"].add_(torch.stack([same.sum(), same.square().sum()]))

    def term(self, opened: BatchStatistics, counts: Counts) -> float | None:
        return self.coefficient / (counts.pairs * opened.layers) if counts.pairs and self.coefficient else None

    def loss(self, view: RouterView, term: float) -> torch.Tensor:
        log_p = view.log_p[view.now]
        return -term * log_p.masked_fill(~view.before, -torch.inf).logsumexp(-1).sum()

    def metrics(self, opened: BatchStatistics) -> dict[str, float]:
        return {"moe/own/same": float(opened.sums["same"][:, 0].mean()) / max(opened.counts.pairs, 1)}


class FrozenWithLoss(SampledEntropy):
    """Cannot be: what would learn from the loss is frozen."""

    @property
    def learns(self) -> bool:
        return False

    def apply(self, chunks: Sequence[torch.nn.Module]) -> None:
        FrozenRouter().apply(chunks)


class HalfALoss(TrainedRouter):
    """Says a loss, and nothing of what it needs."""

    def loss(self, view: RouterView, term: float) -> torch.Tensor:
        return view.logits.sum() * term
