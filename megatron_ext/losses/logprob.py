"""Log-prob of the target and entropy of the distribution, from logits that may be split over the vocabulary.

Invariants (``tests/losses/test_logprob.py`` asserts each):

1. Values and gradients of both outputs are those of ``log_softmax(logits / temperature)`` (checked in fp64); with
   candidate sets, of the softmax over each row's set.
2. The result does not depend on how the vocabulary is split over ranks; on a CPU a row's values are the same bits
   whatever rows it is computed with (verl 2996).
3. Arithmetic is fp32 or wider whatever the dtype of the logits; finite logits give finite outputs and gradients, and
   logits of -inf are tokens of probability 0.
4. No softmax is kept: the forward pass needs a chunk of rows, the backward pass the gradient and a chunk of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_ext.losses._softmax import (
    Entries,
    Rows,
    RowStatistics,
    Shard,
    Upstream,
    check_inputs,
    local_entries,
    pull_back,
)
from megatron_ext.losses.candidates import CandidateSets

# Rows are worked through in chunks of about this many logits. On a CPU (2 MB in fp32) the passes over a chunk then stay
# in cache; elsewhere a chunk keeps the device busy. Either is small beside the logits of a model with its vocabulary.
_CHUNK_ELEMENTS = 1 << 19
_CHUNK_ELEMENTS_ACCELERATOR = 1 << 25


@dataclass(frozen=True)
class _Plan:
    shard: Shard
    temperature: float
    need_entropy: bool
    entropy_grad: bool
    entries: Entries | None  # candidates on this rank, where sets were given
    dense: torch.Tensor | None  # rows over the whole vocabulary; None: all

    def chunks(self, logits: torch.Tensor) -> Iterator[Rows]:
        """The rows over the whole vocabulary, some at a time."""
        width, dense = self.shard.width, self.dense
        elements = _CHUNK_ELEMENTS if logits.device.type == "cpu" else _CHUNK_ELEMENTS_ACCELERATOR
        step = max(2, elements // max(width, 1))
        count = (len(logits) if dense is None else len(dense)) if width else 0
        for start in range(0, count, step):
            stop = min(start + step, count)
            yield slice(start, stop) if dense is None else dense[start:stop]


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, logits: torch.Tensor, targets: torch.Tensor, plan: _Plan
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, width, dtype = len(logits), plan.shard.width, torch.promote_types(logits.dtype, torch.float32)
        inverse = 1.0 / plan.temperature
        column = targets - plan.shard.offset
        statistics = RowStatistics(rows, dtype, logits.device)
        scratch = logits.new_empty(0, dtype=dtype)
        for part in plan.chunks(logits):
            if len(column[part]) == 1:
                # torch splits the reduction of one lone row over threads, and its last bits with it; a pair is not.
                part = torch.arange(rows, device=logits.device)[part].expand(2)
            chunk = logits[part, :width]
            if scratch.numel() < 2 * chunk.numel():
                scratch = logits.new_empty(2 * chunk.numel(), dtype=dtype)
            work = scratch[: 2 * chunk.numel()].view(2, *chunk.shape)
            z = _scaled(chunk, inverse, work[0])
            statistics.pick(part, z, column[part])
            statistics.fold(part, z, work, plan.need_entropy)
        if plan.entries is not None:
            statistics.fold_entries(plan.entries, _entry_logits(logits, plan.entries, dtype, inverse))
        logp, entropy, log_total = statistics.finish(plan.shard.group, plan.need_entropy)

        ctx.save_for_backward(logits, column, log_total, entropy)
        ctx.plan = plan
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_logp: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, column, log_total, entropy = ctx.saved_tensors
        plan: _Plan = ctx.plan
        width, dtype, inverse = plan.shard.width, log_total.dtype, 1.0 / plan.temperature
        up = Upstream.of(grad_logp, grad_entropy if plan.entropy_grad else None, dtype, inverse)
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        # What no chunk below writes: padding columns, and rows of which only candidates get a gradient.
        grad[:, width:] = 0.0
        if plan.entries is not None:
            grad.zero_()
        owned = (column >= 0) & (column < width)
        at, on_target = column.clamp(0, max(width - 1, 0)).unsqueeze(1), torch.where(owned, up.down, 0.0).unsqueeze(1)
        scratch = logits.new_empty(0, dtype=dtype)
        for part in plan.chunks(logits):
            chunk = logits[part, :width]
            if scratch.numel() < 2 * chunk.numel():
                scratch = logits.new_empty(2 * chunk.numel(), dtype=dtype)
            work = scratch[: 2 * chunk.numel()].view(2, *chunk.shape)
            # Where the gradient can be worked out in its own place, it is.
            in_place = isinstance(part, slice) and grad.dtype == dtype
            out = grad[part, :width] if in_place else work[0]
            pull_back(
                _scaled(chunk, inverse, out),
                log_total[part].unsqueeze(1),
                entropy[part].unsqueeze(1),
                up.down[part].unsqueeze(1),
                None if up.pull is None else up.pull[part].unsqueeze(1),
                out=out,
                scratch=work[1],
            )
            out.scatter_add_(1, at[part], on_target[part])
            if not in_place:
                grad[part, :width] = out.to(grad.dtype)
        if plan.entries is not None:
            row = plan.entries.row
            z = _entry_logits(logits, plan.entries, dtype, inverse)
            pull = None if up.pull is None else up.pull[row]
            pull_back(z, log_total[row], entropy[row], up.down[row], pull, out=z)
            z += torch.where(plan.entries.hit, up.down[row], 0.0)
            grad[row, plan.entries.column] = z.to(grad.dtype)
        return grad, None, None


def _scaled(chunk: torch.Tensor, inverse: float, out: torch.Tensor) -> torch.Tensor:
    """The chunk in ``out``'s dtype at the temperature: itself when neither changes anything, else in ``out``."""
    if chunk.dtype == out.dtype:
        return chunk if inverse == 1.0 else torch.mul(chunk, inverse, out=out)
    return out.copy_(chunk) if inverse == 1.0 else out.copy_(chunk).mul_(inverse)


