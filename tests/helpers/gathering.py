"""Data-parallel ranks as threads: what gathers over ranks, tried without processes."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any, TypeVar

from megatron_ext.training.ranks.ranks import Gather

T = TypeVar("T")


def on_ranks(work: Callable[[int, Gather], T], ranks: int) -> list[T]:
    """``work(rank, gather)`` of every rank, in rank order. A rank that gathers less often than another breaks all."""
    barrier, values = Barrier(ranks, timeout=120.0), [None] * ranks  # type: tuple[Barrier, list[Any]]

    def gather_of(rank: int) -> Gather:
        def gather(value: Any) -> list[Any]:
            values[rank] = value
            barrier.wait()
            found = list(values)
            barrier.wait()
            return found

        return gather

    def run(rank: int) -> T:
        try:
            return work(rank, gather_of(rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(ranks) as pool:
        return [future.result() for future in [pool.submit(run, rank) for rank in range(ranks)]]
