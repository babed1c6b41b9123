"""Invariants of checkpoint folders (numbers refer to ``megatron_ext/training/checkpoints/files.py``)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.training.checkpoints import files
from megatron_ext.training.checkpoints.files import CheckpointError, list_checkpoints


def write(root: Path, step: int, score: float | None = None) -> Path:
    folder = files.open_unfinished(root, step)
    (folder / "data").write_bytes(b"x" * 100 * step)
    found = {"data": list(files.fingerprint(folder / "data"))}
    mark = {"step": step, "recipe": "r", "world": 1, "parallel": {}, "score": score, "files": found}
    return files.publish(folder, mark)


def steps(root: Path) -> list[int]:
    return [info.step for info in list_checkpoints(root)]


def test_a_kill_at_any_moment_leaves_whole_checkpoints_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invariant 1: every call that changes the disk is the last one once."""
    write(tmp_path, 1)
    write(tmp_path, 2)

    class Killed(BaseException):
        pass

    calls, limit = [0], [0]

    def dying(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            calls[0] += 1
            if calls[0] > limit[0]:
                raise Killed
            return function(*args, **options)

        return call

    for name in ("mkdir", "write_bytes", "write_text", "rename", "unlink"):
        monkeypatch.setattr(Path, name, dying(getattr(Path, name)))
    remove = shutil.rmtree
    monkeypatch.setattr(files.shutil, "rmtree", dying(remove))
    for limit[0] in range(40):
        calls[0] = 0
        try:
            write(tmp_path, 3)
            files.prune(tmp_path, 2, None)
            break
        except Killed:
            found = steps(tmp_path)
            assert found[-1] in (2, 3) and len(found) >= 2 - (3 in found), found
            for info in list_checkpoints(tmp_path):
                files.verify(info.folder, ["data"])
    else:
        pytest.fail("it never came to its end")
    assert limit[0] > 5 and steps(tmp_path) == [2, 3]


def test_a_file_that_changed_is_named(tmp_path: Path) -> None:  # invariant 2
    folder = write(tmp_path, 1)
    files.verify(folder, ["data"])
    for data, word in ((b"x" * 99, "99 bytes, 100 were"), (b"y" + b"x" * 99, "checksum")):
        (folder / "data").write_bytes(data)
        with pytest.raises(CheckpointError, match=word):
            files.verify(folder, ["data"])
    (folder / "data").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        files.verify(folder, ["data"])


def test_the_last_and_the_best_are_kept(tmp_path: Path) -> None:  # invariant 3
    for step, score in enumerate((None, 0.2, 0.9, 0.9, 0.4, None), start=1):
        write(tmp_path, step, score)
        files.prune(tmp_path, 2, "higher")
    assert steps(tmp_path) == [4, 5, 6], "of equal scores the later one"
    assert [info.score for info in list_checkpoints(tmp_path)] == [0.9, 0.4, None]
    write(tmp_path, 7, 0.1)
    files.prune(tmp_path, 1, "lower")
    assert steps(tmp_path) == [7], "the last one may be the best one"
    write(tmp_path, 8)
    files.prune(tmp_path, 1, None)
    assert steps(tmp_path) == [8], "without a metric the last ones alone"
    files.prune(tmp_path, 0, None)
    assert steps(tmp_path) == [8]


def test_a_kill_while_pruning_leaves_no_half_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 1)  # invariant 3
    write(tmp_path, 2)

    def killed(path: Path, **options: Any) -> None:
        (path / "data").unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files.shutil, "rmtree", killed)
        with pytest.raises(KeyboardInterrupt):
            files.prune(tmp_path, 1, None)
    assert steps(tmp_path) == [2]
    (tmp_path / "step_3.tmp").mkdir()
    files.remove_unfinished(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_2"]
