"""What ranks of a pool run for the tests of routing losses over layouts (``launch.benches._ranks.RankPool``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from launch.benches._layouts_rank import whole_tensors
from launch.benches._layouts_setup import MODEL, TERMS, make_batch
from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.moe.protocol import RouterPolicy, RoutingLossPolicy
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.ranks.lockstep import rank_microbatches
from megatron_ext.training.routing.routing import RoutingLosses
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.structured import with_operations
from tests.helpers.training import random_inputs, rows_of

STEPS = 2
BATCH_SEED = 3


@dataclass(frozen=True)
class Found:
    """Metrics of each step, gradients of each step by HF name, and the sums of the first step's statistics."""

    metrics: Sequence[Mapping[str, float]]
    grads: Sequence[Mapping[str, NDArray[Any]]]
    sums: NDArray[np.float64]


def batch_of() -> TrajectoryBatch:
    return with_operations(make_batch(BATCH_SEED))


def _trainer(context: ParallelContext, policy: RouterPolicy) -> Trainer:
    model = ModelConfig(hf_config="", max_context=128)
    chunks = build_model(MODEL, model, context.config, context.backend, policy.config_overrides(), 1)
    policy.apply(chunks)
    optimizer = OptimizerConfig(name="sgd", clip_grad=0.0, weight_decay=0.0)
    wrapped, megatron = wrap(chunks, optimizer, context.config, context.backend)
    return Trainer(wrapped, megatron, context, temperature=1.0, router=policy)


def routing_step(
    parallel: Mapping[str, Any],
    policy: RoutingLossPolicy | None,
    cap: int,
    rewarded: bool,
    share_prefixes: bool,
    recompute: bool,
    updates: int,
) -> Found | None:
    """Two batches with routing losses (``policy`` None: without), of ``updates`` optimizer steps each, on this rank;
    the first rank says what came of it. ``rewarded`` False: the policy loss has no gradient. A batch's later steps are
    in larger micro-batches, where that moves no row to another replica."""
    context = initialize(ParallelConfig(**parallel), resolve_backend(BackendConfig(device="cpu")), seed=1)
    try:
        trainer, batch = _trainer(context, TrainedRouter() if policy is None else policy), batch_of()
        if recompute:
            for module in trainer.chunks[0].modules():
                config = getattr(module, "config", None)
                if config is not None and hasattr(config, "recompute_granularity"):
                    config.recompute_granularity = "full"
                    config.recompute_method, config.recompute_num_layers = "uniform", 1
        rows = rows_of(batch)
        micro = rank_microbatches(batch, rows, context, cap=cap, share_prefixes=share_prefixes)
        inputs = random_inputs(batch)
        if not rewarded:
            inputs = replace(inputs, weight=torch.zeros(batch.num_tokens))
        terms = {"policy": TERMS["token"]()["policy"]}
        metrics: list[dict[str, float]] = []
        grads, sums = [], np.zeros(0)
        for number in range(STEPS):
            routing = None if policy is None else RoutingLosses(trainer, policy)
            if routing is None:
                trainer.update(micro, inputs, terms, 0.05)
                metrics.append({})
            else:
                routing.open(batch, micro)
                parts = [values.flatten() for values in routing.statistics.sums.values()]
                sums = torch.cat(parts).numpy() if number == 0 and parts else sums
                for update in range(updates):
                    later = update > 0 and context.data_parallel_size == 1
                    now = rank_microbatches(batch, rows, context, cap=3 * cap) if later else micro
                    with routing.attached(now):
                        trainer.update(now, inputs, terms, 0.05)
                metrics.append(routing.close(micro))
            grads.append(whole_tensors(trainer, MODEL, "grad"))
        everybody: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everybody, metrics)
        assert all(other == metrics for other in everybody), "ranks hold different metrics"
        return Found(metrics, grads, sums) if context.rank == 0 else None
    finally:
        shutdown(context)
