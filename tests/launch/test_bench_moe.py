"""The moe bench measures what it says (``launch/benches/moe.py`` and its parts), on a warm start of a few steps."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from launch.benches import moe
from launch.benches._moe_mismatch import Mismatch, played, pooled, stale
from launch.benches._moe_overhead import CLOSED, EVERY_ROUND, OPEN, SOME_ROUNDS, changed_parameters, timed, ways
from launch.benches._moe_setup import SMALL, World, groups_of, training_step, world
from launch.measurement import Measurement
from megatron_ext.trajectory.record import TrajectoryBatch

pytestmark = [pytest.mark.slow, pytest.mark.integration]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with world(SMALL, tmp_path_factory.mktemp("runs"), tmp_path_factory.mktemp("warm")) as found:
        yield found


@pytest.fixture(scope="module")
def in_bf16(made: World) -> tuple[TrajectoryBatch, Mismatch]:
    return played(made, SMALL.tasks, "bfloat16")


def test_two_precisions_part_and_replay_brings_them_together(in_bf16: tuple[TrajectoryBatch, Mismatch]) -> None:
    batch, found = in_bf16
    assert len(found.live) == batch.loss_mask.sum() > 100
    assert 1e-4 < found.live.mean() < 0.1, "bf16 arithmetic, and the same weights"
    assert not (found.apart & found.agreed).any() and found.agreed.any()
    if found.apart.any():
        assert found.replayed[found.apart].mean() < found.live[found.apart].mean()
    both = pooled([found, found])
    assert len(both.live) == 2 * len(found.live) and both.apart.sum() == 2 * found.apart.sum()


def test_one_precision_differs_by_float_error(made: World) -> None:
    _, found = played(made, SMALL.equal_tasks, "float32")
    assert found.live[found.agreed].max() <= 2e-5 and found.replayed.max() <= 2e-5


def test_trainers_begin_alike(made: World) -> None:  # setup, invariant 1
    one, other = made.trainer().snapshot(), made.trainer(OPEN).snapshot()
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert made.warm_steps == 16


def test_every_way_does_what_it_is_named_for(made: World, in_bf16: tuple[TrajectoryBatch, Mismatch]) -> None:
    """Overhead, invariant 1: the same weights before and after, and the mechanism at work in its own way only."""
    batch, _ = in_bf16
    runs = ways(made)
    assert set(runs) == {*EVERY_ROUND, *SOME_ROUNDS}
    trainer = runs["plain"].trainer
    before = trainer.snapshot()
    for name, run in runs.items():
        assert run.trainer is trainer
        rows = run.rows(batch)
        micro = run.microbatches(batch, rows, np.arange(rows.num_rows))
        assert all((mb.replay is not None) == (name == "replay") for mb in micro)
        training_step(run, groups_of(batch))
        assert run.updates == (1 if name.startswith("single") else made.config.batch.optimizer_steps_per_batch)
        if run.routing is not None:
            run.routing.open(batch, micro)
            metrics = run.routing.close()
            assert metrics["moe/gate"] == 1 and metrics["moe/labelled_turns"] > 0
        assert (run.routing is not None) == (name in ("losses", "checked", "single_losses"))
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.snapshot(), strict=True))
    times = timed(made, SMALL, batch)
    assert [len(times.wall[way]) for way in (*EVERY_ROUND, *SOME_ROUNDS)] == [2, 2, 2, 1, 1, 1]
    assert times.overhead("plain") == 0 and times.cpu_overhead("single_losses", "single") > 0


def test_a_closed_gate_changes_nothing_and_an_open_one_does(
    made: World, in_bf16: tuple[TrajectoryBatch, Mismatch]
) -> None:  # overhead, invariant 2
    batch, _ = in_bf16
    assert changed_parameters(made, SMALL, batch, CLOSED) == 0
    assert changed_parameters(made, SMALL, batch, OPEN) > 0


def test_an_engine_behind_is_further_apart(made: World) -> None:  # mismatch, invariant 2
    found, success = stale(made, SMALL)
    assert len(found) == len(success) == SMALL.stale_steps
    assert found[-1].replayed.mean() > found[0].replayed.mean(), "older weights"


def test_every_row_is_reported(made: World, in_bf16: tuple[TrajectoryBatch, Mismatch]) -> None:
    rows: list[Measurement] = []
    batch, found = in_bf16
    forced = Mismatch(found.live, found.replayed, np.ones(len(found.live), dtype=bool), found.agreed)
    moe.report_two_precisions(rows.append, made, forced)
    moe.report_costs(rows.append, made, SMALL, batch)
    moe.report_stale(rows.append, SMALL, [forced, forced], [0.0, 0.5])
    names = [row.name for row in rows]
    assert len(names) == len(set(names)) and all(moe.ABOUT.knows(name) for name in names)
    small = [moe.unclaimed(row) for row in rows]
    assert all(row.bar is None and row.size.startswith("small, no claim: ") for row in small)
    for part, bar in (("replay_mismatch_reduction", 2.0), ("replay_overhead", 0.05), ("routing_loss_overhead", 0.1)):
        assert [row.bar for row in rows if part in row.name and row.bar is not None] == [bar]
    empty = Mismatch(found.live, found.replayed, np.zeros(len(found.live), dtype=bool), found.agreed)
    with pytest.raises(RuntimeError, match="larger batch"):
        moe.report_two_precisions(rows.append, made, empty)
