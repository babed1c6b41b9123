from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_ext.config.schema import ModelConfig, ParallelConfig
from megatron_ext.models.backends import ResolvedBackend
from megatron_ext.models.build import BuildError, build_model, transformer_config, transformer_fields
from megatron_ext.models.forward import packed_logits
from megatron_ext.models.hf_config import HFConfig


def batch(hf: HFConfig, n: int = 24) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, hf.vocab, (n,), generator=torch.Generator().manual_seed(2))
    return ids, torch.arange(n), torch.tensor([0, n])


def gradients(chunk: Any, hf: HFConfig) -> dict[str, torch.Tensor]:
    chunk.zero_grad()
    packed_logits(chunk, *batch(hf)).logsumexp(-1).sum().backward()
    return {name: p.grad.clone() for name, p in chunk.named_parameters()}


def test_deterministic_under_a_seed(build: Any, moe: HFConfig) -> None:
    one, same, other = build(moe, seed=5)[0], build(moe, seed=5)[0], build(moe, seed=6)[0]
    for (name, a), (_, b) in zip(one.named_parameters(), same.named_parameters(), strict=True):
        assert torch.equal(a, b), name
    assert not torch.equal(one.output_layer.weight, other.output_layer.weight)
    assert all(torch.isfinite(p).all() for p in one.parameters())


def test_auxiliary_loss_is_exactly_off_at_zero_and_on_otherwise(build: Any, moe: HFConfig) -> None:
    off, on = build(moe)[0], build(moe, aux_loss_coefficient=0.1)[0]
    assert off.config.moe_router_load_balancing_type == "none" and off.config.moe_aux_loss_coeff == 0.0
    assert off.config.moe_z_loss_coeff is None
    routers = [name for name in gradients(off, moe) if ".router." in name]
    plain, balanced = gradients(off, moe), gradients(on, moe)
    assert all(not torch.equal(plain[name], balanced[name]) for name in routers)
    # Without it the router's gradient comes from the loss alone: zero loss, zero gradient.
    off.zero_grad()
    (0.0 * packed_logits(off, *batch(moe)).sum()).backward()
    assert all(not dict(off.named_parameters())[name].grad.any() for name in routers)
    on.zero_grad()
    (0.0 * packed_logits(on, *batch(moe)).sum()).backward()
    assert any(dict(on.named_parameters())[name].grad.any() for name in routers)


def test_routers_compute_in_fp32(rank: object, moe: HFConfig, backend: ResolvedBackend) -> None:
    low = replace(backend, dtype=torch.bfloat16)
    chunk = build_model(moe, ModelConfig(hf_config="", max_context=64), ParallelConfig(), low)[0]
    assert chunk.decoder.layers[1].mlp.experts.local_experts[0].linear_fc1.weight.dtype is torch.bfloat16
    seen: list[torch.dtype] = []
    router = chunk.decoder.layers[1].mlp.router
    router.register_forward_hook(lambda m, a, out: seen.append(out[0].dtype))
    with torch.no_grad():
        packed_logits(chunk, *batch(moe))
    assert seen == [torch.float32]


def test_overrides_reach_megatron_and_are_checked(build: Any, moe: HFConfig) -> None:
    assert build(moe, overrides={"moe_z_loss_coeff": 1e-3})[0].config.moe_z_loss_coeff == 1e-3
    with pytest.raises(BuildError, match="moe_zloss"):
        build(moe, overrides={"moe_zloss": 1.0})
    with pytest.raises(BuildError, match="moe_router_topk: HF 2, Megatron 3"):
        build(moe, overrides={"moe_router_topk": 3})


def test_impossible_builds_are_all_reported(rank: object, moe: HFConfig, backend: ResolvedBackend) -> None:
    parallel = ParallelConfig(tensor=4, expert=3)
    model = ModelConfig(hf_config="", max_context=4096, aux_loss_coefficient=-1.0)
    with pytest.raises(BuildError) as error:
        build_model(moe, model, parallel, backend)
    for text in ("kv_heads 2", "num_experts 8", "max_context 4096", "parallel.sequence=true", "aux_loss_coefficient"):
        assert text in str(error.value)


def test_configuration_of_other_layouts(moe: HFConfig, backend: ResolvedBackend) -> None:
    model = ModelConfig(hf_config="")
    interleaved = transformer_config(moe, model, ParallelConfig(pipeline=2, virtual_pipeline=2), backend)
    # gloo gets interleaved schedules silently wrong with batched point-to-point calls.
    assert interleaved.overlap_p2p_comm and not interleaved.batch_p2p_comm
    assert not transformer_config(moe, model, ParallelConfig(), backend).gradient_accumulation_fusion
    te = transformer_fields(moe, model, ParallelConfig(), replace(backend, layer_spec="te", device="cuda"))
    assert te["moe_grouped_gemm"] and te["apply_rope_fusion"] and not te["use_cpu_initialization"]
    assert te["transformer_impl"] == "transformer_engine"
