"""The publish path: trained weights to an engine, by HF name, under a policy version.

Invariants (``tests/training/test_publish.py``, ``tests/integration/test_torchrun.py``):

1. Every element of every HF tensor is sent by exactly one rank, the first that holds it; what rank 0 holds stays there.
2. Which rank sends what is a function of the model and the layout: no rank has to ask another.
3. The engine gets the same tensors whatever the layout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from megatron_ext.models.forward import unwrap
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import Coordinate, Layout, Piece, rank_plan
from megatron_ext.models.hf_tensors import hf_shapes, is_bias_of_router
from megatron_ext.models.hf_weights import export_tensors, held_pieces, is_copy, join, place_of
from megatron_ext.rollout.engine import EngineControl

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


def publish(engine: EngineControl | None, chunks: Sequence[torch.nn.Module], hf: HFConfig, version: int) -> None:
    """Sends every weight once; returns when the engine samples with them. Every rank calls it, rank 0 with one."""
    tensors = whole_tensors([unwrap(c) for c in chunks], hf)
    if engine is not None:
        engine.publish(tensors, version)
    else:
        for _ in tensors:
            pass


def whole_tensors(chunks: Sequence[GPTModel], hf: HFConfig) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor) of every weight on rank 0, in the order of ``hf_shapes``; nothing on the other ranks, who
    must run through it all the same: they send their part on the way.

    A tensor may share memory with a parameter: use it before the next optimizer step, or copy it.
    """
    if dist.get_world_size() == 1:
        yield from export_tensors(chunks, hf)
        return
    layout, at = place_of(chunks)
    places: list[Coordinate] = [at] * dist.get_world_size()
    dist.all_gather_object(places, at)
    rank, senders = dist.get_rank(), routes(hf, layout, tuple(places))
    config = chunks[0].config
    device = next(chunks[0].parameters()).device
    own = held_pieces(chunks, hf)
    for name, shape in hf_shapes(hf).items():
        mine = dict(own[name])
        held: list[tuple[Piece, torch.Tensor]] = []
        for sender, piece in senders[name]:
            if sender == rank == 0:
                held.append((piece, mine[piece]))
            elif sender == rank:
                dist.send(mine[piece].contiguous(), dst=0)
            elif rank == 0:
                size = [*shape]
                size[piece.dim] = piece.stop - piece.start
                dtype = torch.float32 if is_bias_of_router(name) else config.params_dtype
                buffer = torch.empty(size, dtype=dtype, device=device)
                dist.recv(buffer, src=sender)
                held.append((piece, buffer))
        if rank == 0:
            yield name, join(name, shape, held)


@lru_cache(maxsize=4)
def routes(hf: HFConfig, layout: Layout, places: tuple[Coordinate, ...]) -> dict[str, list[tuple[int, Piece]]]:
    """HF name -> (rank that sends it, piece), every piece once. ``places[rank]`` is each rank's coordinate."""
    first = {at: rank for rank, at in reversed(list(enumerate(places)))}
    found: dict[str, dict[Piece, int]] = {name: {} for name in hf_shapes(hf)}
    for at, rank in sorted(first.items(), key=lambda item: item[1]):
        for param in rank_plan(hf, layout, at):
            if not is_copy(param, hf):
                for piece in param.pieces:
                    found[piece.name].setdefault(piece, rank)
    return {name: [(rank, piece) for piece, rank in pieces.items()] for name, pieces in found.items()}
