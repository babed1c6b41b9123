"""Invariants of ``models/hf_weights.py``, on models of one rank."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import (
    Piece,
)
from megatron_ext.models.hf_tensors import WeightError
from megatron_ext.models.hf_weights import export_tensors, join, load_tensors
from tests.helpers.hf_tensors import DictReader, random_tensors


@pytest.mark.parametrize("family", ["moe", "dense"])
@pytest.mark.parametrize("tied", [False, True])
def test_hf_to_megatron_to_hf_is_bit_exact(build: Any, request: pytest.FixtureRequest, family: str, tied: bool) -> None:
    hf = replace(request.getfixturevalue(family), tie_word_embeddings=tied)
    chunks = build(hf)
    full = random_tensors(hf)
    load_tensors(chunks, hf, DictReader(full))
    back = dict(export_tensors(chunks, hf))
    assert list(back) == list(full)
    for name, tensor in full.items():
        assert torch.equal(back[name], tensor), name


def test_loading_into_another_architecture_names_the_fields(build: Any, moe: HFConfig) -> None:
    chunks = build(moe)
    other = replace(moe, rms_eps=1e-5, top_k=1, norm_topk_prob=False, rope_theta=500.0)
    with pytest.raises(WeightError) as error:
        load_tensors(chunks, other, DictReader({}))
    for field in ("layernorm_epsilon", "moe_router_topk", "moe_router_pre_softmax", "rotary_base"):
        assert field in str(error.value)


def test_a_model_with_other_parameters_is_named(build: Any, moe: HFConfig) -> None:
    chunks = build(moe)
    chunks[0].decoder.register_parameter("adapter", torch.nn.Parameter(torch.zeros(1)))
    with pytest.raises(WeightError, match="parameter decoder.adapter of the model is not in the weight map"):
        load_tensors(chunks, moe, DictReader(random_tensors(moe)))


def test_a_part_without_gather_is_an_error(moe: HFConfig) -> None:
    with pytest.raises(WeightError, match="pass a gather"):
        join("x", (4, 2), [(Piece("x", 0, 0, 2), torch.zeros(2, 2))])
    with pytest.raises(WeightError, match="pass a gather"):
        join("x", (4, 2), [])
