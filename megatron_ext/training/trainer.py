"""One training rank: Megatron model chunks with their optimizer, and the two things they do, scoring and updating.

Every rank of the layout calls ``score`` and ``update`` together, with equally many micro-batches (``lockstep``): ranks
of one replica (tensor, context, pipeline) with the same rows, data-parallel ranks with rows of their own.

Invariants (``tests/training/test_trainer.py``, over layouts ``tests/integration/test_layouts.py``):

1. The gradient is that of ``sum(weight * per-token loss)`` over the optimizer step's global batch: no term is divided
   by a count of this micro-batch or this rank.
2. One scheduler and one optimizer step per call of ``update``.
3. Scoring leaves parameters, gradients and optimizer untouched.
4. A step whose gradient is not finite is skipped and counted, on all ranks; parameters and expert biases stay as they
   were.
5. Loss, gradients, metrics and scores are those of one rank that ran every row, whatever the layout; ``UpdateResult``
   but for its scores and replay counts is the same on every rank.
6. Micro-batches that carry recorded experts replay them, in every forward and recomputation (``moe.replay``).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_ext.losses.logprob import token_logprob_entropy
from megatron_ext.losses.protocol import LossInputs, LossTerm
from megatron_ext.losses.total import needs_entropy_grad, total_loss
from megatron_ext.models import cpu_platform
from megatron_ext.models.flops import Passes, Work
from megatron_ext.models.forward import Routing, moe_layers, packed_logits, unwrap, vocab_of
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import check_auxiliary_losses
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.moe.replay import replaying
from megatron_ext.moe.replay_tokens import ReplayCounts
from megatron_ext.moe.tap import MicroRun, RouterTap, recording
from megatron_ext.training.measures.phases import span
from megatron_ext.training.measures.throughput import micro_work
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.training.ranks.lockstep import check_count
from megatron_ext.training.ranks.replica import add_over, experts_by_token, whole_metrics, whole_routing
from megatron_ext.training.routing.filler import leave_out_filler
from megatron_ext.training.scoring.scores import TokenScores

LOSS = "train/loss"
Kept = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # token indices, log-probs, entropies


@dataclass(frozen=True)
class TokenInputs:
    """What the loss reads, per token of the batch, float32 [T] on the training device.

    ``old_logp`` None: these weights opened the batch, so the update's own forward gives them (what scoring would have
    given, without a second forward).
    """

    old_logp: torch.Tensor | None
    rollout_logp: torch.Tensor
    advantage: torch.Tensor
    weight: torch.Tensor
    ref_logp: torch.Tensor | None = None


@dataclass(frozen=True)
class UpdateResult:
    """``loss``, ``grad_norm`` and ``metrics`` (means) are of the optimizer step over all ranks; ``applied`` is False
    when the step was skipped. ``scores`` are those of the update's own forward on this rank's rows, where it was asked
    to keep them; ``replay`` counts what was replayed on this rank's rows (None: nothing was asked to be)."""

    loss: float
    grad_norm: float
    lr: float
    applied: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: TokenScores | None = None
    replay: ReplayCounts | None = None


