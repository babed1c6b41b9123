"""Routing losses at the routers of a layout: measured in the scoring forward, attached in the update's.

Invariants (``tests/moe/test_structured.py``, over layouts ``tests/integration/test_routing_layouts.py``):

1. Statistics, values and gradients are those of one rank that ran every row: each token and pair counts once, whatever
   stands on another rank (a sequence-parallel slice, a context-parallel share) or in another row (a repeated prefix).
2. The losses hold the optimizer step's denominators, counted over all ranks.
3. With recomputed activations a token counts once: where gradients are on.
4. Every rank of a stage enters the same collectives, whatever its tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.models import cpu_platform
from megatron_ext.models.forward import moe_layers, unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.routing_losses import consistency, log_probabilities, pulled
from megatron_ext.moe.statistics import RoutingStatistics, TokenStructure, token_structure
from megatron_ext.moe.structured import RoutingTerm, StructuredRouter
from megatron_ext.moe.tap import RouterCall, RouterTap
from megatron_ext.training.context_share import context_share
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.training.scores import TokenScores
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler


# -- where tokens stand ------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class LocalTokens:
    """What one rank's routers see of a micro-batch's structure; indices into the router's n rows.

    Units: ``at`` and ``cell`` int64 [m], ``share`` fp32 [m]. Pairs: ``now`` int64 [p], and ``before`` int64 [p] into
    the n rows with the ``borders`` rows behind them, which hold the experts of tokens that precede a pair on another
    rank; this rank fills those at ``border`` int64 [g] from its rows ``lent`` int64 [g].
    """

    at: torch.Tensor
    cell: torch.Tensor
    share: torch.Tensor
    now: torch.Tensor
    before: torch.Tensor
    borders: int
    border: torch.Tensor
    lent: torch.Tensor


def local_tokens(
    mb: MicroBatch,
    tokens: TokenStructure,
    rows: int,
    *,
    tensor: tuple[int, int] = (0, 1),
    context: tuple[int, int] = (0, 1),
) -> LocalTokens:
    """The structure of a micro-batch as the rank ``tensor`` (rank, size) and ``context`` (rank, size) has it, whose
    routers have ``rows`` rows, as those of every rank of the replica have. No communication."""
    assert mb.predicted is not None, "a micro-batch of build_microbatch"
    place = mb.predicted.cpu().numpy()
    token = mb.token.cpu().numpy()
    offsets = mb.cu_seqlens.cpu().numpy().astype(np.int64)
    part, run = np.zeros(int(offsets[-1]), dtype=np.int64), np.arange(int(offsets[-1]))
    if mb.shared is not None:
        run = mb.shared.distinct.cpu().numpy()
    elif context[1] > 1:
        for rank in range(context[1]):
            share = context_share(np.diff(offsets), context[1], rank)
            here = share.local >= 0
            part[here], run[here] = rank, share.local[here]
    owner, row = part * tensor[1] + run // rows, run % rows
    own = context[0] * tensor[1] + tensor[0]

    mine = (owner[place] == own) & (tokens.cell[token] >= 0)
    ends = place[tokens.pair[token]]
    begins = ends - 1
    apart = owner[begins] != owner[ends]
    slot = np.cumsum(apart) - 1
    held = owner[ends] == own
    gives = apart & (owner[begins] == own)

    def on_device(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(mb.ids.device)

    return LocalTokens(
        at=on_device(row[place[mine]]),
        cell=on_device(tokens.cell[token[mine]]),
        share=on_device(tokens.share[token[mine]].astype(np.float32)),
        now=on_device(row[ends[held]]),
        before=on_device(np.where(apart, rows + slot, row[begins])[held]),
        borders=int(apart.sum()),
        border=on_device(slot[gives]),
        lent=on_device(row[begins[gives]]),
    )


class _Places:
    """``LocalTokens`` of a pass's micro-batches, made once for all layers."""

    def __init__(self, tokens: TokenStructure, context: ParallelContext) -> None:
        self._tokens, self._context = tokens, context
        self._made: dict[int, LocalTokens] = {}

    def of(self, call: RouterCall) -> LocalTokens:
        number, groups = call.run.number, self._context.groups
        if number not in self._made:
            self._made[number] = local_tokens(
                call.run.micro,
                self._tokens,
                len(call.logits),
                tensor=(groups.tp.rank(), groups.tp.size()),
                context=(groups.cp.rank(), groups.cp.size()),
            )
        return self._made[number]


