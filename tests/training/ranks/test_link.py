"""Invariants of the link between ranks (``megatron_ext/training/ranks/link.py``): real sockets, one process."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from megatron_ext.training.ranks.greeting import join, listen, welcome
from megatron_ext.training.ranks.link import Cause, Link, RankLost, Timing

TIMING = Timing(beat_s=0.05, silence_s=60.0, blame_s=0.2, grace_s=60.0, meet_s=60.0)
KEY = b"a key of this job"


@dataclass
class Job:
    """Links of all ranks, what each said, and which would have ended its process."""

    links: list[Link] = field(default_factory=list)
    connections: dict[tuple[int, int], Connection] = field(default_factory=dict)
    said: list[tuple[int, str]] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    kills: list[threading.Timer] = field(default_factory=list)

    def on_all(self, work: Callable[[Link], Any], but: Sequence[int] = ()) -> list[Any]:
        """``work`` on every rank at once, in rank order; an exception is its result."""
        chosen = [link for link in self.links if link.rank not in but]
        with ThreadPoolExecutor(len(chosen)) as pool:
            futures: list[Future[Any]] = [pool.submit(work, link) for link in chosen]
        return [future.exception() or future.result() for future in futures]

    def kill(self, rank: int) -> None:
        """What the kernel does when a process is killed: its sockets close. Its thread stops first."""
        link = self.links[rank]
        link._stopped = True
        link._thread.join()
        for (own, _), connection in self.connections.items():
            if own == rank:
                connection.close()

    def kill_soon(self, rank: int) -> None:
        """``kill`` while the others wait. The end of the test waits for it: the others notice a close that is still
        under way, and a second one would meet a descriptor that is no longer ours."""
        self.kills.append(threading.Timer(0.2, self.kill, [rank]))
        self.kills[-1].start()

    def release(self) -> None:
        for kill in self.kills:
            kill.join()
        for link in self.links:
            link.release()


Make = Callable[..., Job]


def wait_for(come: Callable[[], object]) -> None:
    deadline = time.monotonic() + 60.0
    while not come():
        assert time.monotonic() < deadline
        time.sleep(0.005)


@pytest.fixture
def make() -> Iterator[Make]:
    jobs: list[Job] = []

    def start(size: int, timing: Timing = TIMING) -> Job:
        job = Job()
        jobs.append(job)
        with listen("127.0.0.1") as server, ThreadPoolExecutor(size) as pool:
            port = server.getsockname()[1]
            greeting = pool.submit(welcome, server, size, KEY, TIMING)
            others = [pool.submit(join, "127.0.0.1", port, rank, KEY, TIMING) for rank in range(1, size)]
            peers = [greeting.result(), *({0: other.result()} for other in others)]
        for rank, known in enumerate(peers):
            job.connections |= {(rank, other): connection for other, (connection, _) in known.items()}
            say = lambda line, rank=rank: job.said.append((rank, line))  # noqa: E731
            end = lambda status, rank=rank: job.ended.append(rank)  # noqa: E731
            job.links.append(Link(rank, size, known, timing, say=say, end=end))
        return job

    yield start
    for job in jobs:
        job.release()


def test_what_rank_0_tells_is_heard_in_order(make: Make) -> None:  # invariant 3
    job = make(3)

    values = [0, "a", {"b": [1.5, None]}, b"x" * 1_000_000]

    def work(link: Link) -> list[Any]:
        if link.rank:
            return [link.hear() for _ in values]
        for value in values:
            link.tell(value)
        return []

    _, *heard = job.on_all(work)
    assert heard == [values] * 2


def test_values_come_together_and_meetings_wait_for_all(make: Make) -> None:
    job = make(3)
    assert job.on_all(lambda link: link.gather(link.rank * 10, "count")) == [[0, 10, 20], None, None]
    came: list[int] = []

    def work(link: Link) -> int:
        time.sleep(0.1 * link.rank)
        came.append(link.rank)
        link.meet("meet")
        return len(came)

    assert job.on_all(work) == [3, 3, 3]
    assert job.on_all(Link.close) == [None] * 3 and job.said == []


def test_who_did_not_come_is_named(make: Make) -> None:  # invariants 1 and 4
    job = make(3, replace(TIMING, meet_s=0.3))

    def work(link: Link) -> Any:
        if link.rank == 0:
            wait_for(lambda: link._given[1])  # its time runs from when rank 0 comes
        try:
            return link.meet("save its part")
        except RankLost as error:
            raise link.fail(error, Cause.FAILED) or error from None

    first, second = job.on_all(work, but=[2])
    assert isinstance(first, RankLost) and isinstance(second, RankLost) and str(first) == str(second)
    assert str(first).startswith("rank 2 of 3 did not save its part within 0.3 s (rank 2 of 3 (")


def test_a_killed_rank_ends_every_wait_and_is_named_once(make: Make) -> None:  # invariants 1 and 2
    job = make(4)
    for link in job.links:
        link.doing = "update"
    job.kill_soon(2)
    began = time.monotonic()
    errors = job.on_all(lambda link: link.gather(0, "come") if link.rank == 0 else link.hear(), but=[2])
    assert time.monotonic() - began < TIMING.silence_s / 2, "noticed by its socket, not by its silence"
    (line,) = {str(error) for error in errors}
    assert all(isinstance(error, RankLost) for error in errors)
    assert line.startswith(f"rank 2 of 4 ({socket.gethostname()}, pid {os.getpid()}) is gone") and "(in update)" in line
    assert job.said == [(0, line)]
    with pytest.raises(RankLost):
        job.links[0].check()


def test_rank_1_speaks_when_rank_0_is_lost(make: Make) -> None:  # invariant 2
    job = make(3)
    job.kill_soon(0)
    errors = job.on_all(Link.hear, but=[0])
    assert all(isinstance(error, RankLost) and "rank 0 of 3" in str(error) for error in errors)
    assert [rank for rank, _ in job.said] == [1]


def test_the_first_cause_is_named(make: Make) -> None:  # invariant 2
    """Rank 1's collective broke because rank 2 failed: rank 2 is the reason, although rank 1 was first to say so."""
    job = make(3, replace(TIMING, blame_s=1.0))

    def work(link: Link) -> Any:
        if link.rank == 0:
            return link.gather(0, "come")
        link.doing = "scoring"
        if link.rank == 2:
            wait_for(lambda: job.links[0]._suspects)
        error = ValueError("no such token\nsecond line") if link.rank == 2 else RuntimeError("gloo: closed by peer")
        raise link.fail(error, Cause.FAILED if link.rank == 2 else Cause.PEER) or error

    errors = job.on_all(work)
    (line,) = {str(error) for error in errors}
    assert line.endswith("failed in scoring: ValueError: no such token") and line.startswith("rank 2 of 3 (")
    assert job.said == [(0, line)] and all(isinstance(error, RankLost) for error in errors)