class Trainer:
    """Holds DDP-wrapped chunks and their optimizer (``training.optimizer.build``). ``tap`` is at their routers."""

    def __init__(
        self,
        chunks: Sequence[torch.nn.Module],
        optimizer: Any,
        context: ParallelContext,
        *,
        temperature: float,
        router: RouterPolicy,
    ) -> None:
        with cpu_platform.quiet_import():
            from megatron.core.pipeline_parallel import get_forward_backward_func
            from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
            from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

        # Megatron keeps the scale of the auxiliary loss on the class, whoever set it last and in whatever shape; the
        # schedule sets it anew for this model.
        MoEAuxLossAutoScaler.main_loss_backward_scale = None
        self.chunks = list(chunks)
        self.optimizer = optimizer
        self.context = context
        self.temperature = temperature
        self.router = router
        self._schedule = get_forward_backward_func()
        self._sum_over_ranks = reduce_from_tensor_model_parallel_region
        self.vocab = vocab_of(self.chunks[0])
        self._moe_layers = moe_layers(self.chunks[0])
        self.tap = RouterTap(self.chunks)
        self._auxiliary = unwrap(self.chunks[0]).config.moe_aux_loss_coeff if self._moe_layers else 0.0
        self._passes = Passes()

    # -- scoring ---------------------------------------------------------------------------------------------------
    def score(self, micro: Sequence[MicroBatch], num_tokens: int, *, record_experts: bool = False) -> TokenScores:
        """Log-prob and entropy of every predicted token, under the current weights. No gradient.

        Returns arrays over all ``num_tokens`` tokens of the batch; entries that no micro-batch of this data-parallel
        rank predicts stay 0 (``replica.gather_scores`` fills them). ``record_experts`` also returns what the routers
        chose themselves, for every token that went through the forward.
        """
        for chunk in self.chunks:
            chunk.eval()
        try:
            with torch.no_grad(), recording(self.tap) if record_experts else nullcontext() as routing:
                replies = self.run(micro, self._score_loss, forward_only=True)
        finally:
            for chunk in self.chunks:
                chunk.train()
        return self._collect(replies, routing, micro, num_tokens)

    def _collect(
        self, replies: Iterable[Kept], routing: Routing | None, micro: Sequence[MicroBatch], num_tokens: int
    ) -> TokenScores:
        """Scores by the batch's token from what the last stage replied: token indices, log-probs, entropies."""
        both = torch.zeros(2, num_tokens, device=self.context.device)
        for token, logp, entropy in replies:
            both[:, token] = torch.stack([logp, entropy]).float()
        add_over(self.context.groups.pp, both)
        logp, entropy = both.cpu().numpy()
        if routing is None or not self._moe_layers:
            return TokenScores(logp, entropy)
        top_k = unwrap(self.chunks[0]).config.moe_router_topk
        chosen = whole_routing(routing, micro, self._moe_layers, self.context, top_k)
        return TokenScores(logp, entropy, *experts_by_token(chosen, micro, num_tokens))

    def _score_loss(self, mb: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        logp, entropy = self._logprobs(mb, logits, entropy_grad=False)
        return logits.new_zeros(()), (mb.token, logp, entropy)

    def _logprobs(self, mb: MicroBatch, logits: torch.Tensor, entropy_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """[n] each. Context-parallel ranks exchange what they predict, so that each computes the loss of whole rows (a
        sequence's ratio needs all its tokens); the gradient of a token goes back to the rank that predicted it."""
        with span("log-prob"):
            logp, entropy = token_logprob_entropy(
                logits.index_select(0, mb.logit_index),
                mb.target,
                temperature=self.temperature,
                group=self.context.tensor_group,
                vocab_size=self.vocab,
                need_entropy_grad=entropy_grad,
            )
        if mb.held is None:
            return logp, entropy
        both = logp.new_zeros(2, len(mb.token)).index_copy(1, mb.held, torch.stack([logp, entropy]))
        logp, entropy = self._sum_over_ranks(both, self.context.groups.cp)
        return logp, entropy

    def take_passes(self) -> Passes:
        """What forwards and backwards ran over since the last call, on this replica."""
        taken, self._passes = self._passes, Passes()
        return taken

    # -- updating --------------------------------------------------------------------------------------------------
    def update(
        self,
        micro: Sequence[MicroBatch],
        inputs: TokenInputs,
        terms: Mapping[str, LossTerm],
        lr: float,
        *,
        keep_scores: bool = False,
        record_experts: bool = False,
    ) -> UpdateResult:
        """One optimizer step on these micro-batches.

        ``keep_scores`` returns the forward's own scores, with the routers' choices under ``record_experts``: what
        ``score`` would have returned just before.
        """
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        # Megatron divides a micro-batch's loss by their number and averages gradients over data- and context-parallel
        # ranks (those of experts too, over whichever ranks hold them), after multiplying by the context-parallel size.
        # Our weights already hold the global denominator, so both divisions are undone.
        scale = len(micro) * self.context.data_parallel_size
        # Megatron moves these behind the backward pass, before the gradient is looked at.
        biases = [r.expert_bias for _, r in self.tap.routers() if r.enable_expert_bias and not r.frozen_expert_bias]
        unmoved = [bias.clone() for bias in biases]
        loss_fn = partial(self._update_loss, inputs=inputs, terms=terms, scale=scale)
        evened = self.tap.listening(leave_out_filler) if biases or self._auxiliary else nullcontext()
        with evened, recording(self.tap) if keep_scores and record_experts else nullcontext() as routing:
            replies = self.run(micro, loss_fn, forward_only=False)
        sums: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for _, reply in replies:
            for name, pair in reply.items():
                numerator, denominator = (part.detach().double() for part in pair)
                before = sums.get(name, (0.0, 0.0))
                sums[name] = (before[0] + numerator, before[1] + denominator)
        totals = whole_metrics(sums, self.context)
        loss, _ = totals.pop(LOSS)
        metrics = {name: num / den if den else 0.0 for name, (num, den) in totals.items()}
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Megatron's step does all of this in one call and would apply a gradient that is not finite; its first half is
        # run alone to look at the norm (it only points each parameter at its reduced gradient, so twice is once).
        with span("optimizer"):
            self.optimizer.prepare_grads()
            norm = float(self.optimizer.get_grad_norm())
            finite = np.isfinite(norm) and np.isfinite(loss)
            if finite:
                # Before the step as well as after it: the first look is what later ones are compared with.
                check_auxiliary_losses(self.chunks, self._auxiliary)
                self.router.check(self.chunks)
                self.optimizer.step()
                self.router.check(self.chunks)
            else:
                for bias, before in zip(biases, unmoved, strict=True):
                    bias.copy_(before)
        scores = None
        if keep_scores:
            kept = (kept for kept, _ in replies)
            scores = self._collect(kept, routing, micro, len(inputs.weight))
        counts = [mb.replay.counts for mb in micro if mb.replay is not None]
        replay = sum(counts, ReplayCounts()) if counts else None
        return UpdateResult(loss, norm, lr, bool(finite), metrics, scores, replay)

    def _update_loss(
        self,
        mb: MicroBatch,
        logits: torch.Tensor,
        inputs: TokenInputs,
        terms: Mapping[str, LossTerm],
        scale: float,
    ) -> tuple[torch.Tensor, Any]:
        logp, entropy = self._logprobs(mb, logits, entropy_grad=needs_entropy_grad(terms))
        token = mb.token
        values = LossInputs(
            cur_logp=logp,
            old_logp=logp.detach() if inputs.old_logp is None else inputs.old_logp[token],
            rollout_logp=inputs.rollout_logp[token],
            advantage=inputs.advantage[token],
            weight=inputs.weight[token],
            entropy=entropy,
            row=mb.row,
            turn=mb.turn,
            ref_logp=None if inputs.ref_logp is None else inputs.ref_logp[token],
        )
        with span("loss"):
            output = total_loss(terms, values)
        # A rank that predicts nothing here still enters every collective of the backward pass: 0 * sum anchors it.
        total = output.loss + 0.0 * logits.float().sum() if len(mb.logit_index) == 0 else output.loss
        kept = (token, logp.detach(), entropy.detach())
        # The loss adds up over micro-batches and ranks: its denominator is in the weights.
        loss = output.loss.detach()
        return total * scale, (kept, {**output.metrics, LOSS: (loss, torch.ones_like(loss))})

    # -- the schedule ----------------------------------------------------------------------------------------------
    def run(self, micro: Sequence[MicroBatch], loss_fn: Any, *, forward_only: bool) -> list[Any]:
        """One pass of Megatron's schedule over the micro-batches, as many on every rank; ``loss_fn(mb, logits)`` gives
        the loss and a reply. Returns the replies, on the last pipeline stage.

        Micro-batches that carry recorded experts replay them; ``ReplayError`` where one was not used exactly once.
        """
        if not micro:
            raise ValueError("a step needs at least one micro-batch (short ranks get empty ones)")
        check_count(len(micro), self.context)
        work = sum((micro_work(mb) for mb in micro), Work())
        self._passes += Passes(work, Work() if forward_only else work)

        runs: list[tuple[MicroRun, list[int]]] = []

        def forward_step(source: Iterator[tuple[int, MicroBatch]], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            number, mb = next(source)
            run = MicroRun(mb, number, mb.num_tokens)
            runs.append((run, self.tap.layers_of(model)))
            logits = packed_logits(model, mb.ids, mb.positions, mb.cu_seqlens, shared=mb.shared, run=run)
            return logits, partial(loss_fn, mb)

        iterators = [enumerate(micro) for _ in self.chunks]
        many = len(self.chunks) > 1
        replays = any(mb.replay is not None for mb in micro)
        with replaying(self.tap) if replays else nullcontext() as replay:
            replies: list[Any] = self._schedule(
                forward_step_func=forward_step,
                data_iterator=iterators if many else iterators[0],
                model=self.chunks if many else self.chunks[0],
                num_microbatches=len(micro),
                seq_length=max(mb.num_tokens for mb in micro),
                micro_batch_size=1,
                forward_only=forward_only,
            )
        if not forward_only:
            self.tap.drop_graphs()
        if replay is not None:
            replay.check(runs, backward=not forward_only)
        return replies

    # -- snapshots of weights --------------------------------------------------------------------------------------
    def snapshot(self) -> list[torch.Tensor]:
        """Copies of this rank's parameters (a reference policy in any layout)."""
        return [p.detach().clone() for chunk in self.chunks for p in chunk.parameters()]

    @contextmanager
    def weights(self, snapshot: Sequence[torch.Tensor]) -> Iterator[None]:
        """Scores under other weights: swaps a snapshot in, and the trained weights back."""
        own = self.snapshot()
        try:
            self._write(snapshot)
            yield
        finally:
            self._write(own)

    def _write(self, values: Sequence[torch.Tensor]) -> None:
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        with torch.no_grad():
            for p, value in zip(parameters, values, strict=True):
                p.copy_(value)
