"""One save: planned and copied to host memory at once, written at any time later, by any thread.

Invariants (``tests/training/checkpoints/test_checkpoint.py``):

1. After ``SaveJob`` was made, training may go on: what is written is what there was.
2. ``run`` never raises; ``result`` raises what went wrong as one line, on every rank alike, and the checkpoints that
   were there before are untouched.
3. A save that cannot fit on the disk is refused before it takes the space that the rest of the run needs.
"""

from __future__ import annotations

import io
import queue
import shutil
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from megatron_ext.models import cpu_platform
from megatron_ext.training.checkpoints import files, sharded
from megatron_ext.training.checkpoints.files import CheckpointError
from megatron_ext.training.checkpoints.random_state import random_state
from megatron_ext.training.trainer import Trainer

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

STATES_FILE = "states.pt"


def rank_file(rank: int) -> str:
    return f"rank_{rank}.pt"


@dataclass(frozen=True)
class SaveRequest:
    """What to save. ``states`` are torch-saveable ``state_dict`` results by name, those of rank 0 count; ``reference``
    other weights of the model, ``router_start`` other values of its routers (``training.measures.router_change``);
    ``score`` the metric by which the best checkpoint is kept; ``keep`` the last ones (0: all) and ``best`` which scores
    are better (None: no best one is kept)."""

    step: int
    recipe: str
    states: Mapping[str, Any]
    reference: Sequence[torch.Tensor] | None = None
    router_start: Mapping[str, torch.Tensor] = field(default_factory=dict)
    score: float | None = None
    keep: int = 0
    best: Literal["higher", "lower"] | None = None


@dataclass
class _Plan:
    """What Megatron planned for this rank. ``finalize_fns`` is where it adds what it would do at the end, as
    collectives of the thread that trains; ``SaveJob`` does that itself."""

    writer: Any
    metadata: Any
    finalize_fns: list[Any] = field(default_factory=list)


class _Strategy(TorchDistSaveShardedStrategy):
    """Megatron's format and plan, without its way of running them."""

    def _get_save_and_finalize_callbacks(self, writer: Any, save_state_dict_ret: Any, async_strategy: str) -> _Plan:
        _, metadata, _ = save_state_dict_ret
        return _Plan(writer, metadata)


@contextmanager
def _results_in_process() -> Iterator[None]:
    """Megatron would start a manager process, which imports the main module again, to carry the results of writing from
    one process to another. Here one thread of this process writes and keeps them."""
    before = filesystem_async._results_queue
    filesystem_async._results_queue = queue.Queue()
    try:
        yield
    finally:
        filesystem_async._results_queue = before


