"""Engine protocol: what generates tokens. The embedded sampler and SGLang implement the same one.

Invariants (the contract test in ``tests/rollout/test_engine_contract.py`` asserts each for every engine):

1. Token-in/token-out: ``ids`` of a result are the ids sampled, appended to exactly the ids that were sent.
2. ``logp[i]`` is log p(ids[i] | everything before) of the distribution at the request's temperature, before top-p and
   top-k truncation; greedy decoding (temperature 0) reports it at temperature 1.
3. A stop id that was sampled is the last id of the result and carries its log-prob.
4. ``versions[i]`` is the policy version that sampled token i; it never falls within a result.
5. Random numbers are keyed by (request seed, position), so a request's tokens do not depend on what else runs.
6. ``routed[i]`` are the experts of the last forward of token ``routed_from + i`` of (input + output); the last sampled
   token has none. When the weights changed under a request, all its tokens ran again and have rows, and ``rerun`` says
   how many ids had been sampled before.
7. After ``publish(..., version)`` returns, every token is sampled by those weights and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import torch


class EngineError(RuntimeError):
    """The engine refused a request or is gone; the message names the engine and the fix."""


class FinishReason(StrEnum):
    STOP = "stop"  # sampled a stop id
    LENGTH = "length"  # max_new_tokens reached
    CONTEXT = "context"  # the model's context is full
    ABORT = "abort"  # aborted by request; what was sampled so far is returned


@dataclass(frozen=True)
class SamplingParams:
    """How to sample. ``temperature`` 0 is greedy; ``top_k`` 0 and ``top_p`` 1 switch truncation off."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    stop_ids: tuple[int, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {self.max_new_tokens}")
        if self.temperature < 0 or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise ValueError(
                f"sampling out of range: temperature {self.temperature} (>= 0), top_p {self.top_p} (0..1], "
                f"top_k {self.top_k} (>= 0)"
            )


@dataclass(frozen=True)
class GenerateRequest:
    """One call. ``session_id`` lets the engine keep the KV cache of a dialogue: its next call, when it starts with the
    cached ids, pays only for the new ones. ``input_ids`` int32 [P] is always the whole prompt."""

    request_id: str
    session_id: str
    input_ids: NDArray[np.int32]
    sampling: SamplingParams
    return_routed: bool = False


@dataclass(frozen=True)
class GenerateResult:
    """``ids`` int32 [n], ``logp`` float32 [n], ``versions`` int64 [n], ``routed`` uint8/uint16 [m, L, k] for the tokens
    ``routed_from .. routed_from + m`` of (input + output), ending with the last token but one. ``rerun``: so many of
    the first ids were sampled before the forward that their rows are of."""

    request_id: str
    ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    versions: NDArray[np.int64]
    finish: FinishReason
    routed: NDArray[Any] | None = None
    routed_from: int = 0
    rerun: int = 0


class GenerationClient(Protocol):
    """The driver's side of an engine. Not thread-safe: one owner."""

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        """Queues requests; returns at once. Raises ``EngineError`` on a prompt that leaves no room to generate."""

    def poll(self, timeout: float) -> list[GenerateResult]:
        """Finished results, waiting up to ``timeout`` seconds for the first."""

    def handles(self) -> Sequence[Any]:
        """What becomes readable when results come: for ``multiprocessing.connection.wait``, beside other things."""

    def abort(self, request_ids: Sequence[str]) -> None:
        """Stops requests; each still answers, with ``FinishReason.ABORT``."""

    def end_sessions(self, session_ids: Sequence[str]) -> None:
        """Frees the KV cache of sessions that will not be continued."""

    def close(self) -> None: ...


class EngineAddress(Protocol):
    """Where an engine can be reached; picklable."""

    def open(self) -> GenerationClient:
        """Connects, from the process that will own the client."""


class EngineControl(Protocol):
    """The trainer's side: weights and life cycle. Every call has a deadline and names the engine when it passes."""

    def publish(self, tensors: Iterable[tuple[str, torch.Tensor]], version: int, timeout: float = 600.0) -> None:
        """Replaces all weights. ``tensors`` are (HF name, full tensor) pairs; every weight must come exactly once."""

    def version(self) -> int:
        """Policy version being served; -1 before the first ``publish``."""

    def sleep(self) -> None:
        """Releases KV cache and weights (colocated placement); ``publish`` must follow ``wake``."""

    def wake(self) -> None: ...

    def connect(self) -> EngineAddress:
        """A picklable address from which a driver process opens its ``GenerationClient``."""

    def pids(self) -> Sequence[int]:
        """Its processes on this machine, so that their memory can be told."""

    def close(self) -> None: ...
