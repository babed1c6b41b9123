"""HF tensors into a rank's Megatron parameters and back, by the plan of ``hf_map.py``.

Invariants (``tests/models/test_hf_weights.py``):

1. HF -> Megatron -> HF is bit-exact.
2. Loading writes every parameter exactly once, and reads of each HF tensor only the rows and columns the rank holds.
3. A model that does not fit its plan, or an HF configuration that does not fit the model, is refused before anything is
   written; the error names every parameter and field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Protocol

import torch

from megatron_ext.models.hf_compare import compare_model
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import Coordinate, Layout, ParamPlan, Piece, rank_plan
from megatron_ext.models.hf_tensors import WeightError, hf_shapes

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


class TensorReader(Protocol):
    """Source of HF tensors by name, read in slices."""

    def read(self, name: str, dim: int, start: int, stop: int) -> torch.Tensor:
        """``tensor[start:stop]`` along ``dim``, on the CPU."""


def assemble(param: ParamPlan, read: Callable[[str, int, int, int], torch.Tensor]) -> Iterator[torch.Tensor]:
    """The pieces of one parameter in order, reading each HF tensor once: its pieces are neighbours, so one slice."""
    spans: dict[str, tuple[int, int]] = {}
    for piece in param.pieces:
        low, high = spans.get(piece.name, (piece.start, piece.stop))
        spans[piece.name] = (min(low, piece.start), max(high, piece.stop))
    held = {name: read(name, param.pieces[0].dim, low, high) for name, (low, high) in spans.items()}
    for piece in param.pieces:
        yield held[piece.name].narrow(piece.dim, piece.start - spans[piece.name][0], piece.stop - piece.start)


def place_of(chunks: Sequence[GPTModel]) -> tuple[Layout, Coordinate]:
    """Layout and coordinate of the rank that built these chunks."""
    config, groups = chunks[0].config, chunks[0].pg_collection
    layout = Layout(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        virtual=len(chunks),
        expert=config.expert_model_parallel_size,
        expert_tensor=config.expert_tensor_parallel_size or 1,
        spec="local" if config.transformer_impl == "local" else "te",
        vocab_multiple=chunks[0].vocab_rows.multiple,
    )
    return layout, Coordinate(groups.tp.rank(), groups.pp.rank(), groups.ep.rank(), groups.expt_tp.rank())


def _parameters(chunks: Sequence[GPTModel], params: Sequence[ParamPlan]) -> list[torch.Tensor]:
    """The parameters of a plan, in its order; checks that plan and model agree on names and shapes."""
    have: dict[tuple[int, str], torch.Tensor] = {}
    for i, chunk in enumerate(chunks):
        biases = [(name, b) for name, b in chunk.named_buffers() if name.endswith(".router.expert_bias")]
        have |= {(i, name): tensor for name, tensor in [*chunk.named_parameters(), *biases]}
    want = {(param.chunk, param.param): param for param in params}
    errors = [
        f"parameter {name} of the model is not in the weight map" for _, name in sorted(have.keys() - want.keys())
    ]
    errors += [
        f"parameter {name} of the weight map is not in the model" for _, name in sorted(want.keys() - have.keys())
    ]
    errors += [
        f"parameter {key[1]}: model {tuple(have[key].shape)}, weight map {want[key].shape}"
        for key in want
        if key in have and tuple(have[key].shape) != want[key].shape
    ]
    if errors:
        raise WeightError("\n".join(errors))
    return [have[(param.chunk, param.param)] for param in params]


def load_tensors(chunks: Sequence[GPTModel], hf: HFConfig, reader: TensorReader) -> None:
    """Fills the chunks of this rank from HF tensors, reading only what it holds. No communication.

    The HF configuration is compared with the model's field by field first; a mismatch raises ``WeightError`` that names
    each field. On the host at most one parameter's HF tensors are held at a time.
    """
    mismatches = [line for chunk in chunks for line in compare_model(hf, chunk)]
    if mismatches:
        raise WeightError("the HF config and the model disagree:\n" + "\n".join(dict.fromkeys(mismatches)))
    layout, at = place_of(chunks)
    params = rank_plan(hf, layout, at)
    with torch.no_grad():
        for param, parameter in zip(params, _parameters(chunks, params), strict=True):
            row = 0
            for piece in assemble(param, reader.read):
                parameter[row : row + piece.size(0)].copy_(piece)
                row += piece.size(0)
            parameter[row:].zero_()  # padding of the vocabulary


Gather = Callable[[str, list[tuple[Piece, torch.Tensor]]], list[tuple[Piece, torch.Tensor]]]


def export_tensors(
    chunks: Sequence[GPTModel], hf: HFConfig, gather: Gather | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """(HF name, full tensor) of every weight, once, in the order of ``hf_shapes``.

    A tensor may share memory with a parameter: use it before the next optimizer step, or copy it. ``gather`` completes
    the pieces of one HF tensor from the other ranks; without it every tensor must be whole on this rank.
    """
    parts = held_pieces(chunks, hf)
    for name, shape in hf_shapes(hf).items():
        held = parts[name] if gather is None else gather(name, parts[name])
        yield name, join(name, shape, held)


def held_pieces(chunks: Sequence[GPTModel], hf: HFConfig) -> dict[str, list[tuple[Piece, torch.Tensor]]]:
    """HF name -> the pieces of it that this rank holds, views of its parameters, in the order of its plan."""
    layout, at = place_of(chunks)
    params = rank_plan(hf, layout, at)
    parts: dict[str, list[tuple[Piece, torch.Tensor]]] = {name: [] for name in hf_shapes(hf)}
    for param, parameter in zip(params, _parameters(chunks, params), strict=True):
        if is_copy(param, hf):
            continue
        row = 0
        for piece in param.pieces:
            rows = piece.stop - piece.start if piece.dim == 0 else parameter.size(0)
            parts[piece.name].append((piece, parameter.detach()[row : row + rows]))
            row += rows
    return parts


def is_copy(param: ParamPlan, hf: HFConfig) -> bool:
    """Whether a parameter is the last stage's copy of the tied embedding."""
    return param.param == "output_layer.weight" and hf.tie_word_embeddings


def join(name: str, shape: tuple[int, ...], held: list[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """The full HF tensor of its pieces (equal pieces of several ranks count once). Raises ``WeightError`` on a gap."""
    unique = {(piece.start, piece.stop): (piece, tensor) for piece, tensor in held}
    ordered = [unique[key] for key in sorted(unique)]
    end = 0
    for piece, _ in ordered:
        if piece.start != end:
            break
        end = piece.stop
    if not ordered or end != shape[ordered[0][0].dim]:
        raise WeightError(f"{name}: this rank holds only part of it; pass a gather over the model-parallel ranks")
    tensors = [tensor for _, tensor in ordered]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=ordered[0][0].dim)
