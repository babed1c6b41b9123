"""Log-prob of the target and entropy of the distribution, from hidden states: the logits never exist as a whole.

Forward, a block of columns at a time: ``z = hidden @ W_block^T / temperature``, folded into running softmax statistics.
Backward the same blocks again: the logits are recomputed, turned into their gradient in place and multiplied out,
``d_hidden += dz @ W_block`` and ``d_W_block += dz^T @ hidden``. That is four matrix products where keeping the logits
takes three; what is saved is every pass of a softmax, its logarithm and their gradients over memory.

Invariants (``tests/losses/test_fused_head.py`` asserts each):

1. Values and gradients of both outputs are those of ``token_logprob_entropy(hidden @ W^T, ...)`` (checked in fp64), for
   every chunk size and every split of the vocabulary over ranks.
2. No tensor of ``n * V`` elements is made: temporaries are three blocks of ``rows_per_chunk x columns_per_chunk``.
3. On a CPU a row's values are the same bits whatever rows it is computed with (verl 2996).
4. With a ``weight_grad`` buffer the weight's gradient is added to it, and autograd gets none for the weight.
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

# Below about eight rows BLAS changes kernels, and with them the last bits of a row; fewer are filled up with zeros.
_MIN_ROWS = 16


@dataclass(frozen=True)
class _Plan:
    shard: Shard
    temperature: float
    need_entropy: bool
    entropy_grad: bool
    entries: Entries | None  # candidates on this rank, where sets were given
    dense: torch.Tensor | None  # rows over the whole vocabulary; None: all
    weight_grad: torch.Tensor | None
    reduce_hidden_grad: bool
    rows_per_chunk: int
    columns_per_chunk: int
    dtype: torch.dtype  # of all arithmetic


class _FusedHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        targets: torch.Tensor,
        plan: _Plan,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        column = targets - plan.shard.offset
        statistics = RowStatistics(len(hidden), plan.dtype, hidden.device)
        for block in _blocks(hidden, weight, plan):
            # Padding rows go through the sums too: no reduction then sees fewer rows than a product does.
            statistics.pick(block.rows, block.work[0], column[block.rows] - block.start)
            statistics.fold(block.rows, block.work[0], block.work, plan.need_entropy)
        entry_logits = None
        if plan.entries is not None:
            entry_logits = _entry_logits(hidden, weight, plan.entries, plan)
            statistics.fold_entries(plan.entries, entry_logits)
        logp, entropy, log_total = statistics.finish(plan.shard.group, plan.need_entropy)

        ctx.save_for_backward(hidden, weight, column, log_total, entropy, entry_logits)
        ctx.plan = plan
        if not plan.entropy_grad:
            ctx.mark_non_differentiable(entropy)
        return logp, entropy

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_logp: torch.Tensor, grad_entropy: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        hidden, weight, column, log_total, entropy, entry_logits = ctx.saved_tensors
        plan: _Plan = ctx.plan
        need_hidden, need_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        up = Upstream.of(grad_logp, grad_entropy if plan.entropy_grad else None, plan.dtype, 1.0 / plan.temperature)
        into_hidden = torch.zeros_like(hidden, dtype=plan.dtype) if need_hidden else None
        into_weight = plan.weight_grad
        if into_weight is None and need_weight:
            into_weight = torch.zeros_like(weight, dtype=plan.dtype)

        into = _Gradients(into_hidden, into_weight)
        for block in _blocks(hidden, weight, plan):
            rows, count = block.rows, len(block.hidden)
            z = block.work[0, :count]
            pull_back(
                z,
                log_total[rows].unsqueeze(1),
                entropy[rows].unsqueeze(1),
                up.down[rows].unsqueeze(1),
                None if up.pull is None else up.pull[rows].unsqueeze(1),
                out=z,
                scratch=block.work[1, :count],
            )
            at = column[rows] - block.start
            inside = (at >= 0) & (at < z.shape[1])
            on_target = torch.where(inside, up.down[rows], 0.0).unsqueeze(1)
            z.scatter_add_(1, at.clamp_(0, z.shape[1] - 1).unsqueeze(1), on_target)
            into.add_block(block, z)
        if plan.entries is not None:
            row = plan.entries.row
            pull = None if up.pull is None else up.pull[row]
            dz = pull_back(
                entry_logits, log_total[row], entropy[row], up.down[row], pull, out=torch.empty_like(entry_logits)
            )
            dz += torch.where(plan.entries.hit, up.down[row], 0.0)
            for part in _entry_chunks(plan.entries, hidden.shape[1], plan):
                into.add_entries(hidden, weight, plan.entries.row[part], plan.entries.column[part], dz[part])
        if into_hidden is not None:
            if plan.shard.group is not None and plan.reduce_hidden_grad:
                dist.all_reduce(into_hidden, group=plan.shard.group)
            into_hidden = into_hidden.to(hidden.dtype)
        own = None if plan.weight_grad is not None or into_weight is None else into_weight.to(weight.dtype)
        return into_hidden, own, None, None


@dataclass(frozen=True)
class _Gradients:
    """What the backward pass adds to; None: not wanted."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None

    def add_block(self, block: _Block, dz: torch.Tensor) -> None:
        if self.hidden is not None:
            if isinstance(block.rows, slice):
                _accumulate(self.hidden[block.rows], dz, block.weight)
            else:
                self.hidden.index_add_(0, block.rows, _product(dz, block.weight))
        if self.weight is not None:
            _accumulate(self.weight[block.start : block.start + len(block.weight)], dz.t(), block.hidden)

    def add_entries(
        self, hidden: torch.Tensor, weight: torch.Tensor, row: torch.Tensor, column: torch.Tensor, dz: torch.Tensor
    ) -> None:
        scale = dz.unsqueeze(1)
        if self.hidden is not None:
            self.hidden.index_add_(0, row, weight[column].to(dz.dtype).mul_(scale))
        if self.weight is not None:
            self.weight.index_add_(0, column, hidden[row].to(dz.dtype).mul_(scale).to(self.weight.dtype))


