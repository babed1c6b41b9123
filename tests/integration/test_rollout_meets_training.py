"""What the engine sampled is what training scores: engine process, driver process, environment workers and trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.moe.replay_tokens import ReplayCounts, ReplayRule
from megatron_ext.rollout.driver import GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.embedded.engine import EmbeddedEngine
from megatron_ext.rollout.episode import EpisodeLimits, Sampling
from megatron_ext.training.evaluate import evaluate
from megatron_ext.training.microbatch import build_microbatch
from megatron_ext.training.publish import publish
from megatron_ext.training.trainer import TokenScores, Trainer
from megatron_ext.trajectory import version as policy_version
from megatron_ext.trajectory.joining import concat
from megatron_ext.trajectory.record import Role, SessionKind, TrajectoryBatch
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers import driving
from tests.helpers.errands import RELAY
from tests.helpers.scripted import small_codec
from tests.helpers.training import TERMS, TINY, make_trainer, micro_of, one_rank, random_inputs, rows_of

pytestmark = pytest.mark.integration

TEMPERATURE = 0.8
TASKS = [Task(f"walk/train/{i}", "walk", i, "train") for i in range(4)]


@dataclass
class System:
    trainer: Trainer
    engine: EmbeddedEngine
    driver: DriverProcess
    store: TrajectoryStore
    hf: HFConfig

    def publish(self, step: int) -> int:
        version = policy_version.pack(0, step)
        publish(self.engine, self.trainer.chunks, self.hf, version)
        return version

    def roll_out(self, name: str, sampling: Sampling, tasks: Sequence[Task] = TASKS) -> TrajectoryBatch:
        orders = [GroupOrder(f"{name}/{task.task_id}", "", task, 3, sampling, store=True) for task in tasks]
        self.driver.run(orders)
        refs: dict[str, str] = {}
        end = time.monotonic() + 240
        while len(refs) < len(orders) and time.monotonic() < end:
            refs |= {done.group_id: done.meta.ref for done in self.driver.poll(0.5)}
        return concat([self.store.read(Ref(refs[order.group_id])) for order in orders])

    def score(self, batch: TrajectoryBatch) -> TokenScores:
        return self.trainer.score(micro_of(batch, rows_of(batch), cap=500), batch.num_tokens, record_experts=True)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = tmp_path_factory.mktemp("run")
    codec = small_codec(folder / "tokenizer")
    hf = TINY.with_vocab(codec.vocab_size)
    limits = EpisodeLimits(max_turns=4, max_context=96, max_new_tokens=10)
    with one_rank() as rank:
        engine = EmbeddedEngine(
            hf_config=hf.to_dict(), max_context=96, threads=1, slots=16, log_path=folder / "engine.log"
        )
        driver = DriverProcess(driving.spec(folder, limits=limits, concurrency=12))
        try:
            driver.open(engine.connect(), folder / "tokenizer")
            trainer = make_trainer(rank, hf=hf, temperature=TEMPERATURE)
            yield System(trainer, engine, driver, TrajectoryStore(folder / "store"), hf)
        finally:
            driver.close()
            engine.close()


def differences(system: System, batch: TrajectoryBatch) -> tuple[float, float]:
    """Largest log-prob difference over sampled tokens whose whole context was routed alike, and the share that was."""
    scores = system.score(batch)
    assert scores.experts is not None and batch.routed is not None and batch.routed_valid is not None
    both = scores.routed & batch.routed_valid
    alike = np.ones(batch.num_tokens, dtype=bool)
    ours, theirs = np.sort(scores.experts[both], axis=-1), np.sort(batch.routed[both].astype(np.int64), axis=-1)
    alike[np.flatnonzero(both)] = (ours == theirs).all(axis=(1, 2))
    segment = batch.token_segment()
    before = np.array([alike[batch.segment_tokens[segment[t]] : t].all() for t in range(batch.num_tokens)])
    chosen = batch.loss_mask & before
    return float(np.abs(scores.logp[chosen] - batch.rollout_logp[chosen]).max()), float(
        chosen.sum() / batch.loss_mask.sum()
    )


def test_training_scores_what_was_sampled(system: System) -> None:
    """Over several turns, where the engine continues a cached dialogue, and again after the weights moved."""
    sampling = Sampling(temperature=TEMPERATURE, record_routing=True)
    for step in range(2):
        version = system.publish(step)
        batch = system.roll_out(f"step{step}", sampling)
        assert batch.loss_mask.sum() > 100 and batch.num_groups == len(TASKS)
        assert int(np.bincount(batch.turn_trajectory()).max()) > 4, "several turns"
        assert set(batch.version[batch.loss_mask].tolist()) == {version}
        worst, share = differences(system, batch)
        assert worst <= 1e-5 and share > 0.9
        moved = system.trainer.update(micro_of(batch, rows_of(batch)), random_inputs(batch), TERMS, lr=1e-2)
        assert moved.applied
        stale = np.abs(system.score(batch).logp - batch.rollout_logp)[batch.loss_mask]
        assert stale.mean() > 1e-2, "with other weights a difference is seen"


def test_with_replay_training_scores_what_was_sampled_everywhere(system: System) -> None:
    """Routing replay's invariant: with the same weights and precision the gap is float error on every sampled token,
    and it is not where what was recorded is perturbed, or recorded under other weights."""
    system.publish(3)
    batch = system.roll_out("replayed", Sampling(temperature=TEMPERATURE, record_routing=True))
    rule, rows = ReplayRule.of(system.hf), rows_of(batch)
    assert batch.routed is not None and batch.routed_valid is not None and batch.routed.dtype == np.uint8

    def gap(recorded: TrajectoryBatch) -> np.ndarray:
        members = [[row] for row in range(rows.num_rows)]
        micro = [build_microbatch(recorded, rows, part, rows.mask, replay=rule) for part in members]
        counts = sum((mb.replay.counts for mb in micro if mb.replay is not None), ReplayCounts())
        assert counts.missing == 0 and counts.replayed >= counts.due > 100, "the engine recorded all that is due"
        scores = system.trainer.score(micro, batch.num_tokens)
        return np.abs(scores.logp - batch.rollout_logp)[batch.loss_mask]

    plain = gap(batch)
    assert plain.max() <= 1e-5
    rng = np.random.default_rng(0)
    perturbed = batch.routed.copy()
    at = np.flatnonzero(batch.routed_valid & (rng.random(batch.num_tokens) < 0.2))
    perturbed[at] = (perturbed[at] + 1) % system.hf.num_experts
    assert gap(replace(batch, routed=perturbed)).mean() > 100 * plain.mean()
    own = system.trainer.snapshot()
    other = make_trainer(system.trainer.context, hf=system.hf, seed=7)
    scores = other.score(micro_of(batch, rows, cap=500), batch.num_tokens, record_experts=True)
    assert scores.experts is not None
    stale = np.where(batch.routed_valid[:, None, None], scores.experts, 0).astype(np.uint8)
    assert gap(replace(batch, routed=stale)).mean() > 100 * plain.mean()
    assert all(torch.equal(a, b) for a, b in zip(own, system.trainer.snapshot(), strict=True))


def test_sessions_are_scored_as_they_were_sampled(system: System, tmp_path: Path) -> None:
    """Sub-agents and compressions: the engine goes on from what it kept, training sees each session by itself."""
    system.publish(4)
    small_codec(tmp_path / "tokenizer")
    harness = {
        "_target_": "megatron_ext.harness.text.TextHarness",
        "context_budget": 14,
        "compress_prompt": "what?",
        "resume_prompt": "go",
        "summary_tokens": 5,
    }
    limits = EpisodeLimits(max_turns=6, max_context=96, max_new_tokens=10)
    tasks = [Task(f"relay/train/{i}", "relay", i, "train") for i in range(4)]
    driver = DriverProcess(
        driving.spec(tmp_path, environments={"relay": RELAY}, harness=harness, limits=limits, concurrency=12)
    )
    try:
        driver.open(system.engine.connect(), tmp_path / "tokenizer")
        other = replace(system, driver=driver, store=TrajectoryStore(tmp_path / "store"))
        batch = other.roll_out("sessions", Sampling(temperature=TEMPERATURE, record_routing=True), tasks)
        first, second = (
            evaluate(
                driver,
                tasks,
                "dev",
                samples=1,
                temperature=1.0,
                progress=lambda done: None,
                check=lambda: None,
                timeout=240.0,
            )
            for _ in range(2)
        )
    finally:
        driver.close()
    kinds = batch.session_kind.tolist()
    assert all(kinds.count(int(kind)) >= 12 for kind in SessionKind)
    assert np.diff(batch.segment_tokens).max() <= 96
    worst, share = differences(system, batch)
    assert worst <= 1e-5 and share > 0.9
    assert batch.routed_valid is not None
    for end in batch.turn_end[batch.turn_role == Role.MODEL].tolist():
        start = int(batch.segment_tokens[np.searchsorted(batch.segment_tokens, end, side="left") - 1])
        assert batch.routed_valid[start : end - 1].all(), "every token before a sampled one has its experts"
    assert first.greedy.tolist() == second.greedy.tolist() and first.turns.tolist() == second.turns.tolist()
    assert first.greedy.any() and first.turns.max() > 6, "summaries are turns, but cost none of max_turns"


def test_greedy_evaluations_repeat_exactly(system: System) -> None:
    system.publish(5)
    results = [
        evaluate(
            system.driver,
            TASKS,
            "dev",
            samples=2,
            temperature=1.0,
            progress=lambda done: None,
            check=lambda: None,
            timeout=240.0,
        )
        for _ in range(2)
    ]
    assert results[0].turns.tolist() == results[1].turns.tolist()
    assert results[0].greedy.tolist() == results[1].greedy.tolist()
    assert results[0].sampled.tolist() == results[1].sampled.tolist(), "sampled ones are paired by their seeds"


def test_equal_seeds_sample_equal_tokens(system: System) -> None:
    """Whatever else runs: the group's name and the sample's number alone decide."""
    system.publish(6)
    sampling = Sampling(temperature=TEMPERATURE)
    first = system.roll_out("again", sampling)
    second = system.roll_out("again", sampling)
    assert first.ids.tolist() == second.ids.tolist()
    samples = [first.ids[first.trajectory(j).tokens].tolist() for j in range(3)]
    assert samples[0] != samples[1] != samples[2], "samples of a group differ"
    np.testing.assert_allclose(first.rollout_logp, second.rollout_logp, rtol=0, atol=1e-5)
