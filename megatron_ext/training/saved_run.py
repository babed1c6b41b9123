"""A run's folder read back: which weights it holds, and a freshly built model with them.

Invariants (``tests/launch/test_export.py``, ``test_eval.py``):

1. Only the run's folder is read, and the warm-start cache or HF weights when the weights asked for lie there.
2. What is missing or unreadable is one line that names it, with the steps that there are.
3. Nothing of the run is written or locked: a run that is still training can be evaluated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from megatron_ext.config.saved import load_resolved
from megatron_ext.config.schema import Config, ParallelConfig
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.hf_config import HFConfig, load_hf_config
from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints.checkpoint import CheckpointError
from megatron_ext.training.folder import FolderError
from megatron_ext.training.session import build_chunks, warm_start_folder

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel


@dataclass(frozen=True)
class SavedRun:
    """A run and one of its sets of weights: those of ``step``, 0 being the policy that RL started from. ``weights`` is
    a checkpoint's folder or a warm start's file, None where they are the configuration's own first ones; ``steps`` can
    be asked for."""

    path: Path
    config: Config
    hf: HFConfig
    step: int
    weights: Path | None
    steps: tuple[int, ...]

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"


def open_saved(path: Path, step: int | None = None) -> SavedRun:
    """The run in ``path`` with the weights of ``step`` (None: the last checkpoint, else what RL started from).

    Raises ``FolderError``, ``ConfigError`` or ``CheckpointError``.
    """
    if not path.is_dir():
        raise FolderError(f"{path}: no such run folder; a run is kept in <run.root>/<run.name>")
    config = load_resolved(path / "config.yaml")
    described = path / "model_config.json"
    if not described.is_file() or not (path / "tokenizer" / "tokenizer.json").is_file():
        raise FolderError(f"{path} holds no model yet: the run stopped before it was built; start it again")
    hf = load_hf_config(described)
    files: dict[int, Path | None] = {}
    if config.warm_start.enabled:
        warm = warm_start_folder(config, path, hf) / "rank_0.pt"
        if warm.is_file():
            files[0] = warm
    else:
        files[0] = None
    for found in checkpoint.list_checkpoints(path / "checkpoints"):
        files[found.step] = found.folder
    if not files:
        raise CheckpointError(f"{path} holds no weights yet: its warm start is not finished; start the run again")
    chosen = max(files) if step is None else step
    if chosen not in files:
        raise CheckpointError(f"{path} has no checkpoint of step {chosen}; {_list(files)}")
    return SavedRun(path, config, hf, chosen, files[chosen], tuple(sorted(files)))


@contextmanager
def loaded_model(saved: SavedRun) -> Iterator[list[GPTModel]]:
    """A freshly built model with the saved weights, on one rank; its process groups end with the context.

    However many ranks trained it: a checkpoint is read by any layout. A warm start is kept by place in its layout.
    """
    from megatron_ext.models.parallel import initialize, shutdown

    config = dataclasses.replace(saved.config, parallel=ParallelConfig())
    if saved.weights is not None:
        places = 1 if saved.weights.is_dir() else len(list(saved.weights.parent.glob("rank_*.pt")))
        if places > 1:
            raise CheckpointError(
                f"{saved.weights.parent} is in {places} parts, as its ranks shared the model; only a whole one can be "
                f"read here: ask for a checkpoint; {_list(saved.steps)}"
            )
        # Drawn weights are overwritten at once, and need nothing from outside the folder.
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, weights=""))
    backend = resolve_backend(config.backend)
    context = initialize(config.parallel, backend, config.run.seed)
    try:
        chunks, _ = build_chunks(config, saved.hf, backend)
        if saved.weights is not None:
            try:
                checkpoint.load_weights(saved.weights, chunks)
            except CheckpointError as error:
                raise CheckpointError(f"{error}; {_list(saved.steps)}") from error
        yield chunks
    finally:
        shutdown(context)


def _list(steps: Iterable[int]) -> str:
    return "it has: " + ", ".join("0 (before training)" if step == 0 else str(step) for step in sorted(steps))
