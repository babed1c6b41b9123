"""How the ranks of a job find each other before it begins: rank 0 listens, the others come, all with the job's key.

Invariants (``tests/training/ranks/test_greeting.py``):

1. A connection is authenticated before the first message is unpickled: who does not have the job's key is turned away.
2. Ranks that do not come are named when the time is over.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from megatron_ext.training.ranks.link import RankLost, Timing, own_name, ranks_text

_GREETING_S = 30


def listen(host: str) -> socket.socket:
    """A listening socket on a free port, of the family under which ``host`` is known."""
    family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server(("", 0), family=family, backlog=1024)


def welcome(server: socket.socket, size: int, key: bytes, timing: Timing) -> dict[int, tuple[Connection, str]]:
    """Rank 0's half of the greeting: connection and name of every other rank. ``RankLost`` names who is missing."""
    found: dict[int, tuple[Connection, str]] = {}
    deadline = time.monotonic() + timing.meet_s
    while len(found) < size - 1:
        server.settimeout(max(deadline - time.monotonic(), 0.01))
        try:
            peer, _ = server.accept()
        except TimeoutError:
            missing = sorted(set(range(1, size)) - found.keys())
            raise RankLost(f"{ranks_text(missing)} of {size} did not join within {timing.meet_s:g} s") from None
        connection = _connection(peer)
        try:
            deliver_challenge(connection, key)
            answer_challenge(connection, key)
            rank, name = connection.recv()
            connection.send(own_name())
        except (AuthenticationError, OSError, EOFError):
            connection.close()  # no rank of this job
            continue
        _without_deadline(connection)
        found[rank] = (connection, name)
    return found


def join(host: str, port: int, rank: int, key: bytes, timing: Timing) -> tuple[Connection, str]:
    """Another rank's half: the connection to rank 0 and its name."""
    try:
        connection = _connection(socket.create_connection((host, port), timeout=timing.silence_s))
        answer_challenge(connection, key)
        deliver_challenge(connection, key)
        connection.send((rank, own_name()))
        name = str(connection.recv())
        _without_deadline(connection)
        return connection, name
    except (AuthenticationError, OSError, EOFError) as error:
        raise RankLost(f"rank {rank} cannot reach rank 0 at {host}:{port} ({error})") from error


def _connection(peer: socket.socket) -> Connection:
    """A connection whose reads have a deadline until the greeting is over: whoever called may be no rank."""
    peer.settimeout(None)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", _GREETING_S, 0))
    return Connection(peer.detach())


def _without_deadline(connection: Connection) -> None:
    with socket.socket(fileno=os.dup(connection.fileno())) as peer:
        peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))
