"""What the parts of the moe bench stand on: a warm checkpoint, episodes that an engine plays with it, training steps.

The model is the quickstart's, a Mixture of Experts, warm-started by the stack's own supervised warm start on the tool
environment of ``recipes/moe_expert_structuring``: its tools' names are the operations that routing losses need, and
routers that have learned have the margins that decide how often two precisions choose differently.

Invariants (``tests/launch/test_bench_moe.py``):

1. Every trainer that ``World.trainer`` builds begins with the same weights, and an engine serves what was published.
2. A training step here is the main loop's: the same verbs of ``Learner`` in the same order; nothing is played.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from launch.prepare import prepare
from megatron_ext.config.schema import Config
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import ResolvedBackend, resolve_backend
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.rollout.driver import GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.rollout.episode import Sampling
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.evaluate import run_orders
from megatron_ext.training.learner import Learner
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.ranks.ranks import Ranks, alone, joined
from megatron_ext.training.run import train
from megatron_ext.training.session import (
    build_chunks,
    credit_pipeline,
    driver_spec,
    loss_terms,
    start_engine,
    warm_start_folder,
)
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task


@dataclass(frozen=True)
class Size:
    """What is measured on. ``demonstrations`` and ``epochs`` bound the warm start; a batch is ``tasks`` x ``samples``
    trajectories, ``equal_tasks`` of them in one precision. ``rounds`` of steps are timed, in ``other_rounds`` also
    those without a bar; ``closed_steps`` are compared with the gate closed. The stale run makes ``stale_steps`` steps
    of ``stale_tasks`` tasks with an engine ``lag`` steps behind, at a learning rate (``stale_lr``) so small that a
    policy of some steps ago is still nearly today's."""

    demonstrations: int = 1600
    epochs: float = 2.0
    tasks: int = 16
    samples: int = 8
    equal_tasks: int = 8
    rounds: int = 24
    other_rounds: int = 8
    closed_steps: int = 3
    stale_steps: int = 20
    stale_tasks: int = 8
    lag: int = 4
    stale_lr: float = 5e-5
    threads: int = 1


SMALL = Size(
    demonstrations=128,
    tasks=4,
    samples=4,
    equal_tasks=2,
    rounds=2,
    other_rounds=1,
    closed_steps=2,
    stale_steps=3,
    stale_tasks=2,
    lag=1,
)


def configuration(size: Size, root: Path, cache: Path) -> Config:
    """The run whose warm start and whose steps are measured: the structured recipe with plain routers and no step."""
    return prepare(
        [
            "recipe=moe_expert_structuring/off",
            "run.name=moe",
            f"run.root={root}",
            "run.steps=0",
            f"run.threads={size.threads}",
            f"warm_start.cache={cache}",
            f"warm_start.demonstrations={size.demonstrations}",
            f"warm_start.max_epochs={size.epochs}",
            "warm_start.min_epochs=0.5",
            f"batch.trajectories_per_task={size.samples}",
            "evaluation.before=false",
            "evaluation.after=false",
            "tracking.console=null",
            "tracking.wandb=null",
        ]
    )


@dataclass
class Players:
    """An engine, and a driver that plays with it."""

    engine: EngineControl
    driver: DriverProcess
    store: TrajectoryStore
    config: Config

    def roll_out(self, name: str, first: int, tasks: int) -> TrajectoryBatch:
        """The groups of ``tasks`` training tasks from number ``first`` on, with their routing."""
        config, rollout = self.config, self.config.rollout
        sampling = replace(Sampling.of(rollout), record_routing=True)
        samples = config.batch.trajectories_per_task
        chosen: list[Task] = self.driver.tasks(config.tasks.environment, "train", tasks, first)
        orders = [GroupOrder(f"{name}/{task.task_id}", "", task, samples, sampling, store=True) for task in chosen]
        done = run_orders(self.driver, orders, progress=lambda count: None, check=lambda: None, timeout=600.0)
        return concat([self.store.read(Ref(done[order.group_id].meta.ref)) for order in orders])


