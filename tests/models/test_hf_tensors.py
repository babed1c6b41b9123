"""Invariants of ``models/hf_tensors.py``, against the checkpoints that ``transformers`` saves."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from megatron_ext.models.hf_config import load_hf_config
from megatron_ext.models.hf_tensors import expert_names, hf_shapes, is_bias_of_router, is_next_token_module
from tests.helpers.hf_models import KINDS, saved_hf


@pytest.mark.parametrize("kind", list(KINDS))
def test_names_and_shapes_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    saved_hf(kind, tmp_path / "model")
    hf = load_hf_config(tmp_path / "model")
    tensors = load_file(tmp_path / "model" / "model.safetensors")
    shapes = hf_shapes(hf)
    assert shapes == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    biases = [name for name in shapes if is_bias_of_router(name)]
    assert len(biases) == (sum(hf.moe_pattern) if hf.expert_bias else 0)
    assert all(name.endswith(expert_names(hf).bias) for name in biases)
    assert not any(is_next_token_module(name, hf) for name in shapes)
