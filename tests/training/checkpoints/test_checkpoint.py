"""Invariants of checkpoints (numbers: ``megatron_ext/training/checkpoints/checkpoint.py``): real trainer, real disk."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints.checkpoint import CheckpointError, CheckpointInfo, SaveRequest, list_checkpoints
from megatron_ext.training.checkpoints.write import STATES_FILE
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

STATES: dict[str, Any] = {"updates": 3, "source": {"epoch": 1, "order": [2, 0]}}
DATA = "__0_0.distcp"


@pytest.fixture(scope="module")
def batch() -> TrajectoryBatch:
    return random_batch(3, groups=4)


def train(trainer: Trainer, batch: TrajectoryBatch, seeds: Iterable[int]) -> None:
    for seed in seeds:
        trainer.update(micro_of(batch, rows_of(batch), cap=100), random_inputs(batch, seed), TERMS, lr=1e-3)


def save(root: Path, step: int, trainer: Trainer, states: Any = None, keep: int = 0, **options: Any) -> Path:
    return checkpoint.save(root, SaveRequest(step, "quickstart", states or {}, keep=keep, **options), trainer)


def load(root: Path, trainer: Trainer, step: int | None = None) -> checkpoint.Restored:
    found = [info for info in list_checkpoints(root) if step in (None, info.step)]
    return checkpoint.load(found[-1], "quickstart", trainer)


@pytest.fixture
def trainer(rank: ParallelContext) -> Trainer:
    return make_trainer(rank, lr=1e-3)


def entries(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def draws() -> tuple[float, float, torch.Tensor]:
    """A number of every kind that a rank draws."""
    return random.random(), float(np.random.random()), torch.rand(3)


def test_continuing_is_exact(rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path) -> None:
    """Invariant 4: what follows a restored checkpoint is bit for bit what followed it when it was written."""
    train(trainer, batch, range(3))
    draws()
    reference = [torch.randn_like(p) for chunk in trainer.chunks for p in chunk.parameters()]
    save(tmp_path, 3, trainer, STATES, keep=2, reference=reference)
    saved, saved_moments = parameters(trainer), moments(trainer)
    train(trainer, batch, range(3, 5))
    drawn = draws()

    other = make_trainer(rank, seed=9, lr=1e-3)
    train(other, batch, range(7, 8))  # moments of its own, to be replaced
    draws()
    restored = load(tmp_path, other)
    assert identical(parameters(other), saved)
    assert len(saved_moments) > 0
    assert all(torch.equal(a, b) for a, b in zip(moments(other), saved_moments, strict=True))
    assert restored.states == STATES and restored.random and restored.reference is not None
    assert all(torch.equal(a, b) for a, b in zip(restored.reference, reference, strict=True))
    train(other, batch, range(3, 5))
    assert identical(parameters(other), parameters(trainer))
    assert all(torch.equal(a, b) for a, b in zip(moments(other), moments(trainer), strict=True))
    again = draws()
    assert again[:2] == drawn[:2] and torch.equal(again[2], drawn[2])


def test_a_checkpoint_before_the_first_update(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path
) -> None:
    save(tmp_path, 0, trainer)
    other = make_trainer(rank, seed=9, lr=1e-3)
    train(other, batch, range(1))  # what it had learned of its own is forgotten
    restored = load(tmp_path, other)
    assert restored.states == {} and restored.reference is None
    train(trainer, batch, range(2))
    train(other, batch, range(2))
    assert identical(parameters(other), parameters(trainer))


def test_an_optimizer_without_moments(rank: ParallelContext, batch: TrajectoryBatch, tmp_path: Path) -> None:
    trainer, other = (make_trainer(rank, seed=seed, name="sgd") for seed in (1, 9))
    train(trainer, batch, range(2))
    save(tmp_path, 2, trainer)
    load(tmp_path, other)
    train(trainer, batch, range(2, 4))
    train(other, batch, range(2, 4))
    assert identical(parameters(other), parameters(trainer))


def test_the_steps_of_an_optimizer_that_skipped_some(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path
) -> None:
    """A step whose gradient is not finite is no step of Adam's bias correction, before a resume and after it."""

    def broken(trainer: Trainer, seed: int) -> None:
        inputs = random_inputs(batch, seed)
        bad = replace(inputs, advantage=inputs.advantage * float("nan"))
        result = trainer.update(micro_of(batch, rows_of(batch), cap=100), bad, TERMS, lr=1e-3)
        assert not result.applied

    train(trainer, batch, range(1))
    broken(trainer, 5)
    save(tmp_path, 2, trainer)
    other = make_trainer(rank, seed=9, lr=1e-3)
    load(tmp_path, other)
    for each in (trainer, other):
        broken(each, 6)
        train(each, batch, range(2, 4))
    assert identical(parameters(other), parameters(trainer))
    assert all(torch.equal(a, b) for a, b in zip(moments(other), moments(trainer), strict=True))


def test_checkpoints_are_listed_by_step_and_pruned(trainer: Trainer, tmp_path: Path) -> None:
    assert list_checkpoints(tmp_path / "none yet") == []
    for step in (9, 10, 11):
        written = save(tmp_path, step, trainer, keep=2)
        assert written == tmp_path / f"step_{step}"
    assert [info.step for info in list_checkpoints(tmp_path)] == [10, 11]
    assert entries(tmp_path) == ["step_10", "step_11"]
    save(tmp_path, 12, trainer, keep=0)
    assert len(list_checkpoints(tmp_path)) == 3, "keep=0 keeps all"


