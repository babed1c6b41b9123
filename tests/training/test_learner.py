"""Invariants of the learner (numbers: ``megatron_ext/training/learner.py``): an optimizer step's trajectories and
weights over ranks as threads, and a batch trained on a real model."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_ext.config.schema import BatchConfig, Config, OptimizerConfig
from megatron_ext.credit.pipeline import Pipeline
from megatron_ext.losses.aggregation import MODES, counted, token_weights
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.rollout.agreement import assign
from megatron_ext.rollout.events import GroupMeta
from megatron_ext.tracking.composite import TrackerSet
from megatron_ext.training.collect import StepGroups
from megatron_ext.training.learner import Learner, only, step_weights
from megatron_ext.training.measures.phases import Phases
from megatron_ext.training.ranks.ranks import Gather, Ranks, alone
from megatron_ext.training.step_replay.sample_parts import group_tokens
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.packing import deal_trajectories, split_optimizer_steps
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.gathering import on_ranks
from tests.helpers.records import random_batch
from tests.helpers.training import TERMS, TINY, make_trainer

BATCH = random_batch(5, groups=6)


def homes(batch: TrajectoryBatch, ranks: int) -> list[tuple[int, ...]]:
    """Groups at home on each rank, by the step agreement; more ranks than groups leave some without."""
    metas = [GroupMeta.from_batch(batch, f"ref{g}", g) for g in range(batch.num_groups)]
    return [tuple(batch.group_id.index(name) for name in home) for home in assign(metas, ranks)]


def step_of(batch: TrajectoryBatch, home: tuple[int, ...]) -> StepGroups:
    metas = [GroupMeta.from_batch(batch, f"ref{g}", g) for g in range(batch.num_groups)]
    return StepGroups([], metas, batch.group_id, (), select_groups(batch, home))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_each_optimizer_step_counts_its_own_trajectories(mode: str, steps: int) -> None:
    """Weights are normalised over the step: they sum to 1 on it, whatever the other steps of the batch hold."""
    owner = BATCH.token_trajectory()
    seen = np.zeros(BATCH.num_tokens, dtype=np.int64)
    for trajectories in split_optimizer_steps(BATCH, steps, seed=3):
        weight = token_weights(only(BATCH, trajectories), mode)
        np.testing.assert_array_equal(step_weights(BATCH, trajectories, mode), weight)
        assert weight.sum() == pytest.approx(1.0)
        assert not weight[~np.isin(owner, trajectories)].any()
        seen += weight > 0
    np.testing.assert_array_equal(seen, counted(BATCH) > 0)


def test_metadata_tell_which_trajectories_have_a_token_to_train() -> None:
    tokens, trained = step_of(BATCH, (3,)).trajectories()
    assert tokens.tolist() == np.diff(BATCH.trajectory_tokens()).tolist(), "the whole step's, whoever holds it"
    expected = [bool(BATCH.loss_mask[view.tokens].any()) for view in BATCH.trajectories()]
    assert trained.tolist() == expected and sum(expected) > 0


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.parametrize("mode", MODES)
def test_steps_and_weights_do_not_depend_on_the_number_of_ranks(mode: str, ranks: int) -> None:
    """Losses weighed by rank or micro-batch (slime 365 and 2090, miles 1931, Agent Lightning 594)."""
    whole = [(chosen, step_weights(BATCH, chosen, mode)) for chosen in split_optimizer_steps(BATCH, 3, seed=3)]
    shared = homes(BATCH, ranks)

    def work(rank: int, gather: Gather) -> list[tuple[np.ndarray, np.ndarray]]:
        groups = step_of(BATCH, shared[rank])
        assert groups.batch is not None
        numbers, found = groups.numbers(), []
        for chosen in deal_trajectories(*groups.trajectories(), 3, seed=3):
            local = np.flatnonzero(np.isin(numbers, chosen))
            found.append((numbers[local], step_weights(groups.batch, local, mode, gather)))
        return found

    for number, (chosen, weight) in enumerate(whole):
        parts = [rank[number] for rank in on_ranks(work, ranks)]
        assert sorted(np.concatenate([numbers for numbers, _ in parts]).tolist()) == chosen.tolist()
        for home, (_, part) in zip(shared, parts, strict=True):
            np.testing.assert_allclose(part, weight[group_tokens(BATCH, home)], rtol=1e-12, atol=0)


# -- on a real model -------------------------------------------------------------------------------------------------
def learner_on(context: ParallelContext, steps: int) -> Learner:
    """A learner of a fresh model that makes ``steps`` optimizer steps a batch."""
    trackers = TrackerSet({})
    return Learner(
        config=Config(batch=BatchConfig(optimizer_steps_per_batch=steps), optimizer=OptimizerConfig(lr=1e-2)),
        hf=TINY,
        trainer=make_trainer(context),
        ranks=Ranks(),
        gather=alone,
        pipeline=Pipeline([]),
        terms=TERMS,
        tracker=trackers,
        clock=Phases(trackers),
    )


@pytest.mark.parametrize("steps", [1, 2])
def test_scores_are_those_that_opened_the_batch(rank: ParallelContext, steps: int) -> None:
    """Invariant 2: with one optimizer step its own forward scores, with more a forward before them."""
    learner = learner_on(rank, steps)
    groups, rows = step_of(BATCH, tuple(range(BATCH.num_groups))), learner.rows(BATCH)
    micro = learner.microbatches(BATCH, rows, np.arange(rows.num_rows))
    opened, version = learner.trainer.score(micro, BATCH.num_tokens), learner.version
    before = learner.score(BATCH, rows)
    assert (before is None) == (steps == 1)
    advantage, _ = learner.assign_credit(BATCH)
    results, scores = learner.update(groups, BATCH, rows, before, advantage)
    assert len(results) == learner.updates == learner.version - version == steps
    moved = learner.trainer.score(micro, BATCH.num_tokens)
    np.testing.assert_allclose(scores.logp, opened.logp, atol=1e-5)
    assert np.abs(moved.logp - opened.logp).max() > 1e-2
    kept = learner.step_scores(groups, BATCH, scores, advantage)
    assert kept.weight.sum() == pytest.approx(steps) and kept.before_update == (steps > 1)
    np.testing.assert_array_equal(kept.weight > 0, counted(BATCH) > 0)
