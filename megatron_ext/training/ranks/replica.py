"""What the ranks of a layout put together after a step: a batch's scores, its routing and its metrics.

The ranks that hold one copy of the model (a replica: tensor, context and pipeline ranks) run the same rows. Only the
last pipeline stage has logits, and a rank's routers see its own layers and its share of the tokens.

Invariants (``tests/integration/test_layouts.py``):

1. What a function here returns is the same on every rank of its group, bit for bit, and no rank's share counts twice.
2. Nothing is rounded on the way: shares are disjoint, so that sums add zeros; metrics add in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.models.forward import Routing
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.training.scoring.scores import TokenScores

Sums = Mapping[str, tuple[torch.Tensor, torch.Tensor]]


def add_over(group: dist.ProcessGroup, values: torch.Tensor) -> torch.Tensor:
    """``values`` summed over the group, in place."""
    if group.size() > 1:
        dist.all_reduce(values, group=group)
    return values


def whole_routing(
    routing: Routing, micro: Sequence[MicroBatch], layers: Sequence[int], context: ParallelContext, top_k: int
) -> list[torch.Tensor]:
    """Experts int32 [P, L, k] of each micro-batch's places, from what the routers of the replica's ranks recorded.

    ``layers`` are the numbers of the model's MoE layers. Rows of padding hold what the padding was routed to, or 0.
    """
    device = context.device
    column = {layer: at for at, layer in enumerate(layers)}
    sizes = [len(mb.source) for mb in micro]
    everything = torch.zeros(sum(sizes), len(layers), top_k, dtype=torch.int32, device=device)
    parts = list(everything.split(sizes))
    tensor, sequence = context.groups.tp, context.config.sequence
    if sequence or tensor.rank() == 0:  # without sequence parallelism tensor-parallel ranks all see every token
        for layer, forwards in routing.by_layer.items():
            for mb, part, chosen in zip(micro, parts, forwards, strict=True):
                start = tensor.rank() * len(chosen) if sequence else 0
                held = mb.place[start : start + len(chosen)]  # what followed was filler
                part[held, column[layer]] = chosen[: len(held)].to(torch.int32)
    for group in (tensor, context.groups.cp, context.groups.pp):
        add_over(group, everything)
    # Tokens that rows share were routed once for all of them.
    return [
        part if mb.shared is None else part[mb.place[mb.shared.distinct]] for mb, part in zip(micro, parts, strict=True)
    ]


def experts_by_token(
    chosen: Sequence[torch.Tensor], micro: Sequence[MicroBatch], num_tokens: int
) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """Experts int64 [T, L, k] by the batch's token, and which tokens bool [T] went through a forward."""
    experts = np.zeros((num_tokens, *chosen[0].shape[1:]), dtype=np.int64)
    routed = np.zeros(num_tokens, dtype=bool)
    for part, mb in zip(chosen, micro, strict=True):
        source = mb.source.cpu().numpy()
        real = source >= 0
        experts[source[real]] = part.cpu().numpy()[real]
        routed[source[real]] = True
    return experts, routed


def whole_metrics(sums: Sums, context: ParallelContext) -> dict[str, tuple[float, float]]:
    """Numerators and denominators added over the data-parallel ranks, known on every rank of the layout.

    ``sums`` are those of the last pipeline stage; the context- and tensor-parallel ranks of a replica hold equal ones.
    Raises ``ValueError`` when ranks report different names.
    """
    names = sorted(sums)
    values = torch.empty(0)
    if context.is_last_stage:
        _check_names(names, context)
        pairs = [torch.stack([part.detach().double() for part in sums[name]]) for name in names]
        values = torch.stack(pairs) if pairs else torch.empty(0, 2, dtype=torch.float64)
        values = add_over(context.groups.dp, values.to(context.device))
    pipeline = context.groups.pp
    if pipeline.size() > 1:
        # Earlier stages never saw a loss: they learn the names too.
        held = [(names, values.cpu()) if context.is_last_stage else None]
        dist.broadcast_object_list(held, group=pipeline, group_src=pipeline.size() - 1, device=context.device)
        assert held[0] is not None
        names, values = held[0]
    return {name: (num, den) for name, (num, den) in zip(names, values.tolist(), strict=True)}


def _check_names(names: Sequence[str], context: ParallelContext) -> None:
    """One small reduction, so that ranks whose terms disagree stop with a line instead of waiting for each other."""
    group = context.groups.dp
    if group.size() == 1:
        return
    key = crc32("\n".join(names).encode())
    ends = torch.tensor([key, -key], dtype=torch.int64, device=context.device)
    dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
    if int(ends[0]) != -int(ends[1]):
        raise ValueError(
            f"data-parallel ranks report different metrics, rank {group.rank()}: {', '.join(names)}; a loss term must "
            "report the same names whatever its tokens, also without any"
        )


def gather_scores(scores: TokenScores, context: ParallelContext) -> TokenScores:
    """The whole batch's scores on every rank: those of all data-parallel ranks, whose arrays index the same batch.

    Every rank of the layout calls it. A token is predicted by one data-parallel rank; of ranks that both ran it (a
    prefix that rows repeat) the lowest one's experts count.
    """
    group = context.groups.dp
    if group.size() == 1:
        return scores

    def summed(values: NDArray[np.float32]) -> NDArray[np.float32]:
        return add_over(group, torch.from_numpy(values).to(context.device, copy=True)).cpu().numpy()

    whole = replace(
        scores,
        logp=summed(scores.logp),
        entropy=summed(scores.entropy),
        reference=None if scores.reference is None else summed(scores.reference),
    )
    if scores.experts is None or scores.routed is None:
        return whole
    first = torch.from_numpy(np.where(scores.routed, group.rank(), group.size())).to(context.device)
    dist.all_reduce(first, op=dist.ReduceOp.MIN, group=group)
    first_rank = first.cpu().numpy()
    mine = np.where((first_rank == group.rank())[:, None, None], scores.experts, 0).astype(np.int32)
    experts = add_over(group, torch.from_numpy(mine).to(context.device)).cpu().numpy()
    return replace(whole, experts=experts.astype(np.int64), routed=first_rank < group.size())
