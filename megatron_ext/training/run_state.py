"""What a running job holds, and the verbs that the main loop is written in."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.config.schema import Config
from megatron_ext.credit.pipeline import CreditError, Pipeline, open_view
from megatron_ext.losses.aggregation import token_weights
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.rollout.journal import JournaledCoordinator
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training import checkpoint
from megatron_ext.training.collect import Collector, StepGroups
from megatron_ext.training.evaluate import evaluate
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.interrupt import InterruptFlag
from megatron_ext.training.microbatch import MicroBatch, build_microbatch
from megatron_ext.training.phases import Phases
from megatron_ext.training.publish import publish
from megatron_ext.training.schedule import learning_rate
from megatron_ext.training.trainer import TokenInputs, TokenScores, Trainer, UpdateResult
from megatron_ext.trajectory import version as policy_version
from megatron_ext.trajectory.packing import pack, split_optimizer_steps
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows
from megatron_ext.trajectory.store import TrajectoryStore
from megatron_ext.trajectory.task import Task


def trained_trajectories(batch: TrajectoryBatch) -> NDArray[np.bool_]:
    """bool [J]: trajectories with a token to train."""
    return np.bincount(batch.token_trajectory()[batch.loss_mask], minlength=batch.num_trajectories) > 0


def only(batch: TrajectoryBatch, trajectories: NDArray[np.int64]) -> TrajectoryBatch:
    """The batch with token weight 0 outside ``trajectories``: those of one optimizer step."""
    chosen = np.zeros(batch.num_trajectories, dtype=bool)
    chosen[trajectories] = True
    return replace(batch, weight=np.where(chosen[batch.token_trajectory()], batch.weight, 0.0))


@dataclass
class Run:
    """One job on one rank. Fields are set once by ``training.run``; ``step`` counts finished rollout batches and
    ``updates`` optimizer steps."""

    config: Config
    folder: Path
    hf: HFConfig
    trainer: Trainer
    engine: EngineControl
    driver: DriverProcess
    coordinator: JournaledCoordinator
    source: TaskSource
    store: TrajectoryStore
    pipeline: Pipeline
    terms: Mapping[str, LossTerm]
    tracker: TrackerSet
    dev_tasks: Sequence[Task]
    test_tasks: Sequence[Task]
    clock: Phases
    flag: InterruptFlag
    started: float
    collector: Collector = field(init=False)
    reference: list[torch.Tensor] | None = None
    step: int = 0
    updates: int = 0
    resumed: dict[int, int] = field(default_factory=dict)  # incarnation -> optimizer step it went on from
    seconds_before: float = 0.0

    def __post_init__(self) -> None:
        self.collector = Collector(
            self.config,
            self.coordinator,
            self.source,
            self.driver,
            self.store,
            own_signal=self.pipeline.own_signal,
            check=self.flag.check,
            progress=self.tracker.advance,
        )

    # -- control ---------------------------------------------------------------------------------------------------
    @property
    def steps_total(self) -> int:
        return self.config.run.steps

    @property
    def version(self) -> int:
        """Policy version of the current weights."""
        return policy_version.pack(self.coordinator.state.incarnation, self.updates)

    def phase(self, name: str, total: int | None = None) -> Any:
        return self.clock(name, total)

    def seconds(self) -> float:
        """Training time of the run, earlier incarnations included."""
        return self.seconds_before + time.monotonic() - self.started

    def out_of_time(self) -> bool:
        limit = self.config.run.max_minutes * 60
        return bool(limit) and self.seconds() >= limit

    # -- rows and scores -------------------------------------------------------------------------------------------
    def rows(self, batch: TrajectoryBatch) -> Rows:
        return make_rows(batch, self.config.batch.tokens_per_row)

    def microbatches(self, batch: TrajectoryBatch, rows: Rows, members: NDArray[np.int64]) -> list[MicroBatch]:
        """This rank's micro-batches of the rows ``members``."""
        plan = pack(rows.lengths[members], cap=self.config.batch.tokens_per_microbatch)
        device = self.trainer.context.device
        share = self.config.batch.share_prefixes
        return [
            build_microbatch(batch, rows, members[mb], rows.mask, share_prefixes=share).to(device)
            for mb in plan.microbatches[0]
        ]

    def score(self, batch: TrajectoryBatch, rows: Rows) -> TokenScores | None:
        """Log-prob and entropy of the trained tokens under the weights that open the batch, and their log-prob under
        the reference policy where there is one; once a batch.

        None when nothing needs them before the update: the only optimizer step of a batch starts from those weights, so
        its own forward gives the same scores.
        """
        if self.config.batch.optimizer_steps_per_batch == 1 and self.reference is None:
            return None
        micro = self.microbatches(batch, rows, np.arange(rows.num_rows))
        scores = self.trainer.score(micro, batch.num_tokens, record_experts=self._records_experts)
        if self.reference is None:
            return scores
        with self.trainer.weights(self.reference):
            return replace(scores, reference=self.trainer.score(micro, batch.num_tokens).logp)

    @property
    def _records_experts(self) -> bool:
        # Interleaved pipeline chunks would report their layers out of order.
        return any(self.hf.moe_pattern) and len(self.trainer.chunks) == 1

    def _on_device(self, values: NDArray[Any]) -> torch.Tensor:
        """Per-token values as float32 on the training device."""
        return torch.from_numpy(values.astype(np.float32)).to(self.trainer.context.device)

    # -- credit and update -----------------------------------------------------------------------------------------
    def assign_credit(self, batch: TrajectoryBatch) -> tuple[NDArray[np.float64], dict[str, float]]:
        """Per-token advantages, and what the pipeline reports."""
        view = open_view(batch, step=self.step)
        asking = [name for name, requests in self.pipeline.requests(view).items() if requests]
        if asking:
            raise CreditError(
                f"credit edits {', '.join(asking)} ask for scoring forwards, which training does not run yet"
            )
        view, reports = self.pipeline.run(view)
        return view.advantage, {name: value for report in reports for name, value in report.metrics().items()}

    def update(
        self, batch: TrajectoryBatch, rows: Rows, scores: TokenScores | None, advantage: NDArray[np.float64]
    ) -> tuple[list[UpdateResult], TokenScores]:
        """The batch's optimizer steps, and the scores under the weights that opened it. A trajectory's rows stay in one
        step; weights are counted over that step."""
        count = min(self.config.batch.optimizer_steps_per_batch, int(np.count_nonzero(trained_trajectories(batch))))
        ref = None if scores is None or scores.reference is None else self._on_device(scores.reference)
        row_trajectory = batch.segment_trajectory()[rows.segment]
        results = []
        for number, trajectories in enumerate(
            split_optimizer_steps(batch, count, seed=self.config.run.seed + self.step)
        ):
            members = np.flatnonzero(np.isin(row_trajectory, trajectories))
            weight = token_weights(only(batch, trajectories), self.config.loss.aggregation)
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
            results.append(self.trainer.update(micro, inputs, self.terms, lr, keep_scores=keep, record_experts=record))
            self.updates += 1
            self.tracker.advance(number + 1)
        own = results[0].scores if scores is None else scores
        assert own is not None, "a step that was not scored before keeps the scores of its update"
        return results, own

    def finish_step(self, groups: StepGroups) -> None:
        """Records what the step consumed and reports outcomes to the task source."""
        self.coordinator.consume(self.step + 1, groups.train, groups.filtered)
        for meta in groups.metas:
            task = self.coordinator.state.groups[meta.group_id].task
            self.source.report(task.task_id, float(np.mean(meta.success)), self.step)
        self.step += 1

    # -- weights, evaluation, checkpoints --------------------------------------------------------------------------
    def publish(self) -> None:
        publish(self.engine, self.trainer.chunks, self.hf, self.version)

    def evaluation_due(self) -> bool:
        every = self.config.evaluation.every
        return bool(every) and self.step % every == 0 and self.step < self.steps_total

    def evaluate(self, tasks: Sequence[Task], name: str, samples: int) -> EvalResult:
        with self.phase("evaluate", len(tasks) * (2 if samples else 1)):
            return evaluate(
                self.driver,
                tasks,
                name,
                samples=samples,
                temperature=self.config.evaluation.temperature,
                progress=self.tracker.advance,
                check=self.flag.check,
            )

    def evaluate_dev(self) -> None:
        result = self.evaluate(self.dev_tasks, "dev", self.config.evaluation.samples)
        self.tracker.log(self.step, result.summary())

    def log(self, metrics: Mapping[str, float]) -> None:
        self.tracker.log(self.step, {**metrics, **self.clock.take(), "progress/minutes": self.seconds() / 60})

    def checkpoint_due(self) -> bool:
        every = self.config.checkpoint.every
        return self.step >= self.steps_total or (bool(every) and self.step % every == 0)

    def save(self) -> None:
        """Writes a checkpoint of the finished step, then frees the tokens of the steps it covers.

        One that stands already is kept (a periodic save, then an interrupt): the same step is the same weights, and
        replacing it would open a moment without it.
        """
        if any(kept.step == self.step for kept in checkpoint.list_checkpoints(self.folder / "checkpoints")):
            return
        states = {
            "updates": self.updates,
            "resumed": self.resumed,
            "seconds": self.seconds(),
            "source": self.source.state_dict(),
            "draws": self.coordinator.state.draws,
            "edits": self.pipeline.state_dict(),
            "router": self.trainer.router.state_dict(),
            "reference": self.reference,
        }
        checkpoint.save(
            self.folder / "checkpoints",
            self.step,
            self.config.recipe,
            self.trainer,
            states,
            self.config.checkpoint.keep,
        )
        self.coordinator.checkpointed(self.step)
        self._sweep_store()

    def _sweep_store(self) -> None:
        """Tokens consumed at or before the oldest kept checkpoint can never be asked for again."""
        kept = checkpoint.list_checkpoints(self.folder / "checkpoints")
        if not kept:
            return
        groups = self.coordinator.state.groups.values()
        spent = {group.meta.ref for group in groups if group.meta is not None and 0 <= group.step <= kept[0].step}
        for ref in self.store.list():
            if ref in spent:
                self.store.delete(ref)

    def tidy_store(self) -> None:
        """Removes what a killed run left in the store: files half written, and groups that the journal never heard of
        (they are generated again). Call it before anything is ordered."""
        self.store.sweep()
        known = {group.meta.ref for group in self.coordinator.state.groups.values() if group.meta is not None}
        for ref in self.store.list():
            if ref not in known:
                self.store.delete(ref)