def _entry_logits(logits: torch.Tensor, entries: Entries, dtype: torch.dtype, inverse: float) -> torch.Tensor:
    return logits[entries.row, entries.column].to(dtype) * inverse


def token_logprob_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    candidates: CandidateSets | None = None,
    need_entropy: bool = True,
    need_entropy_grad: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-prob of each target and entropy of each row's distribution, in nats, with exact gradients.

    Args:
        logits: ``[n, V / tp]``, any float dtype; this rank's slice of the vocabulary when ``group`` is given.
        targets: ``[n]`` int64, ids of the whole vocabulary.
        temperature: the distribution is ``softmax(logits / temperature)``.
        group: tensor-parallel group whose ranks hold consecutive, equal slices of the vocabulary.
        vocab_size: ids that exist; logits of padding columns beyond it are left out. None: every column is a token.
        candidates: the sets that the sampler drew from (ids of the whole vocabulary, the same on every rank); each
            row's distribution is renormalised over its set.
        need_entropy: False returns zeros for the entropy (scoring that asks for log-probs alone).
        need_entropy_grad: False makes the entropy a metric: no gradient path, and a cheaper backward pass.

    Returns:
        ``(logp [n], entropy [n])``, float32 (float64 for double logits).

    Raises:
        ValueError: shapes that disagree, a temperature <= 0, a target outside the vocabulary or outside its set.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: expected [n, V] and [n]")
    shard = check_inputs(targets, logits.shape[1], temperature, group, vocab_size, candidates)
    plan = _Plan(
        shard,
        float(temperature),
        need_entropy,
        need_entropy and need_entropy_grad,
        None if candidates is None else local_entries(candidates, targets, shard),
        None if candidates is None else candidates.whole_rows(),
    )
    logp, entropy = _LogProbEntropy.apply(logits, targets, plan)
    return logp, entropy
