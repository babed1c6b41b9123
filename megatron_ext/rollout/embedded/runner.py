"""Runs the model over the slots: one prefill or decode step, and the token that each finished row samples.

Invariants (``tests/rollout/test_embedded_runner.py``):

1. A prefill step runs the new tokens of the rows that have waited longest, up to a budget; a prompt over it takes
   several steps, and samples after its last one. A decode step runs one token of every ready row.
2. What a step runs is in the cache afterwards, and what it samples stands behind it in the slots.
3. ``invariant``: each row is computed as if it were alone, in shapes that do not depend on the others.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.rollout.embedded.cache import Alone, Attention, Decode, Prefill
from megatron_ext.rollout.embedded.model import Decoder
from megatron_ext.rollout.embedded.sampler import SamplingRows, sample
from megatron_ext.rollout.embedded.slots import Slots

# One prefill step runs at most this many new tokens (padding: twice), so that decoding is never held up for long.
PREFILL_TOKENS = 4096
# Elements of a prefill's attention mask; bounds its memory when the context is long.
PREFILL_MASK = 1 << 24
NOBODY: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class Runner:
    """Steps of ``decoder`` over ``slots``. Each returns the seats int64 [n] that end with what they just sampled, under
    the policy version it is told."""

    def __init__(
        self, decoder: Decoder, slots: Slots, max_context: int, device: torch.device, *, invariant: bool
    ) -> None:
        self.decoder = decoder
        self._slots, self._max_context, self._device, self._invariant = slots, max_context, device, invariant
        self._rows: SamplingRows | None = None  # of the last decode step
        self._rows_key: tuple[bytes, ...] = ()

    def prefill(self, version: int) -> NDArray[np.int64]:
        """Runs the new tokens of the first rows that wait for it; a prompt over the budget takes several steps."""
        slots = self._slots
        seats = slots.seat_of[slots.ready : slots.busy]
        pending, start = slots.length[seats] - slots.cached[seats], slots.cached[seats]
        widest, total, rows, span = 0, 0, 0, 0
        for count, first in zip(pending.tolist(), start.tolist(), strict=True):
            widest, total, span = max(widest, count), total + count, max(span, first + count)
            padded = widest * (rows + 1)
            if rows and (total > PREFILL_TOKENS or padded > 2 * PREFILL_TOKENS or padded * span > PREFILL_MASK):
                break
            rows += 1
        counts = pending[:rows].copy()
        if rows == 1:
            most = min(PREFILL_TOKENS, PREFILL_MASK // int(slots.length[seats[0]]))
            counts[0] = min(counts[0], max(most, 1))
        seats, start = seats[:rows].copy(), start[:rows]
        self._ensure(int((start + counts).max()))
        plan: Attention
        if self._invariant:
            within = np.concatenate([np.arange(a, a + c) for a, c in zip(start, counts, strict=True)])
            plan = self._alone(np.repeat(slots.slot_of[seats], counts), within)
        else:
            plan = Prefill(slots.cache, slots.ready, start.tolist(), counts.tolist())
        ids = torch.from_numpy(
            np.concatenate([slots.tokens[s, a : a + c] for s, a, c in zip(seats, start, counts, strict=True)])
        )
        record = bool(slots.record[seats].any())
        last = torch.from_numpy(counts.cumsum() - 1).to(self._device)
        logits, experts = self.decoder.forward(ids.to(self._device), plan, last, record)
        if experts is not None:
            slots.store_routed(np.repeat(seats, counts), plan.positions.cpu().numpy(), experts)
        slots.cached[seats] = start + counts
        if counts[0] < pending[0]:
            return NOBODY
        slots.ready += rows
        return self._sample(seats, logits, self._settings(seats), version)

    def decode(self, version: int) -> NDArray[np.int64]:
        """Runs the last token of every ready row."""
        slots = self._slots
        seats = slots.seat_of[: slots.ready].copy()
        position = slots.cached[seats]
        longest = int(position.max()) + 1
        self._ensure(longest)
        plan: Attention
        if self._invariant:
            plan = self._alone(np.arange(slots.ready), position)
        else:
            plan = Decode(slots.cache, torch.from_numpy(position).to(self._device), longest)
        ids = torch.from_numpy(slots.tokens[seats, position]).to(self._device)
        logits, experts = self.decoder.forward(ids, plan, None, bool(slots.record[seats].any()))
        if experts is not None:
            slots.store_routed(seats, position, experts)
        slots.cached[seats] = position + 1
        return self._sample(seats, logits, self._same_settings(seats), version)

    def _ensure(self, length: int) -> None:
        """Room in the cache; all of it at once where shapes must not change."""
        self._slots.cache.ensure(self._max_context if self._invariant else length)

    def _alone(self, slots: NDArray[np.int64], positions: NDArray[np.int64]) -> Alone:
        where = torch.from_numpy(slots).to(self._device)
        return Alone(self._slots.cache, where, torch.from_numpy(positions).to(self._device))

    def _settings(self, seats: NDArray[np.int64]) -> SamplingRows:
        slots = self._slots
        return SamplingRows.make(
            slots.temperature[seats], slots.top_k[seats], slots.top_p[seats], self.decoder.config.vocab, self._device
        )

    def _same_settings(self, seats: NDArray[np.int64]) -> SamplingRows:
        """Those of the last decode step, where they are the same: they mostly are."""
        slots = self._slots
        key = tuple(values[seats].tobytes() for values in (slots.temperature, slots.top_k, slots.top_p))
        if self._rows is None or key != self._rows_key:
            self._rows, self._rows_key = self._settings(seats), key
        return self._rows

    def _sample(
        self, seats: NDArray[np.int64], logits: torch.Tensor, rows: SamplingRows, version: int
    ) -> NDArray[np.int64]:
        slots = self._slots
        drawn, logp = sample(logits, rows, slots.seed[seats], slots.length[seats])
        ids = drawn.cpu().numpy()
        slots.append(seats, ids, logp.cpu().numpy(), version)
        return slots.done(seats, ids)
