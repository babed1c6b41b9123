"""What a scoring forward is asked for and what it answers: a pure, typed pair, made from the record alone.

Invariants (``tests/credit/test_scoring.py`` asserts each):

1. A request is checked when it is made, and holds read-only arrays: nothing in it depends on a batch or a model.
2. A reply aligns to the request's ``positions``, one entry each, in that order, and is checked against the request.
3. ``logp[p]`` is log p(id of p | every id before p in the request's own sequence); entropy, top-k, given ids and value
   are read at that same place, one before p. Hidden states are of the forward of token p itself.
4. Replies are numpy: no gradient passes through a score.

The sequence of a request is ``context_ids + record[start:cut] + answer_ids``, with ``inserts`` in the record's part:

===================================  ==========================================================================
plain                                ``context_ids`` None: the segment from its first token
privileged prompt, guided, hint      ``context_ids`` in place of what stood before ``start`` (the first position)
a hint before every step             ``inserts``
likelihood of an answer              ``answer_ids`` after the record's token ``cut``, or straight after
                                     ``context_ids``; ``positions`` count inside the answer
snapshot, reference, teacher         ``weights_ref``
===================================  ==========================================================================

Ids are given, never made here: the harness tokenises hints and answers, and what was sampled stays as it was sampled.
Contexts that are embeddings instead of ids (latent prompts) are not scores: their gradient is wanted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

LENGTH = ("mean", "sum")
SPACE = ("log", "prob")


class ScoreError(ValueError):
    """A request that cannot be scored or a reply that does not fit it; the message names which and why."""


def _integers(name: str, value: ArrayLike, dtype: type[np.signedinteger[Any]], ndim: int = 1) -> NDArray[Any]:
    """Integer ids or indices, read-only; floats are refused, an empty list is taken for integers."""
    array = np.asarray(value)
    if array.ndim != ndim or (array.size and array.dtype.kind not in "iu"):
        raise ScoreError(f"{name}: expected {ndim}-dimensional integers, got {array.dtype} {array.shape}")
    if array.size and array.min() < 0:
        raise ScoreError(f"{name}: {array.min()} is negative")
    if array.dtype == dtype and array.flags.owndata and not array.flags.writeable:
        return array  # nobody can change it: requests may share it
    frozen = array.astype(dtype)
    frozen.flags.writeable = False
    return frozen


@dataclass(frozen=True, kw_only=True)
class ScoreOutputs:
    """What is wanted at each position: ``logp`` nats; ``entropy`` nats over the whole vocabulary; ``value`` of the
    state before the token; ``topk`` the k likeliest ids with their log-probs; ``hidden`` layers (0 the embedding, l the
    output of layer l)."""

    logp: bool = True
    entropy: bool = False
    value: bool = False
    topk: int = 0
    hidden: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.topk < 0:
            raise ScoreError(f"outputs.topk {self.topk}: must be >= 0")
        if any(layer < 0 for layer in self.hidden) or list(self.hidden) != sorted(set(self.hidden)):
            raise ScoreError(f"outputs.hidden {self.hidden}: layers must be >= 0, rising and without repetition")

    @property
    def distribution(self) -> bool:
        """Something that the vocabulary's logits are needed for, given ids aside."""
        return self.logp or self.entropy or self.topk > 0

    def union(self, other: ScoreOutputs) -> ScoreOutputs:
        """What serves both."""
        return ScoreOutputs(
            logp=self.logp or other.logp,
            entropy=self.entropy or other.entropy,
            value=self.value or other.value,
            topk=max(self.topk, other.topk),
            hidden=tuple(sorted({*self.hidden, *other.hidden})),
        )


NO_OUTPUTS = ScoreOutputs(logp=False)


@dataclass(frozen=True, eq=False)
class Insert:
    """``ids`` int32 [I] put before the batch's token ``before``."""

    before: int
    ids: NDArray[np.int32]

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", _integers("insert ids", self.ids, np.int32))


