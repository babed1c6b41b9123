"""Seats and slots: who occupies which part of the KV cache, as flat arrays.

An occupant (a request, or an idle session between two calls) keeps its *seat*, an index into the arrays below, for as
long as it lives. Its *slot*, the place of its keys and values, may change: slots are kept in three zones,

    [0, ready) decode   [ready, busy) prefill pending   [busy, slots) idle or free

so that decoding and prefilling read contiguous slices of the cache.

Invariants (``tests/rollout/test_embedded_scheduler.py``):

1. ``seat_of`` and ``slot_of`` are inverse permutations.
2. ``arrange`` moves only occupants that stand in the wrong zone, and their keys and values go with them.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.models.hf_config import HFConfig
from megatron_ext.rollout.embedded.cache import KvCache

READY, FILLING, IDLE = 0, 1, 2


class Slots:
    """State of S seats with room for C tokens each. All arrays are indexed by seat.

    ``tokens`` int32 [S, C] input and output ids; ``logp`` float32 [S, C] and ``versions`` int64 [S, C] where sampled;
    ``routed`` uint8/uint16 [S, C, MoE layers, k], allocated when first asked for; ``length`` int64 [S] tokens known;
    ``cached`` int64 [S] tokens whose keys and values are in the cache; ``limit`` int64 [S] length at which the request
    ends; ``stops`` int64 [S, n] padded with -1; the sampling settings one each.
    """

    def __init__(self, config: HFConfig, slots: int, max_context: int, device: torch.device) -> None:
        self.count, self.max_context, self._config = slots, max_context, config
        self.cache = KvCache(config, slots, max_context, device)
        self.ready = self.busy = 0
        self.seat_of: NDArray[np.int64] = np.arange(slots)
        self.slot_of: NDArray[np.int64] = np.arange(slots)
        self.tokens = np.zeros((slots, max_context), dtype=np.int32)
        self.logp = np.zeros((slots, max_context), dtype=np.float32)
        self.versions = np.zeros((slots, max_context), dtype=np.int64)
        self.routed: NDArray[np.uint8] | NDArray[np.uint16] | None = None
        self.length = np.zeros(slots, dtype=np.int64)
        self.cached = np.zeros(slots, dtype=np.int64)
        self.limit = np.zeros(slots, dtype=np.int64)
        self.seed = np.zeros(slots, dtype=np.uint64)
        self.temperature = np.ones(slots, dtype=np.float32)
        self.top_k = np.zeros(slots, dtype=np.int64)
        self.top_p = np.ones(slots, dtype=np.float64)
        self.record = np.zeros(slots, dtype=np.bool_)
        self.stops = np.full((slots, 1), -1, dtype=np.int64)

    def zones(self) -> NDArray[np.int64]:
        """Zone of each slot, int64 [S]."""
        return np.repeat(np.arange(3), (self.ready, self.busy - self.ready, self.count - self.busy))

    def arrange(self, zone: NDArray[np.int64]) -> None:
        """Reorders the slots so that the occupant of slot s comes to lie in zone ``zone[s]``."""
        counts = np.bincount(zone, minlength=3)
        home = np.repeat(np.arange(3), counts)
        wrong = np.flatnonzero(zone != home)
        self.ready, self.busy = int(counts[READY]), int(counts[READY] + counts[FILLING])
        if not len(wrong):
            return
        source = wrong[zone[wrong].argsort(kind="stable")]
        target = wrong[home[wrong].argsort(kind="stable")]
        seats = self.seat_of[source]
        filled = self.cached[seats] > 0
        if filled.any():
            move_from, move_to = torch.from_numpy(source[filled]), torch.from_numpy(target[filled])
            self.cache.move(move_from, move_to, int(self.cached[seats].max()))
        self.seat_of[target] = seats
        self.slot_of[seats] = target

    def set_stops(self, seat: int, stop_ids: tuple[int, ...]) -> None:
        missing = len(stop_ids) - self.stops.shape[1]
        if missing > 0:
            self.stops = np.pad(self.stops, ((0, 0), (0, missing)), constant_values=-1)
        self.stops[seat] = -1
        self.stops[seat, : len(stop_ids)] = stop_ids

    def common_prefix(self, seat: int, ids: NDArray[np.int32]) -> int:
        """How many leading tokens of ``ids`` the seat has in the cache; one is always left to run."""
        reach = min(int(self.cached[seat]), len(ids) - 1)
        differs = self.tokens[seat, :reach] != ids[:reach]
        return int(differs.argmax()) if differs.any() else reach

    def append(self, seats: NDArray[np.int64], ids: NDArray[np.int64], logp: NDArray[np.float32], version: int) -> None:
        """One sampled token for each of ``seats``."""
        at = self.length[seats]
        self.tokens[seats, at] = ids
        self.logp[seats, at] = logp
        self.versions[seats, at] = version
        self.length[seats] = at + 1

    def done(self, seats: NDArray[np.int64], ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of ``seats`` that end with the ids they just sampled."""
        ended = self.length[seats] >= self.limit[seats]
        ended |= (self.stops[seats] == ids[:, None]).any(axis=1)
        return seats[ended]

    def store_routed(self, seats: NDArray[np.int64], positions: NDArray[np.int64], experts: torch.Tensor) -> None:
        """Keeps the experts [N, MoE layers, k] of tokens at ``positions`` of ``seats`` (both int64 [N])."""
        if self.routed is None:
            kind: type[np.uint8] | type[np.uint16] = np.uint8 if self._config.num_experts <= 256 else np.uint16
            self.routed = np.zeros((self.count, self.max_context, *experts.shape[1:]), dtype=kind)
        self.routed[seats, positions] = experts.cpu().numpy()
