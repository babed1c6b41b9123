"""Several engines behind one: replicas that hold the same weights and share the sessions out.

Invariants (the engine contract test runs against two replicas, and ``tests/rollout/test_replicas.py``):

1. A session stays with the replica that got its first request, where its KV cache is; a new one goes to the replica
   with the fewest live sessions.
2. ``publish`` returns when every replica serves the new weights; replicas that disagree on the version are an error.
3. Each request is answered once, by the replica that got it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatron_ext.config.instantiate import instantiate
from megatron_ext.rollout.engine import (
    EngineAddress,
    EngineControl,
    EngineError,
    GenerateRequest,
    GenerateResult,
    GenerationClient,
)

if TYPE_CHECKING:
    import torch


class ReplicatedEngine:
    """``EngineControl`` of ``replicas`` engines built from the node ``engine`` ({_target_, ...}).

    The CPU threads are shared out; replica i writes its log beside ``log_path``, with ``-i`` before the suffix.
    """

    def __init__(
        self,
        *,
        engine: Mapping[str, Any],
        replicas: int,
        hf_config: Mapping[str, Any],
        max_context: int,
        threads: int,
        log_path: Path,
        batch_invariant: bool = False,
    ) -> None:
        if replicas < 1:
            raise EngineError(f"rollout.engine.replicas must be at least 1, got {replicas}")
        self._engines: list[EngineControl] = []
        # An engine without it need not know the word.
        wanted: dict[str, Any] = {"batch_invariant": True} if batch_invariant else {}
        try:
            for number in range(replicas):
                self._engines.append(
                    instantiate(
                        engine,
                        where="rollout.engine.engine",
                        hf_config=hf_config,
                        max_context=max_context,
                        threads=max(1, threads // replicas),
                        log_path=log_path.with_stem(f"{log_path.stem}-{number}"),
                        **wanted,
                    )
                )
        except BaseException:
            self.close()
            raise

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, timeout: float = 600.0) -> None:
        """Sends every weight to every replica, to all of them at a time."""
        pairs = list(tensors)
        with ThreadPoolExecutor(len(self._engines)) as pool:
            for sent in [pool.submit(engine.publish, pairs, version, timeout) for engine in self._engines]:
                sent.result()

    def version(self) -> int:
        versions = {engine.version() for engine in self._engines}
        if len(versions) > 1:
            raise EngineError(f"replicas serve different policy versions: {sorted(versions)}; publish again")
        return versions.pop()

    def sleep(self) -> None:
        for engine in self._engines:
            engine.sleep()

    def wake(self) -> None:
        for engine in self._engines:
            engine.wake()

    def connect(self) -> ReplicatedAddress:
        return ReplicatedAddress(tuple(engine.connect() for engine in self._engines))

    def pids(self) -> list[int]:
        return [pid for engine in self._engines for pid in engine.pids()]

    def close(self) -> None:
        for engine in self._engines:
            engine.close()


@dataclass(frozen=True)
class ReplicatedAddress:
    addresses: tuple[EngineAddress, ...]

    def open(self) -> ReplicatedClient:
        return ReplicatedClient([address.open() for address in self.addresses])


class ReplicatedClient:
    """``GenerationClient`` over the clients of the replicas."""

    def __init__(self, clients: Sequence[GenerationClient]) -> None:
        self._clients = list(clients)
        self._home: dict[str, int] = {}  # session -> replica
        self._requests: dict[str, int] = {}  # outstanding request -> replica
        self._live = [0] * len(self._clients)

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        counts = Counter(request.request_id for request in requests)
        for name in counts:
            if name in self._requests or counts[name] > 1:
                raise EngineError(f"request {name!r} is already outstanding; request ids must be unique")
        shares: list[list[GenerateRequest]] = [[] for _ in self._clients]
        for request in requests:
            shares[self._place(request.session_id)].append(request)
        for number, share in enumerate(shares):
            if share:
                self._clients[number].submit(share)
                self._requests |= {request.request_id: number for request in share}

    def _place(self, session: str) -> int:
        if session not in self._home:
            self._home[session] = self._live.index(min(self._live))
            self._live[self._home[session]] += 1
        return self._home[session]

    def poll(self, timeout: float) -> list[GenerateResult]:
        results = self._gather()
        if not results and timeout > 0:
            wait(self.handles(), timeout)
            results = self._gather()
        return results

    def _gather(self) -> list[GenerateResult]:
        results = [result for client in self._clients for result in client.poll(0.0)]
        for result in results:
            del self._requests[result.request_id]
        return results

    def handles(self) -> list[Connection]:
        return [handle for client in self._clients for handle in client.handles()]

    def abort(self, request_ids: Sequence[str]) -> None:
        for number, client in enumerate(self._clients):
            share = [name for name in request_ids if self._requests.get(name) == number]
            if share:
                client.abort(share)

    def end_sessions(self, session_ids: Sequence[str]) -> None:
        for number, client in enumerate(self._clients):
            share = [name for name in session_ids if self._home.get(name) == number]
            if share:
                client.end_sessions(share)
                self._live[number] -= len(share)
        for name in session_ids:
            self._home.pop(name, None)

    def close(self) -> None:
        for client in self._clients:
            client.close()
