"""The store's numbered invariants."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from megatron_ext.trajectory.builder import TrajectoryBuilder, build_group
from megatron_ext.trajectory.record import Status, TrajectoryBatch, equal
from megatron_ext.trajectory.store import Ref, StoreError, TrajectoryStore, group_of


@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_round_trip_is_exact(
    tmp_path: Path, random_batch: Callable[..., TrajectoryBatch], seed: int, routed: bool
) -> None:
    batch = random_batch(seed, routed=routed)
    store = TrajectoryStore(tmp_path / "store")
    ref = store.write(batch)
    again = store.read(ref)
    assert equal(batch, again)
    if routed and batch.routed is not None and again.routed is not None:
        assert batch.routed.dtype == again.routed.dtype == np.uint8
    for item in fields(TrajectoryBatch):
        value = getattr(again, item.name)
        assert not isinstance(value, np.ndarray) or not value.flags.writeable


def test_float_bits_survive(tmp_path: Path, random_batch: Callable[..., TrajectoryBatch]) -> None:
    batch = random_batch(1)
    logp = batch.rollout_logp.copy()
    logp[batch.version >= 0] = np.float32(-1e-45)  # the smallest subnormal
    batch = replace(batch, rollout_logp=logp)
    store = TrajectoryStore(tmp_path)
    assert store.read(store.write(batch)).rollout_logp.tobytes() == batch.rollout_logp.tobytes()


def test_empty_trajectory_round_trips(tmp_path: Path) -> None:
    b = TrajectoryBuilder("g/0", 0, "h")
    b.open_session()
    batch = build_group("g", "t", [b.finish(0, {}, False, Status.ENV_ERROR)])
    store = TrajectoryStore(tmp_path)
    assert equal(batch, store.read(store.write(batch)))


def test_list_delete_exists(tmp_path: Path, random_batch: Callable[..., TrajectoryBatch]) -> None:
    store = TrajectoryStore(tmp_path)
    one = replace(random_batch(1, groups=1), group_id=("a/b c-1",))
    two = replace(random_batch(2, groups=1), group_id=("zz",))
    refs = [store.write(one), store.write(two)]
    assert store.list() == sorted(refs) and [group_of(r) for r in refs] == ["a/b c-1", "zz"]
    assert store.exists(refs[0]) and store.delete(refs[0]) and not store.exists(refs[0])
    assert not store.delete(refs[0])
    assert store.list() == [refs[1]] and equal(two, store.read(refs[1]))
    with pytest.raises(StoreError, match="nothing-here.*cannot be read"):
        store.read(Ref("nothing-here"))


def test_a_late_second_writer_of_a_group_replaces_nothing(
    tmp_path: Path, random_batch: Callable[..., TrajectoryBatch]
) -> None:
    store = TrajectoryStore(tmp_path)
    first = random_batch(1, groups=1)
    ref = store.write(first)
    late = store.write(random_batch(2, groups=1))  # same group id, other tokens
    assert late != ref and equal(first, store.read(ref))
    assert store.write(first) == ref and len(store.list()) == 2


def test_damage_is_never_returned(tmp_path: Path, random_batch: Callable[..., TrajectoryBatch]) -> None:
    store = TrajectoryStore(tmp_path)
    ref = store.write(random_batch(3, groups=1, samples=2))
    path = tmp_path / ref
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(64), *rng.integers(0, len(good), 200).tolist(), len(good) - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(StoreError, match=path.name):
            store.read(ref)
    for size in (0, 5, 24, 100, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(StoreError, match=path.name):
            store.read(ref)
    path.write_bytes(good + b"x")
    with pytest.raises(StoreError, match=path.name):
        store.read(ref)


def test_a_full_disk_loses_nothing(
    tmp_path: Path, random_batch: Callable[..., TrajectoryBatch], monkeypatch: pytest.MonkeyPatch
) -> None:
    store = TrajectoryStore(tmp_path)
    before = random_batch(1)
    ref = store.write(before)
    real, calls = os.write, 0

    def short_then_full(handle: int, data: memoryview) -> int:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(handle, data[: max(1, len(data) // 2)])

    monkeypatch.setattr(os, "write", short_then_full)
    with pytest.raises(StoreError, match="disk is full"):
        store.write(random_batch(2))
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == [ref]
    assert equal(before, store.read(ref))


def test_a_real_write_limit_is_a_store_error(tmp_path: Path) -> None:
    """The kernel's own refusal (file-size limit), in a process of its own."""
    code = (
        "import resource, signal, sys; sys.path.insert(0, sys.argv[2])\n"
        "from megatron_ext.trajectory.builder import *\n"
        "from megatron_ext.trajectory.record import Status\n"
        "from megatron_ext.trajectory.store import TrajectoryStore, StoreError\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))\n"
        "b = TrajectoryBuilder('g', 0, 'h'); s = b.open_session(); b.add_context(s, [1] * 5000)\n"
        "try:\n    TrajectoryStore(sys.argv[1]).write(build_group('g', 't', [b.finish(0, {}, False, Status.DONE)]))\n"
        "except StoreError as error:\n    print('REFUSED', error)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), root], capture_output=True, text=True, timeout=60)
    assert "REFUSED" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


def test_sweep_removes_what_a_killed_writer_left(tmp_path: Path, random_batch: Callable[..., TrajectoryBatch]) -> None:
    store = TrajectoryStore(tmp_path)
    ref = store.write(random_batch(1))
    (tmp_path / ".writing-dead").write_bytes(b"half")
    assert store.list() == [ref]
    assert store.sweep() == 1 and store.list() == [ref] and len(list(tmp_path.iterdir())) == 1


def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match=str(blocked / "store")):
        TrajectoryStore(blocked / "store")


def test_a_step_is_written_and_read_in_milliseconds(tmp_path: Path) -> None:
    """16 groups of 8 trajectories of 110 tokens; the bound is loose, syncs depend on the disk."""
    groups = []
    for g in range(16):
        finished = []
        for sample in range(8):
            b = TrajectoryBuilder(f"g{g}/{sample}", sample, "h")
            s = b.open_session()
            for _ in range(8):
                b.add_context(s, [1] * 8)
                b.add_model_turn(s, [2] * 6, [-1.0] * 6, [1] * 6)
            finished.append(b.finish(0, {}, False, Status.DONE))
        groups.append(build_group(f"g{g}", "t", finished))
    store = TrajectoryStore(tmp_path)
    start = time.perf_counter()
    refs = [store.write(group) for group in groups]
    written = time.perf_counter()
    for ref in refs:
        store.read(ref)
    read = time.perf_counter()
    print(f"write {1e3 * (written - start):.1f} ms, read {1e3 * (read - written):.1f} ms")
    assert written - start < 2.0 and read - written < 0.5
