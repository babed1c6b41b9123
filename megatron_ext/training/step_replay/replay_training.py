"""A step trained again: its metrics and its tokens' scores, recorded and replayed.

Invariant (``tests/launch/test_replay.py``): from the checkpoint of the step before, training gives the recorded
metrics, to the last bit under ``run.deterministic``, else within ``RTOL`` and ``ATOL``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from megatron_ext.losses.total import needs_reference
from megatron_ext.rollout.agreement import assign
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.tracking.jsonl import FILE_NAME, read_metrics
from megatron_ext.training import deterministic
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.learner import Learner
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.measures.step_metrics import update_metrics
from megatron_ext.training.ranks.ranks import gather_over
from megatron_ext.training.session import (
    credit_pipeline,
    loss_terms,
)
from megatron_ext.training.step_replay.kept_step import StepScores
from megatron_ext.training.step_replay.replay import Opened, ReplaySession, replaying
from megatron_ext.training.step_replay.sample_parts import part_of
from megatron_ext.trajectory import version as policy_version

RTOL, ATOL = 1e-4, 1e-5  # of fp32 metrics when threads or the layout add in another order


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


def replay_training(opened: Opened) -> TrainReplay | None:
    """Scoring, credit, loss and update of the kept step again. On every rank; rank 0 gets the comparison."""
    with replaying(opened) as session:
        learner, kept, context = _learner(opened, session), opened.kept, session.trainer.context
        metas = [GroupMeta.from_batch(kept.batch, "", number) for number in range(kept.batch.num_groups)]
        own = part_of(kept, assign(metas, context.data_parallel_size)[context.data_parallel_rank])
        batch = own.batch
        groups = StepGroups((), metas, kept.trained, kept.filtered, batch)
        version, rows = learner.version, learner.rows(batch)
        with learner.phase("scoring"):
            before = learner.score(batch, rows)
        advantage, metrics = learner.assign_credit(batch)
        with learner.phase("update"):
            results, scores = learner.update(groups, batch, rows, before, advantage)
        metrics |= update_metrics(
            results, batch, rows, scores, version, learner.clock, dict(kept.resumed), learner.gather
        )
        metrics |= learner.routing_metrics(batch, scores) | learner.routing_losses_done(batch, rows)
        again = learner.step_scores(groups, batch, scores, advantage)
        parts = learner.gather(_token_differences(own.scores, again))
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


def _learner(opened: Opened, session: ReplaySession) -> Learner:
    """The learner as it stood when the step began."""
    kept, config, trackers = opened.kept, opened.config, TrackerSet({})
    learner = Learner(
        config=config,
        hf=opened.hf,
        trainer=session.trainer,
        ranks=session.ranks,
        gather=gather_over(session.trainer.context.groups.dp),
        pipeline=credit_pipeline(config),
        terms=loss_terms(config),
        tracker=trackers,
        clock=Phases(trackers),
        step=kept.step - 1,
    )
    if session.restored is not None:
        learner.reference = session.restored.reference
        learner.pipeline.load_state_dict(session.restored.states["edits"])
        learner.updates = int(session.restored.states["updates"])
    elif needs_reference(learner.terms) or learner.pipeline.needs_reference:
        learner.reference = session.trainer.snapshot()
    # Groups that were read from the store do not say what opened the step: the newest weights that sampled them did.
    opened_by = int(kept.batch.version.max(initial=-1)) if kept.opened is None else kept.opened
    if opened_by >= 0:
        learner.incarnation, learner.updates = policy_version.unpack(opened_by)
    return learner


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
