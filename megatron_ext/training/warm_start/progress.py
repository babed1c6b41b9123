"""An unfinished warm start on disk, so that a Ctrl-C or a kill costs minutes of it and not all.

It is kept as a checkpoint is (``async_save``): weights, optimizer, random state, and where in the demonstrations it
stands; what they are follows from the configuration. It lies in the run's own folder, also where finished warm starts
have a cache that runs share, and is removed when the warm start is done.

Invariants (``tests/training/warm_start/test_progress.py``, ``tests/launch/test_warm_resume.py``):

1. A warm start that goes on from what was kept ends with the weights of one that was never stopped, bit for bit.
2. What is kept is the position after an optimizer step and before its look at the gate, which is taken again.
3. A save in between that fails costs a line of warning; the last one, of an interrupt, is an error.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from megatron_ext.training.checkpoints import checkpoint
from megatron_ext.training.checkpoints.async_save import Saved, Saver
from megatron_ext.training.checkpoints.files import CheckpointError, list_checkpoints, remove_unfinished
from megatron_ext.training.checkpoints.write import SaveRequest
from megatron_ext.training.interrupt import Interrupted
from megatron_ext.training.ranks.ranks import Ranks
from megatron_ext.training.trainer import Trainer
from megatron_ext.training.warm_start.warm_start import Position


def progress_folder(run: Path) -> Path:
    """Where the run in folder ``run`` keeps its unfinished warm start."""
    return run / "warm_start" / "unfinished"


def unfinished_steps(run: Path) -> int | None:
    """Optimizer steps of the unfinished warm start that the run in folder ``run`` keeps; None: it keeps none."""
    found = list_checkpoints(progress_folder(run))
    return found[-1].step if found else None


def forget(run: Path) -> None:
    """Removes what is kept: the warm start is done."""
    shutil.rmtree(progress_folder(run), ignore_errors=True)
    if not any((run / "warm_start").glob("*")):  # its weights are in a cache
        shutil.rmtree(run / "warm_start", ignore_errors=True)


class Progress:
    """Keeps the warm start of ``trainer`` every ``minutes`` (0: never), and when the context is interrupted. Every rank
    has one, and calls the same; rank 0's ``clock`` decides."""

    def __init__(
        self,
        run: Path,
        recipe: str,
        trainer: Trainer,
        ranks: Ranks,
        *,
        minutes: float,
        asynchronous: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._root, self._recipe, self._trainer, self._ranks = progress_folder(run), recipe, trainer, ranks
        self._seconds, self._clock = 60 * minutes, clock
        self._saver = Saver(self._root, trainer, asynchronous=asynchronous)
        self._last = clock()
        self._now = Position()

    def resume(self) -> Position:
        """Where to go on, with everything restored; the beginning where nothing is kept."""
        if self._ranks.leads:
            remove_unfinished(self._root)
        found = self._ranks.tell(list_checkpoints(self._root) if self._ranks.leads else [])
        if found:
            restored = checkpoint.load(found[-1], self._recipe, self._trainer)
            self._now = Position(found[-1].step, float(restored.states["loss"]))
        return self._now

    def note(self, step: int, loss: float) -> None:
        """The warm start has made ``step`` optimizer steps. Begins to save it when it is time to."""
        self._now = Position(step, loss)
        if self._ranks.led(self._due):
            self._save()
        self._warn(self._saver.settle())

    def keep(self) -> None:
        """Saves where it stands and returns when that is durable. Raises ``CheckpointError``."""
        if not self._now.step or self._ranks.led(self._is_kept):
            return
        self._save()
        for saved in self._saver.settle(wait=True):
            if saved.step == self._now.step and saved.error:
                raise CheckpointError(saved.error)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        """Keeps where it stands when it was interrupted, and ends the save under way."""
        try:
            if kind is Interrupted:  # on every rank, as what is led is
                self.keep()
        finally:
            self._saver.close()

    def _due(self) -> bool:
        return bool(self._seconds) and self._clock() - self._last >= self._seconds

    def _is_kept(self) -> bool:
        return any(found.step == self._now.step for found in list_checkpoints(self._root))

    def _save(self) -> None:
        self._last = self._clock()
        states = {"loss": self._now.loss}
        self._saver.start(SaveRequest(self._now.step, self._recipe, states, keep=1))

    def _warn(self, ended: list[Saved]) -> None:
        for saved in ended if self._ranks.leads else ():
            if saved.error:
                print(f"warning: {saved.error}", file=sys.stderr, flush=True)
