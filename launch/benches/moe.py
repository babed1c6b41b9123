"""Routing replay and routing losses of a Mixture of Experts: what they repair, what they cost.

A warm checkpoint is made first. Then episodes of an engine in bf16 and of one in fp32 are scored by an fp32 trainer
with the same weights, with and without replay; training steps with replay and with both routing losses are timed
against plain ones; and RL runs with an engine that stays some steps behind. The parts are ``_moe_setup.py``,
``_moe_mismatch.py`` and ``_moe_overhead.py``.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path
from statistics import median

import numpy as np

from launch.benches._moe_mismatch import Mismatch, played, pooled, stale
from launch.benches._moe_overhead import CLOSED, EVERY_ROUND, OPEN, changed_parameters, timed
from launch.benches._moe_setup import SMALL, Size, World, world
from launch.measurement import About, Measurement, Report
from megatron_ext.trajectory.record import TrajectoryBatch

REDUCTION_BAR, EQUAL_BAR, REPLAY_BAR, LOSSES_BAR = 2.0, 1e-5, 0.05, 0.1
STALE_PARTS = 4
NATS = "nats"
SMALL_SIZES = "small, no claim"


def add_options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--small",
        action="store_true",
        help="the smallest sizes at which everything runs; its figures are no claims and have no bars",
    )
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="FOLDER",
        help="keep the warm checkpoint there, and take it from there the next time (default: made anew, not kept)",
    )


ABOUT = About(
    line="routing replay and routing losses: mismatch with the engine, overhead, a closed gate",
    takes="2.6 minutes on one idle core, under a minute with --small; --cache saves the warm start, about half of it",
    keys={
        "moe_replay_mismatch_reduction": "of tokens that two precisions route apart: mismatch without replay over with",
        "moe_mismatch_<tokens>_<how>": "mean |log-prob difference|, engine bf16: tokens apart or all; live or replayed",
        "moe_routed_apart": "share of the sampled tokens that two precisions route apart",
        "moe_equal_precision_<how>": "the largest difference in one precision: agreed (no replay), replayed",
        "moe_equal_precision_replayed_mean": "the mean of the latter",
        "moe_replay_overhead": "seconds of a step with replay over a plain one's, less 1",
        "moe_routing_loss_overhead": "the same of both routing losses, two optimizer steps a batch",
        "moe_routing_loss_cost_<when>": "the same: checked (linearisation measured), single (one optimizer step)",
        "moe_cpu_cost_<way>": "the same in CPU time of all threads",
        "moe_step_<way>": "seconds of a step",
        "moe_gate_<state>_changed": "parameters that differ from plain RL's after some steps, gate closed or open",
        "moe_stale_steps_<from>_<to>_<how>": "mean |log-prob difference| of an engine some steps behind; apart: share",
    },
    options=add_options,
)


def run(report: Report, small: bool = False, cache: Path | None = None) -> None:
    with tempfile.TemporaryDirectory(prefix="bench-moe-") as scratch:
        root = Path(scratch)
        warm = root / "warm_start" if cache is None else cache.resolve()
        if not small:
            measure(report, Size(), root, warm)
            return
        print("small sizes: they show that everything runs; the figures are no claims", file=sys.stderr)
        measure(lambda row: report(unclaimed(row)), SMALL, root, warm)


def unclaimed(row: Measurement) -> Measurement:
    """A figure of the small sizes."""
    return replace(row, bar=None, size=f"{SMALL_SIZES}: {row.size}")


def measure(report: Report, size: Size, root: Path, cache: Path) -> None:
    """The whole bench under folder ``root``; a warm checkpoint found in ``cache`` is not made again."""
    with world(size, root, cache) as made:
        batch, found = played(made, size.tasks, "bfloat16")
        report_two_precisions(report, made, found)
        report_one_precision(report, played(made, size.equal_tasks, "float32")[1])
        report_costs(report, made, size, batch)
        report_gate(report, made, size, batch)
        report_stale(report, size, *stale(made, size))


def _model(made: World) -> str:
    hf = made.hf
    return (
        f"{hf.layers} layers, hidden {hf.hidden}, {hf.num_experts} experts top-{hf.top_k}, warm after "
        f"{made.warm_steps} steps (greedy dev success {made.success:.2f})"
    )


def report_two_precisions(report: Report, made: World, found: Mismatch) -> None:
    apart = found.apart
    everywhere = f"{len(apart)} sampled tokens; engine bf16, trainer fp32"
    report(Measurement("moe_routed_apart", float(apart.mean()), "of sampled tokens", None, "lower", everywhere))
    report(Measurement("moe_mismatch_all_live", float(found.live.mean()), NATS, None, "lower", everywhere))
    report(Measurement("moe_mismatch_all_replayed", float(found.replayed.mean()), NATS, None, "lower", everywhere))
    if not apart.any():
        raise RuntimeError("no sampled token was routed differently in two precisions: take a larger batch")
    size = f"{int(apart.sum())} of {len(apart)} sampled tokens; engine bf16, trainer fp32; {_model(made)}"
    live, replayed = float(found.live[apart].mean()), float(found.replayed[apart].mean())
    report(Measurement("moe_replay_mismatch_reduction", live / replayed, "x", REDUCTION_BAR, "higher", size))
    report(Measurement("moe_mismatch_apart_live", live, NATS, None, "lower", size))
    report(Measurement("moe_mismatch_apart_replayed", replayed, NATS, None, "lower", size))


def report_one_precision(report: Report, found: Mismatch) -> None:
    count, agreed = len(found.live), int(found.agreed.sum())
    live = float(found.live[found.agreed].max())
    size = f"largest of {agreed} of {count} sampled tokens; engine and trainer fp32"
    report(Measurement("moe_equal_precision_agreed", live, NATS, EQUAL_BAR, "lower", size))
    size = f"largest of all {count} sampled tokens, {int(found.apart.sum())} of them apart without replay"
    report(Measurement("moe_equal_precision_replayed", float(found.replayed.max()), NATS, EQUAL_BAR, "lower", size))
    mean = float(found.replayed.mean())
    report(Measurement("moe_equal_precision_replayed_mean", mean, NATS, None, "lower", f"mean of {count}"))


def report_costs(report: Report, made: World, size: Size, batch: TrajectoryBatch) -> None:
    times = timed(made, size, batch)
    tokens = f"{batch.num_trajectories} trajectories, {batch.num_tokens} tokens; {size.threads} threads"
    updates = f"{made.config.batch.optimizer_steps_per_batch} optimizer steps a batch"
    label = f"{tokens}; {updates}; median of {size.rounds} rounds in turns"
    some = f"{tokens}; {{}}; median of {min(size.other_rounds, size.rounds)} rounds in turns"
    checked = f"{updates}, in a step that measures the linearisation's error (every 10th by default)"
    single = "one optimizer step a batch, of which the plain one needs no scoring forward"
    rows: tuple[tuple[str, str, str, float | None, str], ...] = (
        ("moe_replay_overhead", "replay", "plain", REPLAY_BAR, label),
        ("moe_routing_loss_overhead", "losses", "plain", LOSSES_BAR, label),
        ("moe_routing_loss_cost_checked", "checked", "plain", None, some.format(checked)),
        ("moe_routing_loss_cost_single", "single_losses", "single", None, some.format(single)),
    )
    for name, way, other, bar, size_of in rows:
        report(Measurement(name, times.overhead(way, other), "of the plain step", bar, "lower", size_of))
        cpu = times.cpu_overhead(way, other)
        report(Measurement(f"moe_cpu_cost_{way}", cpu, "of the plain step's CPU time", None, "lower", size_of))
    for way in EVERY_ROUND:
        report(Measurement(f"moe_step_{way}", median(times.wall[way]), "s", None, "lower", label))


def report_gate(report: Report, made: World, size: Size, batch: TrajectoryBatch) -> None:
    total = sum(parameter.numel() for chunk in made.trainer().chunks for parameter in chunk.parameters())
    label = f"of {total} after {size.closed_steps} training steps, against plain RL"
    for name, router, bar in (("closed", CLOSED, 0.0), ("open", OPEN, None)):
        changed = changed_parameters(made, size, batch, router)
        report(Measurement(f"moe_gate_{name}_changed", changed, "parameters", bar, "lower", label))


def report_stale(report: Report, size: Size, steps: list[Mismatch], success: list[float]) -> None:
    """Means over stretches of the run, over all sampled tokens and over those routed apart."""
    for part in np.array_split(np.arange(len(steps)), min(STALE_PARTS, len(steps))):
        found = pooled([steps[step] for step in part])
        first, last = int(part[0]) + 1, int(part[-1]) + 1
        label = (
            f"steps {first} to {last} of RL, engine bf16 and {size.lag} steps behind from step {size.lag + 1} on, lr "
            f"{size.stale_lr:g}; {len(found.live)} sampled tokens; success {float(np.mean(np.take(success, part))):.2f}"
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
