"""One training rank: Megatron model chunks with their optimizer, and the two things they do, scoring and updating.

Invariants (``tests/training/test_trainer.py``):

1. The gradient is that of ``sum(weight * per-token loss)`` over the optimizer step's global batch: no term is divided
   by a count of this micro-batch or this rank.
2. One scheduler and one optimizer step per call of ``update``.
3. Scoring leaves parameters, gradients and optimizer untouched.
4. A step whose gradient is not finite is skipped and counted; the parameters stay as they were.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.losses.logprob import token_logprob_entropy
from megatron_ext.losses.protocol import LossInputs, LossTerm
from megatron_ext.losses.total import needs_entropy_grad, total_loss
from megatron_ext.models import cpu_platform
from megatron_ext.models.forward import Routing, packed_logits, record_routing
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.training.microbatch import MicroBatch


@dataclass(frozen=True)
class TokenScores:
    """Scores of a batch's tokens, float32 [T]; 0 where no score was asked for.

    ``experts`` int64 [T, L, k] of this forward (None unless recorded), valid where ``routed`` bool [T]. ``reference``
    float32 [T]: log-probs under the reference policy (None without one).
    """

    logp: NDArray[np.float32]
    entropy: NDArray[np.float32]
    experts: NDArray[np.int64] | None = None
    routed: NDArray[np.bool_] | None = None
    reference: NDArray[np.float32] | None = None


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
    """``metrics`` are means over the optimizer step; ``applied`` is False when the step was skipped. ``scores`` are
    those of the update's own forward, where it was asked to keep them."""

    loss: float
    grad_norm: float
    lr: float
    applied: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    scores: TokenScores | None = None


def _collect(
    replies: Iterable[tuple[torch.Tensor, torch.Tensor, torch.Tensor]],
    routing: Routing,
    micro: Sequence[MicroBatch],
    num_tokens: int,
) -> TokenScores:
    """Scores by the batch's token from what each micro-batch replied: token indices, log-probs, entropies."""
    logp = np.zeros(num_tokens, dtype=np.float32)
    entropy = np.zeros(num_tokens, dtype=np.float32)
    for token, values, entropies in replies:
        at = token.cpu().numpy()
        logp[at] = values.float().cpu().numpy()
        entropy[at] = entropies.float().cpu().numpy()
    if not routing.by_layer:
        return TokenScores(logp, entropy)
    return TokenScores(logp, entropy, *_by_token(routing.by_layer, micro, num_tokens))