@dataclass(frozen=True, eq=False)
class ScoreRequest:
    """One sequence to score: the record's ``segment`` under another context, other weights or another continuation.

    ``context_ids`` int32 [C] stands in place of what was before the batch's token ``start`` (None: as recorded).
    ``positions`` int64 [P], rising: tokens of the batch, or indices into ``answer_ids`` where there are any.
    ``weights_ref`` names the weights: ``current``, a snapshot, the reference, a teacher.
    ``start`` defaults to the first position, with an answer to ``cut`` (nothing of the record is kept).
    ``answer_ids`` int32 [A] follow the record's tokens before ``cut`` (default: the segment's end).
    ``inserts``, rising, stand before tokens of the record. ``given_ids`` int32 [P, m] asks for the log-probs of these
    ids too. ``replay_routing`` runs a plain row with the experts that the record holds; under any other context tokens
    route differently, so it is refused there.
    """

    segment: int
    context_ids: NDArray[np.int32] | None
    positions: NDArray[np.int64]
    weights_ref: str = "current"
    outputs: ScoreOutputs = ScoreOutputs()
    start: int | None = field(default=None, kw_only=True)
    cut: int | None = field(default=None, kw_only=True)
    answer_ids: NDArray[np.int32] | None = field(default=None, kw_only=True)
    inserts: tuple[Insert, ...] = field(default=(), kw_only=True)
    given_ids: NDArray[np.int32] | None = field(default=None, kw_only=True)
    replay_routing: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "positions", _integers("positions", self.positions, np.int64))
        for name in ("context_ids", "answer_ids"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _integers(name, getattr(self, name), np.int32))
        if self.given_ids is not None:
            object.__setattr__(self, "given_ids", _integers("given_ids", self.given_ids, np.int32, ndim=2))
            if len(self.given_ids) != len(self.positions):
                raise ScoreError(f"given_ids {self.given_ids.shape} for {len(self.positions)} positions")
        if np.any(self.positions[1:] <= self.positions[:-1]):
            raise ScoreError(f"positions must rise, got {_short(self.positions)}")
        if self.segment < 0:
            raise ScoreError(f"segment {self.segment}: must be >= 0")
        if self.start is not None and self.context_ids is None:
            raise ScoreError("start is where the record goes on after context_ids, and there are none")
        if self.cut is not None and self.answer_ids is None:
            raise ScoreError("cut is where answer_ids follow the record, and there are none")
        if self.answer_ids is not None and len(self.positions) and self.positions[-1] >= len(self.answer_ids):
            raise ScoreError(f"positions reach {self.positions[-1]}, the answer has {len(self.answer_ids)} ids")
        if len(self.inserts) > 1 and np.any(np.diff([insert.before for insert in self.inserts]) < 0):
            raise ScoreError(f"inserts must rise, got {[insert.before for insert in self.inserts]}")
        if self.replay_routing and (self.context_ids is not None or self.answer_ids is not None or self.inserts):
            raise ScoreError("replay_routing needs the recorded row alone: another context routes differently")
        if self.outputs == NO_OUTPUTS and self.given_ids is None:
            raise ScoreError("the request wants no output")

    @classmethod
    def likelihood(
        cls,
        segment: int,
        answer_ids: ArrayLike,
        *,
        cut: int | None = None,
        context_ids: NDArray[np.int32] | None = None,
        weights_ref: str = "current",
    ) -> ScoreRequest:
        """The log-prob of every id of an answer, after the record's tokens before ``cut`` or after ``context_ids``."""
        answer = _integers("answer_ids", answer_ids, np.int32)
        positions = np.arange(len(answer), dtype=np.int64)
        return cls(segment, context_ids, positions, weights_ref, answer_ids=answer, cut=cut)


def _short(values: NDArray[Any]) -> str:
    return np.array2string(values, threshold=6, edgeitems=3)


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreArrays:
    """Scores of n tokens, one array for each kind; None where that kind was not asked for.

    ``logp``, ``entropy``, ``value`` float [n]; ``topk_ids`` int and ``topk_logp`` float [n, k], the likeliest first;
    ``given_logp`` float, for given ids; ``hidden`` layer -> float [n, d].
    """

    logp: NDArray[np.floating[Any]] | None = None
    entropy: NDArray[np.floating[Any]] | None = None
    value: NDArray[np.floating[Any]] | None = None
    topk_ids: NDArray[np.integer[Any]] | None = None
    topk_logp: NDArray[np.floating[Any]] | None = None
    given_logp: NDArray[np.floating[Any]] | None = None
    hidden: Mapping[int, NDArray[np.floating[Any]]] = field(default_factory=dict)

    def arrays(self) -> dict[str | int, NDArray[Any]]:
        """What is held: by field name, hidden states by layer."""
        named: dict[str | int, NDArray[Any] | None] = {name: getattr(self, name) for name in NAMED_ARRAYS}
        return {name: array for name, array in (named | dict(self.hidden)).items() if array is not None}


NAMED_ARRAYS = ("logp", "entropy", "value", "topk_ids", "topk_logp", "given_logp")


def from_arrays(arrays: Mapping[str | int, NDArray[Any]]) -> dict[str, Any]:
    """The keyword arguments that make ``ScoreArrays`` of what its ``arrays`` gives."""
    named: dict[str, Any] = {name: array for name, array in arrays.items() if isinstance(name, str)}
    return named | {"hidden": {layer: array for layer, array in arrays.items() if isinstance(layer, int)}}


