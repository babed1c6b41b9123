"""Invariants of ``models/hf_map.py``, for every layout, without a model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import (
    Coordinate,
    Layout,
    ParamPlan,
    Piece,
    check_divisible,
    chunk_layers,
    plan,
    rank_plan,
)
from megatron_ext.models.hf_tensors import WeightError
from megatron_ext.models.hf_weights import assemble, join
from tests.helpers.hf_tensors import DictReader, random_tensors


def shard(param: ParamPlan, reader: DictReader) -> torch.Tensor:
    return torch.cat(list(assemble(param, reader.read)))


LAYOUTS = [
    Layout(),
    Layout(tensor=2),
    Layout(expert=2),
    Layout(expert_tensor=2),
    Layout(expert=4, expert_tensor=2),
    Layout(pipeline=2),
    Layout(pipeline=2, virtual=2),
    Layout(tensor=2, pipeline=2, virtual=2, expert=2, expert_tensor=2),
    Layout(tensor=2, pipeline=4, expert=8, spec="te"),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_shards_of_every_rank_reassemble_bit_exact(moe: HFConfig, layout: Layout, tied: bool) -> None:
    hf = replace(moe, tie_word_embeddings=tied)
    full = random_tensors(hf)
    held: dict[str, list[tuple[Piece, torch.Tensor]]] = {name: [] for name in full}
    ranks = plan(hf, layout)
    assert len(ranks) == layout.tensor * layout.pipeline * layout.expert * layout.expert_tensor
    for params in ranks.values():
        reader = DictReader(full)
        for param in params:
            value = shard(param, reader)
            assert tuple(value.shape) == param.shape
            row = 0
            for piece in param.pieces:
                rows = piece.stop - piece.start if piece.dim == 0 else value.size(0)
                held[piece.name].append((piece, value[row : row + rows]))
                row += rows
            assert row == value.size(0)
        # Only what the rank holds is read.
        assert reader.elements == sum(torch.Size(param.shape).numel() for param in params)
    for name, tensor in full.items():
        assert torch.equal(join(name, tuple(tensor.shape), held[name]), tensor)
        copies: dict[tuple[int, int], torch.Tensor] = {}
        for piece, value in held[name]:
            assert torch.equal(copies.setdefault((piece.start, piece.stop), value), value)


def test_layers_fall_where_megatron_puts_them(build: Any, moe: HFConfig) -> None:
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    hf = replace(moe, layers=8)
    for pipeline, virtual in ((2, 1), (2, 2), (4, 2)):
        config = build(hf)[0].config
        config.pipeline_model_parallel_size = pipeline
        config.virtual_pipeline_model_parallel_size = virtual if virtual > 1 else None
        layout = Layout(pipeline=pipeline, virtual=virtual)
        for rank in range(pipeline):
            for chunk in range(virtual):
                ours = chunk_layers(hf, layout, rank, chunk)
                stage = chunk if virtual > 1 else None
                assert ours.start == get_transformer_layer_offset(config, vp_stage=stage, pp_rank=rank)
                assert len(ours) == 8 // (pipeline * virtual)


def test_tensor_shards_are_megatrons_partitions(moe: HFConfig) -> None:
    """Column-parallel weights are split by rows, row-parallel ones by columns, SwiGLU by halves of each."""
    reader = DictReader(random_tensors(moe))
    whole = {p.param: shard(p, reader) for p in rank_plan(moe, Layout(), Coordinate())}
    for t in range(2):
        parts = {p.param: shard(p, reader) for p in rank_plan(moe, Layout(tensor=2), Coordinate(tensor=t))}
        at = "decoder.layers.0"
        for name, dim in (("self_attention.linear_qkv", 0), ("self_attention.linear_proj", 1), ("mlp.linear_fc2", 1)):
            key = f"{at}.{name}.weight"
            assert torch.equal(parts[key], whole[key].chunk(2, dim)[t])
        gate, up = whole[f"{at}.mlp.linear_fc1.weight"].chunk(2)
        assert torch.equal(parts[f"{at}.mlp.linear_fc1.weight"], torch.cat([gate.chunk(2)[t], up.chunk(2)[t]]))
        assert torch.equal(
            parts["embedding.word_embeddings.weight"], whole["embedding.word_embeddings.weight"].chunk(2)[t]
        )


def test_qkv_interleaves_by_kv_group(moe: HFConfig) -> None:
    full = random_tensors(moe)
    (param,) = [
        p
        for p in rank_plan(moe, Layout(), Coordinate())
        if p.param.endswith("layers.1.self_attention.linear_qkv.weight")
    ]
    at = "model.layers.1.self_attn"
    q, k, v = (full[f"{at}.{x}_proj.weight"] for x in "qkv")
    want = torch.cat([q[:32], k[:16], v[:16], q[32:], k[16:], v[16:]])
    assert torch.equal(shard(param, DictReader(full)), want)


def test_names_of_the_transformer_engine_spec(moe: HFConfig) -> None:
    names = {p.param for p in rank_plan(moe, Layout(spec="te"), Coordinate())}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names
    assert "decoder.layers.1.pre_mlp_layernorm.weight" in names
    assert "decoder.layers.1.mlp.experts.linear_fc1.weight7" in names
    assert not any("input_layernorm" in name or "local_experts" in name for name in names)


def test_the_last_stage_of_a_tied_model_keeps_a_copy(moe: HFConfig) -> None:
    hf = replace(moe, tie_word_embeddings=True)
    last = {p.param: p for p in rank_plan(hf, Layout(pipeline=2), Coordinate(pipeline=1))}
    assert last["output_layer.weight"].pieces[0].name == "model.embed_tokens.weight"
    assert "output_layer.weight" not in {p.param for p in rank_plan(hf, Layout(), Coordinate())}


def test_layouts_that_do_not_divide_are_all_named(moe: HFConfig, dense: HFConfig) -> None:
    lines = check_divisible(moe, Layout(tensor=3, pipeline=3, expert=3, expert_tensor=5))
    assert len(lines) == 5  # heads, kv_heads, layers, experts, expert width (the vocabulary and dense width divide)
    with pytest.raises(WeightError, match="parallel.pipeline"):
        rank_plan(moe, Layout(pipeline=3), Coordinate())
    assert "no experts" in check_divisible(dense, Layout(expert=2))[0]
    assert Layout.of(ParallelConfig(tensor=2, virtual_pipeline=2)) == Layout(tensor=2, virtual=2)
