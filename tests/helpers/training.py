"""A model small enough for hundreds of optimizer steps in a test, with its trainer, and random batches for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import torch

from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.losses.aggregation import token_weights
from megatron_ext.losses.policy import ClipLoss
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.moe.protocol import RouterPolicy
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.packing import pack
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows

TINY = HFConfig(
    family="qwen3_moe",
    vocab=112,
    hidden=32,
    layers=2,
    heads=2,
    kv_heads=1,
    head_dim=16,
    intermediate=48,
    max_position_embeddings=256,
    rope_theta=10000.0,
    tie_word_embeddings=True,
    num_experts=4,
    top_k=2,
    moe_intermediate=24,
    norm_topk_prob=True,
)
BACKEND = resolve_backend(BackendConfig(device="cpu"))
TERMS: Mapping[str, LossTerm] = {"policy": ClipLoss(clip_low=0.2, clip_high=0.28)}


@contextmanager
def one_rank() -> Iterator[ParallelContext]:
    """Process groups of a single rank, for the tests of one module."""
    torch.set_num_threads(1)
    context = initialize(ParallelConfig(), BACKEND, seed=1)
    try:
        yield context
    finally:
        shutdown(context)


def plain_model(context: ParallelContext, seed: int = 1) -> torch.nn.Module:
    """The bare model with the weights of ``make_trainer(seed=seed)``: what a gradient is compared with."""
    model = ModelConfig(hf_config="", max_context=256)
    return build_model(TINY, model, context.config, BACKEND, TrainedRouter().config_overrides(), seed)[0]


def plain_gradients(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Gradients that autograd left on a bare model, named as ``gradients`` names them."""
    return {f"0:module.{name}": p.grad for name, p in chunk.named_parameters() if p.grad is not None}


def make_trainer(
    context: ParallelContext,
    *,
    seed: int = 1,
    hf: HFConfig = TINY,
    router: RouterPolicy | None = None,
    temperature: float = 1.0,
    **optimizer: Any,
) -> Trainer:
    """A trainer with fresh weights of ``seed``; ``optimizer`` are fields of ``OptimizerConfig``."""
    policy = TrainedRouter() if router is None else router
    model = ModelConfig(hf_config="", max_context=256)
    chunks = build_model(hf, model, context.config, BACKEND, policy.config_overrides(), seed)
    policy.apply(chunks)
    wrapped, megatron = wrap(chunks, OptimizerConfig(**({"clip_grad": 0.0} | optimizer)), context.config, BACKEND)
    return Trainer(wrapped, megatron, context, temperature=temperature, router=policy)


def micro_of(
    batch: TrajectoryBatch,
    rows: Rows,
    *,
    cap: int = 4096,
    members: Sequence[int] | None = None,
    context: tuple[int, int] = (1, 0),
) -> list[MicroBatch]:
    """Micro-batches of the rows (all, or ``members`` in that order) under ``cap`` tokens; ``context`` is the size of
    the context-parallel group and the rank whose share is wanted."""
    order = np.arange(rows.num_rows) if members is None else np.asarray(members, dtype=np.int64)
    size, rank = context
    plan = pack(rows.lengths[order], cap=cap, context=size)
    build = partial(build_microbatch, batch, rows, select=rows.mask, context_size=size, context_rank=rank)
    return [build(order[part].tolist()) for part in plan.microbatches[0]]


def random_inputs(batch: TrajectoryBatch, seed: int = 0) -> TokenInputs:
    """Loss inputs with random advantages; old log-probs near those of a fresh model, so that ratios are clipped for
    some tokens and not for others."""
    rng = np.random.default_rng(seed)
    size = batch.num_tokens

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.float32))

    return TokenInputs(
        old_logp=column(rng.normal(-np.log(TINY.vocab), 0.3, size)),
        rollout_logp=column(np.asarray(batch.rollout_logp).copy()),
        advantage=column(rng.normal(size=size)),
        weight=column(token_weights(batch, "token_mean")),
    )


def rows_of(batch: TrajectoryBatch) -> Rows:
    return make_rows(batch)


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Gradients of the last update, by parameter (before clipping, which is off here)."""
    found: dict[str, torch.Tensor] = {}
    for number, chunk in enumerate(trainer.chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.requires_grad:
                found[f"{number}:{name}"] = vars(parameter)["main_grad"].detach().clone()
    return found


def flat(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """All tensors as one float64 vector, in the order of their names."""
    return torch.cat([tensors[name].double().reshape(-1) for name in sorted(tensors)])


def relative(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> float:
    """``|a - b| / |b|`` over everything."""
    assert a.keys() == b.keys()
    return float((flat(a) - flat(b)).norm() / flat(b).norm())


def parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters and buffers."""
    return {
        f"{number}:{name}": tensor.detach().clone()
        for number, chunk in enumerate(trainer.chunks)
        for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]
    }


def moments(trainer: Trainer) -> list[torch.Tensor]:
    """Copies of everything tensor-valued in the optimizer's state, in a fixed order."""
    found: list[torch.Tensor] = []

    def walk(node: Any) -> None:
        if isinstance(node, torch.Tensor):
            found.append(node.detach().clone())
        elif isinstance(node, Mapping):
            for key in sorted(node, key=str):
                walk(node[key])
        elif isinstance(node, (list, tuple)):
            for item in node:
                walk(item)

    walk(trainer.optimizer.state_dict())
    return found


def identical(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
