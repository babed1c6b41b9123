"""What ranks of a pool run to train in a layout, from a checkpoint and to one (``launch.benches._ranks.RankPool``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.losses.policy import ClipLoss
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints.checkpoint import SaveRequest
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.trainer import Trainer
from tests.helpers.records import random_batch
from tests.helpers.training import TINY, micro_of, random_inputs, rows_of

HF = replace(TINY, kv_heads=2, layers=4)  # divisible by every layout of the tests
FAMILIES: dict[str, HFConfig] = {
    "qwen3_moe": HF,
    "minimax_m2": replace(HF, family="minimax_m2", qk_norm="layer", rotary_dim=8),
    "glm4_moe": replace(
        HF, family="glm4_moe", qk_norm="none", qkv_bias=True, rotary_dim=8, shared_experts=1, mlp_only_layers=(0,)
    ),
}
TERMS = {"policy": ClipLoss(clip_low=0.2, clip_high=0.28)}


def trainer_of(context: ParallelContext, hf: HFConfig, seed: int, dtype: str = "float32") -> Trainer:
    backend = resolve_backend(BackendConfig(device="cpu", dtype=dtype))
    model = ModelConfig(hf_config="", max_context=256)
    chunks = build_model(hf, model, context.config, backend, TrainedRouter().config_overrides(), seed)
    wrapped, optimizer = wrap(chunks, OptimizerConfig(clip_grad=1.0, lr=1e-2), context.config, backend)
    return Trainer(wrapped, optimizer, context, temperature=1.0, router=TrainedRouter())


def train(trainer: Trainer, first: int, count: int) -> list[float]:
    """``count`` steps, the data of step s keyed by s and shared out over the data-parallel ranks; gradient norms."""
    batch = random_batch(3, groups=4)
    rows = rows_of(batch)
    context = trainer.context
    size, own = context.data_parallel_size, context.data_parallel_rank
    share = (context.config.context, context.context_rank)
    members = list(range(rows.num_rows))[own::size]
    norms = []
    for step in range(first, first + count):
        half = len(members) // 2  # as many micro-batches as an interleaved pipeline needs
        parts = (members[:half], members[half:])
        micro = [mb for part in parts for mb in micro_of(batch, rows, members=part, context=share)]
        norms.append(trainer.update(micro, random_inputs(batch, step), TERMS, lr=1e-2).grad_norm)
    return norms


def carry_out(
    family: str,
    layout: Mapping[str, Any],
    dtype: str,
    load: tuple[Path, int] | None,
    first: int,
    count: int,
    save: Path | None,
) -> tuple[str, Any]:
    context = initialize(ParallelConfig(**layout), resolve_backend(BackendConfig(device="cpu", dtype=dtype)), seed=1)
    try:
        trainer = trainer_of(context, FAMILIES[family], seed=1 if load is None else 9, dtype=dtype)
        if load is not None:
            (info,) = [c for c in checkpoint.list_checkpoints(load[0]) if c.step == load[1]]
            restored = checkpoint.load(info, "tiny", trainer)
            assert restored.states == {"n": load[1]} and restored.reference is not None
        norms = train(trainer, first, count)
        if save is not None:
            request = SaveRequest(first + count, "tiny", {"n": first + count}, reference=trainer.snapshot())
            checkpoint.save(save, request, trainer)
        return "ok", norms
    except checkpoint.CheckpointError as error:
        return "refused", str(error)
    finally:
        shutdown(context)