def test_an_error_of_rank_0_stays_its_own(make: Make) -> None:
    job = make(2)

    def work(link: Link) -> Any:
        if link.rank:
            return link.hear()
        return link.fail(OSError("disk full"), Cause.FAILED)

    own, other = job.on_all(work)
    assert own is None, "it is raised and told where it was caught"
    assert isinstance(other, RankLost) and "rank 0 of 2" in str(other) and "OSError: disk full" in str(other)
    assert job.said == []


def test_a_silent_rank_is_lost(make: Make) -> None:  # invariant 1
    job = make(2, replace(TIMING, silence_s=0.5))
    job.links[1]._stopped = True  # its process hangs: the connection stands, nothing comes
    (error,) = job.on_all(lambda link: link.gather(0, "come"), but=[1])
    assert isinstance(error, RankLost) and "gave no sign of life for 0.5 s" in str(error)


def test_a_rank_that_is_stuck_is_ended(make: Make) -> None:  # invariant 1
    job = make(3, replace(TIMING, grace_s=0.3))
    job.kill(1)
    wait_for(lambda: len(job.ended) == 2)
    assert sorted(job.ended) == [0, 2]


def test_a_signal_that_reaches_another_rank_reaches_rank_0(make: Make) -> None:
    job = make(3)
    raised = threading.Event()
    job.links[0].on_stop = raised.set
    job.links[2].asked_to_stop = lambda: True
    assert raised.wait(60)
