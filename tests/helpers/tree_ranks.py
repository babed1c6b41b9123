"""What ranks of a pool run to compare prefix trees with whole rows (``launch.benches._ranks.RankPool``)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.training.planning import plan_microbatches
from megatron_ext.training.ranks.lockstep import rank_microbatches
from megatron_ext.training.ranks.replica import gather_scores
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import make_rows
from tests.helpers.records import build, model, single, user
from tests.helpers.training import BACKEND, TERMS, TINY, gradients, make_trainer, random_inputs
from tests.helpers.trees import nested

# Divides by 2 in every dimension.
MODEL = replace(TINY, heads=4, kv_heads=2)


@dataclass(frozen=True)
class Compared:
    """Trees against whole rows in one layout: relative gaps of the losses and, per tensor, of the gradients; the
    absolute gap of log-probs; tokens routed to other experts. ``tokens`` this rank ran, without and with sharing, in
    ``microbatches``; ``odd`` of the shared ones had no multiple of two tokens. ``loss`` of the whole rows."""

    loss: float
    loss_gap: float
    gradient_gap: float
    logp_gap: float
    rerouted: int
    tokens: tuple[int, int]
    microbatches: int
    odd: int


def ragged_batch(groups: int = 3, seed: int = 11) -> TrajectoryBatch:
    """Each group a ragged nested tree: branches inside branches, rows that end inside others. Every token but a row's
    first few is trained, so that rows share trained tokens, which they weigh differently."""
    rng = np.random.default_rng(seed)
    trees: list[list[list[int]]] = []
    while len(trees) < groups:
        rows = [row for row in nested(rng, 3, 12, vocabulary=TINY.vocab) if len(row) > 4]
        if len(rows) >= 6:
            trees.append(rows)
    return build([tuple(single([user(row[:3]), model(row[3:])]) for row in rows) for rows in trees])


def compare(parallel: dict[str, Any], cap: int) -> Compared:
    """One update with and one without shared prefixes, under ``cap`` tokens a micro-batch."""
    context = initialize(ParallelConfig(**parallel), BACKEND, seed=1)
    try:
        return _compare(context, cap)
    finally:
        shutdown(context)


def _compare(context: ParallelContext, cap: int) -> Compared:
    trainer, batch = make_trainer(context, hf=MODEL), ragged_batch()
    rows, inputs = make_rows(batch), random_inputs(batch)
    losses, grads, scores, tokens, odd, count = [], [], [], [], 0, 0
    for share in (False, True):
        members = np.arange(rows.num_rows)
        plan = plan_microbatches(batch, rows, members, cap=cap, ranks=context.data_parallel_size, share_prefixes=share)
        micro = rank_microbatches(batch, rows, context, cap=cap, share_prefixes=share, plan=plan)
        result = trainer.update(micro, inputs, TERMS, 0.0, keep_scores=True, record_experts=True)
        assert result.scores is not None
        losses.append(result.loss)
        grads.append(gradients(trainer))
        scores.append(gather_scores(result.scores, context))
        tokens.append(sum(mb.num_tokens for mb in micro))
        odd, count = sum(mb.num_tokens % 2 for mb in micro), len(micro)
    gaps = [
        float((grads[1][name] - want).abs().max() / want.abs().max())
        for name, want in grads[0].items()
        if float(want.abs().max())  # an expert that no token was sent to
    ]
    return Compared(
        loss=losses[0],
        loss_gap=abs(losses[1] - losses[0]) / abs(losses[0]),
        gradient_gap=max(gaps),
        logp_gap=float(np.abs(scores[1].logp - scores[0].logp).max()),
        rerouted=_rerouted(*scores),
        tokens=(tokens[0], tokens[1]),
        microbatches=count,
        odd=odd,
    )


def _rerouted(one: TokenScores, two: TokenScores) -> int:
    assert one.experts is not None and two.experts is not None
    assert one.routed is not None and two.routed is not None
    assert np.array_equal(one.routed, two.routed) and one.routed.all()
    return int((one.experts != two.experts).any(axis=(1, 2)).sum())
