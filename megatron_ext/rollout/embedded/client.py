"""The driver's side of the embedded engine. Imports no torch, so that a rollout driver stays light.

Invariants (``tests/rollout/test_engine_contract.py``, ``test_embedded_process.py``):

1. Every request submitted is answered once by ``poll``: with a result, or with an ``EngineError`` that names it.
2. With requests outstanding, an engine that died raises at the next call; one that hangs raises within twice
   ``stall_timeout``.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection

from megatron_ext.rollout.embedded.wire import Address, Channel
from megatron_ext.rollout.engine import EngineError, GenerateRequest, GenerateResult


class EmbeddedClient:
    """``GenerationClient`` of an embedded engine. Not thread-safe.

    Args:
        address: what ``EmbeddedEngine.connect`` returned.
        stall_timeout: seconds without any sign of life, while requests are outstanding, after which the engine is
            asked, and then declared hung when it stays silent as long again. Loading weights counts as silence.
    """

    def __init__(self, address: Address, stall_timeout: float = 120.0) -> None:
        self._address, self._stall = address, stall_timeout
        try:
            self._channel = Channel(address, stall_timeout)
        except (ConnectionRefusedError, FileNotFoundError) as error:
            raise address.failure("does not listen: it died or was closed") from error
        self._outstanding: set[str] = set()
        self._ready: deque[GenerateResult] = deque()
        self._refused: deque[str] = deque()
        self._heard = time.monotonic()
        self._asked: float | None = None

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queues requests. ``EngineError`` names the first one that cannot be served; then none is queued."""
        names = [r.request_id for r in requests]
        for name, request in zip(names, requests, strict=True):
            ids = request.input_ids
            if name in self._outstanding or names.count(name) > 1:
                raise EngineError(f"request {name!r} is already outstanding; request ids must be unique")
            if ids.ndim != 1 or not 0 < len(ids) < self._address.max_context:
                raise EngineError(
                    f"request {name!r}: a prompt of shape {ids.shape} leaves no room to generate in a context of "
                    f"{self._address.max_context} tokens; send at least one and fewer than that"
                )
            if int(ids.min()) < 0 or int(ids.max()) >= self._address.vocab:
                raise EngineError(f"request {name!r}: token id outside 0..{self._address.vocab - 1}")
        if not names:
            return
        if not self._outstanding:
            self._heard, self._asked = time.monotonic(), None
        self._channel.send(("submit", list(requests)))
        self._outstanding.update(names)

    def poll(self, timeout: float) -> list[GenerateResult]:
        """Finished results, waiting up to ``timeout`` seconds for the first; empty when none finished by then.

        Raises ``EngineError`` for a request that the engine refused (asleep, no weights), or when the engine is gone.
        """
        deadline = time.monotonic() + timeout
        wait = 0.0
        while True:
            message = self._channel.receive(wait)
            if message is not None:
                self._take(message)
                wait = 0.0
                continue
            if self._refused:
                raise EngineError(self._refused.popleft())
            left = deadline - time.monotonic()
            if self._ready:
                break
            if self._outstanding:
                self._check_alive()
            if left <= 0:
                break
            wait = min(left, max(self._stall / 4, 0.01))
        results = list(self._ready)
        self._ready.clear()
        return results

    def handles(self) -> Sequence[Connection]:
        """The connection: readable when results come, and when the engine ends."""
        return [self._channel.connection]

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stops requests; each outstanding one still answers, with what it sampled so far."""
        self._channel.send(("abort", list(request_ids)))

    def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Frees the cache of sessions that will not be continued (after their running requests, if any)."""
        self._channel.send(("end", list(session_ids)))

    def close(self) -> None:
        self._channel.close()

    def _take(self, message: tuple[object, ...]) -> None:
        self._heard, self._asked = time.monotonic(), None
        kind = message[0]
        if kind == "results":
            results = message[1]
            assert isinstance(results, list)
            for result in results:
                self._outstanding.discard(result.request_id)
                self._ready.append(result)
        elif kind == "refused":
            _, name, text = message
            self._outstanding.discard(str(name))
            self._refused.append(str(text))

    def _check_alive(self) -> None:
        now = time.monotonic()
        if self._asked is None:
            if now - self._heard > self._stall:
                self._channel.send(("ping",))
                self._asked = now
        elif now - self._asked > self._stall:
            silent = now - self._heard
            self._heard, self._asked = now, None  # a caller that goes on waiting gives it as long again
            raise self._address.failure(
                f"has {len(self._outstanding)} request(s) outstanding and gave no sign of life for {silent:.0f} s: "
                "it hangs"
            )
