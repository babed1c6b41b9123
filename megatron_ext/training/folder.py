"""The folder of a run: who may use it, and what it says about itself.

Invariants (``tests/training/test_folder.py``):

1. One process at a time: a second one is refused with the pid of the first.
2. A folder that belongs to another recipe, or to another configuration of this one, is refused, naming the keys that
   differ; keys that only say how long to run or what to show may change between incarnations.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron_ext.config.provenance import collect_provenance
from megatron_ext.config.saved import as_tree, load_resolved, save_resolved
from megatron_ext.config.schema import Config

# What may differ when a run goes on: how long, how often to save or look, how to show it, machine settings, and the
# layout (with the padding by which tensor-parallel ranks share a vocabulary), since any layout reads the checkpoint of
# any other.
MAY_CHANGE = (
    "parallel",
    "model.vocab_multiple",
    "run.steps",
    "run.max_minutes",
    "run.threads",
    "run.root",
    "run.name",
    "tracking",
    "checkpoint",
    "evaluation",
    "samples",
    "profile",
)

_LOCK, _UNFINISHED = ".lock", ".config.yaml.tmp"


class FolderError(RuntimeError):
    """A run folder that cannot be used; the message says why and what to change."""


@dataclass(frozen=True)
class RunFolder:
    """An open run folder; ``provenance`` is what ``provenance.json`` holds (versions, git state, command line). Rank 0
    holds the ``lock``; the others use the folder that it opened (None)."""

    path: Path
    lock: IO[str] | None
    provenance: Mapping[str, Any]

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def store(self) -> Path:
        return self.path / "store"

    @property
    def tokenizer(self) -> Path:
        return self.path / "tokenizer"

    @property
    def evaluations(self) -> Path:
        return self.path / "evaluations"

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        temporary = self.path / f"{name}.tmp"
        temporary.write_text(json.dumps(value, indent=1))
        temporary.replace(self.path / name)

    def close(self) -> None:
        if self.lock is not None:
            self.lock.close()


def open_folder(config: Config) -> RunFolder:
    """Makes or re-opens ``<root>/<name>``; writes ``config.yaml`` and ``provenance.json``. Raises ``FolderError``."""
    path = Path(config.run.root) / config.run.name
    try:
        path.mkdir(parents=True, exist_ok=True)
        lock = (path / _LOCK).open("a+")
    except OSError as error:
        raise FolderError(f"run folder {path} is not writable ({error.strerror}): set run.root or run.name") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.seek(0)
        holder = lock.read().strip() or "?"
        lock.close()
        raise FolderError(
            f"run folder {path} is in use by process {holder}: wait for it, or set another run.name"
        ) from error
    try:
        return _claim(config, RunFolder(path, lock, collect_provenance()), lock)
    except BaseException:
        lock.close()  # a refused folder is free for the next one at once
        raise


def _claim(config: Config, folder: RunFolder, lock: IO[str]) -> RunFolder:
    """Checks the locked folder, then writes what it says about itself, ``config.yaml`` first and whole."""
    path, saved, unfinished = folder.path, folder.path / "config.yaml", folder.path / _UNFINISHED
    if saved.exists():
        _check_same(path, load_resolved(saved), config)
    elif any(p.name not in (_LOCK, _UNFINISHED) for p in path.iterdir()):
        raise FolderError(f"{path} holds files but no config.yaml, so it is no run folder: set another run.name")
    try:
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        save_resolved(config, unfinished)
        unfinished.replace(saved)
        for sub in (folder.logs, folder.store, folder.evaluations):
            sub.mkdir(exist_ok=True)
        folder.write_json("provenance.json", folder.provenance)
    except OSError as error:
        raise FolderError(f"run folder {path} is not writable ({error.strerror}): set run.root or run.name") from error
    return folder


def _flatten(tree: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(tree, Mapping) and tree:
        return {k: v for key, value in tree.items() for k, v in _flatten(value, f"{prefix}{key}.").items()}
    return {prefix.removesuffix("."): tree}


def _of_other_targets(before: Mapping[str, Any], after: Mapping[str, Any]) -> tuple[str, ...]:
    """Where plug points stand whose ``_target_`` changed: their other arguments have nothing to do with each other."""
    named = [key.removesuffix("._target_") for key in before.keys() | after.keys() if key.endswith("._target_")]
    return tuple(at for at in named if before.get(f"{at}._target_", _ABSENT) != after.get(f"{at}._target_", _ABSENT))


def differing(old: Config, new: Config, but: Sequence[str]) -> list[str]:
    """Keys whose values differ, each with both; without those in or under one of ``but``. Of a plug point that is
    another one now, ``_target_`` alone."""
    before, after = _flatten(as_tree(old)), _flatten(as_tree(new))
    others = _of_other_targets(before, after)
    return [
        f"{key} ({before.get(key, 'absent')} there, {after.get(key, 'absent')} now)"
        for key in sorted(before.keys() | after.keys())
        if before.get(key, _ABSENT) != after.get(key, _ABSENT)
        and not any(key == k or key.startswith(f"{k}.") for k in but)
        and not any(key == at or (key.startswith(f"{at}.") and key != f"{at}._target_") for at in others)
    ]


def _check_same(path: Path, old: Config, new: Config) -> None:
    if old.recipe != new.recipe:
        raise FolderError(f"{path} belongs to recipe {old.recipe!r}, this run is {new.recipe!r}: set another run.name")
    found = differing(old, new, MAY_CHANGE)
    if found:
        raise FolderError(
            f"{path} was started with another configuration: {'; '.join(found)}. "
            "Use the same values to continue it, or set another run.name"
        )


_ABSENT = object()
