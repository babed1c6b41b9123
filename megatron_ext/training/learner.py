"""The learner: what training does with a batch of trajectories on one rank, from rows to optimizer steps.

It knows nothing of who plays, of the run's folder or of checkpoints: a main loop, a replayed step and a bench all train
with it. Every rank goes through the same verbs in the same order.

Invariants (``tests/training/test_learner.py``, ``tests/integration/test_torchrun.py``):

1. An optimizer step's trajectories, weights and denominators are those of the global batch: how many ranks share it
   changes none of them.
2. Scores are those under the weights that open the batch: a batch's later optimizer steps do not change them.
3. No verb waits for another rank outside collectives that every rank enters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.config.schema import Config
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.credit.score_plan import ScorePlan, ScoreWeights
from megatron_ext.credit.scoring import ScoreReply
from megatron_ext.losses.aggregation import step_counts, weights
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.credit_step import REFERENCE, assign_credit, weights_table
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.measures.routing_metrics import RoutingLog, step_routing
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.planning import plan_microbatches
from megatron_ext.training.ranks.lockstep import agreed_count, filled
from megatron_ext.training.ranks.ranks import Gather, Ranks, alone
from megatron_ext.training.routing.routing import RoutingLosses
from megatron_ext.training.schedule import learning_rate
from megatron_ext.training.scoring.execution import execute_plan
from megatron_ext.training.scoring.microbatch import Recorded
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.training.step_replay.kept_step import StepScores
from megatron_ext.training.trainer import TokenInputs, Trainer, UpdateResult
from megatron_ext.trajectory import version as policy_version
from megatron_ext.trajectory.packing import deal_trajectories
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows


def only(batch: TrajectoryBatch, trajectories: NDArray[np.int64]) -> TrajectoryBatch:
    """The batch with token weight 0 outside ``trajectories``: those of one optimizer step."""
    chosen = np.zeros(batch.num_trajectories, dtype=bool)
    chosen[trajectories] = True
    return replace(batch, weight=np.where(chosen[batch.token_trajectory()], batch.weight, 0.0))


def step_weights(
    batch: TrajectoryBatch, trajectories: NDArray[np.int64], aggregation: str, gather: Gather = alone
) -> NDArray[np.float64]:
    """Token weights [T] of the optimizer step on ``trajectories`` of this rank's part and their like on the others:
    units are counted over all of them."""
    part = only(batch, trajectories)
    return weights(part, aggregation, reduce(add, gather(step_counts(part))))


@dataclass(kw_only=True)
class Learner:
    """The model that is trained and how. ``step`` counts finished rollout batches, ``updates`` optimizer steps;
    ``gather`` is over the data-parallel ranks; ``tracker`` is empty but on rank 0. ``reference`` are the weights of the
    reference policy, where one is needed; ``routing_log`` keeps the load of every expert, where it is kept."""

    config: Config
    hf: HFConfig
    trainer: Trainer
    ranks: Ranks
    gather: Gather
    pipeline: Pipeline
    terms: Mapping[str, LossTerm]
    tracker: TrackerSet
    clock: Phases
    routing_log: RoutingLog | None = None
    reference: list[torch.Tensor] | None = None
    incarnation: int = 0
    step: int = 0
    updates: int = 0
    routing: RoutingLosses | None = field(init=False)

    def __post_init__(self) -> None:
        self.routing = RoutingLosses.of(self.trainer)

    @property
    def steps_total(self) -> int:
        return self.config.run.steps

    @property
    def version(self) -> int:
        """Policy version of the current weights."""
        return policy_version.pack(self.incarnation, self.updates)

    def phase(self, name: str, total: int | None = None) -> Any:
        self.ranks.doing(name)
        return self.clock(name, total)

    # -- rows and scores -------------------------------------------------------------------------------------------
    def rows(self, batch: TrajectoryBatch) -> Rows:
        return make_rows(batch, self.config.batch.tokens_per_row)

    def microbatches(self, batch: TrajectoryBatch, rows: Rows, members: NDArray[np.int64]) -> list[MicroBatch]:
        """This rank's micro-batches of the rows ``members``: as many as every rank makes of its own."""
        context = self.trainer.context
        size, place = context.config.context, context.context_rank
        share = self.config.batch.share_prefixes
        cap = self.config.batch.tokens_per_microbatch
        plan = plan_microbatches(batch, rows, members, cap=cap, share_prefixes=share, context=size, replay=self._replay)
        build = partial(
            build_microbatch,
            batch,
            rows,
            select=rows.mask,
            share_prefixes=share,
            context_size=size,
            context_rank=place,
            replay=self._replay,
        )
        micro = [build(members[part]).to(context.device) for part in plan.microbatches[0]]
        return filled(micro, build(members[:0]).to(context.device), agreed_count(len(micro), context))

    def score(self, batch: TrajectoryBatch, rows: Rows) -> TokenScores | None:
        """Log-prob and entropy of the trained tokens under the weights that open the batch, and their log-prob under
        the reference policy where there is one; once a batch.

        None when nothing needs them before the update: the only optimizer step of a batch starts from those weights, so
        its own forward gives the same scores. Routing losses take their statistics from a forward of their own then.
        """
        if not self._scores_first and self.routing is None:
            return None
        micro = self.microbatches(batch, rows, np.arange(rows.num_rows))
        record = self._records_experts and self._scores_first
        if self.routing is None:
            scores = self.trainer.score(micro, batch.num_tokens, record_experts=record)
        else:
            scores = self.routing.open(batch, micro, record_experts=record)
        if not self._scores_first:
            return None
        if self.reference is None:
            return scores
        # What was recorded is the trained policy's choice: the reference policy's router chooses for itself.
        micro = [replace(mb, replay=None) for mb in micro]
        with self.trainer.weights(self.reference):
            return replace(scores, reference=self.trainer.score(micro, batch.num_tokens).logp)

    @property
    def _replay(self) -> ReplayRule | None:
        rollout = self.config.rollout
        return ReplayRule.of(self.hf, rollout.replay_missing) if rollout.replay_routing else None

    @property
    def _scores_first(self) -> bool:
        return self.config.batch.optimizer_steps_per_batch > 1 or self.reference is not None

    @property
    def _records_experts(self) -> bool:
        return any(self.hf.moe_pattern)

    def _on_device(self, values: NDArray[Any]) -> torch.Tensor:
        """Per-token values as float32 on the training device."""
        return torch.from_numpy(values.astype(np.float32)).to(self.trainer.context.device)

    # -- credit and update -----------------------------------------------------------------------------------------
    def assign_credit(self, batch: TrajectoryBatch) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Per-token advantages of this rank's groups, and what the pipeline reports of the whole step. The forwards
        that edits ask for run here, under the weights that open the batch."""
        return assign_credit(
            self.pipeline,
            batch,
            step=self.step,
            gather=self.gather,
            weights=self._score_weights(),
            run=partial(self._run_plan, batch),
        )

    def _score_weights(self) -> dict[str, ScoreWeights]:
        return weights_table(
            self.version,
            vocab_size=self.hf.vocab,
            layers=self.hf.layers,
            max_tokens=self.hf.max_position_embeddings,
            temperature=self.config.rollout.temperature,
            reference=self.reference is not None,
        )

    def _run_plan(self, batch: TrajectoryBatch, plan: ScorePlan) -> tuple[ScoreReply, ...]:
        snapshots = {} if self.reference is None else {REFERENCE: self.reference}
        cap = self.config.batch.tokens_per_microbatch
        with self.phase("scoring"):
            recorded = None if self._replay is None else Recorded(batch, self._replay)
            return execute_plan(self.trainer, plan, snapshots, tokens_per_microbatch=cap, recorded=recorded)

    def update(
        self,
        groups: StepGroups,
        batch: TrajectoryBatch,
        rows: Rows,
        scores: TokenScores | None,
        advantage: NDArray[np.float64],
    ) -> tuple[list[UpdateResult], TokenScores]:
        """The batch's optimizer steps, and the scores under the weights that opened it. A trajectory's rows stay in one
        step; which one is decided over all ranks' trajectories, and weights are counted over that step."""
        ref = None if scores is None or scores.reference is None else self._on_device(scores.reference)
        row_trajectory = batch.segment_trajectory()[rows.segment]
        results = []
        for number, (trajectories, weight) in enumerate(self.loss_weights(groups, batch)):
            members = np.flatnonzero(np.isin(row_trajectory, trajectories))
            inputs = TokenInputs(
                old_logp=None if scores is None else self._on_device(scores.logp),
                rollout_logp=self._on_device(batch.rollout_logp),
                advantage=self._on_device(advantage),
                weight=self._on_device(weight),
                ref_logp=ref,
            )
            total = self.steps_total * self.config.batch.optimizer_steps_per_batch
            lr = learning_rate(self.config.optimizer, self.updates, total)
            micro = self.microbatches(batch, rows, members)
            keep, record = scores is None, self._records_experts
            update = partial(self.trainer.update, keep_scores=keep, record_experts=record)
            with nullcontext() if self.routing is None else self.routing.attached(micro):
                results.append(update(micro, inputs, self.terms, lr))
            self.updates += 1
            self.tracker.advance(number + 1)
        own = results[0].scores if scores is None else scores
        assert own is not None, "a step that was not scored before keeps the scores of its update"
        return results, own

    def routing_metrics(self, batch: TrajectoryBatch, scores: TokenScores) -> dict[str, float]:
        """What the step's routers chose; the log keeps the load of every expert."""
        layers = [layer for layer, moe in enumerate(self.hf.moe_pattern) if moe]
        router = self.trainer.router
        sums = step_routing(
            batch,
            scores,
            self.hf.num_experts,
            layers,
            label=router.label,
            fields=router.measured_fields,
            replayed=self.config.rollout.replay_routing,
            gather=self.gather,
        )
        if sums is None:
            return {}
        if self.routing_log is not None:
            self.routing_log.write(self.step + 1, sums)
        return sums.metrics()

    def routing_losses_done(self, batch: TrajectoryBatch, rows: Rows) -> dict[str, float]:
        """Metrics of the batch's routing losses, and now and then of what their linearisation missed."""
        if self.routing is None:
            return {}
        if not self.routing.checks(self.step):
            return self.routing.close()
        with self.phase("scoring"):
            return self.routing.close(self.microbatches(batch, rows, np.arange(rows.num_rows)))

    def loss_weights(
        self, groups: StepGroups, batch: TrajectoryBatch
    ) -> Iterator[tuple[NDArray[np.int64], NDArray[np.float64]]]:
        """The batch's optimizer steps: this rank's trajectories of each, and the share of every token here in its loss,
        float64 [T]. A collective of the data-parallel ranks for each."""
        tokens, trained = groups.trajectories()
        count = min(self.config.batch.optimizer_steps_per_batch, int(np.count_nonzero(trained)))
        numbers = groups.numbers()
        for chosen in deal_trajectories(tokens, trained, count, seed=self.config.run.seed + self.step):
            trajectories = np.flatnonzero(np.isin(numbers, chosen))
            yield trajectories, step_weights(batch, trajectories, self.config.loss.aggregation, self.gather)

    def step_scores(
        self, groups: StepGroups, batch: TrajectoryBatch, scores: TokenScores, advantage: NDArray[np.float64]
    ) -> StepScores:
        """What is kept of this rank's tokens when the batch has been trained. Collective, as ``loss_weights``."""
        weight = np.zeros(batch.num_tokens)
        for _, share in self.loss_weights(groups, batch):
            weight += share
        return StepScores(advantage, weight, scores.logp, scores.entropy, scores.reference, self._scores_first)
