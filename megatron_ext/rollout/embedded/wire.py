"""How processes talk to the engine: an abstract unix socket, pickled messages, a deadline on every wait. No torch here.

Invariants (``tests/rollout/test_embedded_process.py``):

1. A connection is authenticated with the engine's key before the first message is unpickled.
2. When the engine is gone or silent, the error names its pid and log file and quotes the end of the log.

The socket is abstract (Linux), so that nothing is left on disk whatever kills the engine.
"""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.rollout.engine import EngineError

if TYPE_CHECKING:
    from megatron_ext.rollout.embedded.client import EmbeddedClient

LOG_LINES = 15


@dataclass(frozen=True)
class Address:
    """Where an engine listens, and what its clients must know of it. Picklable."""

    socket: str
    key: bytes = field(repr=False)
    pid: int
    log: Path
    max_context: int
    vocab: int

    def open(self) -> EmbeddedClient:
        """A generation client of this engine, for the calling process."""
        from megatron_ext.rollout.embedded.client import EmbeddedClient

        return EmbeddedClient(self)

    def failure(self, what: str) -> EngineError:
        """An error that names the engine and quotes its log."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        tail = "\n".join(text.splitlines()[-LOG_LINES:]) or "(empty)"
        return EngineError(f"embedded engine (pid {self.pid}) {what}. Log {self.log} ends:\n{tail}")


def listen(name: str) -> socket.socket:
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind("\0" + name)
    server.listen(64)
    return server


def welcome(peer: socket.socket, key: bytes) -> Connection:
    """The engine's half of the handshake."""
    connection = Connection(peer.detach())
    deliver_challenge(connection, key)
    answer_challenge(connection, key)
    return connection


class Channel:
    """One connection to the engine. ``timeout`` seconds bound the handshake and any single read or write."""

    def __init__(self, address: Address, timeout: float) -> None:
        self._address = address
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        limit = struct.pack("ll", int(timeout), int(timeout % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)
        try:
            sock.connect("\0" + address.socket)
        except OSError:
            sock.close()
            raise
        self.connection = Connection(sock.detach())
        try:
            answer_challenge(self.connection, address.key)
            deliver_challenge(self.connection, address.key)
        except (AuthenticationError, OSError, EOFError) as error:
            self.connection.close()
            raise address.failure(f"did not complete the handshake in {timeout:g} s ({error!r})") from error

    def send(self, message: tuple[Any, ...]) -> None:
        try:
            self.connection.send(message)
        except OSError as error:
            raise self._lost(error) from error

    def send_bytes(self, data: memoryview) -> None:
        try:
            self.connection.send_bytes(data)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, timeout: float) -> tuple[Any, ...] | None:
        """The next message, or None when none came in ``timeout`` seconds."""
        try:
            if not self.connection.poll(timeout):
                return None
            message: tuple[Any, ...] = self.connection.recv()
        except (OSError, EOFError) as error:
            raise self._lost(error) from error
        return message

    def close(self) -> None:
        self.connection.close()

    def _lost(self, error: Exception) -> EngineError:
        if isinstance(error, BlockingIOError):
            return self._address.failure("did not read or write for the whole deadline: it hangs")
        return self._address.failure("closed the connection: it died or was stopped")


def try_connect(address: Address, timeout: float) -> Channel | None:
    """A channel, or None while nobody listens at the address."""
    try:
        return Channel(address, timeout)
    except (ConnectionRefusedError, FileNotFoundError):
        return None
