"""What is read from the forwards of a score plan: log-probs, entropies, the likeliest tokens, hidden states.

Invariants (``tests/integration/test_score_execution.py``):

1. Log-probs are of logits / the group's own temperature.
2. The vocabulary stays split over tensor-parallel ranks: they exchange k candidates and two numbers a token, never
   logits.
3. A rank writes the items that it holds and leaves zeros elsewhere, so that a replica's ranks add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.credit.score_plan import ScoreGroup
from megatron_ext.losses.logprob import token_logprob_entropy
from megatron_ext.models import cpu_platform
from megatron_ext.models.forward import unwrap
from megatron_ext.training.ranks.replica import add_over
from megatron_ext.training.scoring.microbatch import ScoreMicroBatch
from megatron_ext.training.trainer import Trainer

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.transformer.transformer_layer import TransformerLayer

# The normaliser of the softmax is worked out over about this many logits at a time.
_CHUNK_ELEMENTS = 1 << 22


# -- logits ------------------------------------------------------------------------------------------------------------
def item_shapes(group: ScoreGroup) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """What the logits are read for: name, shape over the group's items and type."""
    wants = group.outputs
    for name in ("logp", "entropy"):
        if getattr(wants, name):
            yield name, (len(group.scored),), torch.float32
    if wants.topk:
        yield "topk_ids", (len(group.topk), wants.topk), torch.int64
        yield "topk_logp", (len(group.topk), wants.topk), torch.float32
    if len(group.given):
        yield "given_logp", (len(group.given),), torch.float32


def read_logits(
    mb: ScoreMicroBatch,
    logits: torch.Tensor,
    group: ScoreGroup,
    items: Mapping[str, torch.Tensor],
    ranks: dist.ProcessGroup,
    vocab: int,
) -> None:
    """Writes what one micro-batch's logits [U, V / tp] say about its items. ``vocab`` ids exist: the columns of others
    are padding."""
    wants, reads, temperature = group.outputs, mb.reads, group.weights.temperature
    if not items or not group.num_rows:
        return
    used = logits.index_select(0, mb.logit_index)
    if wants.logp or wants.entropy:
        logp, entropy = token_logprob_entropy(
            used,
            mb.target,
            temperature=temperature,
            group=ranks,
            vocab_size=vocab,
            need_entropy=wants.entropy,
            need_entropy_grad=False,
        )
        for name, values in (("logp", logp), ("entropy", entropy)):
            if name in items:
                items[name][reads.scored_item] = values.float()
    if not wants.topk and "given_logp" not in items:
        return
    offset = ranks.rank() * used.shape[1]
    used[:, max(0, vocab - offset) :] = -torch.inf  # of the copy: padding is in no sum and no top-k
    total = _log_normaliser(used, temperature, ranks)
    if wants.topk:
        ids, top = _topk(used.index_select(0, reads.topk), wants.topk, offset, ranks)
        items["topk_ids"][reads.topk_item] = ids
        items["topk_logp"][reads.topk_item] = top / temperature - total[reads.topk].unsqueeze(1)
    if "given_logp" in items:
        column = reads.given_id - offset
        here = (column >= 0) & (column < used.shape[1])
        own = used[reads.given, column.clamp(0, used.shape[1] - 1)].float()
        # Where another rank holds the id this one adds nothing, not 0 * logit: a logit may be infinite.
        chosen = add_over(ranks, torch.where(here, own, torch.zeros_like(own)))
        items["given_logp"][reads.given_item] = chosen / temperature - total[reads.given]


def _log_normaliser(logits: torch.Tensor, temperature: float, ranks: dist.ProcessGroup) -> torch.Tensor:
    """log sum exp over the whole vocabulary of ``logits / temperature``, float32 [n], from slices [n, V / tp]."""
    step = max(1, _CHUNK_ELEMENTS // max(logits.shape[1], 1))
    parts = [(part.float() / temperature).logsumexp(-1) for part in logits.split(step)]
    own = torch.cat(parts) if parts else logits.new_empty(0, dtype=torch.float32)
    if ranks.size() == 1:
        return own
    most = own.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ranks)
    return most + add_over(ranks, (own - most).exp()).log()


def _topk(logits: torch.Tensor, k: int, offset: int, ranks: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and logits float32 [n, k] of the k largest over the whole vocabulary, the largest first."""
    top = logits.float().topk(min(k, logits.shape[1]), dim=-1)
    values, ids = top.values, top.indices + offset
    if ranks.size() > 1:
        values, ids = (_side_by_side(part, ranks) for part in (values, ids))
        best = values.topk(k, dim=-1)
        values, ids = best.values, ids.gather(1, best.indices)
    return ids, values


def _side_by_side(part: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(ranks.size())]
    dist.all_gather(parts, part.contiguous(), group=ranks)
    return torch.cat(parts, dim=1)


# -- hidden states -----------------------------------------------------------------------------------------------------
@contextmanager
def record_hidden(
    trainer: Trainer, micro: Sequence[ScoreMicroBatch], states: Mapping[int, torch.Tensor]
) -> Iterator[None]:
    """Writes the wanted states of this rank's layers and tokens, item by item, while the context is open.

    ``states`` layer -> [H, d], zeros elsewhere, so that the replica's ranks add up. Layer 0 is the embedding's output,
    layer l that of the model's l-th layer, before the final norm.
    """
    tensor, sequence = trainer.context.groups.tp, trainer.context.config.sequence
    seen = dict.fromkeys(states, 0)

    def hook(layer: int) -> Callable[[torch.nn.Module, Any, Any], None]:
        def record(module: torch.nn.Module, args: Any, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            mb = micro[seen[layer]]
            seen[layer] += 1
            if not sequence and tensor.rank():
                return  # every tensor-parallel rank holds every token: one of them tells
            values = values.squeeze(1)
            at = mb.reads.hidden - (tensor.rank() * len(values) if sequence else 0)
            here = (at >= 0) & (at < len(values))
            states[layer][mb.reads.hidden_item[here]] = values[at[here]].float()

        return record

    handles = []
    for chunk in trainer.chunks if states else ():
        model = unwrap(chunk)
        if 0 in states and model.pre_process:
            handles.append(model.embedding.register_forward_hook(hook(0)))
        for module in model.modules():
            if isinstance(module, TransformerLayer) and module.layer_number in states:
                handles.append(module.register_forward_hook(hook(module.layer_number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
