"""Tokens that nobody reads, at routers that are kept even: they are no load.

A rank without rows runs a few tokens of filler, rows are padded so that they can be cut over ranks, and sequence
parallelism fills up to a multiple of its size. Megatron's routers take all of them for tokens: a load-balancing loss of
two equal ones is as large as can be, and weighs as much as that of a full micro-batch.

Invariants (``tests/training/routing/test_filler.py``, over layouts ``tests/integration/test_routing_frozen.py``):

1. Expert biases move by the load of the record's tokens alone, the same in every layout.
2. A micro-batch without tokens has no load-balancing loss; its backward enters every collective all the same.

What padding of a few tokens adds to the loss of a micro-batch that has others stays in it.
"""

from __future__ import annotations

import torch

from megatron_ext.moe.tap import RouterCall
from megatron_ext.training.microbatch import MicroBatch


def leave_out_filler(call: RouterCall, probs: torch.Tensor, routing_map: torch.Tensor) -> torch.Tensor | None:
    """A tap's listener (``moe.tap``) of the forwards that are trained on; their micro-batches are ``MicroBatch``."""
    if not torch.is_grad_enabled():
        return None  # activations are recomputed: tokens are counted, and losses attached, where gradients are on
    if call.router.enable_expert_bias:
        with torch.no_grad():
            call.router.local_tokens_per_expert -= (routing_map & ~_of_the_record(call).unsqueeze(1)).sum(dim=0)
    if call.run.tokens or not probs.requires_grad:
        return None
    # Cut off the loss that is attached to them, and kept as a leaf: dispatchers exchange their gradient between ranks.
    return probs.detach().requires_grad_()


def _of_the_record(call: RouterCall) -> torch.Tensor:
    """bool [n]: rows of a call that hold a token of the batch."""
    mb: MicroBatch = call.run.micro
    known = torch.zeros(len(call.logits), dtype=torch.bool, device=call.logits.device)
    known[: call.count] = mb.source[mb.place[call.start : call.start + call.count]] >= 0
    return known
