"""Saves checkpoints while training goes on: a copy is taken at once, a thread writes it.

Invariants (``tests/training/checkpoints/test_async_save.py``):

1. One save at a time: the next one waits for the one before.
2. What is written is what there was when ``start`` returned, however far training has gone on.
3. A save that failed is told once, as one line, by the next ``settle``; the checkpoints before it stand.
4. ``close`` waits for the save under way, so that the process does not leave it half written.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from megatron_ext.training.checkpoints.files import CheckpointError
from megatron_ext.training.checkpoints.write import SaveJob, SaveRequest
from megatron_ext.training.trainer import Trainer

# How long ``close`` waits for a save; a rank that died leaves the others' writers waiting for it.
CLOSE_S = 600.0


@dataclass(frozen=True)
class Saved:
    """How a save ended: ``error`` is "" or one line."""

    step: int
    error: str


class Saver:
    """Every rank has one, made at the same time, and calls ``start`` and ``settle(wait=True)`` together. Writers agree
    over a process group of their own, beside the collectives of training."""

    def __init__(self, root: Path, trainer: Trainer, *, asynchronous: bool) -> None:
        self._root, self._trainer, self._asynchronous = root, trainer, asynchronous
        self._group = dist.new_group(backend="gloo") if trainer.context.world_size > 1 else None
        self._job: SaveJob | None = None
        self._thread: threading.Thread | None = None
        self._ended: list[Saved] = []

    @property
    def under_way(self) -> int | None:
        """The step whose save has not been settled yet."""
        return None if self._job is None else self._job.request.step

    def start(self, request: SaveRequest) -> None:
        """Takes a copy of everything and begins to write it; returns when it is written where saves are not
        asynchronous. Never raises for the disk: ``settle`` tells."""
        self._finish()
        self._job = SaveJob(self._root, request, self._trainer, self._group)
        if self._asynchronous:
            self._thread = threading.Thread(target=self._job.run, name="save", daemon=True)
            self._thread.start()
        else:
            self._job.run()

    def settle(self, *, wait: bool = False) -> list[Saved]:
        """Saves that ended since the last call. Without ``wait`` ranks may see the end of one at different calls."""
        if self._job is not None and (wait or self._job.done.is_set()):
            self._finish()
        ended, self._ended = self._ended, []
        return ended

    def close(self) -> None:
        """Waits for the save under way, for a while."""
        if self._thread is not None:
            self._thread.join(CLOSE_S)

    def _finish(self) -> None:
        if self._job is None:
            return
        if self._thread is not None:
            self._thread.join()
        job, self._job, self._thread = self._job, None, None
        try:
            job.result()
            self._ended.append(Saved(job.request.step, ""))
        except CheckpointError as error:
            self._ended.append(Saved(job.request.step, str(error)))
