"""A running job: the learner, those who play and what is kept; the verbs that the main loop is written in.

Every rank has a ``Run`` and goes through the same verbs. What needs the engine, the driver, the journal or the clock is
done by rank 0, which alone has a ``Lead``; what it decides is told to all (``Run.led``). What is done with a batch from
its rows to its last optimizer step is the learner's (``training/learner.py``).

Invariants (``tests/integration/test_torchrun.py``; ``test_resume.py`` and ``test_full_disk.py`` in ``tests/launch``):

1. No verb waits for another rank outside ``led``, ``Ranks.meet`` and collectives that every rank enters.
2. Tokens leave the store only when no checkpoint that a resume may start from needs them.
3. A checkpoint that cannot be saved costs a line of warning and no step, but for the last one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from megatron_ext.models.flops import Passes
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.rollout.journal import JournaledCoordinator
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.tracking.names import LOWER, lookup
from megatron_ext.training.checkpoints import files as checkpoint_files
from megatron_ext.training.checkpoints.async_save import Saved, Saver
from megatron_ext.training.checkpoints.checkpoint import CheckpointError, SaveRequest
from megatron_ext.training.collect import Collector, StepGroups, take
from megatron_ext.training.evaluate import evaluate
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.interrupt import InterruptFlag
from megatron_ext.training.learner import Learner
from megatron_ext.training.measures.idle_steps import IdleSteps, idle_steps
from megatron_ext.training.measures.memory import memory_metrics, resident_bytes
from megatron_ext.training.measures.profiling import StepProfiler
from megatron_ext.training.measures.router_change import RouterStart, router_change
from megatron_ext.training.measures.throughput import speed_metrics
from megatron_ext.training.publish import publish
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.training.step_replay import kept_step
from megatron_ext.training.step_replay.kept_step import KeptStep
from megatron_ext.training.step_replay.sample_parts import joined_parts, part_of
from megatron_ext.trajectory.store import TrajectoryStore
from megatron_ext.trajectory.task import Task

T = TypeVar("T")


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


@dataclass(kw_only=True)
class Run(Learner):
    """One job as one rank sees it: a learner in a folder, with those who play. Fields are set once by
    ``training.set_up``."""

    folder: Path
    lead: Lead | None
    store: TrajectoryStore
    flag: InterruptFlag
    started: float
    router_start: RouterStart = field(default_factory=dict)  # what RL's routers began as
    profiler: StepProfiler = field(default_factory=StepProfiler)
    peak: float | None = None  # FLOP/s of all ranks, where it was measured
    resumed: dict[int, int] = field(default_factory=dict)  # incarnation -> optimizer step it went on from
    seconds_before: float = 0.0
    saver: Saver = field(init=False)
    _measured: dict[str, float] = field(init=False, default_factory=dict)  # at the step that was finished last

    def __post_init__(self) -> None:
        super().__post_init__()
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
        kept = self.step_scores(groups, groups.batch, scores, advantage)
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

    def idle_steps(self) -> IdleSteps:
        """The steps so far that trained nothing."""
        return self.led(lambda lead: idle_steps(lead.coordinator.state, self.step))

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
        moved = router_change(self.trainer.chunks, self.router_start, self.trainer.context)
        self._measured |= metrics
        engine = 0 if self.lead is None else sum(map(resident_bytes, self.lead.engine.pids()))
        memory = memory_metrics(self.trainer.context.device, engine, self.gather)
        spent = {**self.clock.take(), "progress/minutes": self.seconds() / 60}
        self.tracker.log(self.step, {**metrics, **moved, **speed, **memory, **spent})

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
            router_start=self.router_start,
            score=self._measured.get(best),
            keep=config.checkpoint.keep,
            best=None if not best else "lower" if lookup(best).better == LOWER else "higher",
        )
        self.saver.start(request)

    def settle_saves(self, *, wait: bool = False) -> list[Saved]:
        """Notes the saves that ended: one that failed costs a line of warning, one that stands frees the tokens of the
        steps it covers. Of the last step's ``finish_saving`` tells, as what ends the run."""
        ended = self.saver.settle(wait=wait)
        ends = self.step if wait or self.step >= self.steps_total else None
        for saved in ended if self.lead is not None else ():
            if saved.error and saved.step == ends:
                continue
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
        if self.routing_log is not None:
            self.routing_log.drop_after(self.step)

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
