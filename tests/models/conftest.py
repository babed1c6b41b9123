"""One rank of process groups for the whole folder, small models of both families, and their ``transformers`` twins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import BackendConfig, ModelConfig, ParallelConfig
from megatron_ext.models.backends import ResolvedBackend, resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown


@pytest.fixture(scope="session")
def backend() -> ResolvedBackend:
    return resolve_backend(BackendConfig(device="cpu"))


@pytest.fixture(scope="module")
def rank(backend: ResolvedBackend) -> Iterator[ParallelContext]:
    torch.set_num_threads(1)
    context = initialize(ParallelConfig(), backend, seed=1)
    yield context
    shutdown(context)


MOE = HFConfig(
    family="qwen3_moe",
    vocab=96,
    hidden=32,
    layers=4,
    heads=4,
    kv_heads=2,
    head_dim=16,
    intermediate=48,
    max_position_embeddings=128,
    rope_theta=10000.0,
    num_experts=8,
    top_k=2,
    moe_intermediate=24,
    norm_topk_prob=True,
    mlp_only_layers=(0,),
)
DENSE = replace(
    MOE, family="qwen3", num_experts=0, top_k=0, moe_intermediate=0, norm_topk_prob=False, mlp_only_layers=()
)


@pytest.fixture
def moe() -> HFConfig:
    return MOE


@pytest.fixture
def dense() -> HFConfig:
    return DENSE


Build = Callable[..., list[Any]]


@pytest.fixture
def build(rank: ParallelContext, backend: ResolvedBackend) -> Build:
    """``build(hf, seed=..., weights=..., overrides=..., **ModelConfig fields)`` -> chunks of this one rank."""

    def make(hf: HFConfig, seed: int = 1, overrides: dict[str, Any] | None = None, **fields: Any) -> list[Any]:
        model = ModelConfig(hf_config="", **({"max_context": 64} | fields))
        return build_model(hf, model, ParallelConfig(), backend, overrides, seed)

    return make


@pytest.fixture(scope="session")
def hf_twin(tmp_path_factory: pytest.TempPathFactory) -> Callable[[HFConfig], tuple[Any, Path]]:
    """``hf_twin(hf)`` -> a random ``transformers`` model of that architecture and the folder it was saved to."""
    from transformers import AutoConfig, AutoModelForCausalLM

    def make(hf: HFConfig) -> tuple[Any, Path]:
        raw = hf.to_dict()
        kind = raw.pop("model_type")
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **raw)).float().eval()
        with torch.no_grad():
            for p in model.parameters():
                # Norm weights away from 1 and matrices large enough that every term matters.
                p.add_(0.2 * torch.randn_like(p)) if p.dim() == 1 else p.mul_(6.0)
        folder = tmp_path_factory.mktemp("hf") / "model"
        model.save_pretrained(folder)
        return model, folder

    return make
