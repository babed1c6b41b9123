"""From a configuration to a finished run: sets everything up in order, runs the main loop, cleans up.

``train(config)`` is the whole job on this rank. The same configuration in the same folder continues where the last
checkpoint left off.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.config.saved import as_tree
from megatron_ext.config.schema import Config, OptimizerConfig
from megatron_ext.credit.base import Baseline
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.harness.template import COMPACT, TEMPLATE_FILE, ChatCodec, load_codec
from megatron_ext.harness.tokenizer import learn_tokenizer, save_tokenizer
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.losses.total import needs_reference
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.rollout.demonstrations import demonstration_batch
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.engine import EngineControl
from megatron_ext.rollout.journal import open_coordinator
from megatron_ext.rollout.sources import check_task_set
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training import checkpoint
from megatron_ext.training.evaluate import evaluate, load_result, save_result
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.folder import RunFolder, open_folder
from megatron_ext.training.interrupt import Interrupted, InterruptFlag
from megatron_ext.training.loop import train_loop
from megatron_ext.training.phases import Phases
from megatron_ext.training.publish import publish
from megatron_ext.training.run_state import Run
from megatron_ext.training.session import build_chunks, driver_spec, start_engine, warm_start_folder
from megatron_ext.training.trainer import Trainer
from megatron_ext.training.warm_start import WarmStartReport, run_warm_start
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task


@dataclass(frozen=True)
class RunResult:
    """What ``train`` returns. ``success_*`` is greedy pass@1 on the held-out tasks; None where it was not evaluated."""

    success_before: float | None
    success_after: float | None
    steps: int
    seconds: float
    run_dir: Path
    interrupted: bool


def train(config: Config) -> RunResult:
    """Runs the job. Ctrl-C saves a checkpoint of the last finished step and returns ``interrupted=True``."""
    began = time.monotonic()
    torch.set_num_threads(config.run.threads)
    cpu_platform.tune_allocator()
    with ExitStack() as stack:
        folder = open_folder(config)
        stack.callback(folder.close)
        tracker = TrackerSet(
            {n: instantiate(node, skip=("order",)) for n, node in ordered(config.tracking, "tracking")}
        )
        summary: dict[str, Any] = {}  # filled when there is a result; an error leaves none
        stack.callback(tracker.finish, summary)  # before the start: one that fails leaves others to finish
        found = checkpoint.list_checkpoints(folder.checkpoints)
        tracker.start(
            folder.path, {**as_tree(config), "provenance": folder.provenance}, found[-1].step if found else None
        )
        flag = InterruptFlag()
        stack.enter_context(flag)
        run: Run | None = None
        after: EvalResult | None = None
        interrupted = False
        try:
            run = _set_up(config, folder, tracker, stack, flag)
            _evaluate_before(run, folder)
            run.started = time.monotonic()
            train_loop(run)
            if run.step > 0:
                run.save()  # out of time ends between two checkpoints
            after = _evaluate_after(run, folder)
        except Interrupted:
            interrupted = True
            if run is not None and run.step > 0:
                run.save()
        before = _load_before(folder)
        result = RunResult(
            success_before=None if before is None else float(before.greedy.mean()),
            success_after=None if after is None else float(after.greedy.mean()),
            steps=0 if run is None else run.step,
            seconds=time.monotonic() - began,
            run_dir=folder.path,
            interrupted=interrupted,
        )
        summary |= {**dataclasses.asdict(result), "run_dir": str(folder.path)}
        folder.write_json("result.json", summary)
        return result


# -- set-up, in the order in which one thing needs the other --------------------------------------------------------
def _set_up(config: Config, folder: RunFolder, tracker: TrackerSet, stack: ExitStack, flag: InterruptFlag) -> Run:
    clock = Phases(tracker)
    with clock("start"):
        backend = resolve_backend(config.backend)
        driver = DriverProcess(driver_spec(config, folder.store, folder.logs))
        stack.callback(driver.close)
        name = config.tasks.environment
        tasks = {
            split: driver.tasks(name, split, count)
            for split, count in (
                ("train", config.tasks.train_tasks),
                ("dev", config.tasks.dev_tasks),
                ("test", config.tasks.test_tasks),
            )
        }
        codec = _tokenizer(config, folder, driver)
        hf = _model_config(config, codec)
        folder.write_json("model_config.json", hf.to_dict())
        engine = start_engine(config, hf, folder.logs)
        stack.callback(engine.close)
        driver.open(engine.connect(), folder.tokenizer)
        builder = _TrainerBuilder(config, hf, backend, stack)
    check_task_set(tasks["train"], config.batch.tasks_per_step)
    source = instantiate(config.tasks.source, tasks=tasks["train"], seed=config.run.seed)
    coordinator = open_coordinator(folder.path / "journal.jsonl")
    stack.callback(coordinator.close)
    if coordinator.warning:
        print(f"warning: {coordinator.warning}", file=sys.stderr)
    store = TrajectoryStore(folder.store)
    credit = config.credit
    found = checkpoint.list_checkpoints(folder.checkpoints)
    if found:
        trainer = builder.build(config.optimizer)
    else:
        weights = _first_weights(config, folder, driver, engine, codec, hf, builder, tasks["dev"], clock, tracker, flag)
        trainer = builder.build(config.optimizer)
        if weights is not None:
            checkpoint.load_weights(weights, trainer.chunks)
            trainer.optimizer.reload_model_params()
    run = Run(
        config=config,
        folder=folder.path,
        hf=hf,
        trainer=trainer,
        engine=engine,
        driver=driver,
        coordinator=coordinator,
        source=source,
        store=store,
        pipeline=Pipeline(
            [(n, instantiate(node, skip=("order",))) for n, node in ordered(credit.edits, "credit.edits")],
            baseline=Baseline(
                normalize=credit.normalize,
                std_ddof=credit.std_ddof,
                eps=credit.eps,
                tolerance=credit.filter.tolerance,
            ),
        ),
        terms=_loss_terms(config),
        tracker=tracker,
        dev_tasks=tasks["dev"],
        test_tasks=tasks["test"],
        clock=clock,
        flag=flag,
        started=time.monotonic(),
    )
    if found:
        _continue_from(run, found[-1])
    else:
        coordinator.resume(0, lambda meta: store.exists(Ref(meta.ref)))
        run.resumed = {coordinator.state.incarnation: 0}  # an earlier one may have trained and saved nothing
        _skip(source, coordinator.state.draws)
        if needs_reference(run.terms):
            run.reference = trainer.snapshot()
    run.tidy_store()
    run.publish()
    return run


def _tokenizer(config: Config, folder: RunFolder, driver: DriverProcess) -> ChatCodec:
    """Learns a tokenizer on the training split, or takes the given one; the run keeps a copy either way."""
    if (folder.tokenizer / TEMPLATE_FILE).exists():  # written last: the folder is whole
        return load_codec(folder.tokenizer)
    if config.model.tokenizer:
        codec = load_codec(Path(config.model.tokenizer))
        save_tokenizer(folder.tokenizer, codec.tokenizer, codec.template)
        return load_codec(folder.tokenizer)
    corpus = driver.corpus(config.tasks.environment, "train", config.tokenizer.corpus_tasks)
    tokenizer = learn_tokenizer(corpus, vocab_size=config.tokenizer.vocab_size, phrases=config.tokenizer.phrases)
    save_tokenizer(folder.tokenizer, tokenizer, COMPACT)
    return load_codec(folder.tokenizer)


def _model_config(config: Config, codec: ChatCodec) -> HFConfig:
    hf = load_hf_config(config.model.hf_config)
    if not config.model.weights:
        hf = hf.with_vocab(codec.vocab_size)
    elif hf.vocab < codec.vocab_size:
        raise ValueError(
            f"model.weights={config.model.weights}: vocabulary of {hf.vocab} is smaller than the tokenizer's "
            f"{codec.vocab_size}; set model.tokenizer to the folder that belongs to the weights"
        )
    return hf


class _TrainerBuilder:
    """Builds the trainer, for the warm start and for RL alike: same layout, other optimizer settings."""

    def __init__(self, config: Config, hf: HFConfig, backend: Any, stack: ExitStack) -> None:
        from megatron_ext.models.parallel import initialize, shutdown

        self._config, self._hf, self._backend = config, hf, backend
        self.context = initialize(config.parallel, backend, config.run.seed)
        stack.callback(shutdown, self.context)

    def build(self, optimizer: OptimizerConfig, aux_loss_coefficient: float | None = None) -> Trainer:
        from megatron_ext.training.optimizer import wrap

        config = self._config
        torch.manual_seed(config.run.seed)
        chunks, router = build_chunks(config, self._hf, self._backend, aux_loss_coefficient)
        wrapped, megatron_optimizer = wrap(chunks, optimizer, config.parallel, self._backend)
        return Trainer(wrapped, megatron_optimizer, self.context, temperature=config.rollout.temperature, router=router)


def _loss_terms(config: Config) -> dict[str, LossTerm]:
    return {name: instantiate(node, skip=("order",)) for name, node in ordered(config.loss.terms, "loss.terms")}


def _first_weights(
    config: Config,
    folder: RunFolder,
    driver: DriverProcess,
    engine: EngineControl,
    codec: ChatCodec,
    hf: HFConfig,
    builder: _TrainerBuilder,
    dev_tasks: list[Task],
    clock: Phases,
    tracker: TrackerSet,
    flag: InterruptFlag,
) -> Path | None:
    """Weights that RL starts from: of a warm start (cached by all that decides it), or None for the model's own."""
    warm = config.warm_start
    if not warm.enabled:
        return None
    root = warm_start_folder(config, folder.path, hf)
    weights = root / f"rank_{builder.context.rank}.pt"
    if weights.exists():
        (folder.path / "warm_start.json").write_text((root / "report.json").read_text())
        return weights
    trainer = builder.build(warm.optimizer, aux_loss_coefficient=warm.aux_loss_coefficient)
    with clock("warm_start"):
        environment = config.tasks.environment
        train_tasks = driver.tasks(environment, "train", min(warm.demonstrations, config.tasks.train_tasks))
        chosen = [train_tasks[i % len(train_tasks)] for i in range(warm.demonstrations)]
        demos = driver.demonstrate(
            environment,
            chosen,
            mistake_rate=warm.mistake_rate,
            seed=config.run.seed,
            max_turns=config.rollout.max_turns,
        )
        harness = instantiate(config.harness)
        batch = demonstration_batch(codec, harness, demos, driver.tools(environment), config.model.max_context)

        def gate() -> float:
            publish(engine, trainer.chunks, hf, 0)
            result = evaluate(
                driver,
                dev_tasks[: warm.gate_tasks],
                "gate",
                samples=0,
                temperature=0.0,
                progress=lambda done: None,
                check=flag.check,
            )
            return float(result.greedy.mean())

        last: list[float] = []

        def on_step(step: int, total: int, loss: float) -> None:
            flag.check()
            last.append(loss)
            if step == 1:
                tracker.phase("warm_start", total)
            if step % 10 == 0:
                tracker.advance(step, f"loss {sum(last[-10:]) / len(last[-10:]):.3f}")

        def on_gate(step: int, loss: float, success: float) -> None:
            tracker.phase(f"warm start, step {step}: loss {loss:.3f}, dev success {success:.3f}")
            with (folder.logs / "warm_start.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": loss, "dev_success": success}) + "\n")

        report: WarmStartReport = run_warm_start(
            trainer,
            batch,
            warm,
            seed=config.run.seed,
            tokens_per_microbatch=config.batch.tokens_per_microbatch,
            gate=gate,
            on_step=on_step,
            on_gate=on_gate,
        )
    text = json.dumps(
        {**dataclasses.asdict(report), "demonstration_success": sum(d.success for d in demos) / len(demos)}
    )
    # The weights come last: where they are, the report is (runs that share a cache look for them at any time).
    root.mkdir(parents=True, exist_ok=True)
    temporary = root / f"report.{os.getpid()}.tmp"
    temporary.write_text(text)
    temporary.replace(root / "report.json")
    checkpoint.save_weights(weights, trainer.chunks)
    (folder.path / "warm_start.json").write_text(text)
    return weights


