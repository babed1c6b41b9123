"""What a running job holds, and the verbs that the main loop is written in.

Every rank has a ``Run`` and goes through the same verbs. What needs the engine, the driver, the journal or the clock is
done by rank 0, which alone has a ``Lead``; what it decides is told to all (``Run.led``).

Invariants (``tests/training/test_run_state.py``, ``tests/integration/test_torchrun.py``):

1. An optimizer step's trajectories, weights and denominators are those of the global batch: how many ranks share it
   changes none of them.
2. No verb waits for another rank outside ``led``, ``Ranks.meet`` and collectives that every rank enters.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial, reduce
from operator import add
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.config.schema import Config
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.credit.score_plan import ScorePlan, ScoreWeights
from megatron_ext.credit.scoring import ScoreReply
from megatron_ext.losses.aggregation import step_counts, weights
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.models.flops import Passes
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.rollout.journal import JournaledCoordinator
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.tracking.names import LOWER, lookup
from megatron_ext.training import checkpoint_files, kept_step
from megatron_ext.training.async_save import Saved, Saver
from megatron_ext.training.checkpoint import CheckpointError, SaveRequest
from megatron_ext.training.collect import Collector, StepGroups, take
from megatron_ext.training.credit_step import REFERENCE, assign_credit, weights_table
from megatron_ext.training.evaluate import evaluate
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.interrupt import InterruptFlag
from megatron_ext.training.kept_step import KeptStep, StepScores
from megatron_ext.training.lockstep import agreed_count, filled
from megatron_ext.training.memory import memory_metrics, resident_bytes
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.phases import Phases
from megatron_ext.training.planning import plan_microbatches
from megatron_ext.training.profiling import StepProfiler
from megatron_ext.training.publish import publish
from megatron_ext.training.ranks import Gather, Ranks, alone
from megatron_ext.training.routing import RoutingLosses
from megatron_ext.training.routing_metrics import RoutingLog, step_routing
from megatron_ext.training.sample_parts import joined_parts, part_of
from megatron_ext.training.schedule import learning_rate
from megatron_ext.training.score_execution import Recorded, execute_plan
from megatron_ext.training.scores import TokenScores
from megatron_ext.training.throughput import speed_metrics
from megatron_ext.training.trainer import TokenInputs, Trainer, UpdateResult
from megatron_ext.trajectory import version as policy_version
from megatron_ext.trajectory.packing import deal_trajectories
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows
from megatron_ext.trajectory.store import TrajectoryStore
from megatron_ext.trajectory.task import Task

T = TypeVar("T")


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


@dataclass
class Lead:
    """What rank 0 alone holds: who plays, who hands out, and what is looked at."""

    engine: EngineControl
    driver: DriverProcess
    coordinator: JournaledCoordinator
    source: TaskSource
    collector: Collector
    dev_tasks: Sequence[Task]
    test_tasks: Sequence[Task]


@dataclass
class Run:
    """One job as one rank sees it. Fields are set once by ``training.run``; ``step`` counts finished rollout batches,
    ``updates`` optimizer steps. ``gather`` is over the data-parallel ranks; ``tracker`` is empty but on rank 0."""

    config: Config
    folder: Path
    hf: HFConfig
    trainer: Trainer
    ranks: Ranks
    gather: Gather
    lead: Lead | None
    store: TrajectoryStore
    pipeline: Pipeline
    terms: Mapping[str, LossTerm]
    tracker: TrackerSet
    clock: Phases
    flag: InterruptFlag
    started: float
    profiler: StepProfiler = field(default_factory=StepProfiler)
    peak: float | None = None  # FLOP/s of all ranks, where it was measured
    incarnation: int = 0
    reference: list[torch.Tensor] | None = None
    step: int = 0
    updates: int = 0
    resumed: dict[int, int] = field(default_factory=dict)  # incarnation -> optimizer step it went on from
    seconds_before: float = 0.0
    saver: Saver = field(init=False)
    routing: RoutingLosses | None = field(init=False)
    _routing_log: RoutingLog = field(init=False)
    _measured: dict[str, float] = field(init=False, default_factory=dict)  # at the step that was finished last

    def __post_init__(self) -> None:
        self.routing = RoutingLosses.of(self.trainer)
        self._routing_log = RoutingLog(self.folder)
        self.saver = Saver(self.checkpoints, self.trainer, asynchronous=self.config.checkpoint.asynchronous)

    # -- control ---------------------------------------------------------------------------------------------------
    def led(self, work: Callable[[Lead], T]) -> T:
        """Rank 0 does ``work``; every rank returns its result."""
        return self.ranks.led(lambda: work(self._lead))

    @property
    def _lead(self) -> Lead:
        assert self.lead is not None, "only rank 0 does what is led"
        return self.lead

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

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

    def seconds(self) -> float:
        """Training time of the run, earlier incarnations included."""
        return self.seconds_before + time.monotonic() - self.started

    def goes_on(self) -> bool:
        """Whether there is another step to make, and time for it by rank 0's clock."""
        goes_on = self.step < self.steps_total and not self.led(lambda _: self.out_of_time())
        self.profiler.at(self.step + 1 if goes_on else None)
        return goes_on

    def out_of_time(self) -> bool:
        limit = self.config.run.max_minutes * 60
        return bool(limit) and self.seconds() >= limit

    # -- groups, rows and scores -----------------------------------------------------------------------------------
    def collect(self) -> StepGroups:
        """The groups of the next step: rank 0 offers, every rank takes what is at home on it."""
        offer = self.led(lambda lead: lead.collector.offer(self.step))
        context = self.trainer.context
        return take(
            offer,
            self.config,
            self.store,
            own_signal=self.pipeline.own_signal,
            rank=context.data_parallel_rank,
            ranks=context.data_parallel_size,
            reports=(lambda groups: []) if self.lead is None else self.lead.collector.reports,
        )

    def rows(self, batch: TrajectoryBatch) -> Rows:
        return make_rows(batch, self.config.batch.tokens_per_row)

    def microbatches(self, batch: TrajectoryBatch, rows: Rows, members: NDArray[np.int64]) -> list[MicroBatch]:
        """This rank's micro-batches of the rows ``members``: as many as every rank makes of its own."""
        context = self.trainer.context
        size, place = context.config.context, context.context_rank
        share = self.config.batch.share_prefixes
        cap = self.config.batch.tokens_per_microbatch
        plan = plan_microbatches(batch, rows, members, cap=cap, share_prefixes=share, context=size)
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
            total = self.config.run.steps * self.config.batch.optimizer_steps_per_batch
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
        """What the step's routers chose; rank 0 keeps the load of every expert beside the metrics."""
        layers = [layer for layer, moe in enumerate(self.hf.moe_pattern) if moe]
        replayed = self.config.rollout.replay_routing
        sums = step_routing(batch, scores, self.hf.num_experts, layers, replayed=replayed, gather=self.gather)
        if sums is None:
            return {}
        if self.lead is not None:
            self._routing_log.write(self.step + 1, sums)
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

    def keep_samples(
        self,
        groups: StepGroups,
        opened: int,
        scores: TokenScores,
        advantage: NDArray[np.float64],
        metrics: Mapping[str, float],
    ) -> None:
        """Keeps groups of the step that is being finished, where ``samples.every`` asks for it."""
        samples, step = self.config.samples, self.step + 1
        if groups.batch is None or not kept_step.due(samples, step, self.steps_total):
            return
        weight = np.zeros(groups.batch.num_tokens)
        for _, share in self.loss_weights(groups, groups.batch):
            weight += share
        kept = StepScores(advantage, weight, scores.logp, scores.entropy, scores.reference, self._scores_first)
        own = KeptStep(
            step, groups.batch, groups.train, groups.filtered, kept, opened, dict(self.resumed), dict(metrics)
        )
        if self.ranks.size == 1:
            kept_step.write_step(self.folder, own.first(samples.groups))
            return
        # Ranks of one replica hold the same groups; the first of each gives those that are asked for.
        replica = self.trainer.context.groups
        first = replica.tp.rank() == replica.cp.rank() == replica.pp.rank() == 0
        wanted = groups.train[: samples.groups or None]
        parts = self.ranks.gather(part_of(own, wanted) if first else None, "give its samples")
        if parts is not None:
            kept_step.write_step(self.folder, joined_parts([part for part in parts if part is not None]))

    def finish_step(self, groups: StepGroups) -> None:
        """Records what the step consumed and reports outcomes to the task source."""
        if self.lead is not None:
            self.lead.coordinator.consume(self.step + 1, groups.train, groups.filtered)
            for meta in groups.metas:
                task = self.lead.coordinator.state.groups[meta.group_id].task
                self.lead.source.report(task.task_id, float(np.mean(meta.success)), self.step)
        self.step += 1
        self._measured = {}

    # -- weights, evaluation, checkpoints --------------------------------------------------------------------------
    def publish(self) -> None:
        publish(None if self.lead is None else self.lead.engine, self.trainer.chunks, self.hf, self.version)

    def evaluation_due(self) -> bool:
        every = self.config.evaluation.every
        return bool(every) and self.step % every == 0 and self.step < self.steps_total

    def evaluate(self, tasks: Callable[[Lead], Sequence[Task]], name: str) -> EvalResult:
        """Rank 0's engine plays; every rank waits and gets the result."""
        return self.led(lambda lead: self._play(lead, tasks(lead), name))

    def _play(self, lead: Lead, tasks: Sequence[Task], name: str) -> EvalResult:
        samples = self.config.evaluation.samples
        with self.phase("evaluate", len(tasks) * (2 if samples else 1)):
            return evaluate(
                lead.driver,
                tasks,
                name,
                samples=samples,
                temperature=self.config.evaluation.temperature,
                progress=self.tracker.advance,
                check=self.check,
            )

    def check(self) -> None:
        """What waits on rank 0 call: ends them when a rank is lost or a signal has come."""
        self.ranks.check()
        self.flag.check()

    def evaluate_dev(self) -> None:
        result = self.evaluate(lambda lead: lead.dev_tasks, "dev")
        self._measured |= result.summary()
        self.tracker.log(self.step, result.summary())

    def log(self, metrics: Mapping[str, float]) -> None:
        passes = sum(self.gather(self.trainer.take_passes()), Passes())
        speed = speed_metrics(self.hf, passes, self.clock, metrics, self.peak)
        self._measured |= metrics
        engine = 0 if self.lead is None else sum(map(resident_bytes, self.lead.engine.pids()))
        memory = memory_metrics(self.trainer.context.device, engine, self.gather)
        spent = {**self.clock.take(), "progress/minutes": self.seconds() / 60}
        self.tracker.log(self.step, {**metrics, **speed, **memory, **spent})

    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        return self.step >= self.steps_total or (bool(every) and self.step % every == 0)

    def save(self) -> None:
        """Begins to save the finished step. Training may go on: what is saved is what there is now.

        A checkpoint that stands already is kept (a periodic save, then an interrupt): the same step is the same
        weights, and replacing it would open a moment without it.
        """
        if self.saver.under_way == self.step or self.ranks.led(self._is_saved):
            return
        config, best = self.config, self.config.checkpoint.best
        states = {
            "updates": self.updates,
            "resumed": self.resumed,
            "seconds": self.seconds(),
            "source": None if self.lead is None else self.lead.source.state_dict(),
            "draws": 0 if self.lead is None else self.lead.collector.source_draws,
            "reports": {} if self.lead is None else self.lead.collector.state_dict(),
            "edits": self.pipeline.state_dict(),
            "router": self.trainer.router.state_dict(),
        }
        request = SaveRequest(
            step=self.step,
            recipe=config.recipe,
            states=states,
            reference=self.reference,
            score=self._measured.get(best),
            keep=config.checkpoint.keep,
            best=None if not best else "lower" if lookup(best).better == LOWER else "higher",
        )
        self.saver.start(request)

    def settle_saves(self, *, wait: bool = False) -> list[Saved]:
        """Notes the saves that ended: one that failed costs a line of warning, one that stands frees the tokens of the
        steps it covers."""
        ended = self.saver.settle(wait=wait)
        for saved in ended if self.lead is not None else ():
            if saved.error:
                print(f"warning: {saved.error}", file=sys.stderr, flush=True)
            else:
                self._lead.coordinator.checkpointed(saved.step)
                self._sweep_store(self._lead)
        return ended

    def finish_saving(self) -> None:
        """Returns when the finished step is saved. Raises ``CheckpointError`` when it cannot be."""
        self.save()
        for saved in self.settle_saves(wait=True):
            if saved.step == self.step and saved.error:
                raise CheckpointError(saved.error)

    def _is_saved(self) -> bool:
        return any(kept.step == self.step for kept in checkpoint_files.list_checkpoints(self.checkpoints))

    def _sweep_store(self, lead: Lead) -> None:
        """Tokens consumed at or before the oldest checkpoint that a resume may start from are never asked for again.
        The best one may be older: who goes back to it has the rest generated anew."""
        kept = checkpoint_files.list_checkpoints(self.checkpoints)[-self.config.checkpoint.keep :]
        if not kept:
            return
        groups = lead.coordinator.state.groups.values()
        spent = {group.meta.ref for group in groups if group.meta is not None and 0 <= group.step <= kept[0].step}
        for ref in self.store.list():
            if ref in spent:
                self.store.delete(ref)

    def drop_undone(self) -> None:
        """Removes what was kept of steps after ``step``, which are made again: their samples, and their routing."""
        if self.lead is not None:
            kept_step.drop_after(self.folder, self.step)
            self._routing_log.drop_after(self.step)

    def tidy_store(self) -> None:
        """Removes what a killed run left in the store: files half written, and groups that the journal never heard of
        (they are generated again). Call it before anything is ordered."""
        if self.lead is None:
            return
        checkpoint_files.remove_unfinished(self.checkpoints)
        self.store.sweep()
        groups = self.lead.coordinator.state.groups.values()
        known = {group.meta.ref for group in groups if group.meta is not None}
        for ref in self.store.list():
            if ref not in known:
                self.store.delete(ref)
        self._sweep_store(self.lead)
