"""Continuous batching: requests join and leave the decode batch at every step; sessions keep their cache between calls.

Here is who has a seat, who waits and who is done; ``runner.py`` runs the model over the seats.

Invariants (``tests/rollout/test_embedded_scheduler.py`` and the contract test):

1. A request gives the same tokens alone as in any batch, from a reused prefix as from a fresh prefill, and when it was
   aborted and sent again with what it had sampled (up to float noise in the logits).
2. A request waits when all slots are busy; an idle session gives up its slot to it, the longest unused one first.
3. ``load`` takes effect between two tokens: caches made by older weights are dropped and running requests compute
   theirs again, so that every later token is sampled by the new weights alone.
4. Equal prompts that wait together are prefilled once; the others copy.
5. ``invariant``: what 1 promises holds bit for bit, log-probs included.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.embedded.arithmetic import FAST, INVARIANT
from megatron_ext.rollout.embedded.model import Decoder
from megatron_ext.rollout.embedded.runner import Runner
from megatron_ext.rollout.embedded.slots import FILLING, IDLE, READY, Slots
from megatron_ext.rollout.embedded.weights import ModelWeights
from megatron_ext.rollout.engine import EngineError, FinishReason, GenerateRequest, GenerateResult

Key = tuple[int, str]


@dataclass
class Job:
    """A request. ``prompt``: its ids as bytes; ``routed_from``: first token run for it; ``rerun``: ids that new weights
    ran again; ``ended``: keep no cache."""

    owner: int
    request: GenerateRequest
    prompt: bytes
    seat: int = -1
    routed_from: int = 0
    rerun: int = 0
    ended: bool = False

    @property
    def session(self) -> Key:
        return self.owner, self.request.session_id


class Scheduler:
    """Runs requests of several owners (clients) on one model. Single-threaded: its caller serialises the calls.

    ``invariant``: results do not depend on what runs beside a request, at the price of speed.
    """

    def __init__(
        self,
        config: HFConfig,
        max_context: int,
        slots: int,
        device: torch.device,
        threads: int,
        *,
        invariant: bool = False,
    ) -> None:
        self.config, self.max_context, self.device = config, max_context, device
        self._invariant = invariant
        self.version = -1
        self.asleep = False
        self._count, self._threads = slots, threads
        self._runner: Runner | None = None
        self._slots = Slots(config, slots, max_context, device)
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by seat
        self._sessions: dict[Key, int] = {}
        self._idle: OrderedDict[int, Key] = OrderedDict()  # by seat, longest unused first
        self._free = list(range(slots - 1, -1, -1))
        self._results: list[tuple[int, GenerateResult]] = []

    # -- what clients ask for --------------------------------------------------------------------------------------
    def submit(self, owner: int, request: GenerateRequest) -> None:
        """Queues a request, or raises ``EngineError`` when it cannot be served."""
        name = f"request {request.request_id!r}"
        if self.asleep:
            raise EngineError(f"{name}: the engine is asleep; call wake() and publish() first")
        if self._runner is None:
            raise EngineError(f"{name}: the engine has no weights; call publish() first")
        if request.return_routed and not any(self.config.moe_pattern):
            raise EngineError(f"{name}: return_routed needs a Mixture-of-Experts model, this one is dense")
        ids = np.ascontiguousarray(request.input_ids, dtype=np.int32)
        if not 0 < len(ids) < self.max_context:
            raise EngineError(
                f"{name}: a prompt of {len(ids)} tokens leaves no room in a context of {self.max_context}; send fewer"
            )
        if ids.min() < 0 or ids.max() >= self.config.vocab:
            raise EngineError(f"{name}: token id outside 0..{self.config.vocab - 1}")
        self._waiting.append(Job(owner, request, ids.tobytes()))

    def abort(self, owner: int, request_ids: Sequence[str]) -> None:
        """Ends requests with ``FinishReason.ABORT``; ids that are not there have finished and are passed over."""
        wanted = set(request_ids)
        for job in [j for j in self._waiting if j.owner == owner and j.request.request_id in wanted]:
            self._waiting.remove(job)
            self._results.append((owner, self._empty_result(job)))
        seats = [s for s, j in self._running.items() if j.owner == owner and j.request.request_id in wanted]
        self._finish(np.array(seats, dtype=np.int64), aborted=True)

    def end_sessions(self, owner: int, session_ids: Sequence[str]) -> None:
        keys = {(owner, s) for s in session_ids}
        for job in (*self._waiting, *self._running.values()):
            job.ended |= job.session in keys
        for key in keys:
            seat = self._sessions.pop(key, None)
            if seat is not None and seat in self._idle:
                self._release(seat)

    def drop(self, owner: int) -> None:
        """Forgets a client that went away."""
        self._waiting = deque(j for j in self._waiting if j.owner != owner)
        self.end_sessions(owner, [s for o, s in self._sessions if o == owner])
        seats = [s for s, j in self._running.items() if j.owner == owner]
        self._finish(np.array(seats, dtype=np.int64), aborted=True)
        self._results = [r for r in self._results if r[0] != owner]

    # -- what the trainer asks for ---------------------------------------------------------------------------------
    def load(self, weights: ModelWeights, version: int) -> None:
        """Serves ``weights`` as ``version`` from the next token on."""
        if self.asleep:
            raise EngineError("publish: the engine is asleep; call wake() first")
        if version < max(self.version, 0):
            raise EngineError(f"publish: version {version} is older than the version {self.version} being served")
        if self._runner is None:
            arithmetic = INVARIANT if self._invariant else FAST
            decoder = Decoder(self.config, weights, self.max_context, self.device, self._threads, arithmetic)
            self._runner = Runner(decoder, self._slots, self.max_context, self.device, invariant=self._invariant)
        self._runner.decoder.weights = weights
        self.version = version
        for seat in list(self._idle):
            self._release(seat)
        slots = self._slots
        for seat, job in self._running.items():
            job.routed_from, job.rerun = 0, int(slots.length[seat]) - len(job.request.input_ids)
        slots.cached[:] = 0
        slots.arrange(np.where(slots.zones() == READY, FILLING, slots.zones()))

    def sleep(self) -> None:
        """Aborts what runs and releases weights and cache."""
        for job in self._waiting:
            self._results.append((job.owner, self._empty_result(job)))
        self._waiting.clear()
        self._finish(np.array(list(self._running), dtype=np.int64), aborted=True)
        for seat in list(self._idle):
            self._release(seat)
        self._slots = Slots(self.config, self._count, self.max_context, self.device)
        self._free = list(range(self._count - 1, -1, -1))
        self._runner, self.version, self.asleep = None, -1, True

    def wake(self) -> None:
        self.asleep = False

    # -- the loop --------------------------------------------------------------------------------------------------
    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def counts(self) -> tuple[int, int, int]:
        """Requests running, requests waiting, idle sessions that hold a cache."""
        return len(self._running), len(self._waiting), len(self._idle)

    def take_results(self) -> list[tuple[int, GenerateResult]]:
        """Finished results with their owners, since the last call."""
        results, self._results = self._results, []
        return results

    @torch.inference_mode()
    def step(self) -> None:
        """Admits what fits, runs one prefill step if any is pending, then one decode step.

        Twins of a prompt that was just prefilled join before the decode step: a group then ends together.
        """
        slots, runner = self._slots, self._runner
        if runner is None:
            return  # without weights nothing was taken in
        twins = self._waiting and slots.busy < self._count and self._admit()
        if slots.ready < slots.busy:
            self._finish(runner.prefill(self.version))
        if twins and slots.ready == slots.busy < self._count:
            self._admit()
            if slots.ready < slots.busy:
                self._finish(runner.prefill(self.version))
        if slots.ready:
            self._finish(runner.decode(self.version))

    def _admit(self) -> bool:
        """Gives waiting requests seats; whether some wait for a twin of theirs to be prefilled."""
        slots = self._slots
        zone = slots.zones()
        room = slots.count - slots.busy
        filling: set[bytes] = set()
        donors: dict[bytes, int] = {}
        for seat, job in self._running.items():
            if slots.cached[seat] >= len(job.request.input_ids) - 1:
                donors[job.prompt] = seat
            elif job.request.sampling.max_new_tokens > 1:  # others are gone before anyone could copy from them
                filling.add(job.prompt)
        copies: list[tuple[int, int]] = []
        later: deque[Job] = deque()
        while self._waiting and room:
            job = self._waiting.popleft()
            ids = np.frombuffer(job.prompt, dtype=np.int32)
            seat = self._sessions.get(job.session, -1)
            reuse = slots.common_prefix(seat, ids) if seat in self._idle else 0
            if job.prompt in filling and reuse < len(ids) - 1:
                later.append(job)  # its twin is being prefilled: copy from it when that is done
                continue
            donor = donors.get(job.prompt) if reuse < len(ids) - 1 else None
            if donor is not None and job.request.return_routed and not self._recorded(donor):
                donor = None
            seat = self._seat(job)
            self._place(job, seat, ids, reuse)
            if donor is not None:
                copies.append((donor, seat))
                job.routed_from = self._running[donor].routed_from
                slots.cached[seat] = 0  # nothing of its own is worth moving
            elif job.request.sampling.max_new_tokens > 1:
                filling.add(job.prompt)
            ready = donor is not None or slots.length[seat] - slots.cached[seat] == 1
            zone[slots.slot_of[seat]] = READY if ready else FILLING
            room -= 1
        self._waiting = later + self._waiting
        slots.arrange(zone)
        self._copy(copies)
        return bool(later)

    def _seat(self, job: Job) -> int:
        """A seat for the job: its own idle session's, a free one, or that of the session unused for longest."""
        seat = self._sessions.get(job.session, -1)
        if seat in self._idle:
            del self._idle[seat]
            return seat
        if not self._free:
            self._release(next(iter(self._idle)))
        return self._free.pop()

    def _place(self, job: Job, seat: int, ids: NDArray[np.int32], reuse: int) -> None:
        slots, s = self._slots, job.request.sampling
        job.seat, job.routed_from = seat, reuse
        self._running[seat] = job
        self._sessions[job.session] = seat
        slots.tokens[seat, : len(ids)] = ids
        slots.length[seat], slots.cached[seat] = len(ids), reuse
        slots.limit[seat] = min(len(ids) + s.max_new_tokens, self.max_context)
        slots.seed[seat] = s.seed & 0xFFFFFFFFFFFFFFFF
        slots.temperature[seat], slots.top_k[seat], slots.top_p[seat] = s.temperature, s.top_k, s.top_p
        slots.record[seat] = job.request.return_routed
        slots.set_stops(seat, s.stop_ids)

    def _recorded(self, donor: int) -> bool:
        """Whether a running request has the experts of its whole prompt."""
        return bool(self._slots.record[donor]) and self._running[donor].routed_from == 0

    def _copy(self, copies: list[tuple[int, int]]) -> None:
        """Gives each (donor, seat) the donor's keys, values and experts of all prompt tokens but the last."""
        if not copies:
            return
        slots = self._slots
        donor, seat = np.array(copies).T
        slots.cached[seat] = slots.length[seat] - 1
        longest = int(slots.cached[seat].max())
        if longest:
            source, target = torch.from_numpy(slots.slot_of[donor]), torch.from_numpy(slots.slot_of[seat])
            slots.cache.move(source, target, longest)
        if slots.routed is not None:
            for a, b in copies:
                if slots.record[b]:
                    slots.routed[b, : slots.cached[b]] = slots.routed[a, : slots.cached[b]]

    # -- endings ---------------------------------------------------------------------------------------------------
    def _finish(self, seats: NDArray[np.int64], aborted: bool = False) -> None:
        if not len(seats):
            return
        slots = self._slots
        zone = slots.zones()
        zone[slots.slot_of[seats]] = IDLE
        for seat in seats.tolist():
            job = self._running.pop(seat)
            self._results.append((job.owner, self._result(job, aborted)))
            self._idle[seat] = job.session
            if job.ended or self._sessions.get(job.session) != seat:
                # Ended, or overtaken by a later request of the same session that could not share the seat.
                self._release(seat)
        slots.arrange(zone)

    def _release(self, seat: int) -> None:
        """Frees an idle seat."""
        key = self._idle.pop(seat)
        if self._sessions.get(key) == seat:
            del self._sessions[key]
        self._slots.cached[seat] = self._slots.length[seat] = 0
        self._free.append(seat)

    def _result(self, job: Job, aborted: bool) -> GenerateResult:
        slots, seat, request = self._slots, job.seat, job.request
        span = slice(len(request.input_ids), int(slots.length[seat]))
        ids = slots.tokens[seat, span].copy()
        if aborted:
            finish = FinishReason.ABORT
        elif int(ids[-1]) in request.sampling.stop_ids:
            finish = FinishReason.STOP
        else:
            finish = FinishReason.LENGTH if len(ids) == request.sampling.max_new_tokens else FinishReason.CONTEXT
        routed = None
        if request.return_routed:
            if slots.routed is None:
                return self._empty_result(job)
            routed = slots.routed[seat, job.routed_from : max(job.routed_from, int(slots.cached[seat]))].copy()
        return GenerateResult(
            request.request_id,
            ids,
            np.minimum(slots.logp[seat, span], 0),
            slots.versions[seat, span].copy(),
            finish,
            routed,
            job.routed_from,
            job.rerun,
        )

    def _empty_result(self, job: Job) -> GenerateResult:
        """Answer to a request that was aborted before its first forward."""
        routed = None
        if job.request.return_routed:
            kind = np.uint8 if self.config.num_experts <= 256 else np.uint16
            routed = np.zeros((0, sum(self.config.moe_pattern), self.config.top_k), dtype=kind)
        return GenerateResult(
            job.request.request_id,
            np.zeros(0, dtype=np.int32),
            np.zeros(0, dtype=np.float32),
            np.zeros(0, dtype=np.int64),
            FinishReason.ABORT,
            routed,
        )