def _continue_from(run: Run, info: checkpoint.CheckpointInfo) -> None:
    """Restores everything a checkpoint holds and undoes what came after it."""
    states = checkpoint.load(info, run.config.recipe, run.trainer)
    run.step, run.updates = info.step, int(states["updates"])
    run.seconds_before = float(states["seconds"])
    run.reference = states["reference"]
    run.pipeline.load_state_dict(states["edits"])
    run.trainer.router.load_state_dict(states["router"])
    run.source.load_state_dict(states["source"])
    run.coordinator.resume(info.step, lambda meta: run.store.exists(Ref(meta.ref)))
    # Draws are never undone: skip what the journal already holds.
    _skip(run.source, run.coordinator.state.draws - int(states["draws"]))
    run.resumed = {**states["resumed"], run.coordinator.state.incarnation: run.updates}


def _skip(source: TaskSource, count: int) -> None:
    """Moves a source past tasks that the journal already holds, at most an epoch at a time."""
    while count > 0:
        count -= len(source.draw(min(count, len(source))))


# -- evaluation ------------------------------------------------------------------------------------------------------
def _load_before(folder: RunFolder) -> EvalResult | None:
    path = folder.evaluations / "before.json"
    return load_result(path) if path.exists() else None


def _evaluate_before(run: Run, folder: RunFolder) -> None:
    """Held-out evaluation of the policy that RL starts from. It is kept in the folder: a resumed run does not repeat
    it, and later weights are never taken for those."""
    if run.step > 0 or not run.config.evaluation.before:
        return
    result = _load_before(folder)
    if result is None:
        result = run.evaluate(run.test_tasks, "before", run.config.evaluation.samples)
        save_result(folder.evaluations / "before.json", result)
    run.tracker.log(0, result.summary())  # also when it was loaded: what a run without a checkpoint logged is dropped


def _evaluate_after(run: Run, folder: RunFolder) -> EvalResult | None:
    if not run.config.evaluation.after:
        return None
    result = run.evaluate(run.test_tasks, "after", run.config.evaluation.samples)
    save_result(folder.evaluations / "after.json", result)
    run.tracker.log(run.step, result.summary())
    return result
