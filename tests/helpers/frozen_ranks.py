"""What ranks of a pool run to see that frozen routers stay what they are (``launch.benches._ranks.RankPool``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.parallel import initialize, shutdown
from megatron_ext.moe.policies import FrozenRouter, TrainedRouter, router_parameters
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.training.measures.router_change import router_change, router_start
from megatron_ext.training.optimizer import wrap
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


def _names(chunk: torch.nn.Module, number: int) -> list[str]:
    return [f"{number}:{name}" for name, _ in chunk.named_parameters()]
