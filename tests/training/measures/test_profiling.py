"""Invariants of step traces (numbers refer to ``megatron_ext/training/measures/profiling.py``), on a real trainer."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch.profiler import profile

from megatron_ext.models.forward import unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.measures.phases import MARK, Phases, span
from megatron_ext.training.measures.profiling import OUTSIDE, StepProfiler, StepTable
from megatron_ext.training.trainer import Trainer
from tests.helpers.records import random_batch
from tests.helpers.training import TERMS, make_trainer, micro_of, random_inputs, rows_of


class Silent:
    def phase(self, name: str, total: int | None = None) -> None: ...


def train(trainer: Trainer, profiler: StepProfiler, steps: int, *, unfinished: bool = False) -> None:
    """Steps as the main loop makes them: scoring and update, the profiler told between them."""
    batch = random_batch(3, groups=2)
    micro, inputs, phase = micro_of(batch, rows_of(batch)), random_inputs(batch), Phases(Silent())  # type: ignore[arg-type]
    for step in range(1, steps + 1):
        profiler.at(step)
        with phase("scoring"):
            trainer.score(micro, batch.num_tokens)
        if unfinished and step == steps:
            return
        with phase("update"):
            trainer.update(micro, inputs, TERMS, lr=1e-3)
    profiler.at(None)


@pytest.fixture(scope="module")
def recorded(rank: ParallelContext, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, StepTable]:
    """Steps 2 and 3 of 4, and the table of the last one."""
    from megatron_ext.training.measures import profiling

    folder, tables = tmp_path_factory.mktemp("run") / "profile", list[StepTable]()
    summarize = profiling.summarize

    def kept(recorder: profile, step: int, rank: int, seconds: float) -> StepTable:
        tables.append(summarize(recorder, step, rank, seconds))
        return tables[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling, "summarize", kept)
        trainer = make_trainer(rank)
        train(trainer, StepProfiler([2, 3], folder, 5, trainer.chunks), 4)
    return folder, tables[-1]


def test_the_steps_asked_for_are_recorded_and_no_other(recorded: tuple[Path, StepTable]) -> None:  # invariant 1
    folder, _ = recorded
    names = {f"step_{step}_rank5.{kind}" for step in (2, 3) for kind in ("json.gz", "txt")}
    assert {path.name for path in folder.iterdir()} == names
    with gzip.open(folder / "step_2_rank5.json.gz") as file:
        events = json.load(file)["traceEvents"]
    found = [event["name"].removeprefix(MARK) for event in events if str(event.get("name")).startswith(MARK)]
    assert found.count("scoring") == found.count("update") == found.count("optimizer") == 1
    assert found.count("forward") == 2 and found.count("backward") == found.count("loss") == 1
    assert any(event.get("name") == "aten::mm" for event in events)


def test_own_times_add_up_to_the_step(recorded: tuple[Path, StepTable]) -> None:  # invariant 2
    folder, table = recorded
    paths = {row.path for row in table.ranges}
    assert table.step == 3 and table.rank == 5
    assert {
        ("scoring", "schedule", "forward", "log-prob"),
        ("update", "schedule", "forward", "loss"),
        ("update", "schedule", "backward"),
        ("update", "optimizer"),
        (OUTSIDE,),
    } <= paths
    assert sum(row.own for row in table.ranges) == pytest.approx(table.seconds, rel=1e-3)
    assert all(0 <= row.own <= row.total for row in table.ranges)
    for row in table.ranges:
        inside = sum(r.total for r in table.ranges if r.path[:-1] == row.path)
        assert row.own == pytest.approx(row.total - inside, abs=1e-9)
    assert sum(op.own for op in table.operators) == pytest.approx(sum(r.operators for r in table.ranges))
    assert sum(r.operators for r in table.ranges) <= table.seconds
    assert [op.own for op in table.operators] == sorted((op.own for op in table.operators), reverse=True)
    text = (folder / "step_3_rank5.txt").read_text()
    assert text == table.text() + "\n" and "aten::mm" in text and "      log-prob" in text


def test_nothing_is_left_on_where_nothing_is_recorded(rank: ParallelContext, tmp_path: Path) -> None:  # invariant 3
    trainer = make_trainer(rank)
    assert isinstance(span("any"), nullcontext) and not torch.autograd._profiler_enabled()
    train(trainer, StepProfiler(), 1)
    profiler = StepProfiler([1, 1], tmp_path / "profile", 0, trainer.chunks)
    train(trainer, profiler, 1, unfinished=True)
    assert torch.autograd._profiler_enabled() and unwrap(trainer.chunks[0]).config.timers is not None
    profiler.close()  # as an interrupt does
    profiler.close()
    assert not torch.autograd._profiler_enabled() and unwrap(trainer.chunks[0]).config.timers is None
    assert not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_costs_a_warning(
    rank: ParallelContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # invariant 4
    (tmp_path / "profile").write_text("in the way")
    trainer = make_trainer(rank)
    train(trainer, StepProfiler([1, 1], tmp_path / "profile", 0, trainer.chunks), 2)
    assert "warning: no trace of step 1" in capsys.readouterr().err
    assert not torch.autograd._profiler_enabled()
