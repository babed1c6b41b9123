"""From a configuration and a folder to a ``Run`` that can train: everything is made in the order in which one thing
needs the other, or goes on from a checkpoint.

Invariants (``tests/launch/test_resume.py``, ``tests/launch/test_kill.py``, ``tests/integration/test_torchrun.py``):

1. What a checkpoint holds is restored whole, and what came after it is undone before anything is ordered.
2. Tasks that were drawn are never drawn again: a resumed source goes on behind those that the journal holds.
3. The engine serves the weights of the step that the run stands at.
4. Every rank makes what it shares with the others in the same order; rank 0 alone starts processes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from megatron_ext.config.instantiate import instantiate
from megatron_ext.config.needs import check_started
from megatron_ext.config.schema import Config
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.harness.template import COMPACT, TEMPLATE_FILE, ChatCodec, load_codec
from megatron_ext.harness.tokenizer import learn_tokenizer, save_tokenizer
from megatron_ext.losses.total import needs_reference
from megatron_ext.models.backends import ResolvedBackend
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.rollout.journal import open_coordinator
from megatron_ext.rollout.sources import check_task_set
from megatron_ext.rollout.task_source import TaskSource
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training import deterministic
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.collect import Collector
from megatron_ext.training.folder import RunFolder
from megatron_ext.training.interrupt import InterruptFlag
from megatron_ext.training.measures import profiling
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.measures.profiling import StepProfiler
from megatron_ext.training.measures.router_change import router_start
from megatron_ext.training.measures.routing_metrics import RoutingLog
from megatron_ext.training.measures.throughput import measured_peak
from megatron_ext.training.ranks.ranks import Ranks, gather_over
from megatron_ext.training.run_state import Lead, Run
from megatron_ext.training.session import TrainerBuilder, credit_pipeline, driver_spec, loss_terms, start_engine
from megatron_ext.training.warm_start.first_weights import Players, first_weights
from megatron_ext.trajectory.store import Ref, TrajectoryStore


def set_up(
    config: Config,
    folder: RunFolder,
    backend: ResolvedBackend,
    found: list[checkpoint.CheckpointInfo],
    tracker: TrackerSet,
    stack: ExitStack,
    flag: InterruptFlag,
    ranks: Ranks,
) -> Run:
    """The job as this rank sees it, its weights published. ``found`` are the checkpoints in the folder; what is started
    is closed by ``stack``."""
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
        routing_log=RoutingLog(folder.path) if ranks.leads else None,
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
        run.router_start = router_start(trainer.chunks)
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
    check_started(config, driver.labels(name), driver.tools(name), tasks["train"])
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
    run.router_start = restored.router_start
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
