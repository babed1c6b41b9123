"""A prompt that the engine runs again on other experts: real engine and trainer, weights published inside a trajectory.

What ``Rerun.SEGMENT`` promises (``trajectory/builder.py``, 6): with replay, each trained token has under the weights
that sampled it the log-prob that the engine gave.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from megatron_ext.models.forward import unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.rollout.embedded.engine import EmbeddedEngine
from megatron_ext.rollout.engine import GenerationClient
from megatron_ext.training.publish import whole_tensors
from megatron_ext.training.ranks.lockstep import rank_microbatches
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.builder import FinishedTrajectory, TrajectoryBuilder, build_group
from megatron_ext.trajectory.record import Role, Status, TrajectoryBatch
from megatron_ext.trajectory.routed_rows import Rerun, RerunCounts
from tests.helpers.engines import ask, prompt, request
from tests.helpers.training import TINY, make_trainer, one_rank, rows_of

# Dense layers lead and stand between; enough experts that other weights choose others.
HF = replace(TINY, layers=4, mlp_only_layers=(0, 2), num_experts=8, top_k=3)
RULE = ReplayRule.of(HF)
TURNS = 4


@pytest.fixture(scope="module")
def rank() -> Iterator[ParallelContext]:
    with one_rank() as context:
        yield context


@pytest.fixture(scope="module")
def trainers(rank: ParallelContext) -> tuple[Trainer, Trainer]:
    """Of two policy versions."""
    return make_trainer(rank, hf=HF, seed=1), make_trainer(rank, hf=HF, seed=2)


def tensors(trainer: Trainer) -> Iterator[tuple[str, torch.Tensor]]:
    return whole_tensors([unwrap(chunk) for chunk in trainer.chunks], HF)


@pytest.fixture(scope="module")
def engine() -> Iterator[EmbeddedEngine]:
    with EmbeddedEngine(hf_config=HF.to_dict(), max_context=200, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def client(engine: EmbeddedEngine, trainers: tuple[Trainer, Trainer]) -> Iterator[GenerationClient]:
    engine.publish(tensors(trainers[0]), 0)  # a client waits for weights
    client = engine.connect().open()
    yield client
    client.close()


VERSIONS = iter(range(1, 1000))


def play(
    engine: EmbeddedEngine, client: GenerationClient, weights: dict[int, Trainer], rerun: Rerun
) -> tuple[FinishedTrajectory, dict[int, Trainer]]:
    """A trajectory of four turns; before turn t the engine gets the weights of ``weights[t]``. Also the versions."""
    rng, of = np.random.default_rng(0), dict[int, Trainer]()
    b = TrajectoryBuilder("t", 0, "text", rerun)
    s = b.open_session()
    b.add_message(s, Role.USER, prompt(rng, 9, HF.vocab))
    name = f"{rerun}-{next(VERSIONS)}"
    for turn in range(TURNS):
        if turn in weights:
            version = next(VERSIONS)
            of[version] = weights[turn]
            engine.publish(tensors(weights[turn]), version)
        sent = request(f"{name}/{turn}", b.prompt_ids(s).copy(), session=name, return_routed=True, max_new_tokens=7)
        result = ask(client, [sent])[sent.request_id]
        b.add_model_turn(
            s,
            result.ids,
            result.logp,
            result.versions,
            routed=result.routed,
            routed_from=result.routed_from,
            rerun=result.rerun,
        )
        b.add_message(s, Role.USER, prompt(rng, 4, HF.vocab))
    client.end_sessions([name])
    return b.finish(1.0, {}, True, Status.DONE), of


def errors(
    batch: TrajectoryBatch, of: dict[int, Trainer], rank: ParallelContext, *, share: bool
) -> NDArray[np.float64]:
    """|trainer - engine| of the log-prob of each trained token, under the weights that sampled it."""
    found = np.zeros(batch.num_tokens)
    micro = rank_microbatches(batch, rows_of(batch), rank, cap=4096, replay=RULE, share_prefixes=share)
    for version, trainer in of.items():
        own = batch.version == version
        found[own] = np.abs(trainer.score(micro, batch.num_tokens).logp - batch.rollout_logp)[own]
    return found[batch.loss_mask]


@pytest.mark.parametrize("share", [False, True])
def test_every_token_replays_the_forward_that_sampled_it(
    engine: EmbeddedEngine,
    client: GenerationClient,
    trainers: tuple[Trainer, Trainer],
    rank: ParallelContext,
    share: bool,
) -> None:
    one, two = trainers
    finished, of = play(engine, client, {0: one, 2: two, 3: one}, Rerun.SEGMENT)
    batch = build_group("g", "t", [finished])
    assert batch.num_segments == 3 and len(set(batch.version[batch.loss_mask].tolist())) == 3
    assert batch.loss_mask.sum() == 7 * TURNS and batch.num_turns == 1 + 2 * TURNS
    assert errors(batch, of, rank, share=share).max() < 1e-5
    assert finished.reruns.positions > 20 and finished.reruns.displaced == 0


def test_one_segment_cannot_replay_two_forwards(
    engine: EmbeddedEngine, client: GenerationClient, trainers: tuple[Trainer, Trainer], rank: ParallelContext
) -> None:
    """What ``Rerun.FIRST`` gives up, and what it counts."""
    one, two = trainers
    finished, of = play(engine, client, {0: one, 2: two}, Rerun.FIRST)
    batch = build_group("g", "t", [finished])
    assert batch.num_segments == 1
    error = errors(batch, of, rank, share=False)
    assert error[:14].max() < 1e-5 and np.median(error[14:]) > 1e-3
    assert finished.reruns.displaced == 14 and finished.reruns.positions > 20


def test_the_same_weights_again_change_nothing(
    engine: EmbeddedEngine, client: GenerationClient, trainers: tuple[Trainer, Trainer], rank: ParallelContext
) -> None:
    one, _ = trainers
    finished, of = play(engine, client, {0: one, 2: one}, Rerun.SEGMENT)
    batch = build_group("g", "t", [finished])
    assert batch.num_segments == 1 and finished.reruns == RerunCounts()
    assert errors(batch, of, rank, share=False).max() < 1e-5
