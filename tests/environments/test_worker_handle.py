"""Invariants of ``megatron_ext/environments/worker_handle.py``: a real worker process, whose environment misbehaves on
command."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import pytest

from megatron_ext.environments.messages import Release, Reply, Request, Reset, Step
from megatron_ext.environments.worker_handle import Answers, Deadlines, WorkerHandle
from megatron_ext.trajectory.task import Task

TROUBLE = {"trouble": {"_target_": "tests.environments.troublesome.Troublesome"}}


@pytest.fixture
def worker() -> Iterator[WorkerHandle]:
    handle = WorkerHandle.start(TROUBLE, Deadlines(call_s=1.0, start_s=60.0), None)
    yield handle
    with suppress(OSError, ValueError):  # a test may have ended it
        handle.hang_up()
        handle.reap(5.0)


def reset(name: str, on_reset: str = "") -> Reset:
    return Reset(name, "trouble", Task(f"trouble/train/{name}", "trouble", 1, "train", {"on_reset": on_reset}))


def answers(worker: WorkerHandle, count: int) -> Answers:
    found: Answers = []
    deadline = time.monotonic() + 60.0
    while len(found) < count:
        assert time.monotonic() < deadline and worker.send()
        for _ in wait([worker.connection], 1.0):
            came = worker.receive()
            assert came is not None
            found += came
    return found


def texts(found: list[tuple[Request, Reply]]) -> list[str]:
    return [reply.observation.text for _, reply in found if reply.observation is not None]


def test_requests_are_answered_in_order_a_batch_at_a_time(worker: WorkerHandle) -> None:  # invariants 1 and 2
    requests: list[Request | Release] = [reset("a"), *(Step("a", "go") for _ in range(80)), Release("a")]
    worker.queue.extend(requests)
    assert worker.send() and 0 < len(worker.under_way) < len(requests) and worker.queue
    sent = len(worker.under_way)
    assert worker.send() and len(worker.under_way) == sent, "the next batch waits for the first"
    found = answers(worker, 81)
    assert [request for request, _ in found] == requests[:-1]
    assert texts(found) == [f"seed 1 count {i}" for i in range(81)]
    assert worker.send() and not worker.queue and not worker.under_way, "a release has no answer"


def test_a_death_leaves_one_culprit_and_what_was_not_answered(worker: WorkerHandle) -> None:  # invariant 2
    worker.queue.extend([reset("a"), reset("b")])
    answers(worker, 2)
    die, later, queued = Step("a", "die"), Step("b", "go"), Step("b", "once more")
    worker.queue.extend([Step("b", "go"), die, later])
    assert worker.send()
    worker.queue.append(queued)
    left, ended = worker.end(kill=False)  # it dies by itself
    assert texts(left) in ([], ["seed 1 count 1"]), "its last answer may have died with it"
    assert (ended.how, ended.began, ended.culprit) == ("killed by signal 9", True, die)
    assert ended.left[-2:] == (later, queued) and die not in ended.left and len(left) + len(ended.left) == 3


def test_an_idle_worker_has_no_culprit(worker: WorkerHandle) -> None:  # invariant 2
    worker.queue.append(reset("a"))
    answers(worker, 1)
    os.kill(worker.popen.pid, signal.SIGKILL)
    worker.popen.wait()
    worker.queue.append(Step("a", "go"))
    assert not worker.send() or worker.receive() is None
    _, ended = worker.end(kill=False)
    assert ended.culprit is None and ended.left == (Step("a", "go"),)


def test_the_deadline_is_that_of_the_call(worker: WorkerHandle) -> None:  # invariant 3
    assert worker.overrun() is None, "nothing is under way"
    worker.queue.append(reset("a"))
    assert worker.send()
    while worker.under_way:  # starting has a longer one
        assert worker.overrun() is None and worker.look_in_s(time.monotonic()) <= worker.limit_s / 4
        if worker.connection.poll(0.05):
            worker.receive()
    hang = Step("a", "hang")
    worker.queue.append(hang)
    began = time.monotonic()
    assert worker.send()
    while (limit := worker.overrun()) is None:
        assert time.monotonic() - began < 30.0
        time.sleep(0.02)
    assert limit == 1.0 and time.monotonic() - began >= 1.0
    _, ended = worker.end(kill=True)
    assert ended.culprit == hang and ended.left == ()


def test_one_that_never_began_is_told_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stuck = tmp_path / "python"
    stuck.write_text("#!/bin/sh\nexec sleep 600\n")
    stuck.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(stuck))
    handle = WorkerHandle.start(TROUBLE, Deadlines(1.0, 60.0), None)
    _, ended = handle.end(kill=True)
    assert not ended.began and ended.culprit is None
