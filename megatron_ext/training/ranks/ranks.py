"""The ranks of a job: who leads, what the others learn from it, and sums over the data-parallel ranks.

Every rank runs the same program. What depends on time, signals, files or the engine is done by rank 0 and told to the
others (``led``), so that no rank leaves a collective alone; the rest follows from the same metadata on every rank.

Invariants (``tests/training/ranks/test_ranks.py``, ``tests/integration/test_torchrun.py``):

1. One rank needs no launcher, opens no socket and starts no thread.
2. ``led`` returns the same value on every rank, and an interrupt of rank 0 is one of every rank.
3. An exception on one rank ends all ranks: each leaves ``joined`` with an error, none hangs.
4. Sums over data-parallel ranks are taken in rank order, so that every rank has the same bits.
"""

from __future__ import annotations

import os
import secrets
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol, TypeVar, cast

import torch.distributed as dist

from megatron_ext.training.interrupt import Interrupted, InterruptFlag
from megatron_ext.training.ranks.greeting import join, listen, welcome
from megatron_ext.training.ranks.link import Cause, Link, RankLost, Timing

T = TypeVar("T")
_PREFIX = "megatron_ext/link"


@dataclass(frozen=True)
class _Interrupt:
    """Told in place of a value: rank 0 was interrupted."""


class Ranks:
    """This rank among the ``size`` of the job. ``log``: where another rank than 0 keeps its traceback."""

    def __init__(self, rank: int = 0, size: int = 1, link: Link | None = None) -> None:
        self.rank, self.size = rank, size
        self.log: Path | None = None
        self._link = link
        self._told = False

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def tell(self, value: T) -> T:
        """Rank 0's ``value``, on every rank (what others pass is not looked at)."""
        if self._link is None:
            return value
        if self.leads:
            self._link.tell(value)
            return value
        return cast(T, self._link.hear())

    def led(self, work: Callable[[], T]) -> T:
        """Rank 0 does ``work``; every rank returns its result, or raises ``Interrupted`` when that did."""
        if self._link is None:
            return work()
        if self.leads:
            try:
                value = work()
            except Interrupted:
                self._link.tell(_Interrupt())
                raise
            self._link.tell(value)
            return value
        heard = self._link.hear()
        if isinstance(heard, _Interrupt):
            raise Interrupted
        return cast(T, heard)

    def meet(self, what: str) -> None:
        """Returns once every rank has come here; ``what`` completes "rank 3 did not ..."."""
        if self._link is not None:
            self._link.meet(what)

    def gather(self, value: T, what: str) -> list[T] | None:
        """Every rank's value in rank order, on rank 0 (None elsewhere); ``what`` as in ``meet``. For small values."""
        return [value] if self._link is None else self._link.gather(value, what)

    def check(self) -> None:
        """Raises ``RankLost`` when a rank is lost; for waits that are not on a rank."""
        if self._link is not None:
            self._link.check()

    def doing(self, what: str) -> None:
        """Notes what the job is busy with, for the message if a rank is lost."""
        if self._link is not None:
            self._link.doing = what

    def listen_to(self, flag: InterruptFlag) -> None:
        """A signal that reaches another rank is rank 0's to act on."""
        if self._link is not None:
            self._link.on_stop = flag.raise_it
            self._link.asked_to_stop = lambda: flag.raised

    @contextmanager
    def telling(self) -> Iterator[None]:
        """An exception that leaves the context ends the other ranks too; where another rank is its reason it becomes
        ``RankLost``."""
        try:
            yield
        except BaseException as error:
            instead = None if self._link is None or self._told else self._tell_end(self._link, error)
            if instead is None:
                raise
            raise instead from error

    def _tell_end(self, link: Link, error: BaseException) -> RankLost | None:
        self._told = True
        if not self.leads and not isinstance(error, (RankLost, KeyboardInterrupt)) and self.log is not None:
            self.log.write_text("".join(traceback.format_exception(error)))
        return link.fail(error, _cause(error))


def _cause(error: BaseException) -> Cause:
    """A collective that broke says that some rank ended, not which."""
    text = str(error).lower()
    broken = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and ("gloo" in text or "nccl" in text or "by peer" in text)
    )
    return Cause.PEER if broken else Cause.FAILED


def launched() -> tuple[int, int]:
    """(rank, ranks) as a launcher set them; (0, 1) without one."""
    if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
        return 0, 1
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


@contextmanager
def joined(communication: str, timing: Timing | None = None) -> Iterator[Ranks]:
    """The ranks of this job while the context is open: the default process group over ``communication`` ("gloo",
    "nccl"), and the link. Alone nothing is set up.

    It is left as ``Ranks.telling`` is: an exception reaches all ranks.
    """
    rank, size = launched()
    if size == 1:
        yield Ranks()
        return
    timing = Timing() if timing is None else timing
    limit = timedelta(seconds=timing.meet_s)
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=limit))
    except (ValueError, dist.DistError, RuntimeError) as error:
        raise RankLost(
            f"rank {rank} of {size} cannot reach MASTER_ADDR={os.environ.get('MASTER_ADDR', '(not set)')}, "
            f"MASTER_PORT={os.environ.get('MASTER_PORT', '(not set)')}: {error}"
        ) from error
    peers = _greet(store, rank, size, timing)
    link = Link(rank, size, peers, timing)
    ranks = Ranks(rank, size, link)
    try:
        with ranks.telling():
            dist.init_process_group(
                communication, store=dist.PrefixStore("ranks", store), rank=rank, world_size=size, timeout=limit
            )
            yield ranks
            link.close()
        dist.destroy_process_group()
    except BaseException:
        link.release()  # groups are left as they are: leaving them in order takes all ranks
        raise


def _greet(store: dist.Store, rank: int, size: int, timing: Timing) -> dict[int, tuple[Connection, str]]:
    """Connections over the address and key that rank 0 leaves in the launcher's store."""
    host = os.environ["MASTER_ADDR"]  # where rank 0 runs
    if rank == 0:
        key = secrets.token_hex(32)
        with listen(host) as server:
            store.set(_PREFIX, f"{server.getsockname()[1]} {key}")
            return welcome(server, size, key.encode(), timing)
    port, key = store.get(_PREFIX).decode().split()
    return {0: join(host, int(port), rank, key.encode(), timing)}


class Gather(Protocol):
    """Everybody's value over the data-parallel ranks, in rank order; a collective of theirs."""

    def __call__(self, value: T) -> list[T]: ...


def alone(value: T) -> list[T]:
    """``Gather`` of a single data-parallel rank."""
    return [value]


def gather_over(group: dist.ProcessGroup) -> Gather:
    """``Gather`` over a process group."""
    size = dist.get_world_size(group)
    if size == 1:
        return alone

    def gather(value: T) -> list[T]:
        found: list[T | None] = [None] * size
        dist.all_gather_object(found, value, group=group)
        return cast(list[T], found)

    return gather
