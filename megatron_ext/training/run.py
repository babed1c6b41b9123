"""From a configuration to a finished run: sets everything up in order, runs the main loop, cleans up.

``train(config)`` is the whole job, called on every rank; each does its part. The same configuration in the same folder
continues where the last checkpoint left off.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.config.instantiate import instantiate, ordered
from megatron_ext.config.saved import as_tree
from megatron_ext.config.schema import Config
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.harness.template import COMPACT, TEMPLATE_FILE, ChatCodec, load_codec
from megatron_ext.harness.tokenizer import learn_tokenizer, save_tokenizer
from megatron_ext.losses.total import needs_reference
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import ResolvedBackend, resolve_backend
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.rollout.journal import open_coordinator
from megatron_ext.rollout.sources import check_task_set
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training import checkpoint, deterministic, profiling
from megatron_ext.training.collect import Collector
from megatron_ext.training.evaluate import load_result, save_result
from megatron_ext.training.evaluation import EvalResult
from megatron_ext.training.first_weights import Players, first_weights
from megatron_ext.training.folder import RunFolder, open_folder
from megatron_ext.training.interrupt import Interrupted, InterruptFlag
from megatron_ext.training.loop import train_loop
from megatron_ext.training.phases import Phases
from megatron_ext.training.profiling import StepProfiler
from megatron_ext.training.ranks import Ranks, gather_over, joined
from megatron_ext.training.run_state import Lead, Run
from megatron_ext.training.session import TrainerBuilder, credit_pipeline, driver_spec, loss_terms, start_engine
from megatron_ext.training.throughput import measured_peak
from megatron_ext.trajectory.store import Ref, TrajectoryStore


@dataclass(frozen=True)
class RunResult:
    """What ``train`` returns. ``success_*`` is greedy pass@1 on the held-out tasks; None where it was not evaluated.
    ``report`` is the page that shows the run, on rank 0."""

    success_before: float | None
    success_after: float | None
    steps: int
    seconds: float
    run_dir: Path
    interrupted: bool
    report: Path | None = None


def train(config: Config, recipes: Path | None = None) -> RunResult:
    """Runs the job. Ctrl-C saves a checkpoint of the last finished step and returns ``interrupted=True``.

    ``recipes``: the folder of presets that the run's report compares its configuration with.
    """
    backend = resolve_backend(config.backend)
    with joined(backend.communication) as ranks:
        result = _train(config, backend, ranks)
        # The trackers are done: what a report shows is on disk, and they are not kept waiting by it.
        return dataclasses.replace(result, report=_report(result.run_dir, recipes)) if ranks.leads else result


def _report(run: Path, recipes: Path | None) -> Path | None:
    """The run's ``report.html``; None, and a warning, where it cannot be written: the run has ended well without it."""
    # Imported late: nothing else of a run needs what draws it.
    from megatron_ext.report.render import write_report
    from megatron_ext.report.run_data import ReportError

    try:
        return write_report([run], recipes=recipes)
    except ReportError as error:
        print(f"warning: no report: {error}", file=sys.stderr)
        return None


