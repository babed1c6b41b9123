"""The journal's numbered invariants, and the coordinator that writes it."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_ext.rollout.coordinator import Coordinator, CoordinatorError
from megatron_ext.rollout.events import Added, Checkpointed, Event, GroupMeta, Opened
from megatron_ext.rollout.journal import Journal, JournaledCoordinator, JournalError, open_coordinator, read
from megatron_ext.trajectory.task import Task


def task(number: int) -> Task:
    return Task(f"task/{number}", "env", number, "train", {"n": number})


def meta(group_id: str) -> GroupMeta:
    return GroupMeta(group_id, f"{group_id}.group", (5,), (2,), (1,), (0.25,), (True,), (0,), 1, 2)


def some_events(count: int) -> list[Event]:
    events: list[Event] = [Opened(0, 0)]
    events += [Added((f"g{i}",), (task(i),), 1) for i in range(count - 1)]
    return events


def written(path: Path, count: int) -> bytes:
    journal = Journal(path)
    journal.append(some_events(count))
    journal.close()
    return path.read_bytes()


def play(c: JournaledCoordinator) -> None:
    """Two steps with everything in them."""
    c.add([task(i) for i in range(5)], 1)
    leased = c.lease("d0", 4, 0.0, 10.0)
    assert [g.group_id for g in leased] == [f"g{i:07d}" for i in range(4)] and leased[0].task == task(0)
    assert c.finish(leased[0].lease_id, meta(leased[0].group_id))
    assert c.fail(leased[1].lease_id, "engine refused") and not c.fail(leased[1].lease_id, "again")
    assert c.renew(leased[2].lease_id, 30.0)
    assert c.expire(20.0) == [leased[3].group_id]
    assert not c.finish(leased[3].lease_id, meta(leased[3].group_id))
    c.consume(1, [leased[0].group_id])
    c.checkpointed(1)
    assert c.release("d0", "died") == [leased[2].group_id]
    again = c.lease("d1", 1, 20.0, 40.0)
    assert again[0].group_id == leased[1].group_id and again[0].attempts == 1
    assert c.finish(again[0].lease_id, meta(again[0].group_id))
    c.consume(2, [], [(again[0].group_id, "constant reward")])


def test_lines_are_numbered_json(tmp_path: Path) -> None:
    path = tmp_path / "run" / "journal.jsonl"
    with_coordinator = open_coordinator(path)
    with_coordinator.resume(0, lambda _: True)
    play(with_coordinator)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["seq"] for line in lines] == list(range(len(lines)))
    lease = next(line for line in lines if line["event"] == "lease")
    assert set(lease) == {"seq", "event", "group", "lease", "driver", "deadline"}
    events, size, warning = read(path)
    assert len(events) == len(lines) and size == path.stat().st_size and warning == ""


def test_reopening_gives_the_state(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    first = open_coordinator(path)
    assert first.resume(0, lambda _: True) == 0
    play(first)
    second = open_coordinator(path)
    assert second.state.snapshot() == first.state.snapshot() and second.warning == ""
    assert second.resume(1, lambda m: True) == 1
    assert [m.group_id for m in second.ready()] == ["g0000001"] and second.counts().consumed == 1


def test_one_sync_for_a_whole_append(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "j")
    syncs: list[int] = []
    real = os.fsync

    def counted(handle: int) -> None:
        syncs.append(handle)
        real(handle)

    monkeypatch.setattr(os, "fsync", counted)
    journal.append(some_events(50))
    assert len(syncs) == 1 and len(read(tmp_path / "j")[0]) == 50
    journal.append([])
    assert len(syncs) == 1


def test_cut_anywhere_the_tail_is_dropped_and_writing_goes_on(tmp_path: Path) -> None:
    whole = written(tmp_path / "whole", 4)
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 0x0A]
    for cut in range(len(whole) + 1):
        path = tmp_path / "j"
        path.write_bytes(whole[:cut])
        kept = sum(end <= cut for end in ends)
        journal = Journal(path)
        assert len(journal.events) == kept
        torn = cut not in (0, *ends)
        assert bool(journal.warning) == torn
        if torn:
            assert f"line {kept + 1}" in journal.warning and str(path) in journal.warning
        journal.append([Checkpointed(0)])
        journal.close()
        events, _, warning = read(path)
        assert warning == "" and len(events) == kept + 1 and events[:kept] == some_events(4)[:kept]


@pytest.mark.parametrize("garbage", [b"\x00" * 50, b"{broken\n", b"\xff\xfe\n", b'{"seq": 3'])
def test_a_broken_last_line_is_torn(tmp_path: Path, garbage: bytes) -> None:
    path = tmp_path / "j"
    whole = written(path, 3)
    path.write_bytes(whole + garbage)
    journal = Journal(path)
    assert len(journal.events) == 3 and "torn line 4" in journal.warning
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda lines: [lines[0], b"{broken", *lines[2:]], "line 2: not JSON"),
        (lambda lines: [lines[0], *lines[2:]], "line 2: seq is 2, expected 1"),
        (lambda lines: [*lines[:2], lines[1], *lines[2:]], "line 3: seq is 1, expected 2"),
        (lambda lines: [lines[0], b'{"seq":1,"event":"dance"}', *lines[2:]], "line 2: unknown event 'dance'"),
        (lambda lines: [lines[0], b'{"seq":1,"event":"add"}', *lines[2:]], "line 2: event 'add' has fields"),
        (lambda lines: [*lines[:3], b'{"seq":3,"event":"checkpoint"}'], "line 4: event 'checkpoint' has fields"),
        (lambda lines: [*lines[:3], b"7"], "line 4: seq is 7"),
    ],
)
def test_damage_before_the_end_names_the_line_and_changes_nothing(
    tmp_path: Path, change: Callable[[list[bytes]], list[bytes]], message: str
) -> None:
    path = tmp_path / "j"
    lines = written(path, 4).splitlines()
    damaged = b"\n".join(change(lines)) + b"\n"
    path.write_bytes(damaged)
    with pytest.raises(JournalError, match=message):
        Journal(path)
    assert path.read_bytes() == damaged


def test_events_that_do_not_follow_are_an_error_of_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "j")
    journal.append([Checkpointed(3)])
    journal.close()
    with pytest.raises(JournalError, match="do not follow"):
        open_coordinator(tmp_path / "j")


def full_disk(monkeypatch: pytest.MonkeyPatch, code: int = errno.ENOSPC) -> None:
    real, calls = os.pwrite, 0

    def short_then_full(handle: int, data: memoryview, position: int) -> int:
        nonlocal calls
        calls += 1
        if calls > 2:
            raise OSError(code, os.strerror(code))
        return real(handle, data[:7], position)

    monkeypatch.setattr(os, "pwrite", short_then_full)


def test_a_full_disk_leaves_file_and_state_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "j"
    c = open_coordinator(path)
    c.resume(0, lambda _: True)
    c.add([task(0), task(1)], 1)
    before, content = c.state.snapshot(), path.read_bytes()
    full_disk(monkeypatch)
    with pytest.raises(JournalError, match=f"{path}.*'lease'.*disk is full"):
        c.lease("d", 2, 0.0, 1.0)
    monkeypatch.undo()
    assert c.state.snapshot() == before and path.read_bytes() == content
    assert len(c.lease("d", 2, 0.0, 1.0)) == 2
    assert open_coordinator(path).state.snapshot() == c.state.snapshot()


def test_several_results_in_one_append(tmp_path: Path) -> None:
    c = open_coordinator(tmp_path / "j")
    c.resume(0, lambda _: True)
    c.add([task(i) for i in range(3)], 1)
    a, b, late = c.lease("d", 3, 0.0, 10.0)
    c.fail(late.lease_id, "stopped")
    results = [(g.lease_id, meta(g.group_id)) for g in (b, late, a, b)]
    assert c.finish_many(results) == [True, False, True, False]
    assert [m.group_id for m in c.ready()] == [b.group_id, a.group_id] and c.counts().refused == 2
    assert c.finish_many([]) == []
    assert open_coordinator(tmp_path / "j").state.snapshot() == c.state.snapshot()


def test_another_writer_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "j"
    one, two = Journal(path), Journal(path)
    one.append([Opened(0, 0)])
    with pytest.raises(JournalError, match="another process writes to this run"):
        two.append([Opened(0, 0)])
    assert len(read(path)[0]) == 1


def test_refusals_write_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    c = open_coordinator(path)
    c.resume(0, lambda _: True)
    size = path.stat().st_size
    with pytest.raises(CoordinatorError):
        c.consume(1, ["nope"])
    with pytest.raises(JournalError, match="does not fit JSON"):
        c.add([Task("t", "e", 0, "train", {"x": float("nan")})], 1)
    assert path.stat().st_size == size and c.counts().draws == 0


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match="cannot be opened"):
        Journal(tmp_path / "file" / "j")
    with pytest.raises(JournalError, match="cannot be read"):
        read(tmp_path / "missing")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cut=st.integers(0, 10_000), step=st.integers(0, 2))
def test_killed_at_any_byte_the_run_goes_on(tmp_path: Path, cut: int, step: int) -> None:
    full = tmp_path / "full"
    if not full.exists():
        c = open_coordinator(full)
        c.resume(0, lambda _: True)
        play(c)
        c.close()
    data = full.read_bytes()
    path = tmp_path / "cut"
    path.write_bytes(data[: cut % (len(data) + 1)])
    c = open_coordinator(path)
    c.resume(min(step, c.state.step), lambda _: True)
    c.add([task(100)], 1)
    steps = finish_all(c)
    taken = [g for s in range(1, steps + 1) for g in trained_and_filtered(c.state, s)]
    assert sorted(taken) == sorted(c.state.groups) and c.state.counts().draws == len(taken)
    assert open_coordinator(path).state.snapshot() == c.state.snapshot()
    c.close()


def finish_all(c: JournaledCoordinator) -> int:
    while c.counts().queued or c.ready():
        for leased in c.lease("d9", 2, 100.0, 200.0):
            assert c.finish(leased.lease_id, meta(leased.group_id))
        c.consume(c.state.step + 1, [m.group_id for m in c.ready(1)])
    return c.state.step


def trained_and_filtered(state: Coordinator, step: int) -> Sequence[str]:
    event = state.consumed_at(step)
    return [*event.groups, *(group for group, _ in event.filtered)]