@dataclass(frozen=True, eq=False, kw_only=True)
class ScoreReply(ScoreArrays):
    """Scores at a request's P positions, read-only: float32 and int32, ``given_logp`` [P, m], the rest with n = P."""

    def __post_init__(self) -> None:
        for array in self.arrays().values():
            array.flags.writeable = False

    def check(self, request: ScoreRequest) -> None:
        """Raises ``ScoreError`` unless the reply holds what was asked, in its shapes, finite and possible."""
        count, wanted = len(request.positions), request.outputs
        shapes: dict[str | int, tuple[int, ...]] = {
            name: (count,) for name in ("logp", "entropy", "value") if getattr(wanted, name)
        }
        if wanted.topk:
            shapes |= dict.fromkeys(("topk_ids", "topk_logp"), (count, wanted.topk))
        if request.given_ids is not None:
            shapes["given_logp"] = request.given_ids.shape
        held = self.arrays()
        for layer in wanted.hidden:
            shapes[layer] = (count, *held[layer].shape[1:2]) if layer in held and held[layer].ndim == 2 else (count, -1)
        if set(held) != set(shapes):
            raise ScoreError(f"reply holds {list(held)}, the request wants {list(shapes)}")
        for name, shape in shapes.items():
            what = f"hidden[{name}]" if isinstance(name, int) else name
            if held[name].shape != shape:
                raise ScoreError(f"reply: {what} is {held[name].shape}, expected {shape}")
            if not np.all(np.isfinite(held[name])):
                at = int(np.argmax(~np.isfinite(held[name]).reshape(count, -1).all(axis=1)))
                raise ScoreError(f"reply: {what} is not finite at position {int(request.positions[at])}")
        for name in ("logp", "topk_logp", "given_logp"):
            if name in held and np.any(held[name] > LOGP_ROUNDING):
                raise ScoreError(f"reply: {name} reaches {held[name].max():.3g}, a log-probability is <= 0")
        if self.topk_logp is not None and np.any(np.diff(self.topk_logp, axis=1) > 0):
            raise ScoreError("reply: topk_logp must fall from the likeliest id on")


LOGP_ROUNDING = 1e-3  # a bf16 head can round the log-prob of a certain token to slightly above 0


def _logp(reply: ScoreReply) -> NDArray[np.float64]:
    if reply.logp is None:
        raise ScoreError("this reply holds no logp: ask for ScoreOutputs(logp=True)")
    return reply.logp.astype(np.float64)


def gap(context: ScoreReply, plain: ScoreReply) -> NDArray[np.float64]:
    """``logp under the context - logp without it``, float64 [P]; both replies are for the same positions.

    With a teacher's weights and the plain context it is the distillation advantage log pi_T - log pi_S.
    """
    under, without = _logp(context), _logp(plain)
    if under.shape != without.shape:
        raise ScoreError(f"gap between {under.shape} and {without.shape} positions")
    return under - without


def answer_likelihood(
    replies: Sequence[ScoreReply], *, length: str = "mean", space: str = "log"
) -> NDArray[np.float64]:
    """Likelihood of each reply's ids, float64 [number of replies].

    Args:
        length: ``mean`` log-prob a token (normalised by length), or the ``sum``. No ids at all give 0 (certain).
        space: ``log``, or ``prob`` for its exponential (IGPO's exp of the mean log-prob).
    """
    if length not in LENGTH or space not in SPACE:
        raise ScoreError(f"length {length!r}, space {space!r}: must be one of {LENGTH} and one of {SPACE}")
    held = [reply.logp if reply.logp is not None else _logp(reply) for reply in replies]
    sizes = np.array([len(logp) for logp in held], dtype=np.int64)
    owner = np.repeat(np.arange(len(held)), sizes)
    every = np.concatenate(held) if held else np.empty(0)
    total = np.bincount(owner, weights=every, minlength=len(held)).astype(np.float64)
    if length == "mean":
        total /= np.maximum(sizes, 1)
    return np.exp(total) if space == "prob" else total


def token_scores(
    requests: Sequence[ScoreRequest], replies: Sequence[ScoreReply], num_tokens: int, name: str = "logp"
) -> NDArray[np.float64]:
    """One score of each of the batch's tokens, float64 [T]: ``logp``, ``entropy`` or ``value`` put at the positions
    that were asked for, 0 elsewhere. Refuses two answers for one token, and requests about appended ids."""
    if any(request.answer_ids is not None for request in requests):
        raise ScoreError("token_scores: an appended answer has no token in the batch")
    out, at = np.zeros(num_tokens), [request.positions for request in requests]
    if not at:
        return out
    token = np.concatenate(at)
    if len(token) and token.max() >= num_tokens:
        raise ScoreError(f"token_scores: position {token.max()} in a batch of {num_tokens} tokens")
    if np.bincount(token, minlength=1).max(initial=0) > 1:
        raise ScoreError(f"token_scores: token {int(np.bincount(token).argmax())} was scored by several requests")
    held = [reply.arrays() for reply in replies]
    if any(name not in arrays or arrays[name].ndim != 1 for arrays in held):
        raise ScoreError(f"token_scores: not every reply holds {name!r}, one number a position")
    out[token] = np.concatenate([arrays[name] for arrays in held])
    return out