def _train(config: Config, backend: ResolvedBackend, ranks: Ranks) -> RunResult:
    began = time.monotonic()
    torch.set_num_threads(config.run.threads)
    cpu_platform.tune_allocator()
    # Inside the stack: what ends one rank is told before anything is cleaned up.
    with ExitStack() as stack, ranks.telling():
        folder = _open_folder(config, ranks, stack)
        trackers = ordered(config.tracking, "tracking") if ranks.leads else []
        tracker = TrackerSet({n: instantiate(node, skip=("order",)) for n, node in trackers})
        summary: dict[str, Any] = {}  # filled when there is a result; an error leaves none
        stack.callback(tracker.finish, summary)  # before the start: one that fails leaves others to finish
        found = ranks.led(lambda: checkpoint.list_checkpoints(folder.checkpoints))
        resumed_from = found[-1].step if found else None
        tracker.start(folder.path, {**as_tree(config), "provenance": folder.provenance}, resumed_from)
        stack.enter_context(deterministic.exact(config.run.deterministic, backend))
        flag = InterruptFlag()
        stack.enter_context(flag)
        ranks.listen_to(flag)
        run: Run | None = None
        after: EvalResult | None = None
        interrupted = False
        try:
            run = _set_up(config, folder, backend, found, tracker, stack, flag, ranks)
            _evaluate_before(run, folder)
            run.started = time.monotonic()
            # What set-up made stays for the whole run: a full collection that walks it costs a fraction of a second.
            gc.freeze()
            stack.callback(gc.unfreeze)  # the process may go on with another run
            train_loop(run)
            if run.step > 0:
                run.finish_saving()  # out of time ends between two checkpoints
            after = _evaluate_after(run, folder)
        except Interrupted:
            interrupted = True
            if run is not None and run.step > 0:
                run.finish_saving()
        before = ranks.led(lambda: _load_before(folder))
        result = RunResult(
            success_before=None if before is None else float(before.greedy.mean()),
            success_after=None if after is None else float(after.greedy.mean()),
            steps=0 if run is None else run.step,
            seconds=time.monotonic() - began,
            run_dir=folder.path,
            interrupted=interrupted,
        )
        summary |= {**dataclasses.asdict(result), "run_dir": str(folder.path)}
        del summary["report"]  # not written yet
        if ranks.leads:
            folder.write_json("result.json", summary)
        return result


# -- set-up, in the order in which one thing needs the other --------------------------------------------------------
def _open_folder(config: Config, ranks: Ranks, stack: ExitStack) -> RunFolder:
    """The run's folder: rank 0 holds it, the others use it once it stands."""
    if ranks.leads:
        folder = open_folder(config)
        stack.callback(folder.close)
        ranks.tell(folder.path)
        return folder
    folder = RunFolder(ranks.tell(Path()), None, {})
    ranks.log = folder.logs / f"rank_{ranks.rank}.log"
    return folder


def _set_up(
    config: Config,
    folder: RunFolder,
    backend: ResolvedBackend,
    found: list[checkpoint.CheckpointInfo],
    tracker: TrackerSet,
    stack: ExitStack,
    flag: InterruptFlag,
    ranks: Ranks,
) -> Run:
    clock = Phases(tracker)
    with clock("start"):
        players = _start_players(config, folder, stack) if ranks.leads else None
        hf = ranks.tell(None if players is None else players.hf)
        assert hf is not None
        builder = TrainerBuilder(config, hf, backend, stack)
    store = TrajectoryStore(folder.store)
    pipeline = credit_pipeline(config)

    def check() -> None:
        ranks.check()
        flag.check()

    lead = None if players is None else _lead(config, folder, players, store, pipeline, tracker, stack, check)
    weights = None
    if not found:
        weights = first_weights(
            config, folder, hf, builder, players, ranks=ranks, clock=clock, tracker=tracker, flag=flag
        )
    trainer = builder.build(config.optimizer)
    if weights is not None:
        checkpoint.load_weights(weights, trainer.chunks)
        trainer.optimizer.reload_model_params()
    run = Run(
        config=config,
        folder=folder.path,
        hf=hf,
        trainer=trainer,
        ranks=ranks,
        gather=gather_over(trainer.context.groups.dp),
        lead=lead,
        store=store,
        pipeline=pipeline,
        terms=loss_terms(config),
        tracker=tracker,
        clock=clock,
        flag=flag,
        started=time.monotonic(),
        profiler=StepProfiler(config.profile.steps, folder.path / profiling.FOLDER, ranks.rank, trainer.chunks),
        peak=_peak(config, backend, ranks),
    )
    stack.callback(run.saver.close)
    stack.callback(run.profiler.close)
    if found:
        _continue_from(run, found[-1])
    else:
        run.incarnation = run.led(lambda lead: _open_journal(run, lead, 0, 0))
        run.resumed = {run.incarnation: 0}  # an earlier one may have trained and saved nothing
        if needs_reference(run.terms) or run.pipeline.needs_reference:
            run.reference = trainer.snapshot()
    run.drop_undone()
    run.tidy_store()
    run.publish()
    return run


