"""A step of a run made again: trained on the groups it trained on, or sampled again by the weights it started from.

Invariants (``tests/launch/test_replay.py``):

1. Nothing in the run's folder is written or locked, so that a run that is still going can be looked at.
2. From the checkpoint of the step before, training gives the recorded metrics: to the last bit under
   ``run.deterministic``, else within ``RTOL`` and ``ATOL``.
3. Sampling gives the recorded tokens under ``run.deterministic``; without it rounding may part a few trajectories.
4. What cannot be replayed is one line that says what there is: steps that were kept, checkpoints.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from megatron_ext.config.saved import load_resolved
from megatron_ext.config.schema import Config
from megatron_ext.losses.total import needs_reference
from megatron_ext.models import cpu_platform
from megatron_ext.models.backends import ResolvedBackend, resolve_backend
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.rollout.agreement import assign
from megatron_ext.rollout.driver import GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.episode import Sampling
from megatron_ext.rollout.events import Added, GroupMeta
from megatron_ext.rollout.journal import read as read_journal
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.training import checkpoint, deterministic
from megatron_ext.training.checkpoint import CheckpointError, CheckpointInfo, Restored
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.evaluate import run_orders
from megatron_ext.training.first_weights import place
from megatron_ext.training.folder import FolderError, differing
from megatron_ext.training.interrupt import InterruptFlag
from megatron_ext.training.kept_step import KeptStep, KeptStepError, StepScores, read_step, sampled_steps
from megatron_ext.training.phases import Phases
from megatron_ext.training.publish import publish
from megatron_ext.training.ranks import Ranks, gather_over, joined, launched
from megatron_ext.training.run_state import Run
from megatron_ext.training.sample_parts import part_of
from megatron_ext.training.session import (
    TrainerBuilder,
    credit_pipeline,
    driver_spec,
    loss_terms,
    start_engine,
    warm_start_folder,
)
from megatron_ext.training.step_metrics import update_metrics
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory import version as policy_version
from megatron_ext.trajectory.record import TrajectoryBatch, concat
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task

RTOL, ATOL = 1e-4, 1e-5  # of fp32 metrics when threads or the layout add in another order
SAME_TRAJECTORIES = 0.9  # share of trajectories that rounding must not part
# What may differ from the run's own configuration without a word: where it is, and what is kept or shown.
_NO_MATTER = ("run.name", "run.root", "run.max_minutes", "tracking", "checkpoint", "evaluation", "samples", "profile")


@dataclass(frozen=True)
class Opened:
    """What a replay starts from: the ``kept`` step, ``weights`` of step ``weights_step`` (0: those that RL started
    from; None: drawn), and ``notes`` on what differs from when the step was made."""

    path: Path
    config: Config
    hf: HFConfig
    kept: KeptStep
    weights_step: int
    weights: CheckpointInfo | Path | None
    notes: tuple[str, ...]

    @property
    def faithful(self) -> bool:
        """Whether the weights are those that the step started from."""
        return self.weights_step == self.kept.step - 1

    @property
    def exact(self) -> bool:
        """Whether the step must repeat to the last bit."""
        return self.config.run.deterministic and self.faithful and not self.notes


@dataclass(frozen=True)
class Compared:
    """One number, recorded and replayed (NaN: not finite)."""

    name: str
    recorded: float
    replayed: float
    agrees: bool


@dataclass(frozen=True)
class TrainReplay:
    """``metrics`` of the step, and the largest difference of each per-token value that was kept (``recorded`` is 0)."""

    opened: Opened
    metrics: tuple[Compared, ...]
    tokens: tuple[Compared, ...]

    @property
    def agrees(self) -> bool:
        return all(line.agrees for line in (*self.metrics, *self.tokens))


@dataclass(frozen=True)
class GroupReplay:
    """A group sampled again. ``rewards`` (recorded, replayed) and ``same`` ids, one entry a trajectory; ``parted`` the
    first sampled token that differs, counted in the trajectory's tokens (-1: none)."""

    group: str
    task: str
    rewards: tuple[tuple[float, float], ...]
    same: tuple[bool, ...]
    parted: tuple[int, ...]