@dataclass
class World:
    """One training rank with a warm checkpoint. ``success`` is its greedy success on dev tasks, ``warm_steps`` how many
    steps it learned."""

    config: Config
    hf: HFConfig
    folder: Path
    weights: Path
    success: float
    warm_steps: int
    backend: ResolvedBackend
    context: ParallelContext
    ranks: Ranks

    def trainer(self, router: Mapping[str, Any] | None = None) -> Trainer:
        """A new one with the warm checkpoint's weights and a fresh optimizer. ``router`` is its policy's node, where it
        is not the plain one."""
        config = self.config
        model = replace(config.model, router=dict(config.model.router if router is None else router))
        chunks, policy = build_chunks(replace(config, model=model), self.hf, self.backend)
        checkpoint.load_weights(self.weights, chunks)
        wrapped, optimizer = wrap(chunks, config.optimizer, config.parallel, self.backend)
        return Trainer(wrapped, optimizer, self.context, temperature=config.rollout.temperature, router=policy)

    def learner(
        self,
        trainer: Trainer,
        *,
        replay: bool = False,
        lr: float | None = None,
        steps: int = 1,
        updates: int | None = None,
    ) -> Learner:
        """A learner of ``steps`` steps on this trainer; ``lr`` and ``updates`` (optimizer steps a batch) where they are
        not the recipe's."""
        config = replace(self.config, run=replace(self.config.run, steps=steps))
        if updates is not None:
            config = replace(config, batch=replace(config.batch, optimizer_steps_per_batch=updates))
        if replay:
            config = replace(config, rollout=replace(config.rollout, record_routing=True, replay_routing=True))
        if lr is not None:
            config = replace(config, optimizer=replace(config.optimizer, lr=lr))
        trackers = TrackerSet({})
        return Learner(
            config=config,
            hf=self.hf,
            trainer=trainer,
            ranks=self.ranks,
            gather=alone,
            pipeline=credit_pipeline(config),
            terms=loss_terms(config),
            tracker=trackers,
            clock=Phases(trackers),
        )

    @contextmanager
    def playing(self, dtype: str) -> Iterator[Players]:
        """An engine of that precision with a driver; ``publish`` to it before anything is played."""
        engine_node = {**self.config.rollout.engine, "dtype": dtype}
        config = replace(self.config, rollout=replace(self.config.rollout, engine=engine_node))
        folder = Path(tempfile.mkdtemp(prefix=f"players-{dtype}-", dir=self.folder))
        logs, store = folder / "logs", folder / "store"
        logs.mkdir()
        driver = DriverProcess(driver_spec(config, store, logs))
        try:
            engine = start_engine(config, self.hf, logs)
            try:
                driver.open(engine.connect(), self.folder / "tokenizer")
                yield Players(engine, driver, TrajectoryStore(store), config)
            finally:
                engine.close()
        finally:
            driver.close()


@contextmanager
def world(size: Size, root: Path, cache: Path) -> Iterator[World]:
    """Makes the warm checkpoint (or finds it in ``cache``), and one rank that trains from it. Uses the process's
    threads and Megatron's groups."""
    threads = torch.get_num_threads()
    config = configuration(size, root, cache)
    result = train(config)
    if result.interrupted:
        raise KeyboardInterrupt
    folder = result.run_dir
    hf = load_hf_config(folder / "model_config.json")
    warm = warm_start_folder(config, folder, hf)
    report = json.loads((warm / "report.json").read_text())
    backend = resolve_backend(config.backend)
    try:
        with joined(backend.communication) as ranks, ExitStack() as stack:
            torch.set_num_threads(size.threads)
            cpu_platform.tune_allocator()
            context = initialize(config.parallel, backend, config.run.seed)
            stack.callback(shutdown, context)
            yield World(
                config=config,
                hf=hf,
                folder=folder,
                weights=warm / "rank_0.pt",
                success=float(report["dev_success"]),
                warm_steps=int(report["steps"]),
                backend=backend,
                context=context,
                ranks=ranks,
            )
    finally:
        torch.set_num_threads(threads)


def groups_of(batch: TrajectoryBatch) -> StepGroups:
    """A step that trains on every group of the batch."""
    metas = [GroupMeta.from_batch(batch, "", number) for number in range(batch.num_groups)]
    return StepGroups((), metas, batch.group_id, (), batch)


def training_step(learner: Learner, groups: StepGroups) -> None:
    """What the main loop does with the groups of a step (``training/loop.py``), from rows to the last metric."""
    batch = groups.batch
    assert batch is not None
    rows = learner.rows(batch)
    scores = learner.score(batch, rows)
    advantage, _ = learner.assign_credit(batch)
    _, scores = learner.update(groups, batch, rows, scores, advantage)
    learner.routing_metrics(batch, scores)
    learner.routing_losses_done(batch, rows)
    learner.step += 1
