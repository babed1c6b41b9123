"""Invariants of saving while training goes on (numbers: ``megatron_ext/training/checkpoints/async_save.py``)."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints import write as checkpoint_write
from megatron_ext.training.checkpoints.async_save import Saver
from megatron_ext.training.checkpoints.checkpoint import SaveRequest, list_checkpoints
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.limits import files_at_most
from tests.helpers.records import random_batch
from tests.helpers.training import (
    TERMS,
    identical,
    make_trainer,
    micro_of,
    moments,
    parameters,
    random_inputs,
    rows_of,
)

DEADLINE = 60.0


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return random_batch(3, groups=4)


@pytest.fixture
def trainer(rank: ParallelContext) -> Trainer:
    return make_trainer(rank, lr=1e-2)


def train(trainer: Trainer, batch: TrajectoryBatch, seed: int) -> None:
    trainer.update(micro_of(batch, rows_of(batch)), random_inputs(batch, seed), TERMS, lr=1e-2)


def request(step: int, **options: Any) -> SaveRequest:
    return SaveRequest(step, "tiny", {"step": step}, **options)


@contextmanager
def held_writes(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[threading.Event, threading.Event]]:
    """Writers stop before their first byte: (set when one waits, set to let them go on)."""
    waiting, go = threading.Event(), threading.Event()
    write = checkpoint_write.SaveJob._write_files

    def held(job: checkpoint_write.SaveJob) -> Any:
        waiting.set()
        assert go.wait(DEADLINE)
        return write(job)

    monkeypatch.setattr(checkpoint_write.SaveJob, "_write_files", held)
    yield waiting, go
    go.set()


def test_what_is_written_is_what_there_was(
    rank: ParallelContext,
    batch: TrajectoryBatch,
    trainer: Trainer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # invariant 2
    saver = Saver(tmp_path, trainer, asynchronous=True)
    train(trainer, batch, 0)
    reference = trainer.snapshot()
    kept, kept_moments, kept_reference = parameters(trainer), moments(trainer), [value.clone() for value in reference]
    with held_writes(monkeypatch) as (waiting, go):
        saver.start(request(1, reference=reference))
        assert waiting.wait(DEADLINE) and saver.under_way == 1
        assert saver.settle() == [] and list_checkpoints(tmp_path) == []
        for seed in range(1, 4):
            train(trainer, batch, seed)
        for value in reference:
            value.zero_()
        assert not identical(parameters(trainer), kept)
        go.set()
        (saved,) = saver.settle(wait=True)
    assert saved.step == 1 and saved.error == "" and saver.under_way is None
    other = make_trainer(rank, seed=9)
    restored = checkpoint.load(list_checkpoints(tmp_path)[0], "tiny", other)
    assert identical(parameters(other), kept) and restored.states == {"step": 1}
    assert all(torch.equal(a, b) for a, b in zip(moments(other), kept_moments, strict=True))
    assert restored.reference is not None
    assert all(torch.equal(a, b) for a, b in zip(restored.reference, kept_reference, strict=True))


def test_the_next_save_waits_for_the_one_before(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # invariant 1
    saver = Saver(tmp_path, trainer, asynchronous=True)
    with held_writes(monkeypatch) as (waiting, go):
        saver.start(request(1))
        assert waiting.wait(DEADLINE)
        threading.Timer(0.3, go.set).start()
        saver.start(request(2))
        assert [info.step for info in list_checkpoints(tmp_path)][:1] == [1], "the first one stood before"
        saver.close()
    assert [saved.step for saved in saver.settle(wait=True)] == [1, 2]
    assert saver.settle(wait=True) == [], "each end is told once"


def test_closing_waits(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # invariant 4
    saver = Saver(tmp_path, trainer, asynchronous=True)
    with held_writes(monkeypatch) as (waiting, go):
        saver.start(request(1))
        assert waiting.wait(DEADLINE)
        threading.Timer(0.3, go.set).start()
        saver.close()
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_is_told_once_and_costs_nothing(
    batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path, asynchronous: bool
) -> None:  # invariant 3
    saver = Saver(tmp_path, trainer, asynchronous=asynchronous)
    saver.start(request(1, keep=1))
    assert [saved.error for saved in saver.settle(wait=True)] == [""]
    for step in (2, 3):  # a disk that stays full
        train(trainer, batch, step)
        with files_at_most(20_000):
            saver.start(request(step, keep=1))
            (saved,) = saver.settle(wait=True)
        assert saved.step == step and f"cannot save checkpoint {tmp_path / f'step_{step}'}" in saved.error
        assert "\n" not in saved.error
        assert saver.settle(wait=True) == [] and [info.step for info in list_checkpoints(tmp_path)] == [1]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["step_1"]
    saver.start(request(4, keep=1))
    assert [saved.error for saved in saver.settle(wait=True)] == [""]
    assert [info.step for info in list_checkpoints(tmp_path)] == [4]


def test_a_folder_that_cannot_be_made_is_told(trainer: Trainer, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    root.write_text("a file stands in its place")
    saver = Saver(root, trainer, asynchronous=True)
    saver.start(request(1))
    (saved,) = saver.settle(wait=True)
    assert "cannot save checkpoint" in saved.error
