"""A scripted engine: a ``GenerationClient`` that says what a script says, token by token.

For tests of what stands around an engine (episodes, the driver, collection): their state machines see real token ids,
finish reasons and deadlines, in an order that the test decides. What an engine itself owes is tested on the real one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np

from megatron_ext.harness.template import COMPACT, ChatCodec, load_codec
from megatron_ext.harness.tokenizer import learn_tokenizer, save_tokenizer
from megatron_ext.rollout.engine import FinishReason, GenerateRequest, GenerateResult

Script = Callable[[str, int], str]
"""(session id, turn) -> what the model says there."""

CORPUS = [
    "walk 0 at 0 go stop what? word talk",
    'What is 12 * 7 + 3? <tool_call>{"name": "calculate", "arguments": {"expression": "12 * 7"}}</tool_call>',
    '<tool_call>{"name": "answer", "arguments": {"value": 84}}</tool_call> Answer received.',
]


def small_codec(folder: Path) -> ChatCodec:
    """A tokenizer of a few hundred tokens, kept in ``folder``."""
    save_tokenizer(folder, learn_tokenizer(CORPUS, vocab_size=330, phrases=[]), COMPACT)
    return load_codec(folder)


def answer(codec: ChatCodec, request: GenerateRequest, text: str, version: int = 0) -> GenerateResult:
    """The result of a model that says ``text``: cut at ``max_new_tokens``, log-probs -1/4, -2/4, ..., and expert
    numbers derived from the position when routing is asked for."""
    ids = codec.encode_turn(text)
    finish = FinishReason.STOP
    if len(ids) > request.sampling.max_new_tokens:
        ids, finish = ids[: request.sampling.max_new_tokens], FinishReason.LENGTH
    seen = len(request.input_ids) + len(ids) - 1
    routed = (np.arange(seen)[:, None, None] + np.arange(2)) % 8 if request.return_routed else None
    return GenerateResult(
        request_id=request.request_id,
        ids=np.array(ids, dtype=np.int32),
        logp=(-(np.arange(len(ids)) + 1) / 4).astype(np.float32),
        versions=np.full(len(ids), version, dtype=np.int64),
        finish=finish,
        routed=None if routed is None else routed.astype(np.uint8),
    )


@dataclass
class ScriptedClient:
    """Answers every request at the next poll, or when the test says so (``hold``). Keeps what it was asked."""

    codec: ChatCodec
    script: Script
    version: int = 0
    hold: bool = False
    requests: list[GenerateRequest] = field(default_factory=list)
    waiting: list[GenerateRequest] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    aborted: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._reader, self._writer = Pipe(duplex=False)
        self._woken = False

    def submit(self, requests: Sequence[GenerateRequest]) -> None:
        self.requests += requests
        self.waiting += requests
        self._wake()

    def release(self) -> None:
        """Answers what was held back."""
        self.hold = False
        self._wake()

    def poll(self, timeout: float) -> list[GenerateResult]:
        if self.hold or not self.waiting:
            return []
        if self._woken:
            self._reader.recv_bytes()
            self._woken = False
        requests, self.waiting = self.waiting, []
        return [self._answer(request) for request in requests]

    def _answer(self, request: GenerateRequest) -> GenerateResult:
        turn = int(request.request_id.rpartition("#")[2])
        result = answer(self.codec, request, self.script(request.session_id, turn), self.version)
        if request.request_id not in self.aborted:
            return result
        half = len(result.ids) // 2
        return GenerateResult(
            result.request_id, result.ids[:half], result.logp[:half], result.versions[:half], FinishReason.ABORT
        )

    def handles(self) -> list[Connection]:
        return [self._reader]

    def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted |= set(request_ids)

    def end_sessions(self, session_ids: Sequence[str]) -> None:
        self.ended += session_ids

    def close(self) -> None:
        self._reader.close()
        self._writer.close()

    def _wake(self) -> None:
        if self.waiting and not self.hold and not self._woken:
            self._writer.send_bytes(b"x")
            self._woken = True


@dataclass(frozen=True)
class ScriptedAddress:
    """What a driver process opens: picklable when ``script`` is a module's function. ``hold``: it never answers."""

    tokenizer: Path
    script: Script
    version: int = 0
    hold: bool = False

    def open(self) -> ScriptedClient:
        return ScriptedClient(load_codec(self.tokenizer), self.script, self.version, self.hold)