@dataclass(frozen=True)
class _Block:
    """Some rows by some columns. ``work [2, r, w]``: the scaled logits, and room for as many more values; ``r`` exceeds
    the number of rows where padding rows fill it up."""

    rows: Rows
    start: int
    hidden: torch.Tensor
    weight: torch.Tensor
    work: torch.Tensor


def _blocks(hidden: torch.Tensor, weight: torch.Tensor, plan: _Plan) -> Iterator[_Block]:
    """Every block of the rows over the whole vocabulary, its logits computed. A block is valid until the next one."""
    if plan.dense is not None:
        hidden = hidden[plan.dense]
    count, width = len(hidden), plan.shard.width
    if not count or not width:
        return
    hidden = _operand(hidden, plan.dtype)
    # Columns are the outer loop, so that a block of the weight is read from memory once.
    rows = max(_MIN_ROWS, min(plan.rows_per_chunk, count))
    columns = _even(width, plan.columns_per_chunk)
    room = hidden.new_empty(2 * rows * columns, dtype=plan.dtype)
    last = range(0, count, rows)[-1]
    tail = hidden[last:]
    if len(tail) < _MIN_ROWS:
        tail = torch.cat([tail, tail.new_zeros(_MIN_ROWS - len(tail), tail.shape[1])])
    for start in range(0, width, columns):
        piece = _operand(weight[start : min(start + columns, width)], plan.dtype)
        for first in range(0, count, rows):
            stop = min(first + rows, count)
            left = tail if first == last else hidden[first:stop]
            work = room[: 2 * len(left) * len(piece)].view(2, len(left), len(piece))
            _project(work[0], left, piece.t(), 1.0 / plan.temperature)
            index: Rows = slice(first, stop) if plan.dense is None else plan.dense[first:stop]
            yield _Block(index, start, hidden[first:stop], piece, work)


