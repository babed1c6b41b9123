"""Invariants of how ranks meet (numbers: ``megatron_ext/training/ranks/greeting.py``): real sockets, one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from megatron_ext.training.ranks.greeting import join, listen, welcome
from megatron_ext.training.ranks.link import RankLost, Timing, own_name

KEY = b"a key of this job"


def test_strangers_are_not_listened_to_and_missing_ranks_are_named() -> None:  # invariants 1 and 2
    timing = Timing(meet_s=0.6)
    with listen("127.0.0.1") as server, ThreadPoolExecutor(2) as pool:
        port = server.getsockname()[1]
        greeting = pool.submit(welcome, server, 3, KEY, timing)
        with pytest.raises(RankLost, match="rank 1 cannot reach rank 0 at 127.0.0.1"):
            join("127.0.0.1", port, 1, b"another key", timing)
        connection, name = join("127.0.0.1", port, 1, KEY, timing)
        assert name == own_name()
        with pytest.raises(RankLost, match=r"rank 2 of 3 did not join within 0\.6 s"):
            greeting.result()
        connection.close()