def test_saving_a_step_again_replaces_it(
    rank: ParallelContext, batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path
) -> None:
    save(tmp_path, 4, trainer, {"n": 1})
    train(trainer, batch, range(1))
    save(tmp_path, 4, trainer, {"n": 2})
    assert entries(tmp_path) == ["step_4"]
    other = make_trainer(rank, seed=9, lr=1e-3)
    assert load(tmp_path, other).states == {"n": 2}
    assert identical(parameters(other), parameters(trainer))


def test_a_full_disk_costs_only_the_new_checkpoint(
    batch: TrajectoryBatch, trainer: Trainer, tmp_path: Path
) -> None:  # invariant 3
    train(trainer, batch, range(1))
    save(tmp_path, 1, trainer, {"n": 1}, keep=1)
    before = parameters(trainer)
    content = {path.name: path.read_bytes() for path in (tmp_path / "step_1").iterdir()}
    for step in (1, 2):  # a new step, and one that exists already
        with files_at_most(20_000), pytest.raises(CheckpointError) as caught:
            save(tmp_path, step, trainer, {"n": 2}, keep=1)
        message = str(caught.value)
        assert f"step_{step}" in message and "Older checkpoints are untouched; free space" in message
        assert "File too large" in message and "\n" not in message
    assert entries(tmp_path) == ["step_1"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "step_1").iterdir()} == content
    assert identical(parameters(trainer), before)
    save(tmp_path, 2, trainer, {"n": 2}, keep=1)
    assert entries(tmp_path) == ["step_2"], "with space again the run goes on"


def test_what_does_not_fit_is_not_begun(trainer: Trainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest of the run writes to the same disk: a save must not fill it first and fail then."""
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(checkpoint.files.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(CheckpointError, match=r"needs \d+ MiB, \d+ MiB are free"):
        save(tmp_path, 1, trainer, {"n": 1})
    assert entries(tmp_path) == []


def test_without_its_mark_a_folder_is_refused(trainer: Trainer, tmp_path: Path) -> None:  # invariant 2
    folder = save(tmp_path, 1, trainer)
    (folder / checkpoint.MARK).unlink()
    assert list_checkpoints(tmp_path) == []
    with pytest.raises(CheckpointError, match="COMPLETE"):
        checkpoint.load(CheckpointInfo(folder, 1, "quickstart"), "quickstart", trainer)
    for text in ("", "[]", '{"step": 1}', "nonsense"):
        (folder / checkpoint.MARK).write_text(text)
        with pytest.raises(CheckpointError, match="COMPLETE"):
            list_checkpoints(tmp_path)


def test_another_recipe_is_refused(trainer: Trainer, tmp_path: Path) -> None:  # invariant 2
    save(tmp_path, 1, trainer)
    before = parameters(trainer)
    with pytest.raises(CheckpointError, match="recipe 'quickstart', this run is 'other': choose another run.name"):
        checkpoint.load(list_checkpoints(tmp_path)[0], "other", trainer)
    assert identical(parameters(trainer), before)


def test_random_state_of_other_ranks_is_left_alone(trainer: Trainer, tmp_path: Path) -> None:
    """Invariant 4: a layout that did not write it gets the weights, and keeps the streams that its seed gave it."""
    folder = save(tmp_path, 1, trainer)
    mark = json.loads((folder / checkpoint.MARK).read_text())
    (folder / checkpoint.MARK).write_text(json.dumps(mark | {"world": 8}))
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    assert not load(tmp_path, trainer).random
    assert torch.equal(torch.rand(2), expected)


@pytest.mark.parametrize("name", [DATA, STATES_FILE, "rank_0.pt", ".metadata"])
@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "flipped"])
def test_a_damaged_file_is_named(trainer: Trainer, tmp_path: Path, name: str, damage: str) -> None:  # invariant 2
    path = save(tmp_path, 1, trainer) / name
    data = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        flipped = data[: len(data) // 2] + bytes([data[len(data) // 2] ^ 1]) + data[len(data) // 2 + 1 :]
        damaged = {"empty": b"", "cut": bytes(data[: len(data) // 2]), "flipped": bytes(flipped)}
        path.write_bytes(damaged[damage])
    before = parameters(trainer)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, trainer)
    word = {"missing": "cannot be read", "flipped": "checksum"}.get(damage, "bytes")
    assert str(path) in str(caught.value) and word in str(caught.value)
    assert "continue from an older step" in str(caught.value) and "\n" not in str(caught.value)
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
    folder = save(tmp_path, 1, trainer)
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors of the model, first 'decoder.layers.2"):
        checkpoint.load_weights(folder, make_trainer(rank, hf=replace(TINY, layers=3)).chunks)
    with pytest.raises(CheckpointError, match=r"has \d+ tensors that the model lacks, first 'decoder.layers.1"):
        checkpoint.load_weights(folder, make_trainer(rank, hf=replace(TINY, layers=1)).chunks)
    with pytest.raises(CheckpointError, match=r"word_embeddings.weight has shape \(112, 32\), the model \(120, 32\)"):
        checkpoint.load_weights(folder, make_trainer(rank, hf=replace(TINY, vocab=120)).chunks)


def test_a_flipped_byte_is_noticed(tmp_path: Path) -> None:
    """Inside a tensor torch would load it as if nothing had happened."""
    path = tmp_path / "rank_0.pt"
    torch.save({"model": torch.zeros(4096)}, path)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="rank_0.pt is corrupt.*checksum"):
        checkpoint.read_payload(path)
