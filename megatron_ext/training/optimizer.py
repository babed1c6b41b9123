"""Wraps model chunks in Megatron's DistributedDataParallel and builds their Megatron optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron_ext.config.schema import OptimizerConfig, ParallelConfig
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import BackendError, ResolvedBackend


def wrap(
    chunks: Sequence[torch.nn.Module], config: OptimizerConfig, parallel: ParallelConfig, backend: ResolvedBackend
) -> tuple[list[torch.nn.Module], Any]:
    """DDP-wrapped chunks and their optimizer. Gradients are reduced in fp32; bf16 parameters keep fp32 masters.

    Gradients become whole (data, sequence and tied-embedding reductions) at the end of Megatron's schedule, which calls
    what is set on the chunks' configuration here. Raises ``BackendError`` for what cannot be had.
    """
    if parallel.distributed_optimizer and config.name != "adam":
        raise BackendError(
            f"parallel.distributed_optimizer=true shards Adam alone, and optimizer.name={config.name}; turn it off"
        )
    with cpu_platform.quiet_import():
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import USING_PYTORCH_OPTIMIZER, get_megatron_optimizer
        from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig

    # Megatron takes the fused optimizer whenever one is installed; what runs must be what was asked for.
    if (backend.optimizer == "torch") != USING_PYTORCH_OPTIMIZER:
        found = "torch's optimizer" if USING_PYTORCH_OPTIMIZER else "a fused optimizer (Transformer Engine or Apex)"
        raise BackendError(f"backend.optimizer={backend.optimizer}, but Megatron found {found} in this environment")
    ddp = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    wrapped: list[torch.nn.Module] = [DistributedDataParallel(c.config, ddp, c) for c in chunks]
    bf16 = backend.dtype is torch.bfloat16
    settings = MegatronOptimizerConfig(
        optimizer=config.name,
        lr=config.lr,
        min_lr=0.0,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        sgd_momentum=0.0,
        clip_grad=config.clip_grad,
        bf16=bf16,
        fp16=False,
        params_dtype=backend.dtype,
        use_distributed_optimizer=parallel.distributed_optimizer,
    )
    with cpu_platform.quiet_import():  # it imports more of Megatron on the way
        optimizer = get_megatron_optimizer(settings, wrapped)
    for chunk in chunks:
        chunk.config.finalize_model_grads_func = finalize_model_grads
        chunk.config.grad_scale_func = optimizer.scale_loss
    return wrapped, optimizer
