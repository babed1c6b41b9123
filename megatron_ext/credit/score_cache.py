"""Scores kept between requests and steps, so that what was scored under the same weights is not run again.

Invariants (``tests/credit/test_scoring_cache.py`` asserts each):

1. A hit returns the very arrays that the forward gave, and needs no forward.
2. The key is the identity of the weights (policy version included), the ids that are run, the places that are read and
   the kind of score: where a row comes from, and who asked, do not matter.
3. Weights that left the table take their scores with them: ``current`` under its old version, a retired teacher.
4. What is kept never exceeds the budget; what was not used for longest goes first.
5. Rows that replay recorded routing are never kept: their scores depend on more than their ids.
6. The plan is handed to ``run`` even when nothing is missing, so that ranks with hits stay in step with the others.

A cache belongs to whoever makes it; nothing here is shared between two of them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.score_plan import Identity, ScorePlan, ScoreRow, ScoreWeights, plan_rows, score_rows
from megatron_ext.credit.scoring import ScoreError, ScoreReply, ScoreRequest, from_arrays
from megatron_ext.trajectory.record import TrajectoryBatch

Run = Callable[[ScorePlan], Sequence[ScoreReply]]
RowKey = tuple[Identity, bytes, bytes]
# (row, field or layer, k of a top-k, digest of given ids)
Key = tuple[RowKey, str | int, int, bytes]


@dataclass(frozen=True)
class CacheCounters:
    """Since the cache was made: requests answered without and with a forward, tokens those forwards ran, and arrays
    dropped for want of room (or never kept, being larger than the budget)."""

    hits: int = 0
    misses: int = 0
    forward_tokens: int = 0
    dropped: int = 0


def _digest(array: NDArray[Any]) -> bytes:
    return blake2b(np.ascontiguousarray(array).tobytes(), digest_size=16).digest()


def _keys(row: ScoreRow) -> dict[str | int, Key]:
    """The key of each array in the reply to a row's request."""
    request, wants = row.request, row.request.outputs
    place: RowKey = (row.weights.identity, _digest(row.ids), _digest(row.place))
    keys: dict[str | int, Key] = {
        name: (place, name, 0, b"") for name in ("logp", "entropy", "value") if getattr(wants, name)
    }
    if wants.topk:
        keys |= {name: (place, name, wants.topk, b"") for name in ("topk_ids", "topk_logp")}
    if request.given_ids is not None:
        keys["given_logp"] = (place, "given_logp", request.given_ids.size, _digest(request.given_ids))
    return keys | {layer: (place, layer, 0, b"") for layer in wants.hidden}


class ScoreCache:
    """Keeps up to ``budget`` numbers: a token's log-prob is one, its entropy another, its top-k 2k, hidden states
    layers x width."""

    def __init__(self, budget: int) -> None:
        if budget < 0:
            raise ScoreError(f"score cache budget {budget}: must be >= 0")
        self.budget = budget
        self.counters = CacheCounters()
        self._kept: OrderedDict[Key, NDArray[Any]] = OrderedDict()
        self._size = 0

    @property
    def size(self) -> int:
        """Numbers kept."""
        return self._size

    def score(
        self,
        requests: Sequence[ScoreRequest],
        batch: TrajectoryBatch,
        weights: Mapping[str, ScoreWeights],
        run: Run,
    ) -> tuple[ScoreReply, ...]:
        """The reply to each request; ``run`` gives those of the plan of what is missing."""
        self.keep_only(weights)
        rows = score_rows(requests, batch, weights)
        replies: dict[int, ScoreReply] = {}
        for number, row in enumerate(rows):
            found = self.find(row)
            if found is not None:
                replies[number] = found
        missing = [number for number in range(len(rows)) if number not in replies]
        plan = plan_rows([rows[number] for number in missing], weights)
        answered = run(plan)
        if len(answered) != len(missing):
            raise ScoreError(f"{len(answered)} replies to a plan of {len(missing)} requests")
        for number, reply in zip(missing, answered, strict=True):
            reply.check(rows[number].request)
            self.keep(rows[number], reply)
            replies[number] = reply
        self._count(hits=len(rows) - len(missing), misses=len(missing), forward_tokens=plan.num_tokens)
        return tuple(replies[number] for number in range(len(rows)))

    def find(self, row: ScoreRow) -> ScoreReply | None:
        """The kept reply to a row's request, if all of it is here."""
        if row.replay >= 0 or not len(row.ids):
            return None
        keys = _keys(row)
        if any(key not in self._kept for key in keys.values()):
            return None
        for key in keys.values():
            self._kept.move_to_end(key)
        return ScoreReply(**from_arrays({name: self._kept[key] for name, key in keys.items()}))

    def keep(self, row: ScoreRow, reply: ScoreReply) -> None:
        """Keeps a reply, dropping what was not used for longest where room is needed."""
        if row.replay >= 0 or not len(row.ids):
            return
        held = reply.arrays()
        for name, key in _keys(row).items():
            if held[name].size > self.budget:
                self._count(dropped=1)
                continue
            self._drop(key)
            self._kept[key] = held[name]
            self._size += held[name].size
        while self._size > self.budget:
            self._drop(next(iter(self._kept)))
            self._count(dropped=1)

    def keep_only(self, weights: Mapping[str, ScoreWeights]) -> None:
        """Drops the scores of weights that are not in the table."""
        known = {model.identity for model in weights.values()}
        for key in [key for key in self._kept if key[0][0] not in known]:
            self._drop(key)

    def _drop(self, key: Key) -> None:
        array = self._kept.pop(key, None)
        self._size -= 0 if array is None else array.size

    def _count(self, *, hits: int = 0, misses: int = 0, forward_tokens: int = 0, dropped: int = 0) -> None:
        c = self.counters
        self.counters = CacheCounters(
            c.hits + hits, c.misses + misses, c.forward_tokens + forward_tokens, c.dropped + dropped
        )
