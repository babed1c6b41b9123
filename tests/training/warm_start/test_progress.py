"""Invariants of ``training/warm_start/progress.py`` (numbers refer to it), on a real model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.checkpoints.files import CheckpointError
from megatron_ext.training.interrupt import Interrupted
from megatron_ext.training.ranks.ranks import Ranks
from megatron_ext.training.trainer import Trainer
from megatron_ext.training.warm_start.progress import Progress, forget, progress_folder, unfinished_steps
from megatron_ext.training.warm_start.warm_start import Position, WarmStartReport, run_warm_start
from tests.helpers.limits import files_at_most
from tests.helpers.training import identical, make_trainer, moments, parameters
from tests.training.warm_start.test_warm_start import config, demonstrations

STEPS = 9  # three passes of three steps


class Killed(BaseException):
    """Ends a warm start as a kill does: nothing is kept on the way out."""


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def go(
    run: Path,
    trainer: Trainer,
    *,
    stop: int = 0,
    how: type[BaseException] = Interrupted,
    minutes: float = 0.0,
    target: float = 0.0,
    gates: list[tuple[int, float]] | None = None,
    asynchronous: bool = False,
) -> WarmStartReport:
    """The warm start of ``run`` from where it is kept; ended after step ``stop``. A minute passes with each step."""
    clock = Clock()
    progress = Progress(run, "tiny", trainer, Ranks(), minutes=minutes, asynchronous=asynchronous, clock=clock)
    begin = progress.resume()

    def on_step(step: int, total: int, loss: float) -> None:
        clock.now += 60.0
        progress.note(step, loss)
        if step == stop:
            raise how

    with progress:
        return run_warm_start(
            trainer,
            demonstrations(),
            config(target_success=target),
            seed=5,
            tokens_per_microbatch=64,
            gate=lambda: 0.1,
            on_step=on_step,
            on_gate=lambda step, loss, success: None if gates is None else gates.append((step, loss)),
            begin=begin,
        )


@pytest.fixture(scope="module")
def whole(rank: ParallelContext, tmp_path_factory: pytest.TempPathFactory) -> tuple[Trainer, WarmStartReport]:
    trainer = make_trainer(rank)
    return trainer, go(tmp_path_factory.mktemp("whole"), trainer)


@pytest.mark.parametrize("stops", [(1,), (4,), (3, 5), (STEPS,)])
def test_one_that_was_stopped_ends_as_one_that_was_not(
    rank: ParallelContext, tmp_path: Path, whole: tuple[Trainer, WarmStartReport], stops: tuple[int, ...]
) -> None:  # invariant 1
    for number, stop in enumerate(stops):
        with pytest.raises(Interrupted):
            go(tmp_path, make_trainer(rank, seed=number + 1), stop=stop)  # later ones start with other weights
        assert unfinished_steps(tmp_path) == stop
    trainer = make_trainer(rank, seed=3)
    report = go(tmp_path, trainer)
    assert report == whole[1] and report.steps == STEPS
    assert identical(parameters(trainer), parameters(whole[0]))
    assert all(torch.equal(a, b) for a, b in zip(moments(trainer), moments(whole[0]), strict=True))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_kill_costs_the_steps_since_the_last_save(
    rank: ParallelContext, tmp_path: Path, whole: tuple[Trainer, WarmStartReport], asynchronous: bool
) -> None:
    with pytest.raises(Killed):
        go(tmp_path, make_trainer(rank), stop=5, how=Killed, minutes=2.0, asynchronous=asynchronous)
    assert unfinished_steps(tmp_path) == 4, "a save every two minutes, of which the last is kept"
    assert [folder.name for folder in progress_folder(tmp_path).iterdir()] == ["step_4"]
    (progress_folder(tmp_path) / "step_5.tmp").mkdir()  # a kill while it was saved
    trainer = make_trainer(rank, seed=3)
    assert go(tmp_path, trainer) == whole[1] and identical(parameters(trainer), parameters(whole[0]))
    forget(tmp_path)
    assert unfinished_steps(tmp_path) is None and list(tmp_path.iterdir()) == []


def test_the_look_at_the_gate_is_taken_again(rank: ParallelContext, tmp_path: Path) -> None:  # invariant 2
    seen: list[tuple[int, float]] = []
    go(tmp_path / "whole", make_trainer(rank), target=0.5, gates=seen)
    assert [step for step, _ in seen] == [2, 4, 6, 8, 9]
    before: list[tuple[int, float]] = []
    with pytest.raises(Interrupted):
        go(tmp_path / "run", make_trainer(rank), target=0.5, gates=before, stop=4)
    after: list[tuple[int, float]] = []
    go(tmp_path / "run", make_trainer(rank, seed=3), target=0.5, gates=after)
    assert before + after == seen, "with the same losses"


def test_a_disk_that_is_full(
    rank: ParallelContext, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:  # invariant 3
    with files_at_most(2000):
        report = go(tmp_path, make_trainer(rank), minutes=4.0)
        assert report.steps == STEPS and capsys.readouterr().err.count("warning: ") == 2
        with pytest.raises(CheckpointError):
            go(tmp_path, make_trainer(rank), stop=3)
    assert unfinished_steps(tmp_path) is None


def test_nothing_is_kept_before_the_first_step(rank: ParallelContext, tmp_path: Path) -> None:
    progress = Progress(tmp_path, "tiny", make_trainer(rank), Ranks(), minutes=1.0, asynchronous=False)
    assert progress.resume() == Position()
    with pytest.raises(Interrupted), progress:
        raise Interrupted
    assert unfinished_steps(tmp_path) is None
