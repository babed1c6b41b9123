"""Checkpoint folders on disk: which are whole, which are kept, and whether their files are what was written.

Invariants (``tests/training/checkpoints/test_files.py``):

1. A folder appears under its final name by one rename, after every file in it was synced; what a kill at any byte
   leaves is never listed.
2. ``COMPLETE``, written last, lists every file with its size and digest; a file that is missing, cut or changed is one
   line that names it.
3. Pruning keeps the last ones and the best one, and takes the mark off a folder before its files.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MARK = "COMPLETE"
UNFINISHED = ".tmp"
_REQUIRED = {"step", "recipe", "world", "parallel", "score", "files"}


class CheckpointError(RuntimeError):
    """A checkpoint that cannot be written or read; the message names the folder and the fix."""


@dataclass(frozen=True)
class CheckpointInfo:
    """A whole checkpoint. ``score``: the metric by which the best is kept, where it was measured at that step;
    ``world`` and ``parallel``: the ranks and layout that wrote it."""

    folder: Path
    step: int
    recipe: str
    score: float | None = None
    world: int = 1
    parallel: Mapping[str, Any] = field(default_factory=dict)


def list_checkpoints(root: Path) -> list[CheckpointInfo]:
    """Whole checkpoints of a run, oldest first."""
    found = []
    for folder in sorted(root.glob("step_*")) if root.exists() else []:
        if folder.is_dir() and folder.suffix != UNFINISHED and (folder / MARK).exists():
            mark = read_mark(folder)
            score = None if mark["score"] is None else float(mark["score"])
            step, world = int(mark["step"]), int(mark["world"])
            found.append(CheckpointInfo(folder, step, str(mark["recipe"]), score, world, mark["parallel"]))
    return sorted(found, key=lambda info: info.step)


def read_mark(folder: Path) -> dict[str, Any]:
    path = folder / MARK
    try:
        mark = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is unreadable ({error}): remove {folder} and continue from an older step"
        ) from error
    if not isinstance(mark, dict) or not mark.keys() >= _REQUIRED:
        raise CheckpointError(
            f"{path} lacks {', '.join(sorted(_REQUIRED - set(mark)))}: remove {folder} and continue from an older step"
        )
    return mark


def open_unfinished(root: Path, step: int) -> Path:
    """An empty folder to write the checkpoint of ``step`` in; what a killed save left there is cleared away."""
    folder = root / f"step_{step}{UNFINISHED}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder


def publish(unfinished: Path, mark: Mapping[str, Any]) -> Path:
    """Marks a folder whose files are synced, and gives it its name. One of that name is replaced."""
    final = unfinished.with_suffix("")
    replaced = final.with_name(f"{final.name}.old{UNFINISHED}")
    path = unfinished / MARK
    path.write_text(json.dumps(mark))
    sync_file(path)
    sync_folder(unfinished)
    shutil.rmtree(replaced, ignore_errors=True)
    if final.exists():  # moved aside until the new one stands
        final.rename(replaced)
    unfinished.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)
    return final


def prune(root: Path, keep: int, best: Literal["higher", "lower"] | None) -> None:
    """Removes all but the last ``keep`` (0: keeps all) and, of those with a score, the best one."""
    found = list_checkpoints(root)
    kept = {info.step for info in found[-keep:]}
    scored = [(info.score, info.step) for info in found if info.score is not None]
    if best is not None and scored:
        sign = 1 if best == "higher" else -1
        kept.add(max(scored, key=lambda pair: (sign * pair[0], pair[1]))[1])
    for info in found:
        if info.step not in kept:
            (info.folder / MARK).unlink()  # first: a kill in the middle must not leave a mark on half a checkpoint
            shutil.rmtree(info.folder)


def remove_unfinished(root: Path) -> None:
    """Clears away what killed saves and prunings left; call it while nobody saves."""
    for folder in root.glob("step_*") if root.exists() else ():
        if folder.is_dir() and (folder.suffix == UNFINISHED or not (folder / MARK).exists()):
            shutil.rmtree(folder, ignore_errors=True)


# -- files -------------------------------------------------------------------------------------------------------------
def fingerprint(path: Path) -> tuple[int, str]:
    """Size in bytes and digest."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16))
        return file.tell(), digest.hexdigest()


def verify(folder: Path, names: Iterable[str]) -> None:
    """Compares files with what the mark says of them. Raises ``CheckpointError`` at the first that differs."""
    said = read_mark(folder)["files"]
    for name in names:
        path = folder / name
        size, digest = said[name]
        advice = f"remove {folder} and continue from an older step"
        try:
            found = path.stat().st_size
            if found != size:
                raise CheckpointError(f"checkpoint file {path} has {found} bytes, {size} were written: {advice}")
            if fingerprint(path)[1] != digest:
                raise CheckpointError(f"checkpoint file {path} does not match its checksum: {advice}")
        except OSError as error:
            raise CheckpointError(f"checkpoint file {path} cannot be read ({error.strerror}): {advice}") from error


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
