"""Checkpoints: weights, optimizer, random state and everything with a ``state_dict``, written atomically.

Invariants (``tests/training/checkpoints/test_checkpoint.py``):

1. A checkpoint appears under its final name only when it is whole: written beside it, synced, renamed
   (``checkpoint_files``).
2. Loading refuses a folder without the ``COMPLETE`` mark, one whose files changed, and one of another recipe, in one
   line.
3. A failed save (disk full) leaves the older checkpoints and the run as they were (``checkpoint_write``).
4. Continuing from a checkpoint gives the parameters, optimizer moments and random state that were saved, exactly; under
   another layout (``checkpoint_sharded``) everything but the random state, which belongs to a rank.
"""

from __future__ import annotations

import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_ext.models.forward import unwrap
from megatron_ext.training.checkpoints import files, sharded
from megatron_ext.training.checkpoints.files import MARK, CheckpointError, CheckpointInfo, list_checkpoints
from megatron_ext.training.checkpoints.random_state import restore_random_state
from megatron_ext.training.checkpoints.write import STATES_FILE, SaveJob, SaveRequest, rank_file
from megatron_ext.training.trainer import Trainer

__all__ = [
    "MARK",
    "CheckpointError",
    "CheckpointInfo",
    "Restored",
    "SaveRequest",
    "list_checkpoints",
    "load",
    "load_weights",
    "save",
    "save_weights",
]


@dataclass(frozen=True)
class Restored:
    """What ``load`` gives back: the ``states`` that were saved, the ``reference`` weights (None where there were none),
    ``router_start`` (empty where there was none), and whether this rank's random state was restored, which needs the
    layout that wrote it."""

    states: Mapping[str, Any]
    reference: list[torch.Tensor] | None
    router_start: Mapping[str, torch.Tensor]
    random: bool


def save(root: Path, request: SaveRequest, trainer: Trainer) -> Path:
    """Writes ``root/step_N`` and returns when it is durable. Collective over all ranks; raises ``CheckpointError``."""
    group = dist.new_group(backend="gloo") if trainer.context.world_size > 1 else None
    job = SaveJob(root, request, trainer, group)
    job.run()
    return job.result()


def load(info: CheckpointInfo, recipe: str, trainer: Trainer) -> Restored:
    """Restores weights, optimizer and random state. Collective over all ranks; raises ``CheckpointError``."""
    if info.recipe != recipe:
        raise CheckpointError(
            f"{info.folder} belongs to recipe {info.recipe!r}, this run is {recipe!r}: choose another run.name"
        )
    context = trainer.context
    _verify(info.folder)
    shared = read_payload(info.folder / STATES_FILE)
    facts = sharded.OptimizerFacts(**shared["optimizer"])
    sharded.load_model(info.folder, trainer.chunks)
    sharded.load_optimizer(info.folder, trainer.optimizer, sharded.model_state(trainer.chunks), facts)
    reference = sharded.load_reference(info.folder, trainer.chunks) if shared["reference"] else None
    router_start = sharded.load_router_start(info.folder, trainer.chunks)
    same = info.world == context.world_size and dict(info.parallel) == asdict(context.config)
    if same:
        restore_random_state(read_payload(info.folder / rank_file(context.rank))["random"])
    return Restored(shared["states"], reference, router_start, same)


def load_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Only the model: from a checkpoint's folder, in any layout, or from one rank's file of ``save_weights``.

    ``chunks`` are bare or wrapped.
    """
    if path.is_dir():
        _verify(path)
        sharded.load_model(path, chunks)
        return
    for number, (chunk, state) in enumerate(zip(chunks, read_payload(path)["model"], strict=True)):
        _load_local(chunk, state, f"{path} (chunk {number})")


def save_weights(path: Path, chunks: Sequence[torch.nn.Module]) -> None:
    """Only this rank's part of the model, atomically (a cached warm start, which is read by the same layout)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        torch.save({"model": [_local_state(chunk) for chunk in chunks]}, temporary)
        files.sync_file(temporary)
        temporary.replace(path)
    except (OSError, RuntimeError) as error:
        temporary.unlink(missing_ok=True)
        raise CheckpointError(f"cannot save weights {path}: {error}") from error


def read_payload(path: Path) -> dict[str, Any]:
    """Contents of a file that torch wrote; a missing or corrupt one is a ``CheckpointError`` that names it."""
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


def _verify(folder: Path) -> None:
    """Checks every file, the ranks sharing them out; what one finds, all raise."""
    names = sorted(files.read_mark(folder)["files"])
    world = dist.get_world_size()
    problem = ""
    try:
        files.verify(folder, names[dist.get_rank() :: world])
    except CheckpointError as error:
        problem = str(error)
    said = [problem]
    if world > 1:
        said = [""] * world
        dist.all_gather_object(said, problem)
    if any(said):
        raise CheckpointError(next(line for line in said if line))


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
