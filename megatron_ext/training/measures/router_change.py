"""How far RL has moved the routers: their weights and expert biases against those that it started from.

The start is kept with every checkpoint (``SaveRequest.router_start``), in the model's pieces, so that a resumed run
measures from the same point under any layout.

Invariants (``tests/training/measures/test_router_change.py``, over layouts
``tests/integration/test_routing_frozen.py``):

1. 0 exactly where no router moved, and only there.
2. The same on every rank, and the same in every layout: each pipeline stage has as many ranks as any other, and those
   of a stage hold the same routers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.policies import router_parameters

RouterStart = Mapping[str, torch.Tensor]


def router_start(chunks: Sequence[torch.nn.Module]) -> RouterStart:
    """Copies of this rank's router weights and expert biases, by name; empty for a model without experts."""
    return {name: tensor.detach().clone() for name, tensor in router_parameters(chunks)}


def router_change(chunks: Sequence[torch.nn.Module], start: RouterStart, context: ParallelContext) -> dict[str, float]:
    """``moe/router_change``: ``|now - start| / |start|`` over all routers of all ranks, ``inf`` where they started as
    zeros and moved. Empty where no rank has a router, or it is not known what they started from (``start`` empty on
    every rank). Collective over all ranks."""
    sums = torch.zeros(3, dtype=torch.float64, device=context.device)  # squares of the change, of the start; tensors
    for name, now in router_parameters(chunks) if start else ():
        before = start[name].double()
        sums[0] += (now.detach().double() - before).square().sum()
        sums[1] += before.square().sum()
        sums[2] += 1
    if context.world_size > 1:
        dist.all_reduce(sums)
    moved, norm, tensors = sums.tolist()
    if not tensors:
        return {}
    if not moved:
        return {"moe/router_change": 0.0}
    return {"moe/router_change": math.sqrt(moved / norm) if norm else math.inf}
