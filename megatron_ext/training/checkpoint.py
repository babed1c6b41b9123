"""Checkpoints: model, optimizer, random state and everything with a ``state_dict``, written atomically.

Invariants (``tests/training/test_checkpoint.py``):

1. A checkpoint appears under its final name only when it is whole: written beside it, synced, renamed.
2. Loading refuses a folder without the ``COMPLETE`` mark, and one of another recipe, in one line.
3. A failed save (disk full) leaves the older checkpoints and the run as they were.
4. Continuing from a checkpoint gives the parameters, optimizer moments and random state that were saved, exactly.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_ext.models.forward import unwrap
from megatron_ext.training.trainer import Trainer

MARK = "COMPLETE"


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the folder and the fix."""


@dataclass(frozen=True)
class CheckpointInfo:
    folder: Path
    step: int
    recipe: str


def list_checkpoints(root: Path) -> list[CheckpointInfo]:
    """Whole checkpoints of a run, oldest first."""
    found = []
    for folder in sorted(root.glob("step_*")) if root.exists() else []:
        if folder.is_dir() and folder.suffix != ".tmp" and (folder / MARK).exists():
            meta = _read_mark(folder)
            found.append(CheckpointInfo(folder, int(meta["step"]), str(meta["recipe"])))
    return sorted(found, key=lambda c: c.step)


def save(root: Path, step: int, recipe: str, trainer: Trainer, states: Mapping[str, Any], keep: int) -> Path:
    """Writes ``root/step_N``. ``states`` are JSON-able or torch-saveable ``state_dict`` results, by name."""
    final, temporary = root / f"step_{step}", root / f"step_{step}.tmp"
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        torch.save(
            {
                "model": [_local_state(chunk) for chunk in trainer.chunks],
                "optimizer": trainer.optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "states": dict(states),
            },
            temporary / f"rank_{trainer.context.rank}.pt",
        )
        (temporary / MARK).write_text(json.dumps({"step": step, "recipe": recipe, "world": trainer.context.world_size}))
        _sync(temporary)
        replaced = root / f"step_{step}.old.tmp"
        shutil.rmtree(replaced, ignore_errors=True)
        if final.exists():  # saved before (a periodic save, then an interrupt); moved aside until the new one stands
            final.rename(replaced)
        temporary.rename(final)
        _sync_folder(root)
        shutil.rmtree(replaced, ignore_errors=True)
    except (OSError, RuntimeError) as error:
        # torch reports a full disk as RuntimeError from its zip writer.
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot save checkpoint {final}: {error}. Older checkpoints are untouched; free space and continue the run"
        ) from error
    for old in list_checkpoints(root)[:-keep] if keep > 0 else []:
        (old.folder / MARK).unlink()  # first: a kill in the middle must not leave a mark on half a checkpoint
        shutil.rmtree(old.folder)
    return final


def load(info: CheckpointInfo, recipe: str, trainer: Trainer) -> dict[str, Any]:
    """Restores model, optimizer and random state; returns the other ``states``."""
    if info.recipe != recipe:
        raise CheckpointError(
            f"{info.folder} belongs to recipe {info.recipe!r}, this run is {recipe!r}: choose another run.name"
        )
    path = info.folder / f"rank_{trainer.context.rank}.pt"
    world = int(_read_mark(info.folder)["world"])
    if world != trainer.context.world_size:
        raise CheckpointError(f"{info.folder} was written by {world} ranks, this run has {trainer.context.world_size}")
    payload = read_payload(path)
    for number, (chunk, state) in enumerate(zip(trainer.chunks, payload["model"], strict=True)):
        _load_local(chunk, state, f"{path} (chunk {number})")
    trainer.optimizer.load_state_dict(payload["optimizer"])
    torch.set_rng_state(payload["rng"])
    return payload["states"]


def load_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Only the model of one rank's file (a warm start, or a checkpoint to evaluate); ``chunks`` bare or wrapped."""
    for number, (chunk, state) in enumerate(zip(chunks, read_payload(path)["model"], strict=True)):
        _load_local(chunk, state, f"{path} (chunk {number})")


def save_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Only the model, atomically (a cached warm start)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        torch.save({"model": [_local_state(chunk) for chunk in chunks]}, temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot save weights {path}: {error}") from error


def read_payload(path: Path) -> dict[str, Any]:
    """Contents of a rank's file; a missing or corrupt one is a ``CheckpointError`` that names it."""
    if not path.exists():
        raise CheckpointError(f"checkpoint file {path} is missing: pick another step under {path.parent.parent}")
    try:
        with zipfile.ZipFile(path) as archive:  # torch reads past a damaged record; its checksum tells
            damaged = archive.testzip()
        if damaged is not None:
            raise CheckpointError(f"record {damaged} does not match its checksum")
        return torch.load(path, map_location="cpu", weights_only=False)
    except Exception as error:  # torch raises many types for a corrupt file
        raise CheckpointError(
            f"checkpoint file {path} is corrupt ({type(error).__name__}: {error}): "
            f"remove {path.parent} and continue from an older step"
        ) from error


def _local_state(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in _tensors(chunk).items()}


def _tensors(chunk: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers by the model's own names, whatever wraps it."""
    model = unwrap(chunk)
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _load_local(chunk: torch.nn.Module, saved: Mapping[str, torch.Tensor], where: str) -> None:
    own = _tensors(chunk)
    state = {name.removeprefix("module."): tensor for name, tensor in saved.items()}
    if missing := sorted(own.keys() - state.keys()):
        raise CheckpointError(f"{where}: lacks {len(missing)} tensors, first {missing[0]!r}")
    if extra := sorted(state.keys() - own.keys()):
        raise CheckpointError(f"{where}: has {len(extra)} unknown tensors, first {extra[0]!r}")
    with torch.no_grad():
        for name, value in own.items():
            if value.shape != state[name].shape:
                raise CheckpointError(
                    f"{where}: {name} has shape {tuple(state[name].shape)}, the model {tuple(value.shape)}"
                )
            value.copy_(state[name])


def _read_mark(folder: Path) -> dict[str, Any]:
    path = folder / MARK
    try:
        mark = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is unreadable ({error}): remove {folder} and continue from an older step"
        ) from error
    if not isinstance(mark, dict) or not {"step", "recipe", "world"} <= mark.keys():
        raise CheckpointError(f"{path} lacks step, recipe or world: remove {folder} and continue from an older step")
    return mark


def _sync(folder: Path) -> None:
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _sync_folder(folder)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
