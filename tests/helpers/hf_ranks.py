"""What ranks of a pool run to load an HF folder in a layout, score with it, and write it again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megatron_ext.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.credit.score_plan import plan_scores
from megatron_ext.credit.scoring import ScoreRequest
from megatron_ext.models.build import build_model, transformer_config
from megatron_ext.models.forward import unwrap
from megatron_ext.models.hf_config import load_hf_config
from megatron_ext.models.hf_io import save_hf
from megatron_ext.models.parallel import initialize, shutdown
from megatron_ext.models.wide_norm import WideQueryNorm
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.training.credit_step import weights_table
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.publish import whole_tensors
from megatron_ext.training.scoring.execution import execute_plan
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.training import BACKEND, TINY

SEGMENTS = 6
MODEL = ModelConfig(hf_config="", max_context=256)


def some_batch() -> TrajectoryBatch:
    return random_batch(7)


def wide_norm(parallel: Mapping[str, Any], heads: int, head_dim: int) -> dict[str, np.ndarray]:
    """Output, and gradients of input and weight, of this rank's heads of a norm over all of them."""
    context = initialize(ParallelConfig(**parallel), BACKEND, seed=1)
    try:
        config = transformer_config(
            replace(TINY, heads=heads, kv_heads=heads, head_dim=head_dim), MODEL, context.config, BACKEND
        )
        generator = torch.Generator().manual_seed(2)
        x, weight, back = (torch.randn(size, generator=generator) for size in [(5, 1, heads, head_dim)] * 3)
        norm = WideQueryNorm(config, head_dim, eps=1e-6)
        norm.weight.data.copy_(weight[0, 0].flatten())
        size, rank = context.groups.tp.size(), context.groups.tp.rank()
        own = slice(rank * heads // size, (rank + 1) * heads // size)
        given = x[:, :, own].clone().requires_grad_()
        out = norm(given)
        out.backward(back[:, :, own])
        assert given.grad is not None and norm.weight.grad is not None
        return {"out": out.detach().numpy(), "dx": given.grad.numpy(), "dw": norm.weight.grad.numpy()}
    finally:
        shutdown(context)


def load_and_save(parallel: Mapping[str, Any], source: str, target: str) -> list[np.ndarray]:
    """Log-probs of the first segments under the weights of ``source``, as every rank holds them; ``target`` gets what
    the ranks hold."""
    context = initialize(ParallelConfig(**parallel), BACKEND, seed=1)
    try:
        hf = load_hf_config(source)
        model = ModelConfig(hf_config=source, weights=source, max_context=256)
        chunks = build_model(hf, model, context.config, BACKEND, {}, seed=3)
        wrapped, optimizer = wrap(chunks, OptimizerConfig(), context.config, BACKEND)
        trainer = Trainer(wrapped, optimizer, context, temperature=1.0, router=TrainedRouter())
        batch = some_batch()
        requests = []
        for segment in range(SEGMENTS):
            first, end = (int(batch.segment_tokens[segment + i]) for i in (0, 1))
            requests.append(ScoreRequest(segment, None, np.arange(first + 1, end)))
        table = weights_table(
            1,
            vocab_size=hf.vocab,
            layers=hf.layers,
            max_tokens=hf.max_position_embeddings,
            temperature=1.0,
            reference=False,
        )
        replies = execute_plan(trainer, plan_scores(requests, batch, table), {}, tokens_per_microbatch=80)
        tensors = whole_tensors([unwrap(chunk) for chunk in trainer.chunks], hf)
        if context.rank == 0:
            save_hf(Path(target), hf, tensors)
        else:
            assert not list(tensors), "rank 0 alone holds whole tensors"
        found = [reply.logp for reply in replies]
        assert all(logp is not None for logp in found)
        return [logp for logp in found if logp is not None]
    finally:
        shutdown(context)