class SaveJob:
    """A save under way. Making one is collective over all ranks, and so is ``run``, over ``group``: a process group
    that nothing else uses while the job runs (None with a single rank)."""

    def __init__(self, root: Path, request: SaveRequest, trainer: Trainer, group: dist.ProcessGroup | None) -> None:
        context = trainer.context
        self.request, self._root, self._group = request, root, group
        self._rank, self._world = context.rank, context.world_size
        self._parallel = asdict(context.config)
        self._vocab = trainer.vocab
        self.final = root / f"step_{request.step}"
        self._folder = root / f"step_{request.step}{files.UNFINISHED}"
        self._error = ""
        self.done = threading.Event()
        model = sharded.model_state(trainer.chunks)
        facts = sharded.optimizer_facts(trainer.optimizer)
        state: dict[str, Any] = {**model, "optimizer": sharded.optimizer_state(trainer.optimizer, model, facts)}
        if request.reference is not None:
            state["reference"] = sharded.reference_state(trainer.chunks, model, request.reference)
        if request.router_start:
            state["router_start"] = sharded.router_state(trainer.chunks, model, request.router_start)
        shared = {"optimizer": asdict(facts), "reference": request.reference is not None, "states": request.states}
        self._blobs = {rank_file(self._rank): _bytes({"random": random_state()})}
        if self._rank == 0:
            self._blobs[STATES_FILE] = _bytes(shared)
        self._agree(self._make_folder())
        if self._error:
            self._plan: _Plan | None = None
            self._buckets: list[Any] = []
            return
        with _results_in_process(), cpu_platform.quiet_import():
            self._plan = dist_checkpointing.save(
                state, str(self._folder), sharded_strategy=_Strategy(), async_sharded_save=True, async_strategy="mcore"
            )
        self._buckets = _copies(self._plan.writer.write_buckets or [])

    # -- in any thread -------------------------------------------------------------------------------------------------
    def run(self) -> None:
        """Writes, checks, names and prunes."""
        try:
            if not self._error:
                self._write()
        except Exception as error:  # it may run in a thread of its own: ``result`` tells
            self._error = self._line(error)
        finally:
            self._buckets, self._blobs = [], {}
            self.done.set()

    def result(self) -> Path:
        """The checkpoint's folder, once ``done``. Raises ``CheckpointError``."""
        assert self.done.is_set(), "the save is still under way"
        if self._error:
            raise CheckpointError(self._error)
        return self.final

    def _write(self) -> None:
        results: list[Any] = []
        found: dict[str, tuple[int, str]] = {}
        error = self._room()
        if not error:
            try:
                results, found = self._write_files()
            except (OSError, RuntimeError) as problem:  # torch reports a full disk as RuntimeError from its zip writer
                error = self._line(problem)
        everyone = self._gather((error, results, found))
        errors = [said for said, _, _ in everyone if said]
        if not errors and self._rank == 0:
            try:
                self._finish([wrote for _, wrote, _ in everyone], [prints for _, _, prints in everyone])
            except (OSError, RuntimeError) as problem:
                errors = [self._line(problem)]
        outcome = self._gather(errors[0] if errors else "")
        if any(outcome):
            self._error = next(said for said in outcome if said)
            if self._rank == 0:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _write_files(self) -> tuple[list[Any], dict[str, tuple[int, str]]]:
        """This rank's files, synced: what the metadata needs to know, and their fingerprints."""
        results: list[Any] = []
        written: list[Path] = []
        assert self._plan is not None
        transforms = [self._plan.writer.transforms]
        for number, bucket in enumerate(self._buckets):
            _, wrote = filesystem_async.FileSystemWriterAsync.write_preloaded_data(
                transforms, number, bucket, None, None, True
            )
            if isinstance(wrote, Exception):
                raise wrote
            results += wrote
            written.append(Path(bucket[0]))
        for name, data in self._blobs.items():
            path = self._folder / name
            path.write_bytes(data)
            files.sync_file(path)
            written.append(path)
        return results, {path.name: files.fingerprint(path) for path in written}

    def _finish(self, results: list[list[Any]], prints: list[dict[str, tuple[int, str]]]) -> None:
        """On rank 0, when every rank has written: the metadata, the mark, the name."""
        assert self._plan is not None
        self._plan.writer.finish(self._plan.metadata, results)
        strategy = _Strategy()
        save_config(CheckpointingConfig(strategy.backend, strategy.version), str(self._folder))
        every = {name: list(found) for part in prints for name, found in part.items()}
        for path in self._folder.iterdir():
            if path.name not in every:
                files.sync_file(path)
                every[path.name] = list(files.fingerprint(path))
        mark = {
            "step": self.request.step,
            "recipe": self.request.recipe,
            "world": self._world,
            "parallel": self._parallel,
            "vocab": self._vocab,
            "score": self.request.score,
            "files": every,
        }
        files.publish(self._folder, mark)
        files.prune(self._root, self.request.keep, self.request.best)

    # -- agreement -----------------------------------------------------------------------------------------------------
    def _make_folder(self) -> str:
        if self._rank:
            return ""
        try:
            files.open_unfinished(self._root, self.request.step)
        except OSError as error:
            return self._line(error)
        return ""

    def _agree(self, error: str) -> None:
        """Whether the ranks may go on, asked in the thread that trains."""
        said = [error]
        if self._world > 1:
            said = [""] * self._world
            dist.all_gather_object(said, error)
        self._error = next((line for line in said if line), "")

    def _room(self) -> str:
        """Why the files do not fit; empty when they do."""
        own = sum(tensor.nbytes for _, _, (_, tensors) in self._buckets for _, tensor in tensors)
        needed = sum(self._gather(own + sum(len(data) for data in self._blobs.values())))
        try:
            free = shutil.disk_usage(self._folder).free
        except OSError as error:
            return self._line(error)
        if free < needed:
            return self._line(OSError(f"needs {needed / 2**20:.0f} MiB, {free / 2**20:.0f} MiB are free"))
        return ""

    def _gather(self, value: Any) -> list[Any]:
        if self._group is None:
            return [value]
        values: list[Any] = [None] * self._world
        dist.all_gather_object(values, value, group=self._group)
        return values

    def _line(self, error: Exception) -> str:
        reason = " ".join(str(error).split())
        return (
            f"cannot save checkpoint {self.final}: {reason}. Older checkpoints are untouched; free space, and the run "
            "goes on from them"
        )


def _bytes(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def _copies(buckets: Sequence[Any]) -> list[Any]:
    """The planned writes with copies of their tensors in host memory."""
    return [
        (path, key, (data, [(item, tensor.detach().to("cpu", copy=True)) for item, tensor in tensors]))
        for path, key, (data, tensors) in buckets
    ]
