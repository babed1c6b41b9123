"""What replay and routing losses cost a training step, and that a closed gate costs nothing but their measurement.

A step is the main loop's between the arrival of its groups and its last metric: rows, packing, scoring, credit, the
batch's optimizer steps, metrics. Playing, which neither changes, is left out, so that a step of a run is longer and the
overheads in it are smaller. The ways take turns in rotating order on one trainer and one batch with learning rate 0; an
overhead is the median over rounds of the ratio to the other way's step of the same round, less 1.

``checked`` is ``losses`` in a step that also measures what the linearisation missed. ``single`` makes one optimizer
step a batch, which needs no scoring forward; ``single_losses`` then has one of its own.

Invariants (``tests/launch/test_bench_moe.py``):

1. All ways train the same tokens with the same weights.
2. With the gate closed parameters are compared after steps that move them, bit for bit.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from launch.benches._moe_setup import Size, World, groups_of, training_step
from megatron_ext.config.instantiate import instantiate
from megatron_ext.training.learner import Learner
from megatron_ext.training.routing.routing import RoutingLosses
from megatron_ext.trajectory.record import TrajectoryBatch

EVERY_ROUND = ("plain", "replay", "losses")
SOME_ROUNDS = ("checked", "single", "single_losses")
STRUCTURED: Mapping[str, Any] = {"_target_": "megatron_ext.moe.structured.StructuredRouter", "operations": 5}
OPEN = {**STRUCTURED, "entropy_high": 100.0, "error_every": 0}
CHECKED = {**OPEN, "error_every": 1}
CLOSED = {**STRUCTURED, "entropy_low": 50.0, "entropy_high": 100.0}  # a vocabulary of 1,024 has at most 6.9 nats


@dataclass(frozen=True)
class Timings:
    """Seconds of each round's step, one list a way; ``cpu`` of all threads of the process."""

    wall: Mapping[str, list[float]]
    cpu: Mapping[str, list[float]]

    def overhead(self, way: str, other: str = "plain") -> float:
        """Of the other way's step."""
        return _overhead(self.wall, way, other)

    def cpu_overhead(self, way: str, other: str = "plain") -> float:
        return _overhead(self.cpu, way, other)


def _overhead(seconds: Mapping[str, list[float]], way: str, other: str) -> float:
    # Ways of some rounds only were in the first ones.
    return median(a / b for a, b in zip(seconds[way], seconds[other], strict=False)) - 1


def ways(world: World) -> dict[str, Learner]:
    """A learner for each way, all on one trainer."""
    trainer = world.trainer(OPEN)
    learners = {way: world.learner(trainer, replay=way == "replay", lr=0.0) for way in EVERY_ROUND}
    learners["checked"] = world.learner(trainer, lr=0.0)
    learners |= {way: world.learner(trainer, lr=0.0, updates=1) for way in ("single", "single_losses")}
    for way in ("plain", "replay", "single"):
        learners[way].routing = None
    policy = instantiate(CHECKED)
    learners["checked"].routing = RoutingLosses(trainer, policy)
    return learners


def timed(world: World, size: Size, batch: TrajectoryBatch) -> Timings:
    """``size.rounds`` rounds of the first three ways, ``size.other_rounds`` of them with the others."""
    learners, groups = ways(world), groups_of(batch)
    wall: dict[str, list[float]] = {way: [] for way in learners}
    cpu: dict[str, list[float]] = {way: [] for way in learners}
    for learner in learners.values():
        training_step(learner, groups)
    for number in range(size.rounds):
        due = EVERY_ROUND + (SOME_ROUNDS if number < size.other_rounds else ())
        turn = number % len(due)
        for way in due[turn:] + due[:turn]:
            began, spent = time.perf_counter(), time.process_time()
            training_step(learners[way], groups)
            wall[way].append(time.perf_counter() - began)
            cpu[way].append(time.process_time() - spent)
    return Timings(wall, cpu)


def changed_parameters(world: World, size: Size, batch: TrajectoryBatch, router: Mapping[str, Any]) -> int:
    """Parameters, counted by element, that differ in any bit from plain RL's after ``closed_steps`` steps."""
    groups, found = groups_of(batch), []
    for node in (None, router):
        trainer = world.trainer(node)
        learner = world.learner(trainer, steps=size.closed_steps)
        for _ in range(size.closed_steps):
            training_step(learner, groups)
        found.append(trainer.snapshot())
    bits = [[value.view(torch.int32) for value in values] for values in found]
    return sum(int((a != b).sum()) for a, b in zip(*bits, strict=True))