def _by_token(
    by_layer: Sequence[torch.Tensor], micro: Sequence[MicroBatch], num_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Recorded experts (one [T', k] a layer, micro-batch after micro-batch) by the batch's token; which have any."""
    layers = len(by_layer) // len(micro)
    experts = np.zeros((num_tokens, layers, by_layer[0].shape[-1]), dtype=np.int64)
    routed = np.zeros(num_tokens, dtype=bool)
    for number, mb in enumerate(micro):
        source = mb.source.cpu().numpy()
        chosen = torch.stack(list(by_layer[number * layers : (number + 1) * layers]), dim=1)[: mb.num_tokens]
        # What followed was filler; tokens that rows share were routed once for all of them.
        experts[source] = (chosen if mb.shared is None else chosen[mb.shared.distinct]).cpu().numpy()
        routed[source] = True
    return experts, routed


class Trainer:
    """Holds DDP-wrapped chunks and their optimizer (``training.optimizer.build``)."""

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

    # -- scoring ---------------------------------------------------------------------------------------------------
    def score(self, micro: Sequence[MicroBatch], num_tokens: int, *, record_experts: bool = False) -> TokenScores:
        """Log-prob and entropy of every predicted token, under the current weights. No gradient.

        Returns arrays over all ``num_tokens`` tokens of the batch; entries that no micro-batch predicts stay 0.
        ``record_experts`` also returns what the routers chose, for every token that went through the forward.
        """
        for chunk in self.chunks:
            chunk.eval()
        try:
            with torch.no_grad(), record_routing(self.chunks if record_experts else []) as routing:
                replies = self._run(micro, self._score_loss, forward_only=True)
        finally:
            for chunk in self.chunks:
                chunk.train()
        return _collect(replies, routing, micro, num_tokens)

    def _score_loss(self, mb: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        logp, entropy = self._logprobs(mb, logits, entropy_grad=False)
        return logits.new_zeros(()), (mb.token, logp, entropy)

    def _logprobs(self, mb: MicroBatch, logits: torch.Tensor, entropy_grad: bool) -> tuple[torch.Tensor, torch.Tensor]:
        return token_logprob_entropy(
            logits.index_select(0, mb.logit_index),
            mb.target,
            temperature=self.temperature,
            group=self.context.tensor_group,
            need_entropy_grad=entropy_grad,
        )

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
        # Megatron divides a micro-batch's loss by their number and averages gradients over data-parallel ranks; our
        # weights already hold the global denominator, so both divisions are undone.
        scale = len(micro) * self.context.data_parallel_size
        loss_fn = partial(self._update_loss, inputs=inputs, terms=terms, scale=scale, micro=len(micro))
        sums: dict[str, torch.Tensor] = {}
        with record_routing(self.chunks if keep_scores and record_experts else []) as routing:
            replies = self._run(micro, loss_fn, forward_only=False)
        for _, reply in replies:
            for name, (numerator, denominator) in reply.items():
                pair = torch.stack([numerator.detach().double(), denominator.detach().double()])
                sums[name] = sums[name] + pair if name in sums else pair
        metrics = {name: float(s[0] / s[1]) if s[1] else 0.0 for name, s in sums.items()}
        loss = metrics.pop("train/loss", 0.0)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        # Megatron's step does all of this in one call and would apply a gradient that is not finite; its first half is
        # run alone to look at the norm (it only points each parameter at its reduced gradient, so twice is once).
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        finite = np.isfinite(norm) and np.isfinite(loss)
        if finite:
            # Before the step as well as after it: the first look is what later ones are compared with.
            self.router.check(self.chunks)
            self.optimizer.step()
            self.router.check(self.chunks)
        scores = None
        if keep_scores:
            scores = _collect((kept for kept, _ in replies), routing, micro, len(inputs.weight))
        return UpdateResult(loss=loss, grad_norm=norm, lr=lr, applied=bool(finite), metrics=metrics, scores=scores)

    def _update_loss(
        self,
        mb: MicroBatch,
        logits: torch.Tensor,
        inputs: TokenInputs,
        terms: Mapping[str, LossTerm],
        scale: float,
        micro: int,
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
        output = total_loss(terms, values)
        # An empty micro-batch still enters every collective of the backward pass: 0 * sum anchors it in the graph.
        total = output.loss + 0.0 * logits.float().sum() if mb.num_tokens == 0 else output.loss
        # Numerators add over micro-batches to the step's loss: the weights hold its denominator, so this one is 1 once.
        share = torch.full((), 1.0 / micro, dtype=torch.float64)
        kept = (token, logp.detach(), entropy.detach())
        return total * scale, (kept, {**output.metrics, "train/loss": (output.loss.detach(), share)})

    # -- the schedule ----------------------------------------------------------------------------------------------
    def _run(self, micro: Sequence[MicroBatch], loss_fn: Any, *, forward_only: bool) -> list[Any]:
        if not micro:
            raise ValueError("a step needs at least one micro-batch (short ranks get empty ones)")

        def forward_step(source: Iterator[MicroBatch], model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
            mb = next(source)
            logits = packed_logits(model, mb.ids, mb.positions, mb.cu_seqlens, shared=mb.shared)
            return logits, partial(loss_fn, mb)

        iterators = [iter(micro) for _ in self.chunks]
        many = len(self.chunks) > 1
        return self._schedule(
            forward_step_func=forward_step,
            data_iterator=iterators if many else iterators[0],
            model=self.chunks if many else self.chunks[0],
            num_microbatches=len(micro),
            seq_length=max(mb.num_tokens for mb in micro),
            micro_batch_size=1,
            forward_only=forward_only,
        )

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
