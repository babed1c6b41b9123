"""Every parallel dimension once, on two gloo ranks of this machine: the same logits and gradients as one rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from megatron_ext.config.schema import BackendConfig, ModelConfig, ParallelConfig
from megatron_ext.models.hf_config import HFConfig

LENGTHS = (16, 8, 28, 12)
LAYOUTS = {
    "single": ParallelConfig(),
    "context": ParallelConfig(context=2),
    "tensor": ParallelConfig(tensor=2, sequence=True, expert_tensor=2),
    "tensor_expert": ParallelConfig(tensor=2, sequence=True, expert=2),
    "expert": ParallelConfig(expert=2),
}


def _worker(rank: int, folder: str, hf: HFConfig) -> None:
    torch.set_num_threads(1)
    from megatron_ext.models import cpu_platform
    from megatron_ext.models.attention import zigzag
    from megatron_ext.models.backends import resolve_backend
    from megatron_ext.models.build import build_model
    from megatron_ext.models.forward import packed_logits
    from megatron_ext.models.hf_map import Layout, rank_plan
    from megatron_ext.models.hf_weights import place_of
    from megatron_ext.models.parallel import initialize, shutdown

    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    backend = resolve_backend(BackendConfig(device="cpu"))

    # Uneven collectives against a plain computation.
    mine = torch.arange(6.0).view(3, 2) + rank if rank else torch.ones(1, 2)
    outs = [torch.empty(1, 2), torch.empty(3, 2)]
    cpu_platform.all_gather_uneven(outs, mine, dist.group.WORLD)
    assert torch.equal(outs[0], torch.ones(1, 2)) and torch.equal(outs[1], torch.arange(6.0).view(3, 2) + 1)
    out = torch.empty(3 if rank else 1, 2)
    cpu_platform.reduce_scatter_uneven(
        out, [torch.ones(1, 2) * (rank + 1), torch.ones(3, 2) * (rank + 3)], dist.group.WORLD
    )
    assert torch.equal(out, torch.full_like(out, 7.0 if rank else 3.0))

    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, hf.vocab, (sum(LENGTHS),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    cu = torch.tensor([0, *LENGTHS]).cumsum(0)
    results: dict[str, Any] = {}
    for name, config in LAYOUTS.items():
        context = initialize(config, backend, seed=1)
        model = ModelConfig(hf_config="", max_context=64)
        chunk = build_model(hf, model, config, backend, seed=11)[0]
        rows = torch.arange(len(ids))
        if config.context > 1:
            starts = cu[:-1].tolist()
            shares = [a + zigzag(n, 2, rank, ids.device) for a, n in zip(starts, LENGTHS, strict=True)]
            rows = torch.cat(shares)
        logits = packed_logits(chunk, ids[rows], positions[rows], cu)
        first = context.groups.tp.rank() * logits.size(1)
        weight = torch.randn(len(ids), hf.vocab, generator=torch.Generator().manual_seed(4))
        (logits * weight[rows, first : first + logits.size(1)]).sum().backward()
        layout, at = place_of([chunk])
        grads = {p.param: dict(chunk.named_parameters())[p.param].grad for p in rank_plan(hf, layout, at)}
        results[name] = {"rows": rows, "first": first, "logits": logits.detach(), "grads": grads, "at": at}
        shutdown(context)
        assert layout == Layout.of(config, vocab_multiple=model.vocab_multiple)
    torch.save(results, f"{folder}/rank{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    hf = HFConfig(
        family="qwen3_moe",
        vocab=96,
        hidden=32,
        layers=2,
        heads=4,
        kv_heads=2,
        head_dim=16,
        intermediate=48,
        max_position_embeddings=128,
        rope_theta=10000.0,
        num_experts=4,
        top_k=2,
        moe_intermediate=24,
        norm_topk_prob=True,
        mlp_only_layers=(0,),
    )
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(_worker, args=(str(folder), hf), nprocs=2, start_method="spawn")
    return [torch.load(Path(folder) / f"rank{r}.pt", weights_only=False) for r in range(2)]


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "single"])
def test_logits_equal_one_rank(results: list[dict[str, Any]], name: str) -> None:
    want = results[0]["single"]["logits"]
    covered = torch.zeros_like(want, dtype=torch.bool)
    for rank in results:
        got = rank[name]
        columns = slice(got["first"], got["first"] + got["logits"].size(1))
        torch.testing.assert_close(got["logits"], want[got["rows"], columns], rtol=0, atol=1e-5)
        covered[got["rows"], columns] = True
    assert bool(covered.all())


@pytest.mark.integration
@pytest.mark.slow
def test_gradients_under_context_parallelism_add_up(results: list[dict[str, Any]]) -> None:
    for name, want in results[0]["single"]["grads"].items():
        total = results[0]["context"]["grads"][name] + results[1]["context"]["grads"][name]
        assert float((total - want).norm()) <= 1e-5 * float(want.norm()), name
