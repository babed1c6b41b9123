"""Where a replicated engine sends requests; the engine contract test runs it for real."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing.connection import Connection

import numpy as np
import pytest

from megatron_ext.rollout.engine import EngineError, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from megatron_ext.rollout.replicas import ReplicatedClient


class Recorder:
    """A client that writes down what it is asked; enough to see the routing, which is all that is tested here."""

    def __init__(self) -> None:
        self.requests: list[str] = []
        self.aborted: list[str] = []
        self.ended: list[str] = []

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.requests += [request.request_id for request in requests]

    def poll(self, timeout: float) -> list[GenerateResult]:
        none = np.zeros(0, dtype=np.int32)
        done = [
            GenerateResult(name, none, none.astype(np.float32), none.astype(np.int64), FinishReason.STOP)
            for name in self.requests
        ]
        self.requests = []
        return done

    def handles(self) -> list[Connection]:
        return []

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    def end_sessions(self, session_ids: Sequence[str]) -> None:
        self.ended += session_ids

    def close(self) -> None: ...


def call(request: str, session: str) -> GenerateRequest:
    return GenerateRequest(request, session, np.array([1], dtype=np.int32), SamplingParams(1))


@pytest.fixture
def replicas() -> tuple[Recorder, Recorder]:
    return Recorder(), Recorder()


@pytest.fixture
def client(replicas: tuple[Recorder, Recorder]) -> ReplicatedClient:
    return ReplicatedClient(replicas)


def test_sessions_stay_and_new_ones_go_where_fewest_live(
    client: ReplicatedClient, replicas: tuple[Recorder, Recorder]
) -> None:
    client.submit([call("r0", "a"), call("r1", "b"), call("r2", "c")])
    assert replicas[0].requests == ["r0", "r2"] and replicas[1].requests == ["r1"]
    assert {result.request_id for result in client.poll(0.0)} == {"r0", "r1", "r2"}
    client.submit([call("r3", "b"), call("r4", "a")])
    assert replicas[0].requests == ["r4"] and replicas[1].requests == ["r3"], "sessions stay"
    client.end_sessions(["a", "c"])
    assert replicas[0].ended == ["a", "c"] and replicas[1].ended == []
    client.submit([call("r5", "d"), call("r6", "e")])
    assert replicas[0].requests == ["r4", "r5", "r6"], "it had none left, and wins the tie that follows"


def test_a_request_is_outstanding_once_and_aborted_where_it_runs(
    client: ReplicatedClient, replicas: tuple[Recorder, Recorder]
) -> None:
    client.submit([call("r0", "a"), call("r1", "b")])
    with pytest.raises(EngineError, match="r1"):
        client.submit([call("r1", "c")])
    with pytest.raises(EngineError, match="r7"):
        client.submit([call("r7", "c"), call("r7", "d")])
    client.abort(["r1", "unknown"])
    assert replicas[0].aborted == [] and replicas[1].aborted == ["r1"]
