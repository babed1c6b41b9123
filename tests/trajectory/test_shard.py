"""The numbered invariants of ``trajectory/shard.py``."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from megatron_ext.trajectory import shard as files
from megatron_ext.trajectory.framing import END, encode

MESSAGE = encode(pa.RecordBatch.from_pydict({"a": list(range(100))}), "about")
FAR = 1 << 40


def test_data_are_synced_before_they_are_promised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:  # inv. 1
    synced: list[tuple[str, int]] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        synced.append((path.name, path.stat().st_size if path.is_file() else -1))
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    shard, [(at, length)] = files.create(tmp_path, [MESSAGE], FAR)
    assert synced == [(shard.path.name, at + length), (tmp_path.name, -1)]
    synced.clear()
    grown = files.append(shard, [MESSAGE], FAR)
    assert grown is not None and synced == [(shard.path.name, grown[0].size)]
    synced.clear()
    several = files.append(grown[0], [MESSAGE, MESSAGE], FAR)  # one sync for all
    assert several is not None and synced == [(shard.path.name, several[0].size)]
    assert several[1] == [(grown[0].size, length), (grown[0].size + length, length)]
    synced.clear()
    files.mark_deleted(shard.path, grown[1][0])
    files.mark_deleted(shard.path, (at, length))
    assert [name for name, _ in synced] == [shard.path.name + ".deleted", tmp_path.name, shard.path.name + ".deleted"]


@pytest.mark.parametrize("call", ["write", "fsync"])
def test_a_failure_leaves_the_shard_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:  # 1
    shard, _ = files.create(tmp_path, [MESSAGE], FAR)
    before = shard.path.read_bytes()
    real, calls = getattr(os, call), 0

    def failing(*arguments: object) -> object:
        nonlocal calls
        calls += 1
        if call == "fsync" or calls > 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(*arguments)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OSError, match="No space"):
        files.append(shard, [MESSAGE], FAR)
    assert shard.path.read_bytes() == before
    calls = 0
    with pytest.raises(OSError, match="No space"):
        files.create(tmp_path, [MESSAGE], FAR)
    assert list(tmp_path.iterdir()) == [shard.path]


def test_only_the_shard_that_this_process_left_is_continued(tmp_path: Path) -> None:  # invariant 2
    shard, _ = files.create(tmp_path, [MESSAGE], FAR)
    assert files.append(replace(shard, process=shard.process + 1), [MESSAGE], FAR) is None
    assert files.append(replace(shard, ended=True), [MESSAGE], FAR) is None
    assert files.append(replace(shard, path=tmp_path / "gone.arrows"), [MESSAGE], FAR) is None
    with shard.path.open("ab") as file:
        file.write(b"torn")
    assert files.append(shard, [MESSAGE], FAR) is None
    assert shard.path.stat().st_size == shard.size + 4


def test_a_shard_ends_at_its_limit(tmp_path: Path) -> None:  # invariant 2
    shard, [(at, length)] = files.create(tmp_path, [MESSAGE], FAR)
    full = files.append(shard, [MESSAGE], at + 2 * length)
    assert full is not None and full[0].ended and full[0].path.read_bytes().endswith(END)
    assert full[0].path.stat().st_size == full[0].size
    at_once, _ = files.create(tmp_path, [MESSAGE], 1)
    assert at_once.ended and at_once.path.read_bytes() == MESSAGE.schema + b"".join(map(bytes, MESSAGE.parts)) + END


def test_torn_marks_count_as_not_made(tmp_path: Path) -> None:  # invariant 3
    path = tmp_path / "x.arrows"
    spans = [(8 * n, 16 + n) for n in range(4)]
    assert files.deleted(path) == frozenset()
    for span in spans:
        files.mark_deleted(path, span)
    marks = files.marks_of(path)
    data = marks.read_bytes()
    line = len(data) // 4
    for size in [*range(0, len(data), 7), *range(line - 1, len(data) + 1, line), len(data)]:
        marks.write_bytes(data[:size])
        assert files.deleted(path) == set(spans[: size // line])
        files.mark_deleted(path, (7, 7))
        assert files.deleted(path) == {*spans[: size // line], (7, 7)}, "one made after a torn one counts"
    for at in range(line):
        bad = bytearray(data)
        bad[at] ^= 1
        marks.write_bytes(bytes(bad))
        assert files.deleted(path) == set(spans[1:])


def test_a_file_of_no_bytes_is_mapped(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    with files.mapped(tmp_path / "x") as data:
        assert data == b""
