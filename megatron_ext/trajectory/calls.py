"""Recorded model calls of one rollout, as a gateway in front of an engine sees them, and which of them are repeats.

Invariants (``tests/trajectory/test_calls.py`` asserts each):

1. A call is complete when it exists: shapes, ranges, versions and the alignment of routing rows are checked at once,
   and an error names the request.
2. ``routed`` ends with the forward of the last sampled token but one: rows shifted by a token (or a layer count that
   shifts them) cannot enter.
3. The same request id with the same content is one call; with other content it is an error, never a guess.
4. What is kept does not depend on the order in which the calls are handed over, only on their ``order``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from dataclasses import field as new
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from megatron_ext.trajectory.record import Array, Field, RecordError, Role

FINISHES = ("stop", "length", "context", "abort")
# After these the model had not ended its message: a call that sends exactly prompt and answer back resumes it.
UNFINISHED = ("length", "abort")


class Dedup(StrEnum):
    """Which calls are repeats of one another."""

    REQUEST = "request"  # the same request id; calls without one are all kept
    PROMPT = "prompt"  # besides, of calls without a request id that share session and prompt ids the last is kept
    OFF = "off"  # none


@dataclass(frozen=True)
class MessageSpan:
    """Tokens ``start .. end`` of a prompt are one message. ``returns`` is the tag of the session whose result it is."""

    role: Role
    start: int
    end: int
    returns: str | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """One request to the model and its answer. P prompt tokens, n sampled ones.

    ``order`` numbers the requests of the rollout as they reached the gateway. ``prompt_ids`` int32 [P] and ``ids``
    int32 [n] as the engine read and sampled them; ``logp`` float32 [n], nats, <= 0; ``versions`` int64 [n], packed,
    never falling. ``routed`` unsigned [m, L, k]: experts of tokens ``routed_from .. routed_from + m`` of (prompt +
    ids), ending with the last sampled token but one. ``finish``: one of ``FINISHES``.

    What only the harness knows, where it says so: ``request_id`` and ``session`` tag ("" = none); ``messages``, the
    spans of the prompt's messages in order (those of role MODEL are ignored: what was sampled is known); ``trained``
    False leaves the answer out of the loss; ``field`` one or [n]; keys, ``reward`` and ``labels`` of the turn.
    """

    order: int
    prompt_ids: NDArray[np.int32]
    ids: NDArray[np.int32]
    logp: NDArray[np.float32]
    versions: NDArray[np.int64]
    finish: str = "stop"
    request_id: str = ""
    session: str = ""
    messages: tuple[MessageSpan, ...] = ()
    routed: Array | None = None
    routed_from: int = 0
    trained: bool = True
    field: Field | NDArray[np.int8] = Field.OTHER
    state_key: int = 0
    action_key: int = 0
    reward: float = 0.0
    labels: Mapping[str, int] = new(default_factory=dict)

    def __post_init__(self) -> None:
        for name, dtype in (("prompt_ids", np.int32), ("ids", np.int32), ("logp", np.float32), ("versions", np.int64)):
            object.__setattr__(self, name, self._read_only(name, dtype))
        n = len(self.ids)
        if not len(self.prompt_ids):
            raise RecordError(f"{self.name}: its prompt has no tokens; a model turn needs a context")
        for name in ("logp", "versions"):
            if len(getattr(self, name)) != n:
                raise RecordError(
                    f"{self.name}: {name} has {len(getattr(self, name))} entries, {n} tokens were sampled"
                )
        bad = ~(np.isfinite(self.logp) & (self.logp <= 0))
        if np.any(bad):
            at = int(np.argmax(bad))
            raise RecordError(f"{self.name}: log-prob {self.logp[at]} of sampled token {at} is not a finite value <= 0")
        if n and (self.versions[0] < 0 or np.any(self.versions[1:] < self.versions[:-1])):
            raise RecordError(f"{self.name}: policy versions are negative or fall inside the answer")
        if self.finish not in FINISHES:
            raise RecordError(f"{self.name}: finish {self.finish!r}; give one of {', '.join(FINISHES)}")
        self._check_routed()
        reached = 0
        for span in self.messages:
            if not reached <= span.start <= span.end <= len(self.prompt_ids):
                raise RecordError(
                    f"{self.name}: message [{span.start}, {span.end}) overlaps the one before it or leaves the prompt "
                    f"of {len(self.prompt_ids)} tokens"
                )
            reached = span.end

    @property
    def name(self) -> str:
        return f"request {self.request_id!r} (order {self.order})" if self.request_id else f"call of order {self.order}"

    @property
    def length(self) -> int:
        """Tokens of prompt and answer."""
        return len(self.prompt_ids) + len(self.ids)

    def _read_only(self, name: str, dtype: type) -> Array:
        given = np.asarray(getattr(self, name))
        whole = np.issubdtype(dtype, np.integer)
        if given.ndim != 1 or (whole and given.size and given.dtype.kind not in "iu"):
            kind = "integers" if whole else "numbers"
            raise RecordError(f"{self.name}: {name} must be one-dimensional {kind}, got {given.dtype} {given.shape}")
        if dtype is np.int32 and given.size and (given.min() < 0 or given.max() > np.iinfo(np.int32).max):
            raise RecordError(f"{self.name}: {name} holds token ids outside 0 .. {np.iinfo(np.int32).max}")
        view: Array = np.ascontiguousarray(given, dtype=dtype).view()
        view.flags.writeable = False
        return view

    def _check_routed(self) -> None:
        if self.routed is None:
            return
        if self.routed.ndim != 3 or self.routed.dtype.kind != "u":
            raise RecordError(
                f"{self.name}: routed is {self.routed.dtype} {self.routed.shape}, expected unsigned [m, L, k]"
            )
        first, last = self.routed_from, self.routed_from + len(self.routed)
        aligned = last == self.length - 1 if len(self.ids) else last <= len(self.prompt_ids)
        if first < 0 or not aligned:
            raise RecordError(
                f"{self.name}: routed covers tokens {first}..{last}, but {len(self.prompt_ids)} prompt and "
                f"{len(self.ids)} sampled tokens have rows up to {self.length - 1 if len(self.ids) else self.length}"
            )


def same_content(a: Call, b: Call) -> bool:
    """Whether two records are of one call: everything but ``order`` is equal."""
    if (a.routed is None) != (b.routed is None) or a.routed_from != b.routed_from:
        return False
    if a.routed is not None and b.routed is not None and not np.array_equal(a.routed, b.routed):
        return False
    plain = ("finish", "request_id", "session", "messages", "trained", "state_key", "action_key", "reward", "labels")
    arrays = ("prompt_ids", "ids", "logp", "versions", "field")
    return all(getattr(a, name) == getattr(b, name) for name in plain) and all(
        np.array_equal(getattr(a, name), getattr(b, name)) for name in arrays
    )


def unique_calls(calls: Sequence[Call], dedup: Dedup, where: str) -> tuple[list[Call], list[Call]]:
    """``(kept, dropped)``, each by ``order``. Raises ``RecordError`` (opening with ``where``) on a request id with two
    contents and on two kept calls of one order.

    ``Dedup.PROMPT`` is Agent Lightning's rule (the last of the calls with identical prompt ids) limited to calls whose
    request id is unknown: deliberate samples from one prompt that carry ids are all kept.
    """
    ordered = sorted(calls, key=lambda call: call.order)
    kept, dropped = ordered, []
    if dedup is not Dedup.OFF:
        named: dict[str, Call] = {}
        # Keyed by the bytes themselves: equal prompts, not equal hashes.
        prompts: dict[tuple[str, bytes], Call] = {}
        repeats: set[int] = set()
        for call in ordered:
            if call.request_id:
                first = named.setdefault(call.request_id, call)
                if first is not call:
                    if not same_content(first, call):
                        raise RecordError(
                            f"{where}: request id {call.request_id!r} was recorded twice with different content "
                            f"(orders {first.order} and {call.order}); give every request an id of its own"
                        )
                    repeats.add(id(call))
            elif dedup is Dedup.PROMPT:
                key = (call.session, call.prompt_ids.tobytes())
                if key in prompts:
                    repeats.add(id(prompts[key]))
                prompts[key] = call
        kept = [call for call in ordered if id(call) not in repeats]
        dropped = [call for call in ordered if id(call) in repeats]
    for a, b in zip(kept, kept[1:], strict=False):
        if a.order == b.order:
            raise RecordError(f"{where}: {a.name} and {b.name} carry one order; number the requests as they arrive")
    return kept, dropped
