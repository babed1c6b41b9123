"""How the ranks of a job hold together beside their collectives: rank 0's word, named waits, and what happens when one
of them is lost. Sockets and a thread; no torch.

Rank 0 keeps a connection to every other rank. A thread on each rank reads, sends signs of life and watches.

Invariants (``tests/training/ranks/test_link.py``):

1. A rank that is killed, fails or falls silent ends the job on every rank: each wait raises ``RankLost``, and a rank
   that cannot raise, stuck in a collective whose peer is gone, is ended ``Timing.grace_s`` later.
2. The reason is one line, said once, by rank 0 (by rank 1 when rank 0 is what was lost). It names the rank that was
   lost first: what broke on others because of that is not told.
3. What rank 0 tells arrives on every rank, in the order told.
4. A wait for several ranks has a deadline, and names those that did not come. A wait for rank 0 ends with its last sign
   of life: whatever rank 0 waits for has a deadline of its own.
"""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import IntEnum
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

_TICK_S = 0.25


class RankLost(Exception):
    """A rank of the job is gone, failed or did not come; the message names it. It was told where it has to be."""


class Cause(IntEnum):
    """Why a rank ended. Of several that come together the first kind is the reason and the rest follow from it."""

    GONE = 0  # killed, silent, or its machine is lost
    FAILED = 1  # an exception of its own
    PEER = 2  # a collective broke: somebody else did


@dataclass(frozen=True)
class Timing:
    """Seconds: between signs of life, of silence until a rank counts as lost, for all reasons of one loss to come in,
    for a rank to end by itself, and that ranks may come after one another to a meeting."""

    beat_s: float = 5.0
    silence_s: float = 120.0
    blame_s: float = 1.0
    grace_s: float = 20.0
    meet_s: float = 1800.0


@dataclass(frozen=True)
class _Loss:
    rank: int
    cause: Cause
    line: str


@dataclass
class _Peer:
    """A connection as the threads share it."""

    connection: Connection
    name: str  # "host, pid 123"
    heard: float
    open: bool = True
    bye: bool = False
    failed: bool = False
    sending: threading.Lock = field(default_factory=threading.Lock)


def own_name() -> str:
    return f"{socket.gethostname()}, pid {os.getpid()}"