def _peak(config: Config, backend: ResolvedBackend, ranks: Ranks) -> float | None:
    """FLOP/s of all ranks, measured at once as they train at once; on rank 0, where it is wanted."""
    if not config.profile.peak:
        return None
    every = ranks.gather(measured_peak(backend.torch_device, backend.dtype), "measure its peak")
    return None if every is None else sum(every)


def _start_players(config: Config, folder: RunFolder, stack: ExitStack) -> Players:
    """The driver with its environments, the tokenizer and the engine."""
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
    return Players(driver, engine, codec, hf, tasks)


def _lead(
    config: Config,
    folder: RunFolder,
    players: Players,
    store: TrajectoryStore,
    pipeline: Pipeline,
    tracker: TrackerSet,
    stack: ExitStack,
    check: Callable[[], None],
) -> Lead:
    """What rank 0 alone holds; the journal is replayed, and not yet gone on with."""
    tasks = players.tasks
    check_task_set(tasks["train"], config.batch.tasks_per_step)
    source = instantiate(config.tasks.source, tasks=tasks["train"], seed=config.run.seed)
    coordinator = open_coordinator(folder.path / "journal.jsonl")
    stack.callback(coordinator.close)
    if coordinator.warning:
        print(f"warning: {coordinator.warning}", file=sys.stderr)
    collector = Collector(
        config,
        coordinator,
        source,
        players.driver,
        store,
        own_signal=pipeline.own_signal,
        check=check,
        progress=tracker.advance,
    )
    return Lead(players.engine, players.driver, coordinator, source, collector, tasks["dev"], tasks["test"])


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


def _continue_from(run: Run, info: checkpoint.CheckpointInfo) -> None:
    """Restores everything a checkpoint holds and undoes what came after it."""
    restored = checkpoint.load(info, run.config.recipe, run.trainer)
    states = restored.states
    run.step, run.updates = info.step, int(states["updates"])
    run.seconds_before = float(states["seconds"])
    run.reference = restored.reference
    run.pipeline.load_state_dict(states["edits"])
    run.trainer.router.load_state_dict(states["router"])
    if run.lead is not None:
        run.lead.source.load_state_dict(states["source"])
    run.incarnation = run.led(lambda lead: _open_journal(run, lead, info.step, int(states["draws"])))
    if run.lead is not None:
        run.lead.collector.load_state_dict(states["reports"])
    # Where steps repeat exactly, the weights of an undone step are those of the step that replaces it.
    run.resumed = {} if run.config.run.deterministic else {**states["resumed"], run.incarnation: run.updates}


def _open_journal(run: Run, lead: Lead, step: int, draws: int) -> int:
    """Goes on from the checkpoint of ``step``, at which the source had drawn ``draws`` tasks; the new incarnation."""
    state, exact = lead.coordinator.state, run.config.run.deterministic

    def available(meta: GroupMeta) -> bool:
        wanted = not exact or deterministic.keeps(state.groups[meta.group_id], step)
        return wanted and run.store.exists(Ref(meta.ref))

    lead.coordinator.resume(step, available)
    # Draws are never undone: what the journal holds is played again in its order, or passed over by the source.
    if exact:
        lead.collector.play_again(state.draws - draws)
    else:
        _skip(lead.source, state.draws - draws)
    return lead.coordinator.state.incarnation


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
    result = run.ranks.led(lambda: _load_before(folder))
    if result is None:
        result = run.evaluate(lambda lead: lead.test_tasks, "before")
        if run.lead is not None:
            save_result(folder.evaluations / "before.json", result)
    run.tracker.log(0, result.summary())  # also when it was loaded: what a run without a checkpoint logged is dropped


def _evaluate_after(run: Run, folder: RunFolder) -> EvalResult | None:
    if not run.config.evaluation.after:
        return None
    result = run.evaluate(lambda lead: lead.test_tasks, "after")
    if run.lead is not None:
        save_result(folder.evaluations / "after.json", result)
    run.tracker.log(run.step, result.summary())
    return result
