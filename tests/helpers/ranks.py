"""What ranks of a pool run for tests that need several of them (``launch.benches._ranks.RankPool``)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.training.microbatch import build_microbatch
from megatron_ext.training.ranks.lockstep import agreed_count, rank_microbatches
from megatron_ext.training.ranks.replica import gather_scores, whole_metrics
from tests.helpers.records import random_batch
from tests.helpers.training import BACKEND, TERMS, TINY, make_trainer, random_inputs, rows_of


def _said(work: Any) -> str:
    """The error that ``work`` raised, or an empty text."""
    try:
        work()
    except ValueError as error:
        return str(error)
    return ""


def _context(**parallel: Any) -> ParallelContext:
    return initialize(ParallelConfig(**parallel), BACKEND, seed=1)


def disagreeing_counts() -> list[str]:
    """What update, score and metrics say when the second rank has one micro-batch more, or another metric."""
    context = _context()
    try:
        trainer, batch = make_trainer(context), random_batch(3)
        rows, inputs = rows_of(batch), random_inputs(batch)
        micro = rank_microbatches(batch, rows, context, cap=4096)
        micro += [build_microbatch(batch, rows, [], rows.mask)] * context.data_parallel_rank
        one = torch.ones(())
        sums = {"a" if context.data_parallel_rank else "b": (one, one)}
        return [
            _said(lambda: trainer.update(micro, inputs, TERMS, 1e-3)),
            _said(lambda: trainer.score(micro, batch.num_tokens)),
            _said(lambda: whole_metrics(sums, context)),
        ]
    finally:
        shutdown(context)


def agreed_counts(parallel: dict[str, Any]) -> int:
    """What ranks agree on that planned 1, 2, ... micro-batches."""
    context = _context(**parallel)
    try:
        return agreed_count(context.data_parallel_rank + 1, context)
    finally:
        shutdown(context)


def own_and_whole_scores() -> list[list[int]]:
    """Tokens with a score of this data-parallel rank, and of all."""
    context = _context()
    try:
        trainer, batch = make_trainer(context, hf=TINY), random_batch(3)
        own = trainer.score(rank_microbatches(batch, rows_of(batch), context, cap=4096), batch.num_tokens)
        whole = gather_scores(replace(own, reference=own.logp), context)
        assert whole.reference is not None and (whole.reference == whole.logp).all()
        return [[int(token) for token in scores.logp.nonzero()[0]] for scores in (own, whole)]
    finally:
        shutdown(context)
