"""Invariants of the ranks of a job (numbers refer to ``megatron_ext/training/ranks/ranks.py``), without a launcher."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_ext.training.interrupt import Interrupted, InterruptFlag
from megatron_ext.training.ranks.greeting import join, listen, welcome
from megatron_ext.training.ranks.link import Link, RankLost, Timing
from megatron_ext.training.ranks.ranks import Ranks, alone, gather_over, joined, launched
from tests.helpers.training import one_rank

TIMING = Timing(beat_s=0.05, blame_s=0.2, meet_s=60.0)


@pytest.fixture
def three() -> Iterator[list[Ranks]]:
    """Three ranks of one job, linked."""
    with listen("127.0.0.1") as server, ThreadPoolExecutor(3) as pool:
        port = server.getsockname()[1]
        greeting = pool.submit(welcome, server, 3, b"key", TIMING)
        others = [pool.submit(join, "127.0.0.1", port, rank, b"key", TIMING) for rank in (1, 2)]
        peers = [greeting.result(), *({0: other.result()} for other in others)]
    linked = [Link(r, 3, known, TIMING, say=lambda line: None, end=lambda s: None) for r, known in enumerate(peers)]
    yield [Ranks(link.rank, 3, link) for link in linked]
    for link in linked:
        link.release()


def on_all(ranks: list[Ranks], work: Callable[[Ranks], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as pool:
        futures = [pool.submit(work, rank) for rank in ranks]
    return [future.exception() or future.result() for future in futures]


def test_one_rank_needs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:  # invariant 1
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert launched() == (0, 1)
    before = set(threading.enumerate())  # others of this process may end meanwhile
    with joined("gloo") as ranks:
        assert set(threading.enumerate()) <= before
        assert ranks.leads and ranks.tell(3) == 3 and ranks.led(lambda: 4) == 4 and ranks.gather(5, "come") == [5]
        ranks.meet("come")
        ranks.check()
        ranks.listen_to(InterruptFlag())
        with pytest.raises(ZeroDivisionError), ranks.telling():
            raise ZeroDivisionError
    with one_rank() as context:
        assert gather_over(context.groups.dp) is alone and alone(3) == [3]


def test_what_rank_0_does_every_rank_gets(three: list[Ranks]) -> None:  # invariant 2
    did: list[int] = []

    def result(ranks: Ranks) -> str:
        did.append(ranks.rank)
        return "result"

    def work(ranks: Ranks) -> list[Any]:
        return [ranks.led(lambda: result(ranks)), ranks.tell(ranks.rank), ranks.gather(1, "come")]

    assert on_all(three, work) == [["result", 0, [1, 1, 1]], ["result", 0, None], ["result", 0, None]]
    assert did == [0]


def test_an_interrupt_of_rank_0_is_one_of_every_rank(three: list[Ranks]) -> None:  # invariant 2
    flags = [InterruptFlag() for _ in three]
    for ranks, flag in zip(three, flags, strict=True):
        ranks.listen_to(flag)
    flags[2].raised = True  # the signal reached another rank

    def work(ranks: Ranks) -> str:
        while True:
            ranks.led(flags[ranks.rank].check)

    assert [type(error) for error in on_all(three, work)] == [Interrupted] * 3
    assert not flags[1].raised, "rank 0 decides, by one flag"


@pytest.mark.parametrize("failing", [0, 1])
def test_an_exception_on_one_rank_ends_all(three: list[Ranks], failing: int, tmp_path: Path) -> None:  # invariant 3
    def work(ranks: Ranks) -> None:
        ranks.log = tmp_path / f"rank_{ranks.rank}.log"
        ranks.doing("scoring")
        with ranks.telling():
            if ranks.rank == failing:
                raise ValueError("a token that is none")
            ranks.meet("come")

    errors = on_all(three, work)
    assert [type(error) for error in errors] == [ValueError if failing == r == 0 else RankLost for r in range(3)]
    lines = {str(error) for error in errors if isinstance(error, RankLost)}
    (line,) = lines
    assert line.startswith(f"rank {failing} of 3 (") and line.endswith("in scoring: ValueError: a token that is none")
    logs = sorted(path.name for path in tmp_path.iterdir())
    assert logs == ([] if failing == 0 else ["rank_1.log"])
    assert failing == 0 or "a token that is none" in (tmp_path / "rank_1.log").read_text()
