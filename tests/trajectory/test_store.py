"""The store's numbered invariants."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from megatron_ext.trajectory.builder import TrajectoryBuilder, build_group
from megatron_ext.trajectory.framing import END
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import Status, TrajectoryBatch, equal
from megatron_ext.trajectory.store import Ref, StoreError, TrajectoryStore

Maker = Callable[..., TrajectoryBatch]


def place(ref: Ref) -> tuple[str, int, int]:
    """File, first byte and last byte plus one of a reference."""
    name, _, span = ref.partition("@")
    at, _, length = span.partition("+")
    return name, int(at), int(at) + int(length)


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.arrows"))


# -- 1: round trip --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("routed", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_round_trip_is_exact(tmp_path: Path, random_batch: Maker, seed: int, routed: bool) -> None:
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


def test_float_bits_survive(tmp_path: Path, random_batch: Maker) -> None:
    batch = random_batch(1)
    logp = batch.rollout_logp.copy()
    logp[batch.version >= 0] = np.float32(-1e-45)  # the smallest subnormal
    nan = np.array([0x7FC01234], dtype=np.uint32).view(np.float32)[0]  # with a payload
    batch = replace(batch, rollout_logp=logp, reward_parts={"x": np.full(batch.num_trajectories, nan)})
    store = TrajectoryStore(tmp_path)
    again = store.read(store.write(batch))
    assert again.rollout_logp.tobytes() == batch.rollout_logp.tobytes() and equal(batch, again)


def test_nothing_round_trips(tmp_path: Path, random_batch: Maker) -> None:
    b = TrajectoryBuilder("g/0", 0, "h")
    b.open_session()
    store = TrajectoryStore(tmp_path)
    for batch in (
        build_group("g", "t", [b.finish(0, {}, False, Status.ENV_ERROR)]),
        select_groups(random_batch(1), []),
    ):
        assert equal(batch, store.read(store.write(batch)))


def test_what_is_read_lies_in_the_file(tmp_path: Path, random_batch: Maker) -> None:
    """Arrays are views of one mapping and stay valid when the shard is gone."""
    batch = random_batch(2, groups=1, samples=1, turns=9, routed=True)
    store = TrajectoryStore(tmp_path)
    ref = store.write(batch)
    again = store.read(ref)
    for name in ("ids", "loss_mask", "turn", "version", "rollout_logp", "routed", "routed_valid"):
        assert not getattr(again, name).flags.owndata, name
    with np.testing.assert_raises(ValueError):
        again.ids[...] = 0
    store.delete(ref)
    store.sweep()
    assert shards(tmp_path) == [] and equal(batch, again)


# -- 2: references --------------------------------------------------------------------------------------------------
def test_several_at_once(tmp_path: Path, random_batch: Maker, monkeypatch: pytest.MonkeyPatch) -> None:  # 1, 2
    """Each has its own reference, in the order given; batches of one schema lie in one shard behind one sync."""
    batches = [random_batch(seed, routed=seed % 2 == 0) for seed in range(6)]
    store = TrajectoryStore(tmp_path)
    synced: list[int] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(handle)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    refs = store.write_many(batches)
    assert len(set(refs)) == len(refs) == len(batches) and store.write_many([]) == []
    assert all(equal(store.read(ref), batch) for ref, batch in zip(refs, batches, strict=True))
    shards = {ref.split("@")[0] for ref in refs}
    assert len(synced) == 2 * len(shards)  # the file and its folder
    synced.clear()
    store.write_many(batches)
    assert len(synced) == len(shards)


def test_list_delete_exists(tmp_path: Path, random_batch: Maker) -> None:
    store = TrajectoryStore(tmp_path)
    batches = [random_batch(n, groups=1, routed=n == 3) for n in range(4)]
    refs = [store.write(batch) for batch in batches]
    assert set(store.list()) == set(refs) and [r for r in store.list() if r in refs[:3]] == refs[:3]
    assert len(shards(tmp_path)) == 2, "batches of one schema share a shard"
    assert store.exists(refs[0]) and store.delete(refs[0]) and not store.exists(refs[0])
    assert not store.delete(refs[0]) and set(store.list()) == set(refs[1:])
    with pytest.raises(StoreError, match="was deleted"):
        store.read(refs[0])
    for ref, batch in zip(refs[1:], batches[1:], strict=True):
        assert equal(batch, store.read(ref))


def test_references_to_nothing(tmp_path: Path, random_batch: Maker) -> None:
    store = TrajectoryStore(tmp_path)
    name, start, stop = place(store.write(random_batch(1)))
    absent = (f"{name}@{start + 8}+{stop - start - 8}", f"{name}@{start}+{stop - start - 8}", f"{name}@{start}+{stop}")
    for text in ("", "nothing-here", f"../{name}@{start}+8", f"{name}@{start}+0", f"no.arrows@{start}+8", *absent):
        ref = Ref(text)
        assert not store.exists(ref) and not store.delete(ref)
        with pytest.raises(StoreError):
            store.read(ref)
    with pytest.raises(StoreError, match="'nothing-here' cannot be read: it is no reference of this store"):
        store.read(Ref("nothing-here"))


def test_a_late_second_writer_of_a_group_replaces_nothing(tmp_path: Path, random_batch: Maker) -> None:
    first, other = random_batch(1, groups=1), random_batch(2, groups=1)  # same group id, other tokens
    one, two = TrajectoryStore(tmp_path), TrajectoryStore(tmp_path)
    ref = one.write(first)
    late, again = two.write(other), two.write(first)
    assert len({ref, late, again}) == 3
    for reader in (one, two, TrajectoryStore(tmp_path)):
        assert equal(first, reader.read(ref)) and equal(other, reader.read(late))
    assert two.delete(again) and equal(first, one.read(ref))


# -- 3: damage ------------------------------------------------------------------------------------------------------
def test_damage_is_never_returned_and_spreads_to_nothing_else(tmp_path: Path, random_batch: Maker) -> None:
    store = TrajectoryStore(tmp_path)
    batches = [random_batch(n, groups=1, samples=2) for n in range(3)]
    refs = [store.write(batch) for batch in batches]
    name, start, stop = place(refs[1])
    path = tmp_path / name
    good = path.read_bytes()
    rng = np.random.default_rng(0)
    for at in [*range(start, start + 64), *rng.integers(start, stop, 200).tolist(), stop - 1]:
        bad = bytearray(good)
        bad[at] ^= 1 << int(rng.integers(8))
        path.write_bytes(bad)
        with pytest.raises(StoreError, match=f"{name}.*damaged"):
            store.read(refs[1])
        assert equal(batches[0], store.read(refs[0])) and equal(batches[2], store.read(refs[2]))
        assert [ref for ref in store.list() if ref != refs[1]] == [refs[0], refs[2]]
    for at in range(0, start, 97):  # in the schema, or in the batch before it
        bad = bytearray(good)
        bad[at] ^= 1
        path.write_bytes(bad)
        assert store.list()[-2:] == refs[1:]
        if at < place(refs[0])[1]:
            with pytest.raises(StoreError, match="schema"):
                store.read(refs[1])


# -- 4: torn tails --------------------------------------------------------------------------------------------------
def test_nothing_before_a_torn_tail_is_lost(tmp_path: Path, random_batch: Maker) -> None:
    """Cut anywhere, or filled with zeros as after a crash: what was written before stays, the rest is swept away, and a
    restarted writer goes on elsewhere."""
    store = TrajectoryStore(tmp_path / "store")
    batches = [random_batch(n, groups=1, samples=1, turns=2) for n in (1, 3, 4)]
    refs = [store.write(batch) for batch in batches]
    (path,) = shards(tmp_path / "store")
    good, ends = path.read_bytes(), [place(ref)[2] for ref in refs]
    rng = np.random.default_rng(0)
    near = [end + d for end in (place(refs[0])[1], *ends) for d in (-9, -8, -1, 0, 1, 4, 8, 9)]
    for size in sorted({0, 1, 7, 8, *rng.integers(0, len(good), 20).tolist(), *near} & set(range(len(good)))):
        for zeros in (0, len(good) - size):
            torn = good[:size] + bytes(zeros)
            whole = [n for n in range(3) if torn[: ends[n]] == good[: ends[n]]]
            path.write_bytes(torn)
            reopened = TrajectoryStore(tmp_path / "store")
            if not zeros:
                assert reopened.list() == [refs[n] for n in whole]
                assert [reopened.exists(ref) for ref in refs] == [n in whole for n in range(3)]
            written = reopened.write(batches[0])
            assert written.partition("@")[0] != path.name and path.stat().st_size == size + zeros
            changed = not whole or ends[whole[-1]] < len(torn)
            assert reopened.sweep() == changed, "one file was cut or removed"
            assert reopened.list() == sorted([*(refs[n] for n in whole), written])
            for n in whole:
                assert equal(batches[n], reopened.read(refs[n]))
            if whole:
                table = pa.ipc.open_stream(path.read_bytes()).read_all()
                assert table.num_rows == sum(batches[n].num_trajectories for n in whole)
            else:
                assert not path.exists()
            assert equal(batches[0], reopened.read(written)) and reopened.delete(written)
            assert reopened.sweep() == 0


def test_sweep_touches_no_whole_batch(tmp_path: Path, random_batch: Maker) -> None:
    store = TrajectoryStore(tmp_path)
    refs = [store.write(random_batch(n)) for n in range(2)]
    path = shards(tmp_path)[0]
    (tmp_path / "20200101T000000-dead.arrows").write_bytes(b"left by a writer that was killed")
    (tmp_path / "20200101T000000-gone.arrows.deleted").write_bytes(b"left when its shard was removed")
    assert store.sweep() == 1 and shards(tmp_path) == [path] == list(tmp_path.iterdir())
    assert store.sweep() == 0 and store.list() == refs and path.read_bytes().endswith(END)
    after = store.write(random_batch(3))
    assert place(after)[0] != path.name, "nothing is written behind an end"
    bad = bytearray(path.read_bytes())
    bad[place(refs[0])[1] + 4] ^= 1  # a damaged first batch hides no later one
    path.write_bytes(bad)
    assert store.sweep() == 0 and set(store.list()) == {refs[1], after}


def test_a_full_disk_loses_nothing(tmp_path: Path, random_batch: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
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
    for routed in (False, True):  # behind what is there, and into a new shard
        calls = 0
        with pytest.raises(StoreError, match=f"{tmp_path}.*not written: the disk is full; free space and go on"):
            store.write(random_batch(2, routed=routed))
    with pytest.raises(StoreError, match="not deleted: the disk is full"):
        store.delete(ref)
    monkeypatch.undo()
    assert [p.name for p in shards(tmp_path)] == [place(ref)[0]]
    assert store.list() == [ref] and equal(before, store.read(ref))
    again = store.write(before)
    assert equal(before, store.read(again)) and store.list() == [ref, again]


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
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path), root], capture_output=True, text=True, timeout=300
    )
    assert "REFUSED" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 1000


# -- 5: deletion ----------------------------------------------------------------------------------------------------
def test_a_shard_goes_with_its_last_group(tmp_path: Path, random_batch: Maker) -> None:
    batches = [random_batch(n, groups=1) for n in range(5)]
    writer, trainer = TrajectoryStore(tmp_path, shard_bytes=20_000), TrajectoryStore(tmp_path)
    refs = [writer.write(batch) for batch in batches]
    names = [place(ref)[0] for ref in refs]
    ended = [path for path in shards(tmp_path) if path.read_bytes().endswith(END)]
    assert len(set(names)) > 1 and {path.name for path in ended} >= {name for name in names if name != names[-1]}
    for ref, name in zip(refs, names, strict=True):
        assert trainer.delete(ref)
        left = [n for n, r in zip(names, refs, strict=True) if trainer.exists(r)]
        if tmp_path / name in ended:
            assert (tmp_path / name).exists() == (name in left), "an ended shard goes with its last group"
    assert trainer.list() == []
    more = writer.write(batches[0])
    assert trainer.list() == [more], "the writer's own shard stays while it may go on"
    assert trainer.delete(more) and trainer.sweep() <= 1 and list(tmp_path.iterdir()) == []


def test_a_deleted_group_stays_deleted(tmp_path: Path, random_batch: Maker) -> None:
    store = TrajectoryStore(tmp_path)
    refs = [store.write(random_batch(n)) for n in range(3)]
    assert store.delete(refs[1])
    for reopened in (TrajectoryStore(tmp_path), TrajectoryStore(tmp_path)):
        assert reopened.list() == [refs[0], refs[2]] and not reopened.exists(refs[1])
        reopened.sweep()
    assert store.delete(refs[0]) and store.delete(refs[2]) and list(tmp_path.iterdir()) == []


# -- 6: several processes -------------------------------------------------------------------------------------------
WRITER = """
import pickle, sys
sys.path.insert(0, sys.argv[1])
from megatron_ext.trajectory.store import TrajectoryStore
store, times, batches = TrajectoryStore(sys.argv[2], int(sys.argv[3])), int(sys.argv[4]), pickle.load(sys.stdin.buffer)
for n in range(times * len(batches)):
    print(store.write(batches[n % len(batches)]), flush=True)
