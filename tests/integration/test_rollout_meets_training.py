"""What the engine sampled is what training scores: engine process, driver process, environment workers and trainer."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.driver import GroupOrder
from megatron_ext.rollout.driver_process import DriverProcess
from megatron_ext.rollout.embedded.engine import EmbeddedEngine
from megatron_ext.rollout.episode import EpisodeLimits, Sampling
from megatron_ext.training.evaluate import evaluate
from megatron_ext.training.publish import publish
from megatron_ext.training.trainer import TokenScores, Trainer
from megatron_ext.trajectory import version as policy_version
from megatron_ext.trajectory.record import TrajectoryBatch, concat
from megatron_ext.trajectory.store import Ref, TrajectoryStore
from megatron_ext.trajectory.task import Task
from tests.helpers import driving
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

    def roll_out(self, name: str, sampling: Sampling) -> TrajectoryBatch:
        orders = [GroupOrder(f"{name}/{task.task_id}", "", task, 3, sampling, store=True) for task in TASKS]
        self.driver.run(orders)
        refs: dict[str, str] = {}
        end = time.monotonic() + 60
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
            timeout=60.0,
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
