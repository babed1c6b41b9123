"""The forward over a packed micro-batch that training, scoring and evaluation share, and a recorder of its routing.

Invariants (``tests/models/test_forward.py``):

1. Packed logits equal those of the sequences run one by one, and those of ``transformers`` (1e-5 in fp32).
2. An empty micro-batch (no tokens) runs forward and backward, enters every collective, and gives zero gradients.
3. Recorded experts are the ones the forward used, the larger probability first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from megatron_ext.models import cpu_platform
from megatron_ext.models.packing import PackedBatch, SharedTokens, pack

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.moe.router import TopKRouter


def unwrap(chunk: torch.nn.Module) -> GPTModel:
    """The ``GPTModel`` inside Megatron's DDP and precision wrappers."""
    while not isinstance(chunk, GPTModel):
        inner = chunk.module
        if not isinstance(inner, torch.nn.Module):
            raise TypeError(f"{type(chunk).__name__} wraps no GPTModel")
        chunk = inner
    return chunk


def vocab_of(chunk: torch.nn.Module) -> int:
    """Ids of the model that a chunk is part of; what its logits have beyond them is padding (``models.vocab``)."""
    return int(unwrap(chunk).vocab_rows.true)


def packed_logits(
    chunk: torch.nn.Module,
    ids: torch.Tensor,
    position_ids: torch.Tensor,
    cu_seqlens: torch.Tensor,
    batch: PackedBatch | None = None,
    shared: SharedTokens | None = None,
    run: object = None,
) -> torch.Tensor:
    """Logits [T, V / tp] of a packed micro-batch on the last pipeline stage, hidden states [T', 1, H] on earlier ones.

    ``ids`` and ``position_ids`` int64 [T], ``cu_seqlens`` [S + 1] with ``cu_seqlens[-1] == T`` (times the
    context-parallel size, where a rank passes its zigzag share). Positions must restart at 0 with every sequence:
    that is what RoPE uses. ``batch = pack(cu_seqlens)`` may be passed to share its plan between forwards over the same
    micro-batch. ``chunk`` may be wrapped in DDP. With ``shared`` the ids, positions and logits are those of its U
    distinct tokens, while ``cu_seqlens`` still covers all T places (local attention, no context parallelism). ``run``
    names this forward at the layers (``moe.tap.MicroRun``). Columns of ids from ``vocab_of(chunk)`` on are padding:
    whoever reads logits leaves them out.
    """
    model, tokens = unwrap(chunk), ids.numel()
    filler = _filler(tokens, model.config.tensor_model_parallel_size, model.config.context_parallel_size)
    if filler:
        share = torch.arange(filler, device=ids.device)
        ids = torch.cat([ids, torch.zeros_like(share)])
        position_ids = torch.cat([position_ids, share])
        end = cu_seqlens[-1:] + filler * model.config.context_parallel_size
        batch = pack(torch.cat([cu_seqlens, end]), None if shared is None else shared.extended(filler))
    elif batch is None:
        batch = pack(cu_seqlens, shared)
    if run is not None:
        batch = replace(batch, run=run)
    out = chunk(ids.unsqueeze(0), position_ids.unsqueeze(0), None, packed_seq_params=batch)
    return out.squeeze(0)[:tokens] if model.post_process else out


def _filler(tokens: int, tensor: int, context: int) -> int:
    """Tokens of an extra sequence that this rank's share needs: Megatron takes no empty forward, and sequence
    parallelism only multiples of its size. Nothing of it is returned, so no gradient reaches it."""
    if tokens == 0:
        return 2 * tensor
    short = -tokens % tensor
    return short + tensor if context > 1 and short % 2 else short


def moe_layers(chunk: torch.nn.Module) -> list[int]:
    """Numbers (from 0) of the whole model's MoE layers, whichever of them this chunk holds."""
    config = unwrap(chunk).config
    if config.num_moe_experts is None:
        return []
    return [layer for layer, moe in enumerate(config.moe_layer_freq) if moe]


@dataclass
class Routing:
    """Experts of the recorded forwards: ``by_layer[layer]`` holds one int64 [T, k] a forward, the larger probability
    first, by the number of the layer in the whole model (from 0)."""

    by_layer: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def experts(self) -> torch.Tensor:
        """int64 [T, L_moe, k] of exactly one recorded forward, layers in order."""
        once = [forwards[0] for _, forwards in sorted(self.by_layer.items()) if len(forwards) == 1]
        if not once or len(once) != len(self.by_layer):
            raise ValueError("record exactly one forward of a model with MoE layers")
        return torch.stack(once, dim=1)


@contextmanager
def record_routing(chunks: Sequence[torch.nn.Module]) -> Iterator[Routing]:
    """Records which experts the routers of ``chunks`` choose while the context is open. Costs one top-k a layer.

    A rank sees its own layers, and of the tokens its share: under context parallelism, and under tensor parallelism
    with sequence parallelism. ``training.ranks.replica.whole_routing`` puts the shares together.
    """
    routing = Routing()

    def hook(router: TopKRouter, args: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        probs, chosen = output
        # A chosen expert's probability may underflow to 0, so rank the others below it.
        ranked = torch.where(chosen, probs.detach(), -1.0)
        routing.by_layer.setdefault(router.layer_number - 1, []).append(ranked.topk(router.topk, dim=-1).indices)

    handles = [
        module.register_forward_hook(hook)
        for chunk in chunks
        for module in chunk.modules()
        if isinstance(module, TopKRouter)
    ]
    try:
        yield routing
    finally:
        for handle in handles:
            handle.remove()