"""


def writer(folder: Path, batches: list[TrajectoryBatch], shard_bytes: int, times: int) -> subprocess.Popen[bytes]:
    """A process that writes the batches in turn, ``times`` times, and prints each reference."""
    root = str(Path(__file__).parents[2])
    arguments = [sys.executable, "-c", WRITER, root, str(folder), str(shard_bytes), str(times)]
    child = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None
    with child.stdin:
        child.stdin.write(pickle.dumps(batches))
    return child


def promised(lines: list[bytes]) -> list[Ref]:
    return [Ref(line.decode().strip()) for line in lines if line.endswith(b"\n")]


def test_several_processes_share_a_folder(tmp_path: Path, random_batch: Maker) -> None:
    batches = [random_batch(n, groups=1) for n in range(12)]
    trainer, taken = TrajectoryStore(tmp_path), set[Ref]()
    children = [writer(tmp_path, batches, 30_000, 1) for _ in range(3)]
    while any(child.poll() is None for child in children) or (trainer.list() and not taken):
        for ref in trainer.list()[::2]:
            assert trainer.read(ref).num_groups == 1 and trainer.delete(ref)
            taken.add(ref)
        time.sleep(0.002)
    refs = []
    for child in children:
        assert child.wait() == 0 and child.stdout is not None
        with child.stdout as lines:
            refs.append(promised(lines.readlines()))
    written = {ref for mine in refs for ref in mine}
    assert len(written) == 36 and taken and set(trainer.list()) == written - taken
    for mine in refs:
        for ref, batch in zip(mine, batches, strict=True):
            assert trainer.exists(ref) == (ref not in taken)
            assert ref in taken or equal(trainer.read(ref), batch)


def test_a_killed_writer_loses_nothing_it_promised(tmp_path: Path, random_batch: Maker) -> None:
    batches = [random_batch(n, routed=n % 2 == 0) for n in range(3)]
    child = writer(tmp_path, batches, 1 << 20, 100_000)
    assert child.stdout is not None
    with child.stdout as lines:
        seen = [lines.readline() for _ in range(20)]
        child.kill()
        refs = promised([*seen, *lines.readlines()])
    child.wait()
    store = TrajectoryStore(tmp_path)
    store.sweep()
    assert len(store.list()) - len(refs) in (0, 1)
    for n, ref in enumerate(refs):
        assert store.exists(ref) and equal(store.read(ref), batches[n % 3])


# -- 7: stock tools -------------------------------------------------------------------------------------------------
def test_stock_tools_read_a_shard(tmp_path: Path, random_batch: Maker) -> None:
    store = TrajectoryStore(tmp_path)
    batches = [random_batch(n, routed=True) for n in range(2)]
    for batch in batches:
        store.write(batch)
    both = concat([replace(b, trajectory_id=tuple(f"{n}{t}" for t in b.trajectory_id)) for n, b in enumerate(batches)])
    (path,) = shards(tmp_path)
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_stream(source).read_all()  # while its writer may still go on
        assert table.column("reward").to_pylist() == both.reward.tolist()
        assert table.column("success").to_pylist() == both.success.tolist()
        assert table.column("reward_parts/é part").to_pylist() == both.reward_parts["é part"].tolist()
        tokens = [both.trajectory(j).tokens for j in range(both.num_trajectories)]
        for name in ("ids", "loss_mask", "rollout_logp", "version", "weight"):
            assert table.column(name).to_pylist() == [getattr(both, name)[span].tolist() for span in tokens], name
        assert both.routed is not None
        assert table.column("routed").to_pylist() == [both.routed[span].tolist() for span in tokens]
        trained = pc.sum(table.column("loss_mask").combine_chunks().values.storage).as_py()
        assert trained == int(both.loss_mask.sum())
        groups = table.group_by("group_id").aggregate([("reward", "mean")]).sort_by("group_id")
        assert groups.column("group_id").to_pylist() == ["g0", "g1"]


# -- folders and time -----------------------------------------------------------------------------------------------
def test_an_unwritable_folder_is_named(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(StoreError, match=str(blocked / "store")):
        TrajectoryStore(blocked / "store")
    with pytest.raises(ValueError, match="shard_bytes must be > 0, got 0"):
        TrajectoryStore(tmp_path, shard_bytes=0)


def test_text_that_is_none_is_refused(tmp_path: Path, random_batch: Maker) -> None:
    batch = random_batch(1)
    with pytest.raises(StoreError, match="not written: task_id: .* is no valid text"):
        TrajectoryStore(tmp_path).write(replace(batch, task_id=("\udc80",) * batch.num_groups))


def test_a_step_is_written_and_read_in_milliseconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 groups of 8 trajectories of 110 tokens. The time is the processor's own, which other processes do not
    lengthen, and the bound is loose; how long a sync takes is up to the disk, so those are counted."""
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
    store, syncs, fsync = TrajectoryStore(tmp_path), list[int](), os.fsync

    def counted(file: int) -> None:
        syncs.append(file)
        fsync(file)

    monkeypatch.setattr(os, "fsync", counted)
    store.read(store.write(groups[0]))  # what is imported with the first one
    syncs.clear()
    start = time.process_time()
    refs = [store.write(group) for group in groups]
    written = time.process_time()
    for ref in refs:
        store.read(ref)
    read = time.process_time()
    print(f"write {1e3 * (written - start):.1f} ms, read {1e3 * (read - written):.1f} ms, {len(syncs)} syncs")
    assert written - start < 0.5 and read - written < 0.5  # each about 20 ms
    assert len(syncs) == len(groups), "one a group"
