"""Which rank sends what when weights are published (numbers refer to ``megatron_ext/training/publish.py``)."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from megatron_ext.models.hf_map import Coordinate, Layout, Piece, rank_plan
from megatron_ext.models.hf_tensors import WeightError, hf_shapes
from megatron_ext.models.hf_weights import join
from megatron_ext.training.publish import routes
from tests.helpers.training import TINY

MODEL = replace(TINY, heads=4, kv_heads=2, layers=4)
LAYOUTS = {
    "data": Layout(),
    "tensor": Layout(tensor=2),
    "tensor, experts' tensor": Layout(tensor=2, expert_tensor=2),
    "expert": Layout(expert=4),
    "pipeline": Layout(pipeline=2),
    "interleaved": Layout(pipeline=2, virtual=2),
    "everything": Layout(tensor=2, pipeline=2, expert=2),
}


def places_of(layout: Layout, copies: int) -> tuple[Coordinate, ...]:
    """A rank for every coordinate that Megatron makes of the layout, ``copies`` times over: tensor fastest, then the
    data-parallel ranks, the pipeline last; experts lie across the ranks of a stage."""
    stage = max(layout.tensor, layout.expert * layout.expert_tensor) * copies
    return tuple(
        Coordinate(
            rank % layout.tensor,
            pipeline,
            rank // layout.expert_tensor % layout.expert,
            rank % layout.expert_tensor,
        )
        for pipeline, rank in product(range(layout.pipeline), range(stage))
    )


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("copies", [1, 2])
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_element_is_sent_once_by_the_first_rank_that_holds_it(name: str, copies: int, tied: bool) -> None:
    """Invariants 1 and 2."""
    layout, hf = LAYOUTS[name], replace(MODEL, tie_word_embeddings=tied)
    places = places_of(layout, copies)
    found = routes(hf, layout, places)
    assert list(found) == list(hf_shapes(hf))
    holders: dict[Piece, list[int]] = {}
    for rank, at in enumerate(places):
        for param in rank_plan(hf, layout, at):
            for piece in param.pieces:
                holders.setdefault(piece, []).append(rank)
    for tensor, sent in found.items():
        assert len({piece for _, piece in sent}) == len(sent) > 0
        assert all(piece.name == tensor and rank == min(holders[piece]) for rank, piece in sent)
        size = hf_shapes(hf)[tensor][sent[0][1].dim]
        assert sum(piece.stop - piece.start for _, piece in sent) == size, "no gap and nothing twice"
    senders = {rank for sent in found.values() for rank, _ in sent}
    assert 0 in senders and (name != "data" or senders == {0}), "data-parallel ranks have nothing to send"


def test_a_part_that_nobody_holds_is_a_gap() -> None:
    shape, name = hf_shapes(MODEL)["model.embed_tokens.weight"], "model.embed_tokens.weight"
    sent = routes(MODEL, Layout(tensor=2), (Coordinate(),))[name]
    with pytest.raises(WeightError, match="holds only part"):
        join(name, shape, [(piece, torch.zeros(piece.stop - piece.start, shape[1])) for _, piece in sent])


def test_routes_are_kept_by_what_decides_them() -> None:
    layout = LAYOUTS["expert"]
    first = routes(MODEL, layout, places_of(layout, 1))
    assert routes(replace(MODEL), replace(layout), places_of(layout, 1)) is first
    assert routes(MODEL, layout, places_of(layout, 2)) == first, "copies have nothing to send"
