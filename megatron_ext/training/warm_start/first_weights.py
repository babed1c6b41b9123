"""The weights that RL starts from: of a supervised warm start, kept by everything that decides it.

A file holds the weights of one place in the model-parallel layout, so that any number of data-parallel ranks share it.
Rank 0 plays (demonstrations, the gate) and writes reports; all ranks train. One that is stopped goes on where it was
kept last (``training.warm_start.progress``).
"""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

from megatron_ext.config.instantiate import instantiate
from megatron_ext.config.schema import Config
from megatron_ext.environments.pool import Demonstration
from megatron_ext.harness.template import ChatCodec
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import Coordinate, Layout
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.rollout.demonstrations import demonstration_batch
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.tracking.jsonl import read_metrics
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.evaluate import evaluate
from megatron_ext.training.folder import RunFolder
from megatron_ext.training.interrupt import InterruptFlag
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.publish import publish
from megatron_ext.training.ranks.ranks import Ranks
from megatron_ext.training.session import TrainerBuilder, warm_start_folder
from megatron_ext.training.warm_start.key import warm_start_seed
from megatron_ext.training.warm_start.progress import Progress, forget
from megatron_ext.training.warm_start.warm_start import WarmStartReport, run_warm_start
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.task import Task

GATES = "warm_start.jsonl"  # in the run's logs: each look at the gate


@dataclass
class Players:
    """What rank 0 plays with."""

    driver: DriverProcess
    engine: EngineControl
    codec: ChatCodec
    hf: HFConfig
    tasks: dict[str, list[Task]]


def place(context: ParallelContext) -> int:
    """Number of this rank's place in the model-parallel layout, 0 on rank 0: which weights it holds."""
    groups = context.groups
    at = Coordinate(groups.tp.rank(), groups.pp.rank(), groups.ep.rank(), groups.expt_tp.rank())
    return list(Layout.of(context.config).coordinates()).index(at)


def first_weights(
    config: Config,
    folder: RunFolder,
    hf: HFConfig,
    builder: TrainerBuilder,
    players: Players | None,
    *,
    ranks: Ranks,
    clock: Phases,
    tracker: TrackerSet,
    flag: InterruptFlag,
) -> Path | None:
    """This rank's file of the weights that RL starts from, or None for the model's own. Trains them when there are none
    yet; ``players`` are rank 0's."""
    warm = config.warm_start
    if not warm.enabled:
        return None
    root = warm_start_folder(config, folder.path, hf)
    here = place(builder.context)
    weights = root / f"rank_{here}.pt"
    there = ranks.gather((here, weights.exists()), "look for its first weights")
    if ranks.led(lambda: there is not None and all(found for _, found in there)):
        if ranks.leads:
            forget(folder.path)
            (folder.path / "warm_start.json").write_text((root / "report.json").read_text())
        return weights
    seed = warm_start_seed(config)
    trainer = builder.build(warm.optimizer, aux_loss_coefficient=warm.aux_loss_coefficient, seed=seed)
    progress = Progress(
        folder.path,
        config.recipe,
        trainer,
        ranks,
        minutes=config.checkpoint.warm_start_minutes,
        asynchronous=config.checkpoint.asynchronous,
    )
    begin = progress.resume()
    if begin.step:
        tracker.phase(f"warm start: goes on from its step {begin.step}")
    if ranks.leads:
        _drop_gates(folder.logs / GATES, begin.step)
    ranks.doing("warm_start")

    def check() -> None:
        ranks.check()
        flag.check()

    def greedy() -> float:
        assert players is not None
        tasks = players.tasks["dev"][: warm.gate_tasks]
        result = evaluate(
            players.driver, tasks, "gate", samples=0, temperature=0.0, progress=lambda done: None, check=check
        )
        return float(result.greedy.mean())

    def gate() -> float:
        publish(None if players is None else players.engine, trainer.chunks, hf, 0)
        return ranks.led(greedy)

    last: list[float] = []

    def on_step(step: int, total: int, loss: float) -> None:
        last.append(loss)
        if len(last) == 1:
            tracker.phase("warm_start", total)
        progress.note(step, loss)
        ranks.led(flag.check)
        if step % 10 == 0:
            tracker.advance(step, f"loss {sum(last[-10:]) / len(last[-10:]):.3f}")

    def on_gate(step: int, loss: float, success: float) -> None:
        tracker.phase(f"warm start, step {step}: loss {loss:.3f}, dev success {success:.3f}")
        if ranks.leads:
            with (folder.logs / GATES).open("a") as log:
                log.write(json.dumps({"step": step, "loss": loss, "dev_success": success}) + "\n")

    with clock("warm_start"), progress:
        demos = [] if players is None else _demonstrations(config, players)
        batch = ranks.tell(None if players is None else _as_batch(config, players, demos))
        assert batch is not None
        report: WarmStartReport = run_warm_start(
            trainer,
            batch,
            warm,
            seed=seed,
            tokens_per_microbatch=config.batch.tokens_per_microbatch,
            gate=gate,
            on_step=on_step,
            on_gate=on_gate,
            begin=begin,
        )
    # The weights come last: where they are, the report is (runs that share a cache look for them at any time).
    if ranks.leads:
        root.mkdir(parents=True, exist_ok=True)
        success = sum(demo.success for demo in demos) / len(demos)
        text = json.dumps({**dataclasses.asdict(report), "demonstration_success": success})
        temporary = root / f"report.{os.getpid()}.tmp"
        temporary.write_text(text)
        temporary.replace(root / "report.json")
        (folder.path / "warm_start.json").write_text(text)
    ranks.meet("end its warm start")
    places = ranks.tell([number for number, _ in there or []])
    if places.index(here) == ranks.rank:  # the first of those that hold the same
        checkpoint.save_weights(weights, trainer.chunks)
    ranks.meet("keep its first weights")
    if ranks.leads:
        forget(folder.path)
    return weights


def _drop_gates(path: Path, step: int) -> None:
    """Removes the looks at the gate that are taken again when the warm start goes on from ``step``."""
    if path.exists():
        kept = [row for row in read_metrics(path) if row["step"] < step]
        path.write_text("".join(json.dumps(row) + "\n" for row in kept))


def _demonstrations(config: Config, players: Players) -> list[Demonstration]:
    warm, environment = config.warm_start, config.tasks.environment
    tasks = players.driver.tasks(environment, "train", min(warm.demonstrations, config.tasks.train_tasks))
    return players.driver.demonstrate(
        environment,
        [tasks[i % len(tasks)] for i in range(warm.demonstrations)],
        mistake_rate=warm.mistake_rate,
        seed=warm_start_seed(config),
        max_turns=config.rollout.max_turns,
    )


def _as_batch(config: Config, players: Players, demos: list[Demonstration]) -> TrajectoryBatch:
    tools = players.driver.tools(config.tasks.environment)
    return demonstration_batch(players.codec, instantiate(config.harness), demos, tools, config.model.max_context)
