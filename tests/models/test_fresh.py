from __future__ import annotations

import math

import pytest
import torch

from megatron_ext.config.schema import ModelConfig
from megatron_ext.models.fresh import FreshReader
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_tensors import hf_shapes


def full(reader: FreshReader, hf: HFConfig, name: str) -> torch.Tensor:
    return reader.read(name, 0, 0, hf_shapes(hf)[name][0])


def test_fan_in_and_normal_scales(moe: HFConfig) -> None:
    fan = FreshReader(moe, ModelConfig(hf_config="", init="fan_in", embedding_std=0.08), seed=1)
    normal = FreshReader(moe, ModelConfig(hf_config="", init="normal"), seed=1)
    for name, shape in hf_shapes(moe).items():
        drawn = full(fan, moe, name)
        if len(shape) == 1:
            assert torch.equal(drawn, torch.ones(shape))
            continue
        want = 0.08 if "embed" in name else 1 / math.sqrt(shape[1])
        # 5 standard errors of a sample standard deviation.
        assert abs(float(drawn.std()) / want - 1) < 5 / math.sqrt(2 * drawn.numel()), name
        assert abs(float(full(normal, moe, name).std()) / 0.02 - 1) < 5 / math.sqrt(2 * drawn.numel()), name


def test_values_depend_on_seed_and_name_only(moe: HFConfig) -> None:
    a, b = (FreshReader(moe, ModelConfig(hf_config=""), seed=4) for _ in range(2))
    names = list(hf_shapes(moe))
    forward = {name: full(a, moe, name) for name in names}
    for name in reversed(names):
        assert torch.equal(full(b, moe, name), forward[name])
    q = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(b.read(q, 1, 8, 16), forward[q][:, 8:16])
    assert not torch.equal(forward[q], full(FreshReader(moe, ModelConfig(hf_config=""), seed=5), moe, q))
    assert not torch.equal(forward[q], forward[q.replace("layers.1", "layers.2")])


def test_unknown_init_is_refused(moe: HFConfig) -> None:
    with pytest.raises(ValueError, match="model.init='xavier'"):
        FreshReader(moe, ModelConfig(hf_config="", init="xavier"), seed=1)
