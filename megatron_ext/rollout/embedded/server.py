"""The engine process: one thread computes, two threads a connection do its input and output.

Invariants (``tests/rollout/test_embedded_process.py``):

1. A client that does not read, or that goes away, never stops the others.
2. Weights are staged beside the ones being served and replace them between two tokens; a publish that fails, or whose
   sender goes away, changes nothing.
3. An unexpected error ends the process with its traceback in the log; clients see the connection close.
"""

from __future__ import annotations

import ctypes
import gc
import queue
import socket
import threading
from collections.abc import Mapping
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import torch

from megatron_ext.rollout.embedded.scheduler import Scheduler
from megatron_ext.rollout.embedded.served import read_config
from megatron_ext.rollout.embedded.weights import ModelWeights, WeightStage
from megatron_ext.rollout.embedded.wire import listen, welcome
from megatron_ext.rollout.engine import EngineError, GenerateResult

Message = tuple[Any, ...]


def serve(
    *,
    socket_name: str,
    key: str,
    hf_config: Mapping[str, Any],
    max_context: int,
    slots: int,
    threads: int,
    device: str,
    batch_invariant: bool,
    dtype: str,
) -> NoReturn:
    """Listens and serves until the process is ended. ``key`` is the authentication key in hex."""
    torch.set_num_threads(threads)
    config = read_config(hf_config, max_context)
    where = torch.device(device)
    scheduler = Scheduler(config, max_context, slots, where, threads, invariant=batch_invariant)
    server = Server(scheduler, bytes.fromhex(key), getattr(torch, dtype))
    server.run(listen(socket_name))


class Peer:
    """One connection: what its reader thread receives goes to the inbox, what is put in ``out`` is sent."""

    def __init__(self, number: int, connection: Connection) -> None:
        self.number, self.connection = number, connection
        self.out: queue.SimpleQueue[Message | None] = queue.SimpleQueue()

    def write(self) -> None:
        try:
            while (message := self.out.get()) is not None:
                self.connection.send(message)
        except OSError:
            return  # the reader sees the same end and reports it


class Server:
    """Owns the scheduler; everything that touches it runs in ``run``'s thread."""

    def __init__(self, scheduler: Scheduler, key: bytes, dtype: torch.dtype) -> None:
        self._scheduler, self._key, self._dtype = scheduler, key, dtype
        self._inbox: queue.SimpleQueue[tuple[Peer, Message] | BaseException] = queue.SimpleQueue()
        self._peers: dict[int, Peer] = {}

    def run(self, listener: socket.socket) -> NoReturn:
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()
        print("engine ready", flush=True)
        gc.freeze()  # what was imported stays: no collection between two tokens walks it
        while True:
            if not self._scheduler.busy:
                self._handle(self._inbox.get())
            while not self._inbox.empty():
                self._handle(self._inbox.get())
            if self._scheduler.busy:
                self._scheduler.step()
            self._send_results()

    # -- connections -----------------------------------------------------------------------------------------------
    def _accept(self, listener: socket.socket) -> None:
        number = 0
        while True:
            peer, _ = listener.accept()
            number += 1
            threading.Thread(target=self._serve_peer, args=(number, peer), daemon=True).start()

    def _serve_peer(self, number: int, sock: socket.socket) -> None:
        try:
            connection = welcome(sock, self._key)
        except (AuthenticationError, OSError, EOFError) as error:
            print(f"connection {number} refused: {error!r}", flush=True)
            return
        peer = Peer(number, connection)
        threading.Thread(target=peer.write, daemon=True).start()
        self._inbox.put((peer, ("joined",)))
        try:
            while True:
                message = connection.recv()
                self._inbox.put((peer, self._stage(connection, message) if message[0] == "publish" else message))
        except (EOFError, OSError):
            self._inbox.put((peer, ("gone",)))
        except BaseException as error:  # handed to the main thread, which raises it
            self._inbox.put(error)

    def _stage(self, connection: Connection, message: Message) -> Message:
        """Receives the tensors of one publish, in the reader's thread; keeps an error until the sender has finished."""
        _, call, version = message
        stage = WeightStage(self._scheduler.config, self._scheduler.device, self._dtype)
        failure: str | None = None
        while (part := connection.recv())[0] == "tensor":
            _, name, dtype, shape = part
            data = bytearray(connection.recv_bytes())
            if failure is None:
                try:
                    flat = torch.frombuffer(data, dtype=getattr(torch, dtype)) if data else torch.empty(0)
                    stage.add(name, flat.view(shape))
                except EngineError as error:
                    failure = str(error)
        if part[0] == "publish_drop":
            return ("dropped", call)
        weights: ModelWeights | None = None
        if failure is None:
            try:
                weights = stage.finish()
            except EngineError as error:
                failure = str(error)
        return ("load", call, version, weights, failure)

    # -- messages, in the main thread ------------------------------------------------------------------------------
    def _handle(self, item: tuple[Peer, Message] | BaseException) -> None:
        if isinstance(item, BaseException):
            raise item
        peer, (kind, *rest) = item
        scheduler = self._scheduler
        if kind == "submit":
            for request in rest[0]:
                try:
                    scheduler.submit(peer.number, request)
                except EngineError as error:
                    peer.out.put(("refused", request.request_id, str(error)))
        elif kind == "abort":
            scheduler.abort(peer.number, rest[0])
        elif kind == "end":
            scheduler.end_sessions(peer.number, rest[0])
        elif kind == "ping":
            peer.out.put(("pong",))
        elif kind == "joined":
            self._peers[peer.number] = peer
        elif kind == "gone":
            scheduler.drop(peer.number)
            self._peers.pop(peer.number).out.put(None)
        else:
            self._control(peer, kind, rest)

    def _control(self, peer: Peer, kind: str, rest: list[Any]) -> None:
        scheduler, call = self._scheduler, rest[0]
        try:
            if kind == "load":
                _, version, weights, failure = rest
                if failure is not None:
                    raise EngineError(failure)
                scheduler.load(weights, version)
            elif kind == "sleep":
                scheduler.sleep()
                if scheduler.device.type == "cuda":
                    torch.cuda.empty_cache()
                else:
                    ctypes.CDLL(None).malloc_trim(0)
            elif kind == "wake":
                scheduler.wake()
            elif kind not in ("health", "dropped"):
                raise AssertionError(f"unknown message {kind!r}")
        except EngineError as error:
            peer.out.put(("error", call, str(error)))
            return
        peer.out.put(("reply", call, (scheduler.version, scheduler.asleep, *scheduler.counts)))

    def _send_results(self) -> None:
        ready: dict[int, list[GenerateResult]] = {}
        for owner, result in self._scheduler.take_results():
            ready.setdefault(owner, []).append(result)
        for owner, results in ready.items():
            self._peers[owner].out.put(("results", results))