def _even(total: int, most: int) -> int:
    """The size of as many even parts of ``total`` as parts of ``most`` would be: no sliver is left at the end."""
    parts = -(-total // most)
    return -(-total // parts)


def _operand(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a product with results in ``dtype`` reads: on CUDA half precision as it is, which tensor cores take and
    accumulate in fp32."""
    return x if x.is_cuda and dtype == torch.float32 else x.to(dtype)


def _project(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor, factor: float) -> None:
    """``out = factor * a @ b``; ``a`` and ``b`` are operands."""
    if a.dtype == out.dtype:
        out.addmm_(a, b, beta=0.0, alpha=factor)
    else:
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=0.0, alpha=factor, out=out)


def _product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """``a @ b`` of a gradient and an operand, in the gradient's dtype."""
    return a @ b if a.dtype == b.dtype else torch.mm(a.to(b.dtype), b, out_dtype=a.dtype)


def _accumulate(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> None:
    """``out += a @ b`` of a gradient and an operand."""
    if a.dtype == b.dtype == out.dtype:
        out.addmm_(a, b)
    else:
        out.add_(_product(a, b))


def _entry_chunks(entries: Entries, size: int, plan: _Plan) -> Iterator[slice]:
    """Some candidates at a time, so that their rows of the weight ``[c, size]`` take no more room than a block."""
    count = len(entries.row)
    step = max(1, plan.rows_per_chunk * plan.columns_per_chunk // max(size, 1))
    return (slice(start, start + step) for start in range(0, count, step))


def _entry_logits(hidden: torch.Tensor, weight: torch.Tensor, entries: Entries, plan: _Plan) -> torch.Tensor:
    """Scaled logits of the candidates, a dot product each."""
    z = hidden.new_empty(len(entries.row), dtype=plan.dtype)
    for part in _entry_chunks(entries, hidden.shape[1], plan):
        products = hidden[entries.row[part]].to(plan.dtype).mul_(weight[entries.column[part]])
        z[part] = products.sum(1)
    return z.mul_(1.0 / plan.temperature)


def fused_logprob_entropy(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    temperature: float,
    group: dist.ProcessGroup | None = None,
    vocab_size: int | None = None,
    candidates: CandidateSets | None = None,
    weight_grad: torch.Tensor | None = None,
    reduce_hidden_grad: bool = True,
    need_entropy: bool = True,
    need_entropy_grad: bool = True,
    rows_per_chunk: int = 1024,
    columns_per_chunk: int = 4096,
) -> tuple[torch.Tensor, torch.Tensor]:
    """``token_logprob_entropy(hidden @ weight.T, targets, ...)`` without the logits, with exact gradients.

    Rows with a candidate set cost only their candidates: ``C * H`` multiplications forward, whatever the vocabulary.

    Args:
        hidden: ``[n, H]``, what the output head reads, whole on every rank (sequence parallelism gathers it before).
        weight: ``[V / tp, H]`` of the same dtype; this rank's slice of the vocabulary when ``group`` is given.
        targets: ``[n]`` int64, ids of the whole vocabulary.
        temperature, group, vocab_size, candidates, need_entropy, need_entropy_grad: as ``token_logprob_entropy``.
        weight_grad: ``[V / tp, H]``, any float dtype: the backward pass adds the weight's gradient to it (Megatron's
            ``main_grad``) and autograd hands the weight none. None: the weight gets an ordinary gradient if it
            requires one.
        reduce_hidden_grad: sum the hidden states' gradient over ``group``, as a column-parallel layer does. False when
            the caller's own backward sums it (the reduce-scatter behind a sequence-parallel gather).
        rows_per_chunk, columns_per_chunk: the block of logits that exists at a time. The bits of a row depend on
            ``columns_per_chunk``, not on ``rows_per_chunk``.

    Returns:
        ``(logp [n], entropy [n])``, float32 (float64 for double inputs).

    Raises:
        ValueError: shapes or dtypes that disagree, a temperature <= 0, a chunk size below 1, a target outside the
            vocabulary or outside its set.
    """
    shapes = f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)}"
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(f"{shapes}: expected [n, H], [V, H] and [n]")
    if hidden.dtype != weight.dtype:
        raise ValueError(f"hidden is {hidden.dtype} and weight {weight.dtype}: expected one dtype")
    if weight_grad is not None and (weight_grad.shape != weight.shape or not weight_grad.is_floating_point()):
        raise ValueError(f"weight_grad {weight_grad.dtype} {tuple(weight_grad.shape)}: expected {tuple(weight.shape)}")
    if rows_per_chunk < 1 or columns_per_chunk < 1:
        raise ValueError(
            f"chunks of {rows_per_chunk} rows and {columns_per_chunk} columns: expected at least 1 of each"
        )
    shard = check_inputs(targets, len(weight), temperature, group, vocab_size, candidates)
    plan = _Plan(
        shard,
        float(temperature),
        need_entropy,
        need_entropy and need_entropy_grad,
        None if candidates is None else local_entries(candidates, targets, shard),
        None if candidates is None else candidates.whole_rows(),
        weight_grad,
        reduce_hidden_grad,
        rows_per_chunk,
        columns_per_chunk,
        torch.promote_types(hidden.dtype, torch.float32),
    )
    logp, entropy = _FusedHead.apply(hidden, weight, targets, plan)
    return logp, entropy
