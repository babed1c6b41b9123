"""Process groups of a rank: ``torch.distributed``, Megatron's model-parallel groups and their random-number trackers.

Invariants (``tests/models/test_parallel.py``):

1. A single process needs no launcher, no port and no environment; several are started by ``torchrun`` or ``srun`` with
   the usual RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT.
2. A layout that does not fit the number of ranks is one clear error before any group is made.
3. ``shutdown`` undoes what ``initialize`` did, so that one process can hold one layout after another.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import ResolvedBackend

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.moe.router_replay import RouterReplay


class ParallelError(ValueError):
    """A layout that does not fit the ranks; one line per reason."""


@dataclass(frozen=True)
class ParallelContext:
    """What a rank knows about its place. ``groups`` is passed to the model, DDP, optimizer and schedules."""

    config: ParallelConfig
    backend: ResolvedBackend
    groups: ProcessGroupCollection
    rank: int
    world_size: int
    data_parallel_rank: int
    data_parallel_size: int
    owns_process_group: bool

    @property
    def context_rank(self) -> int:
        """Which share of every row is this rank's, of ``config.context``."""
        return self.groups.cp.rank()

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank's last model chunk gives the logits."""
        return self.groups.pp.rank() == self.groups.pp.size() - 1

    @property
    def device(self) -> torch.device:
        """Where this rank's tensors live."""
        return self.backend.torch_device

    @property
    def tensor_group(self) -> dist.ProcessGroup:
        """The tensor-parallel group: the ranks that share one copy of the vocabulary's logits."""
        return self.groups.tp


def check_layout(config: ParallelConfig, world_size: int) -> list[str]:
    """Reasons why ``world_size`` ranks cannot be laid out as ``config`` says; empty when they can."""
    sizes = {
        name: getattr(config, name)
        for name in ("tensor", "pipeline", "virtual_pipeline", "expert", "expert_tensor", "context")
    }
    errors = [f"parallel.{name} must be >= 1, got {size}" for name, size in sizes.items() if size < 1]
    if errors:
        return errors
    dense = config.tensor * config.pipeline * config.context
    if world_size % dense:
        errors.append(
            f"{world_size} ranks are not a multiple of parallel.tensor x pipeline x context = "
            f"{config.tensor} x {config.pipeline} x {config.context}"
        )
    experts = config.expert * config.expert_tensor * config.pipeline
    if world_size % experts:
        errors.append(
            f"{world_size} ranks are not a multiple of parallel.expert x expert_tensor x pipeline = "
            f"{config.expert} x {config.expert_tensor} x {config.pipeline}"
        )
    if config.virtual_pipeline > 1 and config.pipeline == 1:
        errors.append("parallel.virtual_pipeline > 1 needs parallel.pipeline > 1")
    if config.sequence and config.tensor == 1:
        errors.append("parallel.sequence needs parallel.tensor > 1")
    return errors


def initialize(
    config: ParallelConfig, backend: ResolvedBackend, seed: int, timeout_minutes: float = 30.0
) -> ParallelContext:
    """Joins the process group and makes the layout's groups. ``seed`` seeds every generator of this process.

    Called again after ``shutdown``, or with another layout over a process group that someone else holds, it makes the
    new layout. Raises ``ParallelError`` when the layout does not fit.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    world_size = dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"]) if launched else 1
    errors = check_layout(config, world_size)
    if errors:
        raise ParallelError("\n".join(errors))
    if backend.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    owns = not dist.is_initialized()
    if owns:
        timeout = timedelta(minutes=timeout_minutes)
        if launched and world_size > 1:
            dist.init_process_group(backend.communication, timeout=timeout)
        else:
            # Alone, ranks have nobody to find: an in-process store needs neither a port nor an address.
            dist.init_process_group(
                backend.communication, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout
            )
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tensor,
        pipeline_model_parallel_size=config.pipeline,
        virtual_pipeline_model_parallel_size=config.virtual_pipeline if config.virtual_pipeline > 1 else None,
        context_parallel_size=config.context,
        expert_model_parallel_size=config.expert,
        expert_tensor_parallel_size=config.expert_tensor,
        distributed_timeout_minutes=max(1, round(timeout_minutes)),
    )
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    return ParallelContext(
        config=config,
        backend=backend,
        groups=ProcessGroupCollection.use_mpu_process_groups(),
        rank=dist.get_rank(),
        world_size=world_size,
        data_parallel_rank=parallel_state.get_data_parallel_rank(),
        data_parallel_size=parallel_state.get_data_parallel_world_size(),
        owns_process_group=owns,
    )


def shutdown(context: ParallelContext) -> None:
    """Leaves the layout's groups, and the process group when ``initialize`` made it. What Megatron keeps for all models
    of a process goes too: the next one may have more layers."""
    RouterReplay.clear_global_router_replay_instances()
    destroy_moe_metrics_tracker()
    parallel_state.destroy_model_parallel()
    if context.owns_process_group and dist.is_initialized():
        dist.destroy_process_group()
