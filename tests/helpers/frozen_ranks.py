"""What ranks of a pool run to see what moves routers besides the policy loss (``launch.benches._ranks.RankPool``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.parallel import initialize, shutdown
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter, router_parameters
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.training.measures.router_change import router_change, router_start
from megatron_ext.training.microbatch import build_microbatch
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.planning import plan_microbatches
from megatron_ext.training.ranks.lockstep import rank_microbatches
from megatron_ext.training.trainer import Trainer
from tests.helpers.records import random_batch
from tests.helpers.training import TERMS, TINY, parameters, random_inputs, rows_of

# Divides by 2 in every dimension; sigmoid routing, so that its routers have expert biases.
MODEL = replace(
    TINY,
    family="minimax_m2",
    qk_norm="layer",
    tie_word_embeddings=False,
    heads=4,
    kv_heads=2,
    layers=4,
)


@dataclass(frozen=True)
class Moved:
    """Routers' tensors on this rank, those of them that changed, and other parameters that did not; and how far routers
    moved over all ranks (``moe/router_change``)."""

    routers: int
    changed: tuple[str, ...]
    still: tuple[str, ...]
    change: float


def train(parallel: Mapping[str, Any], policy: str, dtype: str, steps: int) -> Moved:
    """``steps`` optimizer steps with weight decay and a large learning rate."""
    backend = resolve_backend(BackendConfig(device="cpu", dtype=dtype))
    context = initialize(ParallelConfig(**parallel), backend, seed=1)
    try:
        router: RouterPolicy = FrozenRouter() if policy == "frozen" else TrainedRouter(bias_update_rate=0.01)
        model = ModelConfig(hf_config="", max_context=256)
        chunks = build_model(MODEL, model, context.config, backend, router.config_overrides(), 1)
        router.apply(chunks)
        wrapped, optimizer = wrap(chunks, OptimizerConfig(weight_decay=0.1, clip_grad=1.0), context.config, backend)
        trainer = Trainer(wrapped, optimizer, context, temperature=1.0, router=router)
        batch = random_batch(3, groups=4)
        own = {name: tensor.detach().clone() for name, tensor in router_parameters(wrapped)}
        before, start = parameters(trainer), router_start(wrapped)
        for step in range(steps):
            micro = rank_microbatches(batch, rows_of(batch), context, cap=100)
            assert trainer.update(micro, random_inputs(batch, step), TERMS, lr=1e-2).applied
        after = dict(router_parameters(wrapped))
        changed = [name for name, tensor in own.items() if not torch.equal(tensor, after[name].to(tensor.dtype))]
        learned = {name for chunk in range(len(wrapped)) for name in _names(wrapped[chunk], chunk)} - own.keys()
        still = [name for name in sorted(learned) if torch.equal(before[name], parameters(trainer)[name])]
        moved = router_change(wrapped, start, context)["moe/router_change"]
        return Moved(len(own), tuple(changed), tuple(still), moved)
    finally:
        shutdown(context)


def evened(parallel: Mapping[str, Any], members: int, cap: int) -> dict[str, NDArray[Any]]:
    """How an optimizer step on the first ``members`` rows moves this rank's expert biases, by layer, and the gradient
    that a load-balancing loss alone gives its routers. On one rank with the micro-batches of two, but for empty ones,
    which only count in the mean."""
    backend = resolve_backend(BackendConfig(device="cpu"))
    context = initialize(ParallelConfig(**parallel), backend, seed=1)
    try:
        policy = TrainedRouter(bias_update_rate=0.5)
        model = ModelConfig(hf_config="", max_context=256, aux_loss_coefficient=0.1)
        chunks = build_model(MODEL, model, context.config, backend, policy.config_overrides(), 1)
        policy.apply(chunks)
        wrapped, optimizer = wrap(chunks, OptimizerConfig(clip_grad=0.0), context.config, backend)
        trainer = Trainer(wrapped, optimizer, context, temperature=1.0, router=policy)
        batch = random_batch(3, groups=4)
        rows, chosen = rows_of(batch), np.arange(members)
        if context.world_size == 1:
            plan = plan_microbatches(batch, rows, chosen, cap=cap, ranks=2)
            parts = [part for rank in plan.microbatches for part in rank]
            micro = [build_microbatch(batch, rows, part, rows.mask) for part in parts if len(part)]
            share = len(micro) / len(parts)
        else:
            share = 1.0
            micro = rank_microbatches(batch, rows, context, cap=cap, members=chosen)
        inputs = random_inputs(batch)
        inputs = replace(inputs, weight=torch.zeros_like(inputs.weight))
        assert trainer.update(micro, inputs, TERMS, lr=0.0).applied
        found = {}
        for layer, router in trainer.tap.routers():
            found[f"{layer} bias"] = router.expert_bias.numpy().copy()
            found[f"{layer} gradient"] = router.weight.main_grad.numpy() * share
        return found
    finally:
        shutdown(context)


def _names(chunk: torch.nn.Module, number: int) -> list[str]:
    return [f"{number}:{name}" for name, _ in chunk.named_parameters()]
