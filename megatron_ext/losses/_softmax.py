"""Softmax statistics by parts: what the log-prob from logits and the one fused with the output head share.

Per row: the peak ``m = max z``, the sum ``s = sum exp(z - m)`` and the moment ``sum exp(z - m) (z - m)``. Two parts of
a row merge exactly (online softmax, Milakov and Gimelshein 2018, with the moment carried along), whether the parts are
blocks of the vocabulary or ranks. From them: ``log_total = m + log s``, ``logp = z_target - log_total`` and
``entropy = log s - moment / s``.

Logits of -inf are tokens that cannot be drawn: they weigh 0 in every sum, ``0 * -inf`` included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
import torch.distributed as dist

from megatron_ext.losses.candidates import CandidateSets

# exp of it is 0 in fp64 too, so lifting smaller exponents to it changes no sum and keeps 0 * exponent finite.
_FLOOR = -1000.0

Rows: TypeAlias = slice | torch.Tensor


@dataclass(frozen=True)
class Shard:
    """Which ids a rank's columns are: column ``j < width`` is id ``offset + j``; from ``width`` on they are padding."""

    offset: int
    width: int
    group: dist.ProcessGroup | None


@dataclass(frozen=True)
class Entries:
    """The candidates that live on this rank: ``row`` and ``column`` int64 [C]; ``hit`` bool [C], is it the target."""

    row: torch.Tensor
    column: torch.Tensor
    hit: torch.Tensor


def check_inputs(
    targets: torch.Tensor,
    columns: int,
    temperature: float,
    group: dist.ProcessGroup | None,
    vocab_size: int | None,
    candidates: CandidateSets | None,
) -> Shard:
    """The shard of this rank, after the checks that both functions make. ``columns``: those of this rank."""
    if not 0 < temperature < torch.inf:
        raise ValueError(f"temperature {temperature}: must be above 0 (greedy decoding is scored at temperature 1)")
    total = columns * (1 if group is None else dist.get_world_size(group))
    size = total if vocab_size is None else vocab_size
    if not 0 < size <= total:
        raise ValueError(f"vocab_size {size}: there are {total} columns over all ranks")
    if len(targets):
        low, high = (int(x) for x in torch.aminmax(targets))
        if low < 0 or high >= size:
            raise ValueError(f"targets span {low}..{high}, outside the vocabulary of {size}")
    if candidates is not None:
        candidates.check(targets, size)
    offset = columns * (0 if group is None else dist.get_rank(group))
    return Shard(offset, max(0, min(columns, size - offset)), group)


def local_entries(candidates: CandidateSets, targets: torch.Tensor, shard: Shard) -> Entries:
    column = candidates.ids.to(torch.int64) - shard.offset
    mine = (column >= 0) & (column < shard.width)
    row, column = candidates.rows()[mine], column[mine]
    return Entries(row, column, column == targets[row] - shard.offset)


