"""Invariants of how ranks meet (numbers: ``megatron_ext/training/ranks/greeting.py``): real sockets, one process."""

from __future__ import annotations

import select
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ext.training.ranks.greeting import join, listen, welcome
from megatron_ext.training.ranks.link import RankLost, Timing, own_name

KEY = b"a key of this job"


def port_of(server: socket.socket) -> int:
    return int(server.getsockname()[1])


def test_strangers_are_not_listened_to() -> None:  # invariant 1
    timing = Timing(meet_s=60.0)
    with listen("127.0.0.1") as server, ThreadPoolExecutor(1) as pool:
        greeting = pool.submit(welcome, server, 2, KEY, timing)
        with pytest.raises(RankLost, match="rank 1 cannot reach rank 0 at 127.0.0.1"):
            join("127.0.0.1", port_of(server), 1, b"another key", timing)
        connection, name = join("127.0.0.1", port_of(server), 1, KEY, timing)
        assert name == own_name()
        with connection, greeting.result()[1][0]:
            assert greeting.result().keys() == {1} and greeting.result()[1][1] == own_name()


def test_missing_ranks_are_named() -> None:  # invariant 2
    timing = Timing(meet_s=0.2)
    with listen("127.0.0.1") as server, ThreadPoolExecutor(1) as pool:
        one = pool.submit(join, "127.0.0.1", port_of(server), 1, KEY, timing)
        assert select.select([server], [], [], 60.0)[0], "it waits at the door when the time begins"
        with pytest.raises(RankLost, match=r"rank 2 of 3 did not join within 0\.2 s"):
            welcome(server, 3, KEY, timing)
        with one.result()[0]:
            pass