@dataclass(frozen=True)
class RolloutReplay:
    """``logp`` is the largest difference of a sampled token's log-prob, over trajectories whose ids are the same."""

    opened: Opened
    groups: tuple[GroupReplay, ...]
    logp: float

    @property
    def same(self) -> float:
        """Share of the trajectories whose ids are all the same."""
        return float(np.mean([same for group in self.groups for same in group.same]))

    @property
    def agrees(self) -> bool:
        for group in self.groups:
            if any(same and a != b for (a, b), same in zip(group.rewards, group.same, strict=True)):
                return False
        return self.same >= (1.0 if self.opened.exact else SAME_TRAJECTORIES)


def open_step(config: Config, step: int, *, whole: bool) -> Opened:
    """The kept step and the weights nearest before it. ``whole``: every group that it trained on is needed.

    Raises ``FolderError``, ``KeptStepError`` or ``CheckpointError``.
    """
    path = Path(config.run.root) / config.run.name
    if not (path / "config.yaml").is_file():
        raise FolderError(f"{path}: no such run; --replay-step needs the run.name (and run.root) of one that was made")
    saved = load_resolved(path / "config.yaml")
    kept = read_step(path, step)
    if whole and not kept.whole:
        others = [n for n in sampled_steps(path) if n != step and read_step(path, n).whole]
        raise KeptStepError(
            f"{path}: step {step} keeps {kept.batch.num_groups} of the {len(kept.trained)} groups it trained on, and "
            f"training it again needs all: run with samples.groups=0. Steps kept whole: "
            f"{', '.join(map(str, others)) or 'none'}; --replay rollout works on any"
        )
    hf = load_hf_config(path / "model_config.json")
    found, weights = _weights(config, path, hf)
    nearest = min(found, key=lambda n: (abs(n - (step - 1)), n >= step))
    notes = [f"configured differently: {line}" for line in differing(saved, config, _NO_MATTER)]
    if nearest != step - 1:
        shown = ", ".join("0 (before training)" if n == 0 else str(n) for n in sorted(found))
        notes.append(
            f"weights of step {nearest}: step {step} started from those of step {step - 1}, which are not kept (there "
            f"are: {shown}); the numbers will differ"
        )
    worlds = {info.world for info in weights.values() if isinstance(info, CheckpointInfo)} - {launched()[1]}
    if worlds:
        notes.append(f"trained on {min(worlds)} ranks, replayed on {launched()[1]}: sums are taken in another order")
    if config.control.permute_rewards and (not whole or kept.scores is None):
        notes.append("control.permute_rewards=true: what is compared here has the rewards before they were permuted")
    return Opened(path, config, hf, kept, nearest, weights[nearest], tuple(notes))


def _weights(config: Config, path: Path, hf: HFConfig) -> tuple[list[int], Mapping[int, CheckpointInfo | Path | None]]:
    """Steps whose weights there are, and where."""
    found: dict[int, CheckpointInfo | Path | None] = {}
    if not config.warm_start.enabled:
        found[0] = None
    else:
        folder = warm_start_folder(config, path, hf)
        if (folder / "report.json").is_file():
            found[0] = folder
    found |= {info.step: info for info in checkpoint.list_checkpoints(path / "checkpoints")}
    if not found:
        raise CheckpointError(f"{path}: no checkpoint and no warm start, so there are no weights to start from")
    return list(found), found


# -- what both replays stand on --------------------------------------------------------------------------------------
@dataclass
class _Session:
    config: Config
    backend: ResolvedBackend
    ranks: Ranks
    trainer: Trainer
    restored: Restored | None
    scratch: Path
    flag: InterruptFlag
    stack: ExitStack


@contextmanager
def _session(opened: Opened) -> Iterator[_Session]:
    """The trainer with the weights and the optimizer state that the step started from, and a folder to write in."""
    config = opened.config
    backend = resolve_backend(config.backend)
    with joined(backend.communication) as ranks, ExitStack() as stack:
        torch.set_num_threads(config.run.threads)
        cpu_platform.tune_allocator()
        stack.enter_context(deterministic.exact(config.run.deterministic, backend))
        flag = stack.enter_context(InterruptFlag())
        ranks.listen_to(flag)
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="replay-")))
        builder = TrainerBuilder(config, opened.hf, backend, stack)
        trainer = builder.build(config.optimizer)
        restored = None
        if isinstance(opened.weights, CheckpointInfo):
            restored = checkpoint.load(opened.weights, config.recipe, trainer)
            trainer.router.load_state_dict(restored.states["router"])
        elif opened.weights is not None:
            checkpoint.load_weights(opened.weights / f"rank_{place(builder.context)}.pt", trainer.chunks)
            trainer.optimizer.reload_model_params()
        yield _Session(config, backend, ranks, trainer, restored, scratch, flag, stack)