def _before(call: RouterCall, local: LocalTokens, chosen: torch.Tensor) -> torch.Tensor:
    """Experts bool [p, E] of the token before each of this rank's pairs; ``chosen`` bool [n, E]."""
    if local.borders:
        borders = torch.zeros(local.borders, chosen.shape[1], dtype=torch.uint8, device=chosen.device)
        borders[local.border] = chosen[local.lent].to(torch.uint8)
        if call.router.tp_cp_group.size() > 1:
            dist.all_reduce(borders, group=call.router.tp_cp_group)
        chosen = torch.cat([chosen, borders.bool()])
    return chosen[local.before]


# -- the two passes ----------------------------------------------------------------------------------------------------
class _Measure:
    """Listens in a forward without gradient, and adds up what its statistics are made of."""

    def __init__(self, policy: StructuredRouter, places: _Places, sums: torch.Tensor, pairs: torch.Tensor) -> None:
        self._policy, self._places = policy, places
        self.sums, self.pairs = sums, pairs  # [L, F * O, E]; [L, 2], loss and number of those pulled

    def __call__(self, call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> None:
        local = self._places.of(call)
        chosen = routing_map.bool()
        before, now = _before(call, local, chosen), chosen[local.now]
        log_p = log_probabilities(call.logits, call.router.score_function)
        parts = log_p[local.at].double().exp() * local.share.unsqueeze(1)
        self.sums[call.position].index_add_(0, local.cell, parts)
        pull = pulled(before, now, self._policy.pull, self._policy.threshold)
        losses = torch.where(pull, consistency(log_p[local.now], before), 0.0)
        self.pairs[call.position] += torch.stack([losses.double().sum(), pull.double().sum()])


class _Attach:
    """Listens in the update's forward, and attaches a step's routing loss to the routers' probabilities."""

    def __init__(
        self, policy: StructuredRouter, places: _Places, term: RoutingTerm, tap: RouterTap, scale: int
    ) -> None:
        self._policy, self._places, self._term, self._scale = policy, places, term, scale
        self._turn = term.turn
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
        local = self._places.of(call)
        token, policy = self._term.token, self._policy
        before = None if token is None else _before(call, local, routing_map.bool())
        logits = call.logits
        if policy.detach_input:
            logits = call.router.gating(hidden.detach()).view_as(logits)
        log_p = log_probabilities(logits, call.router.score_function)
        loss = log_p.new_zeros(())
        if self._turn is not None:
            weights = self._turn[call.position][local.cell] * local.share.unsqueeze(1)
            loss = loss + (weights * log_p[local.at].exp()).sum()
        if before is not None and token is not None:
            pull = pulled(before, routing_map.bool()[local.now], policy.pull, policy.threshold)
            loss = loss + token * torch.where(pull, consistency(log_p[local.now], before), 0.0).sum()
        return MoEAuxLossAutoScaler.apply(probs, loss * self._scale)


# -- a batch -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class _Opened:
    tokens: TokenStructure
    statistics: RoutingStatistics


class RoutingLosses:
    """The routing losses of one trainer, batch after batch: ``open``, then ``attached`` around each update, then
    ``close``. Every rank calls the same."""

    def __init__(self, trainer: Trainer, policy: StructuredRouter) -> None:
        self._trainer, self._policy, self._context = trainer, policy, trainer.context
        config = unwrap(trainer.chunks[0]).config
        self._layers, self._experts = len(moe_layers(trainer.chunks[0])), int(config.num_moe_experts or 0)
        if not self._layers:
            raise ValueError("model.router: routing losses need a model with experts, this one has none")
        groups = trainer.context.groups
        self._first = groups.tp.rank() == groups.cp.rank() == groups.pp.rank() == 0  # of its replica
        self._open: _Opened | None = None

    @classmethod
    def of(cls, trainer: Trainer) -> RoutingLosses | None:
        """Those of the trainer's router policy; None for one without."""
        return cls(trainer, trainer.router) if isinstance(trainer.router, StructuredRouter) else None

    def checks(self, step: int) -> bool:
        """Whether the batch after ``step`` finished ones measures what the linearisation missed."""
        every = self._policy.error_every
        return bool(every) and step % every == 0

    @property
    def statistics(self) -> RoutingStatistics:
        """Those of the batch that is open."""
        return self._opened.statistics

    @property
    def _opened(self) -> _Opened:
        if self._open is None:
            raise RuntimeError("no batch is open for routing losses: score it first")
        return self._open

    def open(self, batch: TrajectoryBatch, micro: Sequence[MicroBatch], *, record_experts: bool = False) -> TokenScores:
        """Scores the batch under the weights that open it, and keeps its statistics."""
        policy = self._policy
        tokens = token_structure(batch, policy.measured_fields, policy.label, policy.operations)
        scores, statistics = self.measure(tokens, micro, batch.num_tokens, record_experts=record_experts)
        self._open = _Opened(tokens, statistics)
        return scores

    def measure(
        self, tokens: TokenStructure, micro: Sequence[MicroBatch], num_tokens: int, *, record_experts: bool = False
    ) -> tuple[TokenScores, RoutingStatistics]:
        """Scores of this rank's rows under the current weights, and statistics over the rows of all ranks."""
        cells = tokens.fields * tokens.operations
        whole = partial(torch.zeros, dtype=torch.float64, device=self._context.device)
        sums, pairs = whole(self._layers, cells, self._experts), whole(self._layers, 2)
        listener = _Measure(self._policy, _Places(tokens, self._context), sums, pairs)
        with self._trainer.tap.listening(listener):
            scores = self._trainer.score(micro, num_tokens, record_experts=record_experts)
        trained = _trained(micro, num_tokens)
        counted = trained & tokens.trained
        entropy = [float(scores.entropy[counted].sum(dtype=np.float64)), float(counted.sum())]
        replica = torch.from_numpy(np.concatenate([tokens.counts(trained), entropy])) * float(self._first)
        parts = [sums.flatten(), pairs.flatten(), replica.to(sums.device)]
        sums, pairs, totals = self._over_ranks(torch.cat(parts)).split([part.numel() for part in parts])
        local, pull = pairs.view(self._layers, 2).unbind(1)
        return scores, RoutingStatistics(
            sums=sums.view(self._layers, tokens.fields, tokens.operations, self._experts),
            turns=totals[:cells].view(tokens.fields, tokens.operations),
            local=local,
            pulled=pull,
            pairs=int(totals[cells]),
            entropy=float(totals[cells + 1] / totals[cells + 2].clamp_min(1)),
        )

    def _over_ranks(self, values: torch.Tensor) -> torch.Tensor:
        """fp64 values added over every rank, on the CPU; ranks hold disjoint parts."""
        if self._context.world_size > 1:
            values = values.to(self._context.device)
            dist.all_reduce(values)
        return values.cpu()

    @contextmanager
    def attached(self, micro: Sequence[MicroBatch]) -> Iterator[None]:
        """Attaches the losses of the optimizer step on ``micro`` to its forwards while the context is open."""
        opened = self._opened
        tokens, cells = opened.tokens, opened.tokens.fields * opened.tokens.operations
        trained = _trained(micro, len(tokens.cell))
        counts = self._over_ranks(torch.from_numpy(tokens.counts(trained)) * float(self._first))
        units = counts[:cells].view(tokens.fields, tokens.operations)
        term = self._policy.term(opened.statistics, units, int(counts[cells]))
        if term is None:
            yield
            return
        if term.turn is not None:
            term = RoutingTerm(term.turn.to(self._context.device), term.token)
        # As for the loss of the tokens (``Trainer.update``): Megatron divides by both.
        scale = len(micro) * self._context.data_parallel_size
        listener = _Attach(self._policy, _Places(tokens, self._context), term, self._trainer.tap, scale)
        try:
            with self._trainer.tap.listening(listener):
                yield
        finally:
            listener.close()

    def close(self, micro: Sequence[MicroBatch] | None = None) -> dict[str, float]:
        """Ends the batch and returns its metrics. With ``micro``, the whole batch again, one more forward measures what
        the linearisation missed."""
        opened, policy = self._opened, self._policy
        self._open = None
        before = opened.statistics
        metrics = {
            "moe/turn_mi": before.information(),
            "moe/token_loss": before.local_loss(),
            "moe/pulled_fraction": before.pulled_fraction(),
            "moe/gate": float(policy.gate.is_open(before.entropy)),
            "moe/gate_entropy": before.entropy,
            "moe/labelled_turns": float(before.turns.sum(-1).max()),
            "moe/unlabelled_batch": float(not before.turns.any()),
        }
        if micro is not None:
            _, after = self.measure(opened.tokens, micro, len(opened.tokens.cell))
            exact = after.information()
            metrics["moe/turn_mi_after"] = exact
            metrics["moe/mi_linear_error"] = exact - after.linear_information(before)
        return metrics


def _trained(micro: Sequence[MicroBatch], num_tokens: int) -> NDArray[np.bool_]:
    """bool [T]: the batch's tokens that this data-parallel rank's micro-batches predict."""
    trained = np.zeros(num_tokens, dtype=bool)
    for mb in micro:
        trained[mb.token.cpu().numpy()] = True
    return trained
