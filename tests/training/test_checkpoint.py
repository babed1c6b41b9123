"""Invariants of checkpoints (numbers refer to ``megatron_ext/training/checkpoint.py``): real trainer, real disk."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training import checkpoint
from megatron_ext.training.checkpoint import CheckpointError, CheckpointInfo, list_checkpoints
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.limits import files_at_most
from tests.helpers.records import random_batch
from tests.helpers.training import (
    TERMS,
    TINY,
    identical,
    make_trainer,
    micro_of,
    moments,
    parameters,
    random_inputs,
    rows_of,
)

STATES: dict[str, Any] = {"updates": 3, "source": {"epoch": 1, "order": [2, 0]}, "reference": [torch.ones(2)]}


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return random_batch(3, groups=4)


def train(trainer: Trainer, batch: TrajectoryBatch, seeds: Iterable[int]) -> None:
    for seed in seeds:
        trainer.update(micro_of(batch, rows_of(batch), cap=100), random_inputs(batch, seed), TERMS, lr=1e-3)


@pytest.fixture
def trainer(rank: ParallelContext) -> Trainer:
    return make_trainer(rank, lr=1e-3)


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_continuing_is_exact(rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path) -> None:
    """Invariant 4: what follows a restored checkpoint is bit for bit what followed it when it was written."""
    train(trainer, batch, range(3))
    torch.rand(5)
    checkpoint.save(tmp_path, 3, "quickstart", trainer, STATES, keep=2)
    saved, saved_moments = parameters(trainer), moments(trainer)
    train(trainer, batch, range(3, 5))
    noise = torch.rand(4)

    other = make_trainer(rank, seed=9, lr=1e-3)
    train(other, batch, range(7, 8))  # moments of its own, to be replaced
    (info,) = list_checkpoints(tmp_path)
    states = checkpoint.load(info, "quickstart", other)
    assert identical(parameters(other), saved)
    assert len(saved_moments) > 0
    assert all(torch.equal(a, b) for a, b in zip(moments(other), saved_moments, strict=True))
    assert states["updates"] == 3 and states["source"] == STATES["source"]
    assert torch.equal(states["reference"][0], torch.ones(2))
    train(other, batch, range(3, 5))
    assert identical(parameters(other), parameters(trainer))
    assert all(torch.equal(a, b) for a, b in zip(moments(other), moments(trainer), strict=True))
    assert torch.equal(torch.rand(4), noise)


def test_a_checkpoint_before_the_first_update(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, 0, "quickstart", trainer, {}, keep=2)
    other = make_trainer(rank, seed=9, lr=1e-3)
    assert checkpoint.load(list_checkpoints(tmp_path)[0], "quickstart", other) == {}
    train(trainer, batch, range(2))
    train(other, batch, range(2))
    assert identical(parameters(other), parameters(trainer))


def test_checkpoints_are_listed_by_step_and_pruned(trainer: Trainer, tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none yet") == []
    for step in (9, 10, 11):
        written = checkpoint.save(tmp_path, step, "quickstart", trainer, {}, keep=2)
        assert written == tmp_path / f"step_{step}"
    assert [info.step for info in list_checkpoints(tmp_path)] == [10, 11]
    assert entries(tmp_path) == ["step_10", "step_11"]
    checkpoint.save(tmp_path, 12, "quickstart", trainer, {}, keep=0)
    assert len(list_checkpoints(tmp_path)) == 3, "keep=0 keeps all"


def test_a_kill_while_pruning_leaves_no_half_checkpoint(
    trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # invariant 1
    checkpoint.save(tmp_path, 1, "quickstart", trainer, {}, keep=1)
    remove = shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if path.name == "step_1":
            (path / "rank_0.pt").unlink()
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(checkpoint.shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, "quickstart", trainer, {}, keep=1)
    assert [info.step for info in list_checkpoints(tmp_path)] == [2]


def test_saving_a_step_again_replaces_it(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path, 4, "quickstart", trainer, {"n": 1}, keep=2)
    train(trainer, batch, range(1))
    checkpoint.save(tmp_path, 4, "quickstart", trainer, {"n": 2}, keep=2)
    assert entries(tmp_path) == ["step_4"]
    other = make_trainer(rank, seed=9, lr=1e-3)
    assert checkpoint.load(list_checkpoints(tmp_path)[0], "quickstart", other) == {"n": 2}
    assert identical(parameters(other), parameters(trainer))


class Killed:
    """Stands for a kill in the middle of a write: the exception is one that nobody may handle."""

    def __reduce__(self) -> str:
        raise KeyboardInterrupt


def test_a_killed_save_is_never_taken_for_a_checkpoint(trainer: Trainer, tmp_path: Path) -> None:  # invariant 1
    checkpoint.save(tmp_path, 1, "quickstart", trainer, {"n": 1}, keep=5)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save(tmp_path, 2, "quickstart", trainer, {"bomb": Killed()}, keep=5)
    # Killed later, between the mark and the rename: what the mark vouches for may not be on the disk yet.
    shutil.copytree(tmp_path / "step_1", tmp_path / "step_2.tmp", dirs_exist_ok=True)
    assert [info.step for info in list_checkpoints(tmp_path)] == [1]
    checkpoint.save(tmp_path, 2, "quickstart", trainer, {"n": 2}, keep=5)
    assert entries(tmp_path) == ["step_1", "step_2"], "what the kill left was cleared away"
    assert checkpoint.load(list_checkpoints(tmp_path)[1], "quickstart", trainer) == {"n": 2}


def test_a_full_disk_costs_only_the_new_checkpoint(
    batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path
) -> None:  # invariant 3
    train(trainer, batch, range(1))
    checkpoint.save(tmp_path, 1, "quickstart", trainer, {"n": 1}, keep=1)
    before, content = parameters(trainer), (tmp_path / "step_1" / "rank_0.pt").read_bytes()
    for step in (1, 2):  # a new step, and one that exists already
        with files_at_most(20_000), pytest.raises(CheckpointError) as caught:
            checkpoint.save(tmp_path, step, "quickstart", trainer, {"n": 2}, keep=1)
        message = str(caught.value)
        assert f"step_{step}" in message and "Older checkpoints are untouched; free space" in message
    assert entries(tmp_path) == ["step_1"]
    assert (tmp_path / "step_1" / "rank_0.pt").read_bytes() == content
    assert identical(parameters(trainer), before)
    checkpoint.save(tmp_path, 2, "quickstart", trainer, {"n": 2}, keep=1)
    assert entries(tmp_path) == ["step_2"], "with space again the run goes on"


def test_without_its_mark_a_folder_is_refused(trainer: Trainer, tmp_path: Path) -> None:  # invariant 2
    folder = checkpoint.save(tmp_path, 1, "quickstart", trainer, {}, keep=2)
    (folder / checkpoint.MARK).unlink()
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match=r"step_1/COMPLETE is unreadable .*: remove .*step_1"):
        checkpoint.load(CheckpointInfo(folder, 1, "quickstart"), "quickstart", trainer)
    for text in ("", "{", "[]", '{"step": 1}'):
        (folder / checkpoint.MARK).write_text(text)
        with pytest.raises(CheckpointError, match="COMPLETE"):
            list_checkpoints(tmp_path)


def test_another_recipe_or_layout_is_refused(trainer: Trainer, tmp_path: Path) -> None:  # invariant 2
    folder = checkpoint.save(tmp_path, 1, "quickstart", trainer, {}, keep=2)
    before = parameters(trainer)
    with pytest.raises(CheckpointError, match="recipe 'quickstart', this run is 'other': choose another run.name"):
        checkpoint.load(list_checkpoints(tmp_path)[0], "other", trainer)
    mark = json.loads((folder / checkpoint.MARK).read_text())
    (folder / checkpoint.MARK).write_text(json.dumps(mark | {"world": 8}))
    with pytest.raises(CheckpointError, match="written by 8 ranks, this run has 1"):
        checkpoint.load(list_checkpoints(tmp_path)[0], "quickstart", trainer)
    assert identical(parameters(trainer), before)


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "garbage"])
def test_a_damaged_file_is_named(trainer: Trainer, tmp_path: Path, damage: str) -> None:
    folder = checkpoint.save(tmp_path, 1, "quickstart", trainer, {}, keep=2)
    path = folder / "rank_0.pt"
    data = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes({"empty": b"", "cut": data[: len(data) // 2], "garbage": b"x" * 5000}[damage])
    before = parameters(trainer)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(list_checkpoints(tmp_path)[0], "quickstart", trainer)
    word = "missing" if damage == "missing" else "corrupt"
    assert str(path) in str(caught.value) and word in str(caught.value)
    assert identical(parameters(trainer), before)


def test_weights_alone(rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path) -> None:
    """What a cached warm start keeps; written whole or not at all."""
    train(trainer, batch, range(1))
    path = tmp_path / "cache" / "rank_0.pt"
    with files_at_most(5_000), pytest.raises(CheckpointError, match="cannot save weights"):
        checkpoint.save_weights(path, trainer.chunks)
    assert entries(path.parent) == []
    checkpoint.save_weights(path, trainer.chunks)
    assert entries(path.parent) == ["rank_0.pt"]
    other = make_trainer(rank, seed=9)
    checkpoint.load_weights(path, other.chunks)
    assert identical(parameters(other), parameters(trainer))


def test_weights_of_another_model_are_refused_by_name(rank: ParallelContext, trainer: Trainer, tmp_path: Path) -> None:
    from dataclasses import replace

    path = tmp_path / "weights.pt"
    checkpoint.save_weights(path, trainer.chunks)
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors, first 'decoder.layers.2"):
        checkpoint.load_weights(path, make_trainer(rank, hf=replace(TINY, layers=3)).chunks)
    with pytest.raises(CheckpointError, match=r"has \d+ unknown tensors, first 'decoder.layers.1"):
        checkpoint.load_weights(path, make_trainer(rank, hf=replace(TINY, layers=1)).chunks)
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight has shape \(112, 32\), the model \(120, 32\)"):
        checkpoint.load_weights(path, make_trainer(rank, hf=replace(TINY, vocab=120)).chunks)
    with pytest.raises(CheckpointError, match="is missing"):
        checkpoint.load_weights(tmp_path / "none.pt", trainer.chunks)


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Inside a tensor torch would load it as if nothing had happened."""
    path = tmp_path / "rank_0.pt"
    torch.save({"model": torch.zeros(4096)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="rank_0.pt is corrupt.*checksum"):
        checkpoint.read_payload(path)
