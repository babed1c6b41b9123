"""Routing replay and routing losses of a Mixture of Experts: what they repair, what they cost.

A warm checkpoint is made first (``_moe_setup``). Then episodes of an engine in bf16 and of one in fp32 are scored by an
fp32 trainer with the same weights, with and without replay; training steps with replay and with both routing losses are
timed against plain ones; and RL runs with an engine that stays some steps behind (``_moe_mismatch``,
``_moe_overhead``).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from statistics import median

import numpy as np

from launch.benches._moe_mismatch import Mismatch, played, pooled, stale
from launch.benches._moe_overhead import CLOSED, OPEN, WAYS, changed_parameters, timed
from launch.benches._moe_setup import Size, World, world
from launch.measurement import Measurement, Report
from megatron_ext.trajectory.record import TrajectoryBatch

HELP = "routing replay and routing losses: mismatch with the engine, overhead, a closed gate"

REDUCTION_BAR, EQUAL_BAR, REPLAY_BAR, LOSSES_BAR = 2.0, 1e-5, 0.05, 0.1
STALE_PARTS = 4
NATS = "nats"


def run(report: Report) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-moe-") as scratch:
        measure(report, Size(), Path(scratch), Path(scratch) / "warm_start")


def measure(report: Report, size: Size, root: Path, cache: Path) -> None:
    """The whole bench under folder ``root``; a warm checkpoint found in ``cache`` is not made again."""
    with world(size, root, cache) as made:
        batch, found = played(made, size, "bfloat16")
        _two_precisions(report, made, found)
        _one_precision(report, made, played(made, size, "float32")[1])
        _costs(report, made, size, batch)
        _gate(report, made, size, batch)
        _stale(report, made, size, stale(made, size))


def _model(made: World) -> str:
    hf = made.hf
    return (
        f"{hf.layers} layers, hidden {hf.hidden}, {hf.num_experts} experts top-{hf.top_k}, warm after "
        f"{made.warm_steps} steps (greedy dev success {made.success:.2f})"
    )


def _two_precisions(report: Report, made: World, found: Mismatch) -> None:
    apart = found.apart
    if not apart.any():
        raise RuntimeError("no sampled token was routed differently in two precisions: take a larger batch")
    size = f"{int(apart.sum())} of {len(apart)} sampled tokens; engine bf16, trainer fp32; {_model(made)}"
    live, replayed = float(found.live[apart].mean()), float(found.replayed[apart].mean())
    report(Measurement("moe_replay_mismatch_reduction", live / replayed, "x", REDUCTION_BAR, "higher", size))
    report(Measurement("moe_mismatch_apart_live", live, NATS, None, "lower", size))
    report(Measurement("moe_mismatch_apart_replayed", replayed, NATS, None, "lower", size))
    everywhere = f"{len(apart)} sampled tokens; engine bf16, trainer fp32"
    report(Measurement("moe_mismatch_all_live", float(found.live.mean()), NATS, None, "lower", everywhere))
    report(Measurement("moe_mismatch_all_replayed", float(found.replayed.mean()), NATS, None, "lower", everywhere))
    share = float(apart.mean())
    report(Measurement("moe_routed_apart", share, "of sampled tokens", None, "lower", everywhere))


def _one_precision(report: Report, made: World, found: Mismatch) -> None:
    count, agreed = len(found.live), int(found.agreed.sum())
    live = float(found.live[found.agreed].max())
    size = f"largest of {agreed} of {count} sampled tokens; engine and trainer fp32"
    report(Measurement("moe_equal_precision_agreed", live, NATS, EQUAL_BAR, "lower", size))
    size = f"largest of all {count} sampled tokens, {int(found.apart.sum())} of them apart without replay"
    report(
        Measurement("moe_equal_precision_replayed", float(found.replayed.max()), NATS, EQUAL_BAR, "lower", size)
    )


def _costs(report: Report, made: World, size: Size, batch: TrajectoryBatch) -> None:
    times = timed(made, size, batch)
    label = (
        f"{batch.num_trajectories} trajectories, {batch.num_tokens} tokens, "
        f"{made.config.batch.optimizer_steps_per_batch} optimizer steps; {size.threads} threads; "
        f"median of {size.rounds} rounds in turns"
    )
    names = {"replay": ("moe_replay_overhead", REPLAY_BAR), "losses": ("moe_routing_loss_overhead", LOSSES_BAR)}
    for way, (name, bar) in names.items():
        report(Measurement(name, times.overhead(way), "of a plain step", bar, "lower", label))
        report(Measurement(f"{name}_cpu", times.cpu_overhead(way), "of its CPU time", None, "lower", label))
    for way in WAYS:
        report(Measurement(f"moe_step_{way}", median(times.wall[way]), "s", None, "lower", label))


def _gate(report: Report, made: World, size: Size, batch: TrajectoryBatch) -> None:
    total = sum(parameter.numel() for chunk in made.trainer().chunks for parameter in chunk.parameters())
    label = f"of {total} after {size.closed_steps} training steps, against plain RL"
    for name, router, bar in (("closed", CLOSED, 0.0), ("open", OPEN, None)):
        changed = changed_parameters(made, size, batch, router)
        report(Measurement(f"moe_gate_{name}_changed", changed, "parameters", bar, "lower", label))


def _stale(report: Report, made: World, size: Size, steps: list[Mismatch]) -> None:
    """Means over stretches of the run, over all sampled tokens and over those routed apart."""
    for part in np.array_split(np.arange(len(steps)), min(STALE_PARTS, len(steps))):
        found = pooled([steps[step] for step in part])
        first, last = int(part[0]) + 1, int(part[-1]) + 1
        label = (
            f"steps {first} to {last} of RL, engine bf16 and {size.lag} steps behind from step {size.lag + 1} on; "
            f"{len(found.live)} sampled tokens"
        )
        name = f"moe_stale_steps_{first:02}_{last:02}"
        report(Measurement(f"{name}_live", float(found.live.mean()), NATS, None, "lower", label))
        report(Measurement(f"{name}_replayed", float(found.replayed.mean()), NATS, None, "lower", label))
        apart = found.apart
        report(Measurement(f"{name}_apart", float(apart.mean()), "of sampled tokens", None, "lower", label))
        if apart.any():
            report(Measurement(f"{name}_apart_live", float(found.live[apart].mean()), NATS, None, "lower", label))
            replayed = float(found.replayed[apart].mean())
            report(Measurement(f"{name}_apart_replayed", replayed, NATS, None, "lower", label))
