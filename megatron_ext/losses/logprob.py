"""Log-prob of the target and entropy of the distribution, from logits that may be split over the vocabulary.

Invariants (``tests/losses/test_logprob.py`` asserts each):

1. Values and gradients of both outputs are those of ``log_softmax(logits / temperature)`` (checked in fp64).
2. The result does not depend on how the vocabulary is split over ranks, nor on the row chunk.
3. Arithmetic is fp32 or wider whatever the dtype of the logits; finite logits give finite outputs and gradients.
4. No softmax is kept: the forward pass needs a chunk of rows, the backward pass the gradient and a chunk of rows.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

# Rows are worked through in this many chunks: temporaries then cost an eighth of the logits, and on a CPU a chunk of an
# ordinary micro-batch (14k rows of a small vocabulary) stays in cache.
_CHUNKS = 16
_MIN_CHUNK_ELEMENTS = 1 << 17


def _chunk_rows(rows: int, width: int) -> int:
    smallest = -(-_MIN_CHUNK_ELEMENTS // max(width, 1))
    return max(1, min(rows, max(-(-rows // _CHUNKS), smallest)))


def _scaled(logits: torch.Tensor, dtype: torch.dtype, inverse: float) -> torch.Tensor:
    """The chunk in ``dtype`` at the temperature; the logits themselves when neither changes anything."""
    chunk = logits.to(dtype)
    return chunk if inverse == 1.0 else chunk * inverse


class _LogProbEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        logits: torch.Tensor,
        targets: torch.Tensor,
        temperature: float,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        need_entropy: bool,
        entropy_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows, columns = logits.shape
        dtype = torch.promote_types(logits.dtype, torch.float32)
        inverse = 1.0 / temperature
        offset = columns * (0 if group is None else dist.get_rank(group))
        width = max(0, min(columns, vocab_size - offset))
        local = targets - offset
        owned = (local >= 0) & (local < width)

        # Row by row: local maximum, sum of exp(z - max), and sum of exp(z - max) * (z - max).
        peak = torch.full((rows,), -torch.inf, dtype=dtype, device=logits.device)
        total = torch.zeros(rows, dtype=dtype, device=logits.device)
        moment = torch.zeros(rows, dtype=dtype, device=logits.device)
        picked = torch.zeros(rows, dtype=dtype, device=logits.device)
        step = _chunk_rows(rows, width)
        for start in range(0, rows if width else 0, step):
            part = slice(start, start + step)
            z = _scaled(logits[part, :width], dtype, inverse)
            index = local[part].clamp(0, width - 1).unsqueeze(1)
            picked[part] = z.gather(1, index).squeeze(1).masked_fill_(~owned[part], 0.0)
            peak[part] = z.amax(1)
            centred = z - peak[part].unsqueeze(1)
            weights = centred.exp()
            total[part] = weights.sum(1)
            if need_entropy:
                moment[part] = torch.linalg.vecdot(weights, centred)
        if group is not None:
            highest = peak.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            shift = (peak - highest) if width else torch.zeros_like(peak)
            scale = shift.exp()
            packed = torch.stack([total * scale, scale * (moment + shift * total), picked])
            dist.all_reduce(packed, group=group)
            peak, (total, moment, picked) = highest, packed.unbind(0)
        log_total = peak + total.log()
        logp = picked - log_total
        entropy = total.log() - moment / total if need_entropy else torch.zeros_like(logp)

        ctx.save_for_backward(logits, local, owned, log_total, entropy)
        ctx.dtype, ctx.inverse, ctx.width = dtype, inverse, width
        ctx.entropy_grad = entropy_grad
        if not entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_logp: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        logits, local, owned, log_total, entropy = ctx.saved_tensors
        width, inverse, dtype = ctx.width, ctx.inverse, ctx.dtype
        grad = torch.empty_like(logits, memory_format=torch.contiguous_format)
        grad[:, width:] = 0.0
        on_target = torch.where(owned, grad_logp, 0.0).to(dtype) * inverse
        down = (grad_logp.to(dtype) * inverse).unsqueeze(1)
        pull = (grad_entropy.to(dtype) * inverse).unsqueeze(1) if ctx.entropy_grad else None
        step = _chunk_rows(len(logits), width)
        for start in range(0, len(logits) if width else 0, step):
            part = slice(start, start + step)
            logq = _scaled(logits[part, :width], dtype, inverse) - log_total[part].unsqueeze(1)
            if pull is None:
                out = logq.exp_().mul_(-down[part])
            else:
                # d(entropy)/dz_j = -q_j (log q_j + entropy);  d(logp)/dz_j = [j is the target] - q_j
                factor = (logq + entropy[part].unsqueeze(1)).mul_(-pull[part]).sub_(down[part])
                out = logq.exp_().mul_(factor)
            index = local[part].clamp(0, width - 1).unsqueeze(1)
            out.scatter_add_(1, index, on_target[part].unsqueeze(1))
            grad[part, :width] = out
        return grad, None, None, None, None, None, None


def token_logprob_entropy(
    logits: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
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
        need_entropy: False returns zeros for the entropy (scoring that asks for log-probs alone).
        need_entropy_grad: False makes the entropy a metric: no gradient path, and a cheaper backward pass.

    Returns:
        ``(logp [n], entropy [n])``, float32 (float64 for double logits).

    Raises:
        ValueError: shapes that disagree, a temperature <= 0, or a target outside the vocabulary.
    """
    if logits.ndim != 2 or targets.shape != logits.shape[:1]:
        raise ValueError(f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: expected [n, V] and [n]")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: must be above 0 (greedy decoding is scored at temperature 1)")
    columns = logits.shape[1] * (1 if group is None else dist.get_world_size(group))
    size = columns if vocab_size is None else vocab_size
    if not 0 < size <= columns:
        raise ValueError(f"vocab_size {size}: the logits have {columns} columns over all ranks")
    if len(targets):
        low, high = (int(x) for x in torch.aminmax(targets))
        if low < 0 or high >= size:
            raise ValueError(f"targets span {low}..{high}, outside the vocabulary of {size}")
    logp, entropy = _LogProbEntropy.apply(
        logits, targets, float(temperature), group, size, need_entropy, need_entropy and need_entropy_grad
    )
    return logp, entropy