# -- training --------------------------------------------------------------------------------------------------------
def replay_training(opened: Opened) -> TrainReplay | None:
    """Scoring, credit, loss and update of the kept step again. On every rank; rank 0 gets the comparison."""
    with _session(opened) as session:
        run = _run(opened, session)
        kept = opened.kept
        context = session.trainer.context
        metas = [GroupMeta.from_batch(kept.batch, "", number) for number in range(kept.batch.num_groups)]
        own = part_of(kept, assign(metas, context.data_parallel_size)[context.data_parallel_rank])
        batch = own.batch
        groups = StepGroups((), metas, kept.trained, kept.filtered, batch)
        version, rows = run.version, run.rows(batch)
        with run.phase("scoring"):
            before = run.score(batch, rows)
        advantage, metrics = run.assign_credit(batch)
        weight = np.zeros(batch.num_tokens)
        for _, share in run.loss_weights(groups, batch):
            weight += share
        with run.phase("update"):
            results, scores = run.update(groups, batch, rows, before, advantage)
        metrics |= update_metrics(results, batch, rows, scores, version, run.clock, run.resumed, run.gather)
        metrics |= run.routing_metrics(batch, scores) | run.routing_losses_done(batch, rows)
        again = StepScores(advantage, weight, scores.logp, scores.entropy, scores.reference)
        parts = run.gather(_token_differences(own.scores, again))
        if not session.ranks.leads:
            return None
        tokens = {name: max(part[name] for part in parts) for name in parts[0]}
        recorded = _recorded(opened)
        return TrainReplay(
            opened,
            tuple(
                _compared(name, recorded[name], value, opened.exact)
                for name, value in deterministic.comparable(metrics).items()
                if name in recorded
            ),
            tuple(_compared(name, 0.0, value, opened.exact) for name, value in tokens.items()),
        )


def _run(opened: Opened, session: _Session) -> Run:
    """A ``Run`` as it stood when the step began, without those who play, on another folder."""
    kept, config, trackers = opened.kept, opened.config, TrackerSet({})
    run = Run(
        config=config,
        folder=session.scratch,
        hf=opened.hf,
        trainer=session.trainer,
        ranks=session.ranks,
        gather=gather_over(session.trainer.context.groups.dp),
        lead=None,
        store=TrajectoryStore(session.scratch / "store"),
        pipeline=credit_pipeline(config),
        terms=loss_terms(config),
        tracker=trackers,
        clock=Phases(trackers),
        flag=session.flag,
        started=time.monotonic(),
    )
    session.stack.callback(run.saver.close)
    run.step = kept.step - 1
    if session.restored is not None:
        run.reference = session.restored.reference
        run.pipeline.load_state_dict(session.restored.states["edits"])
        run.updates = int(session.restored.states["updates"])
    elif needs_reference(run.terms) or run.pipeline.needs_reference:
        run.reference = session.trainer.snapshot()
    # Groups that were read from the store do not say what opened the step: the newest weights that sampled them did.
    opened_by = int(kept.batch.version.max(initial=-1)) if kept.opened is None else kept.opened
    if opened_by >= 0:
        run.incarnation, run.updates = policy_version.unpack(opened_by)
    run.resumed = dict(kept.resumed)
    return run


def _recorded(opened: Opened) -> Mapping[str, float]:
    if opened.kept.metrics:
        return opened.kept.metrics
    path = opened.path / FILE_NAME
    rows = read_metrics(path) if path.is_file() else []
    row = next((row for row in rows if row["step"] == opened.kept.step), {})
    return {name: math.nan if value is None else float(value) for name, value in row.items() if name != "step"}


def _compared(name: str, recorded: float, replayed: float, exact: bool) -> Compared:
    if math.isnan(recorded) or math.isnan(replayed):
        agrees = not math.isfinite(recorded) and not math.isfinite(replayed)
    elif exact:
        agrees = recorded == replayed
    else:
        agrees = abs(recorded - replayed) <= ATOL + RTOL * max(abs(recorded), abs(replayed))
    return Compared(name, recorded, replayed, agrees)