def ranks_text(ranks: list[int]) -> str:
    """As in "rank 3" and "ranks 1, 3"."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


class Link:
    """One rank's end. ``doing`` says what the rank is busy with, for messages.

    ``peers``: rank -> (connection, name), all others on rank 0 and rank 0 alone elsewhere. ``say`` writes the one line,
    ``end`` ends a process that did not end by itself.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        peers: Mapping[int, tuple[Connection, str]],
        timing: Timing | None = None,
        *,
        say: Callable[[str], None] | None = None,
        end: Callable[[int], None] = os._exit,
    ) -> None:
        self.rank, self.size = rank, size
        self.doing = "start"
        self.on_stop: Callable[[], None] = lambda: None  # rank 0: another rank was asked to stop
        self.asked_to_stop: Callable[[], bool] = lambda: False  # others: whether this one was
        self._timing = Timing() if timing is None else timing
        self._say, self._end = say or _to_stderr, end
        now = time.monotonic()
        self._peers = {number: _Peer(connection, name, now) for number, (connection, name) in peers.items()}
        self._told: deque[Any] = deque()
        self._given: dict[int, deque[Any]] = {number: deque() for number in peers}
        self._changed = threading.Condition()
        self._suspects: list[_Loss] = []
        self._judged_at = self._end_at = float("inf")
        self._loss: _Loss | None = None
        self._stopped = self._passed_on = False
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    # -- what the job calls ----------------------------------------------------------------------------------------
    def tell(self, value: Any) -> None:
        """Rank 0: ``value`` to every other rank."""
        data = pickle.dumps(("tell", value), protocol=5)
        for peer in self._peers.values():
            self._send(peer, data)
        self.check()

    def hear(self) -> Any:
        """Other ranks: the next thing that rank 0 tells."""
        with self._changed:
            self._changed.wait_for(lambda: self._told or self._loss is not None)
            if not self._told:
                self._raise()
            return self._told.popleft()

    def gather(self, value: Any, what: str) -> list[Any] | None:
        """Everybody's values in rank order, on rank 0 (None elsewhere). ``what`` completes "rank 3 did not ..."."""
        if self.rank:
            self._send(self._peers[0], pickle.dumps(("give", value), protocol=5))
            self.check()
            return None
        deadline = time.monotonic() + self._timing.meet_s
        with self._changed:
            while True:
                missing = sorted(number for number, given in self._given.items() if not given)
                self.check()
                if not missing:
                    return [value, *(self._given[number].popleft() for number in sorted(self._given))]
                if time.monotonic() > deadline:
                    late, first = f"{ranks_text(missing)} of {self.size}", self._describe(missing[0])
                    raise RankLost(f"{late} did not {what} within {self._timing.meet_s:g} s ({first})")
                self._changed.wait(_TICK_S)

    def meet(self, what: str) -> None:
        """Returns once every rank has come here."""
        if self.gather(None, what) is None:
            self.hear()
        else:
            self.tell(None)

    def check(self) -> None:
        """Raises ``RankLost`` once a rank is lost."""
        if self._loss is not None:
            self._raise()

    def fail(self, error: BaseException, cause: Cause) -> RankLost | None:
        """Tells the others that this rank ends with ``error``. Returns what to raise instead of it: the loss of another
        rank that was the reason, or, but on rank 0, that it has been told there."""
        if not isinstance(error, RankLost):
            first = (str(error).splitlines() or [""])[0]
            line = f"{self._describe(self.rank)} failed in {self.doing}: {type(error).__name__}: {first}"
            if self.rank:
                self._send(self._peers[0], pickle.dumps(("failed", int(cause), line)))
            else:
                self._suspect(_Loss(0, cause, line))
        elif self._loss is None:  # raised here: somebody did not come
            self._suspect(_Loss(self.rank, Cause.GONE, str(error)))
        with self._changed:
            self._changed.wait_for(lambda: self._loss is not None, self._timing.grace_s)
        loss = self._loss
        if loss is None:
            return None
        return None if loss.rank == self.rank == 0 else RankLost(loss.line)

    def close(self) -> None:
        """The polite end, when every rank is done: nobody leaves before all have said so."""
        bye = pickle.dumps(("bye",))
        if self.rank:
            self._send(self._peers[0], bye)
        self._wait_for_byes()
        if not self.rank:
            for peer in self._peers.values():
                self._send(peer, bye)
        self.release()

    def release(self) -> None:
        """Lets go without a word: after a loss, which everybody knows of."""
        self._stopped = True
        self._thread.join()
        for peer in self._peers.values():
            peer.connection.close()

    def _wait_for_byes(self) -> None:
        deadline = time.monotonic() + self._timing.meet_s
        with self._changed:
            while self._loss is None:
                missing = sorted(number for number, peer in self._peers.items() if not peer.bye)
                if not missing:
                    return
                if time.monotonic() > deadline:
                    raise RankLost(f"{ranks_text(missing)} of {self.size} did not end within {self._timing.meet_s:g} s")
                self._changed.wait(_TICK_S)
        self._raise()

    # -- inside ----------------------------------------------------------------------------------------------------
    def _raise(self) -> NoReturn:
        assert self._loss is not None
        raise RankLost(self._loss.line)

    def _describe(self, rank: int) -> str:
        name = own_name() if rank == self.rank else self._peers[rank].name
        return f"rank {rank} of {self.size} ({name})"

    def _send(self, peer: _Peer, data: bytes) -> None:
        # A rank that does not take it is dead: the watch sees that, and every wait after this ends.
        with peer.sending, suppress(OSError):
            peer.connection.send_bytes(data)

    def _offer(self, peer: _Peer, data: bytes) -> bool:
        """From the watch, which must not wait for a send under way (a sign of life itself); whether it was sent."""
        if not peer.open or not peer.sending.acquire(blocking=False):
            return False
        try:
            with suppress(OSError):
                peer.connection.send_bytes(data)
        finally:
            peer.sending.release()
        return True

    def _watch(self) -> None:
        beat, next_beat = pickle.dumps(("beat",)), 0.0
        while not self._stopped:
            by_connection = {peer.connection: number for number, peer in self._peers.items() if peer.open}
            if not by_connection:
                time.sleep(_TICK_S)
            for connection in wait(list(by_connection), _TICK_S) if by_connection else ():
                assert isinstance(connection, Connection)
                self._read(by_connection[connection])
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + self._timing.beat_s
                for peer in self._peers.values():
                    self._offer(peer, beat)
            for number, peer in self._peers.items():
                if peer.open and not peer.bye and now - peer.heard > self._timing.silence_s:
                    self._lose(number, f"gave no sign of life for {self._timing.silence_s:g} s")
            if self.rank and not self._passed_on and self.asked_to_stop():
                # While another thread sends, the next tick tries again: a stop must not be lost.
                self._passed_on = self._offer(self._peers[0], pickle.dumps(("stop",)))
            if now >= self._judged_at:
                self._judge()
            if now >= self._end_at:
                self._end(1)
                return

    def _read(self, number: int) -> None:
        peer = self._peers[number]
        try:
            kind, *values = peer.connection.recv()
        except (EOFError, OSError):
            peer.open = False
            if not (peer.bye or peer.failed):
                self._lose(number, "is gone: it was killed, or its machine is lost")
            return
        peer.heard = time.monotonic()
        if kind == "stop":
            self.on_stop()
        elif kind == "failed":
            peer.failed = True
            self._suspect(_Loss(number, Cause(values[0]), values[1]))
        with self._changed:
            if kind == "tell":
                self._told.append(values[0])
            elif kind == "give":
                self._given[number].append(values[0])
            elif kind == "bye":
                peer.bye = True
            elif kind == "lost" and self._loss is None:
                self._settle(_Loss(*values))
            self._changed.notify_all()

    def _lose(self, number: int, how: str) -> None:
        self._peers[number].open = False
        line = f"{self._describe(number)} {how} (in {self.doing}); the same command goes on from the last checkpoint"
        self._suspect(_Loss(number, Cause.GONE, line))

    def _suspect(self, loss: _Loss) -> None:
        """Notes a loss. Others that follow from it, or that it follows from, may be on their way."""
        self._suspects.append(loss)
        self._judged_at = min(self._judged_at, time.monotonic() + (0.0 if self.rank else self._timing.blame_s))

    def _judge(self) -> None:
        self._judged_at = float("inf")
        if self._loss is not None:
            return
        loss = min(self._suspects, key=lambda s: s.cause)
        data = pickle.dumps(("lost", loss.rank, loss.cause, loss.line))
        if not self.rank:
            for peer in self._peers.values():
                self._offer(peer, data)
        # Rank 0's own error is told where it is caught.
        if loss.rank != self.rank and (self.rank == 0 or (self.rank == 1 and loss.rank == 0)):
            self._say(loss.line)
        with self._changed:
            self._settle(loss)
            self._changed.notify_all()

    def _settle(self, loss: _Loss) -> None:
        self._loss = loss
        self._end_at = time.monotonic() + self._timing.grace_s


def _to_stderr(line: str) -> None:
    print(f"error: {line}", file=sys.stderr, flush=True)