class RowStatistics:
    """Running statistics of ``n`` rows, and the logit of each row's target."""

    def __init__(self, rows: int, dtype: torch.dtype, device: torch.device) -> None:
        self.peak = torch.full((rows,), -torch.inf, dtype=dtype, device=device)
        self.total, self.moment, self.picked = torch.zeros(3, rows, dtype=dtype, device=device).unbind(0)

    def fold(self, rows: Rows, z: torch.Tensor, scratch: torch.Tensor, need_moment: bool) -> None:
        """Adds a block of columns ``z [r, w]`` of ``rows``. ``scratch [2, r, w]`` is overwritten; ``scratch[0]`` may be
        ``z`` itself. Rows of ``z`` beyond ``rows`` are ignored."""
        peak = z.amax(1)
        centred = torch.sub(z, _finite(peak).unsqueeze(1), out=scratch[0]).clamp_(min=_FLOOR)
        if need_moment:
            weights = torch.exp(centred, out=scratch[1])
            moment = torch.linalg.vecdot(weights, centred)
        else:
            weights, moment = centred.exp_(), torch.zeros_like(peak)
        count = len(self.peak[rows])
        self._merge(rows, peak[:count], weights.sum(1)[:count], moment[:count])

    def fold_entries(self, entries: Entries, z: torch.Tensor) -> None:
        """Adds candidates: ``z [C]``, the logit of each entry."""
        row = entries.row
        peak = torch.full_like(self.peak, -torch.inf).scatter_reduce_(0, row, z, "amax")
        centred = (z - _finite(peak)[row]).clamp_(min=_FLOOR)
        weights = centred.exp()
        total = torch.zeros_like(peak).index_add_(0, row, weights)
        moment = torch.zeros_like(peak).index_add_(0, row, weights.mul_(centred))
        self._merge(slice(None), peak, total, moment)
        self.picked.index_add_(0, row, torch.where(entries.hit, z, 0.0))

    def pick(self, rows: Rows, z: torch.Tensor, column: torch.Tensor) -> None:
        """Notes the targets' logits: ``column [r]`` is the target's column in ``z``; outside ``z`` for other blocks."""
        inside = (column >= 0) & (column < z.shape[1])
        at = column.clamp(0, z.shape[1] - 1).unsqueeze(1)
        self.picked[rows] += torch.where(inside, z[: len(column)].gather(1, at).squeeze(1), 0.0)

    def _merge(self, rows: Rows, peak: torch.Tensor, total: torch.Tensor, moment: torch.Tensor) -> None:
        before, sums, moments = self.peak[rows], self.total[rows], self.moment[rows]
        after = torch.maximum(before, peak)
        shift_a, shift_b = _shift(before, after), _shift(peak, after)
        scale_a, scale_b = shift_a.exp(), shift_b.exp()
        self.moment[rows] = scale_a * (moments + shift_a * sums) + scale_b * (moment + shift_b * total)
        self.total[rows] = scale_a * sums + scale_b * total
        self.peak[rows] = after

    def finish(
        self, group: dist.ProcessGroup | None, need_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``(logp, entropy, log_total)`` over all ranks of ``group``; entropy 0 unless needed."""
        peak, total, moment, picked = self.peak, self.total, self.moment, self.picked
        if group is not None:
            highest = peak.clone()
            dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
            shift = _shift(peak, highest)
            scale = shift.exp()
            packed = torch.stack([total * scale, scale * (moment + shift * total), picked])
            dist.all_reduce(packed, group=group)
            peak, (total, moment, picked) = highest, packed.unbind(0)
        log_sum = total.log()
        log_total = peak + log_sum
        # Rounding must not make the entropy of a row that is sure of one token negative.
        entropy = (log_sum - moment / total).clamp_(min=0.0) if need_entropy else torch.zeros_like(log_total)
        # The peak goes first, so that its size costs the log-prob no digits (near 1e3 fp32 has a spacing of 6e-5).
        return (picked - peak) - log_sum, entropy, log_total


@dataclass(frozen=True)
class Upstream:
    """Gradients that reach the outputs, divided by the temperature, ``[n]``. ``pull`` None: the entropy gets none."""

    down: torch.Tensor
    pull: torch.Tensor | None

    @classmethod
    def of(
        cls, grad_logp: torch.Tensor, grad_entropy: torch.Tensor | None, dtype: torch.dtype, inverse: float
    ) -> Upstream:
        pull = None if grad_entropy is None else grad_entropy.to(dtype) * inverse
        return cls(grad_logp.to(dtype) * inverse, pull)


def pull_back(
    z: torch.Tensor,
    log_total: torch.Tensor,
    entropy: torch.Tensor,
    down: torch.Tensor,
    pull: torch.Tensor | None,
    *,
    out: torch.Tensor,
    scratch: torch.Tensor | None = None,
) -> torch.Tensor:
    """Gradient of the logits ``z`` into ``out`` (which may be ``z``), all but the ``+ down`` that the target's column
    gets. The row vectors are passed in a shape that broadcasts with ``z``. ``d logp / dz_j = [j is the target] - q_j``,
    ``d entropy / dz_j = -q_j (log q_j + entropy)``."""
    logq = torch.sub(z, log_total, out=out).clamp_(min=_FLOOR)
    if pull is None:
        return logq.exp_().mul_(-down)
    factor = torch.add(logq, entropy, out=scratch).mul_(-pull).sub_(down)
    return logq.exp_().mul_(factor)


def _finite(peak: torch.Tensor) -> torch.Tensor:
    """What to subtract from a row: its peak, or nothing where every logit is -inf."""
    return peak.masked_fill(peak == -torch.inf, 0.0)


def _shift(peak: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
    return (peak - _finite(above)).clamp_(min=_FLOOR)