def _token_differences(recorded: StepScores | None, replayed: StepScores) -> dict[str, float]:
    """Largest difference of each value, over the tokens of this rank."""
    if recorded is None:
        return {}
    pairs = {
        name: (getattr(recorded, name), getattr(replayed, name))
        for name in ("advantage", "weight", "logp", "entropy", "reference")
    }
    return {
        name: float(np.abs(a.astype(np.float64) - b).max(initial=0.0))
        for name, (a, b) in pairs.items()
        if a is not None and b is not None
    }


# -- sampling --------------------------------------------------------------------------------------------------------
def replay_rollout(opened: Opened) -> RolloutReplay:
    """The kept groups again: the same tasks, seeds and limits, the weights that the step started from. On one rank."""
    config, kept = opened.config, opened.kept
    tasks = _tasks(opened)
    with _session(opened) as session:
        logs, store = session.scratch / "logs", session.scratch / "store"
        logs.mkdir()
        driver = DriverProcess(driver_spec(config, store, logs))
        session.stack.callback(driver.close)
        engine = start_engine(config, opened.hf, logs)
        session.stack.callback(engine.close)
        driver.open(engine.connect(), opened.path / "tokenizer")
        publish(engine, session.trainer.chunks, opened.hf, max(kept.opened or 0, 0))
        rollout = config.rollout
        sampling = Sampling(
            rollout.temperature, rollout.top_p, rollout.top_k, rollout.record_routing, rollout.ignore_stop
        )
        sizes = np.diff(kept.batch.group_trajectories)
        orders = [
            GroupOrder(group, f"replay/{group}", tasks[group], int(size), sampling, store=True)
            for group, size in zip(kept.batch.group_id, sizes, strict=True)
        ]
        done = run_orders(
            driver,
            orders,
            progress=lambda count: None,
            check=session.flag.check,
            timeout=rollout.lease_deadline_s,
        )
        read = TrajectoryStore(store)
        again = concat([read.read(Ref(done[group].meta.ref)) for group in kept.batch.group_id])
    groups, logp = compare_rollouts(kept.batch, again, tasks)
    return RolloutReplay(_with_ages(opened), groups, logp)


def _tasks(opened: Opened) -> dict[str, Task]:
    """The task of each kept group, from the run's journal."""
    events = read_journal(opened.path / "journal.jsonl")[0]
    known = {
        group: task
        for event in events
        if isinstance(event, Added)
        for group, task in zip(event.groups, event.tasks, strict=True)
    }
    missing = [group for group in opened.kept.batch.group_id if group not in known]
    if missing:
        raise KeptStepError(f"{opened.path}: the journal does not know group {missing[0]!r} of step {opened.kept.step}")
    return known


def _with_ages(opened: Opened) -> Opened:
    """Notes tokens that were sampled by other weights than those that opened the step."""
    sampled = opened.kept.batch.version[opened.kept.batch.version >= 0]
    if opened.kept.opened is None or not len(sampled):
        return opened
    older = int((sampled != opened.kept.opened).sum())
    if not older:
        return opened
    note = f"{older} of {len(sampled)} recorded tokens were sampled by other weights than those that opened the step"
    return replace(opened, notes=(*opened.notes, note))


def compare_rollouts(
    recorded: TrajectoryBatch, replayed: TrajectoryBatch, tasks: Mapping[str, Task]
) -> tuple[tuple[GroupReplay, ...], float]:
    """Group by group, and the largest difference of a log-prob where ids are the same. Pure."""
    groups, logp = [], 0.0
    offsets, again = recorded.trajectory_tokens(), replayed.trajectory_tokens()
    for number, group in enumerate(recorded.group_id):
        rewards, same, parted = [], [], []
        for j in range(*recorded.group_trajectories[number : number + 2].tolist()):
            a, b = slice(offsets[j], offsets[j + 1]), slice(again[j], again[j + 1])
            ids, others = recorded.ids[a], replayed.ids[b]
            common = min(len(ids), len(others))
            unlike = np.flatnonzero(ids[:common] != others[:common])
            first = int(unlike[0]) if len(unlike) else -1 if len(ids) == len(others) else common
            parted.append(first)
            same.append(first < 0)
            rewards.append((float(recorded.reward[j]), float(replayed.reward[j])))
            if first < 0:
                difference = np.abs(recorded.rollout_logp[a].astype(np.float64) - replayed.rollout_logp[b])
                logp = max(logp, float(difference.max(initial=0.0)))
        groups.append(GroupReplay(group, tasks[group].task_id, tuple(rewards), tuple(same), tuple(parted)))
    return tuple(groups), logp
