"""Routing losses at the routers of a layout: measured in the scoring forward, attached in the update's.

What is measured, kept and attached is the router policy's (``moe.protocol``); where its tokens stand is told by
``routing_places``.

Invariants (``tests/moe/test_structured.py``, ``tests/moe/test_contract.py``, over layouts
``tests/integration/test_routing_layouts.py``):

1. Statistics, values and gradients are those of one rank that ran every row: each token and pair counts once, whatever
   stands on another rank (a sequence-parallel slice, a context-parallel share) or in another row (a repeated prefix).
2. The losses hold the optimizer step's denominators, counted over all ranks.
3. With recomputed activations a token counts once: where gradients are on.
4. What was kept of a token is found by whichever rank runs it in the update, in whatever micro-batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.models import cpu_platform
from megatron_ext.models.forward import moe_layers, unwrap
from megatron_ext.moe.protocol import Gated, RoutingLossPolicy, routing_loss
from megatron_ext.moe.statistics import TokenStructure
from megatron_ext.moe.tap import RouterCall, RouterTap
from megatron_ext.moe.view import BatchStatistics, Counts, RouterView
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.training.routing.places import Places
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


# -- the two passes ----------------------------------------------------------------------------------------------------
@dataclass(eq=False)
class _Measure:
    """Listens in a forward without gradient: adds up what the policy measures, and collects what it keeps of
    ``num_tokens`` tokens (None: nothing)."""

    policy: RoutingLossPolicy
    places: Places
    sums: Mapping[str, torch.Tensor]  # [L, ...] each
    num_tokens: int | None
    kept: dict[int, torch.Tensor] = field(default_factory=dict)  # layer -> [T, K]
    groups: dict[int, Any] = field(default_factory=dict)  # layer -> the ranks that run its tokens

    def __call__(self, call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        view = self.places.view(call, routing_map)
        sums = {name: values[call.position] for name, values in self.sums.items()}
        self.policy.measure(view, MappingProxyType(sums))
        if self.num_tokens is not None:
            self._keep(call, view, self.num_tokens)

    def _keep(self, call: RouterCall, view: RouterView, num_tokens: int) -> None:
        values = self.policy.keep(view)
        if values is None:
            return
        if values.dim() != 2 or len(values) != len(view.at):
            raise ValueError(f"keep: of {len(view.at)} tokens [m, K] is wanted, got {list(values.shape)}")
        if call.position not in self.kept:
            self.kept[call.position] = torch.zeros(num_tokens, values.shape[1], device=values.device)
            self.groups[call.position] = call.router.tp_cp_group
        self.kept[call.position][view.token] = values.float()

    def everywhere(self) -> dict[int, torch.Tensor]:
        """What was kept, on every rank that may run a token in the update; ranks hold disjoint tokens."""
        for layer, values in sorted(self.kept.items()):
            if self.groups[layer].size() > 1:
                dist.all_reduce(values, group=self.groups[layer])
        return self.kept


class _Attach:
    """Listens in the update's forward, and attaches a step's routing loss to the routers' probabilities."""

    def __init__(self, policy: RoutingLossPolicy, places: Places, term: Any, tap: RouterTap, scale: int) -> None:
        self._policy, self._places, self._term, self._scale = policy, places, term, scale
        self._inputs: dict[int, torch.Tensor] = {}
        self._handles = [router.register_forward_pre_hook(self._enter) for _, router in tap.routers()]

    def _enter(self, router: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self._inputs[id(router)] = args[0]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def __call__(self, call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor | None:
        hidden = self._inputs.pop(id(call.router))
        if not torch.is_grad_enabled():
            return None  # activations are recomputed: the losses are attached where they are
        logits = call.logits
        if self._policy.detach_input:
            logits = call.router.gating(hidden.detach()).view_as(logits)
        loss = self._policy.loss(self._places.view(call, routing_map, logits), self._term)
        return MoEAuxLossAutoScaler.apply(probs, loss * self._scale)


# -- a batch -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Opened:
    tokens: TokenStructure
    scored: NDArray[np.bool_]  # [T], the tokens that this data-parallel rank's micro-batches predict
    statistics: BatchStatistics
    kept: Mapping[int, torch.Tensor]


class RoutingLosses:
    """The routing loss of one trainer, batch after batch: ``open``, then ``attached`` around each update, then
    ``close``. Every rank calls the same."""

    def __init__(self, trainer: Trainer, policy: RoutingLossPolicy) -> None:
        self._trainer, self.policy, self._context = trainer, policy, trainer.context
        config = unwrap(trainer.chunks[0]).config
        self._layers, self._experts = len(moe_layers(trainer.chunks[0])), int(config.num_moe_experts or 0)
        if not self._layers:
            raise ValueError("model.router: routing losses need a model with experts, this one has none")
        if not policy.learns:
            raise ValueError(f"model.router: {type(policy).__name__} freezes routers, and its routing loss trains them")
        groups = trainer.context.groups
        self._first = groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0  # of its replica
        self._open: _Opened | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> RoutingLosses | None:
        """That of the trainer's router policy; None for one without."""
        policy = routing_loss(trainer.router)
        return None if policy is None else cls(trainer, policy)

    def checks(self, step: int) -> bool:
        """Whether the batch after ``step`` finished ones is measured again after its update."""
        every = self.policy.error_every
        return bool(every) and step % every == 0

    @property
    def statistics(self) -> BatchStatistics:
        """Those of the batch that is open."""
        return self._opened.statistics

    @property
    def _opened(self) -> _Opened:
        if self._open is None:
            raise RuntimeError("no batch is open for routing losses: score it first")
        return self._open

    def open(self, batch: TrajectoryBatch, micro: Sequence[MicroBatch], *, record_experts: bool = False) -> TokenScores:
        """Scores the batch under the weights that open it, and keeps its statistics."""
        tokens, size = self.policy.tokens(batch), batch.num_tokens
        listener = self._listener(tokens, {}, keep=size)
        scores, statistics = self._measure(listener, tokens, micro, size, record_experts)
        self._open = _Opened(tokens, _trained(micro, size), statistics, listener.everywhere())
        return scores

    def _listener(self, tokens: TokenStructure, kept: Mapping[int, torch.Tensor], keep: int | None) -> _Measure:
        device = self._context.device
        sums = {
            name: torch.zeros(self._layers, *size, dtype=torch.float64, device=device)
            for name, size in self.policy.sizes(self._experts).items()
        }
        return _Measure(self.policy, Places(tokens, self._context, kept), sums, keep)

    def _measure(
        self,
        listener: _Measure,
        tokens: TokenStructure,
        micro: Sequence[MicroBatch],
        num_tokens: int,
        record_experts: bool = False,
    ) -> tuple[TokenScores, BatchStatistics]:
        """Scores of this rank's rows under the current weights, and statistics over the rows of all ranks."""
        with self._trainer.tap.listening(listener):
            scores = self._trainer.score(micro, num_tokens, record_experts=record_experts)
        trained = _trained(micro, num_tokens)
        counted = trained & tokens.trained
        entropy = [float(scores.entropy[counted].sum(dtype=np.float64)), float(counted.sum())]
        replica = torch.from_numpy(np.concatenate([tokens.counts(trained), entropy])) * float(self._first)
        parts = [*(values.flatten() for values in listener.sums.values()), replica.to(self._context.device)]
        *sums, totals = self._over_ranks(torch.cat(parts)).split([part.numel() for part in parts])
        return scores, BatchStatistics(
            sums={name: part.view(old.shape) for (name, old), part in zip(listener.sums.items(), sums, strict=True)},
            counts=Counts(totals[: tokens.cells], int(totals[tokens.cells])),
            entropy=float(totals[-2] / totals[-1].clamp_min(1)),
            layers=self._layers,
            experts=self._experts,
        )

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """fp64 values added over every rank; ranks hold disjoint parts."""
        if self._context.world_size > 1:
            dist.all_reduce(values)
        return values

    @contextmanager
    def attached(self, micro: Sequence[MicroBatch]) -> Iterator[None]:
        """Attaches the loss of the optimizer step on ``micro`` to its forwards while the context is open.

        Raises ``ValueError`` for tokens that were not in the batch when it was opened.
        """
        opened = self._opened
        term = self._term(opened, _trained(micro, len(opened.tokens.cell)))
        if term is None:
            yield
            return
        # As for the loss of the tokens (``Trainer.update``): Megatron divides by both.
        scale = len(micro) * self._context.data_parallel_size
        places = Places(opened.tokens, self._context, opened.kept)
        listener = _Attach(self.policy, places, term, self._trainer.tap, scale)
        try:
            with self._trainer.tap.listening(listener):
                yield
        finally:
            listener.close()

    def _term(self, opened: _Opened, trained: NDArray[np.bool_]) -> Any:
        """What the loss of a step on the tokens ``trained`` bool [T] needs; None when nothing acts."""
        unscored = int(np.count_nonzero(trained & ~opened.scored))
        if unscored:
            raise ValueError(f"{unscored} tokens of the optimizer step were not scored when the batch was opened")
        counts = torch.from_numpy(opened.tokens.counts(trained)) * float(self._first)
        counts = self._over_ranks(counts.to(self._context.device))
        units, pairs = counts[:-1], int(counts[-1])
        if not self._is_open(opened.statistics) or not (pairs or bool(units.any())):
            return None
        return self.policy.term(opened.statistics, Counts(units, pairs))

    def _is_open(self, opened: BatchStatistics) -> bool:
        return not isinstance(self.policy, Gated) or self.policy.is_open(opened)

    def close(self, micro: Sequence[MicroBatch] | None = None) -> dict[str, float]:
        """Ends the batch and returns its metrics. With ``micro``, the whole batch again, one more forward measures it
        under the weights of now."""
        opened, policy = self._opened, self.policy
        self._open = None
        before = opened.statistics
        metrics = policy.metrics(before)
        if isinstance(policy, Gated):
            metrics |= {"moe/gate": float(policy.is_open(before)), "moe/gate_entropy": before.entropy}
        if micro is not None:
            listener = self._listener(opened.tokens, opened.kept, keep=None)
            _, after = self._measure(listener, opened.tokens, micro, len(opened.tokens.cell))
            metrics |= policy.metrics_after(before, after)
        return metrics


def _trained(micro: Sequence[MicroBatch], num_tokens: int) -> NDArray[np.bool_]:
    """bool [T]: the batch's tokens that this data-parallel rank's micro-batches predict."""
    trained = np.zeros(num_tokens, dtype=bool)
    for mb in micro:
        trained[mb.token.cpu().numpy()] = True
    return trained
