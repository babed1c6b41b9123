"""From score requests to the fewest forwards: which rows run under which weights, and where each answer is read.

Invariants (``tests/credit/test_scoring_plan.py`` asserts each):

1. A row's ids are the request's own sequence, up to its last position; nothing predicts a row's first id.
2. Rows of equal weights whose ids are equal, or the beginning of another's, run once, whoever asked for them: what is
   causal does not see what follows. Rows that replay recorded routing are shared inside their segment alone.
3. One group for each set of weights in the table (names that mean the same weights share one), in an order that only
   the table decides: ranks enter the same groups, empty or not, and weights are swapped once a group.
4. The plan of a set of requests does not depend on their order, nor on the other requests of other weights.
5. A row over its weights' limit, an id outside their vocabulary, or weights with another vocabulary than ``current``
   are refused in one line that names the request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.scoring import NO_OUTPUTS, ScoreError, ScoreOutputs, ScoreRequest
from megatron_ext.trajectory.record import TrajectoryBatch, owners

CURRENT = "current"
Identity = tuple[str, int, float]


@dataclass(frozen=True, kw_only=True)
class ScoreWeights:
    """What a name of weights stands for.

    ``model`` and ``version`` (packed policy version) identify the weights: equal pairs are equal weights.
    ``vocabulary`` identifies the tokenizer, ``vocab_size`` bounds its ids, ``layers`` those that ``hidden`` may name,
    ``max_tokens`` context and response together. Log-probs are of logits / ``temperature``.
    """

    model: str
    version: int
    vocabulary: str
    vocab_size: int
    layers: int
    max_tokens: int
    value_head: bool = False
    temperature: float = 1.0

    @property
    def identity(self) -> Identity:
        return self.model, self.version, self.temperature


def ordered(weights: Mapping[str, ScoreWeights]) -> list[tuple[tuple[str, ...], ScoreWeights]]:
    """Each distinct set of weights with its names: ``current`` first, then by name."""
    if CURRENT not in weights:
        raise ScoreError(f"weights {', '.join(sorted(weights)) or '(none)'}: {CURRENT!r} is missing")
    names: dict[Identity, list[str]] = {}
    for name in sorted(weights, key=lambda n: (n != CURRENT, n)):
        names.setdefault(weights[name].identity, []).append(name)
        if weights[name] != weights[names[weights[name].identity][0]]:
            first = names[weights[name].identity][0]
            raise ScoreError(f"weights {first!r} and {name!r}: one model and version, described differently")
    return [(tuple(group), weights[group[0]]) for group in names.values()]


@dataclass(frozen=True, eq=False)
class ScoreRow:
    """A request's own sequence: ``ids`` int32 [L], ``place`` int64 [P] of each position in it, and the batch's token
    whose recorded routing its first id replays (-1: none is replayed)."""

    request: ScoreRequest
    weights: ScoreWeights
    ids: NDArray[np.int32]
    place: NDArray[np.int64]
    replay: int


def score_rows(
    requests: Sequence[ScoreRequest], batch: TrajectoryBatch, weights: Mapping[str, ScoreWeights]
) -> tuple[ScoreRow, ...]:
    """The sequence of each request, checked against the batch and the table of weights."""
    ordered(weights)
    trajectory = batch.segment_trajectory()
    rows = []
    for number, request in enumerate(requests):
        where = f"score request {number}"
        if request.segment < batch.num_segments:
            where += f" (trajectory {batch.trajectory_id[trajectory[request.segment]]!r}, segment {request.segment})"
        try:
            rows.append(_row(request, batch, weights))
        except ScoreError as error:
            raise ScoreError(f"{where}: {error}") from None
    return tuple(rows)


def _row(request: ScoreRequest, batch: TrajectoryBatch, weights: Mapping[str, ScoreWeights]) -> ScoreRow:
    if request.weights_ref not in weights:
        raise ScoreError(f"weights {request.weights_ref!r} are not among {', '.join(sorted(weights))}")
    model = weights[request.weights_ref]
    _check_model(request, model, weights[CURRENT])
    if request.segment >= batch.num_segments:
        raise ScoreError(f"segment {request.segment} of a batch that holds {batch.num_segments}")
    if request.replay_routing and batch.routed is None:
        raise ScoreError("replay_routing, but the batch holds no recorded experts")
    first, end = (int(batch.segment_tokens[request.segment + i]) for i in (0, 1))
    positions, context, answer = request.positions, request.context_ids, request.answer_ids
    if not len(positions):
        return ScoreRow(request, model, np.empty(0, dtype=np.int32), positions, -1)
    cut = int(positions[-1]) + 1 if answer is None else end if request.cut is None else request.cut
    kept_from = int(positions[0]) if answer is None else cut
    start = first if context is None else kept_from if request.start is None else request.start
    if not first <= start <= cut <= end:
        raise ScoreError(f"the record's part [{start}, {cut}) leaves its segment [{first}, {end})")
    if answer is None and positions[0] < start:
        raise ScoreError(f"position {positions[0]} is before the record's part [{start}, {cut})")
    record, place = batch.ids[start:cut], positions - start
    if request.inserts:
        before = np.array([insert.before for insert in request.inserts], dtype=np.int64)
        if before[0] < start or before[-1] > (cut - 1 if answer is None else cut):
            raise ScoreError(f"inserts before {before.tolist()} leave the record's part [{start}, {cut})")
        sizes = np.array([len(insert.ids) for insert in request.inserts], dtype=np.int64)
        record = np.insert(record, np.repeat(before - start, sizes), np.concatenate([i.ids for i in request.inserts]))
        place = place + np.concatenate([[0], np.cumsum(sizes)])[np.searchsorted(before, positions, side="right")]
    if answer is not None:
        record, place = np.concatenate([record, answer]), len(record) + positions
    if context is not None:
        record, place = np.concatenate([context, record]), len(context) + place
    ids = record[: int(place[-1]) + 1]
    if len(ids) > model.max_tokens:
        raise ScoreError(f"{len(ids)} tokens of context and response, {request.weights_ref!r} takes {model.max_tokens}")
    if ids.max() >= model.vocab_size:
        raise ScoreError(f"id {ids.max()} in a vocabulary of {model.vocab_size}")
    predicted = request.outputs.distribution or request.outputs.value or request.given_ids is not None
    if predicted and place[0] == 0:
        raise ScoreError(f"position {positions[0]} has nothing before it that could predict it")
    return ScoreRow(request, model, ids, place, start if request.replay_routing else -1)


def _check_model(request: ScoreRequest, model: ScoreWeights, current: ScoreWeights) -> None:
    name, outputs = request.weights_ref, request.outputs
    if model.vocabulary != current.vocabulary:
        raise ScoreError(f"weights {name!r} read {model.vocabulary!r}, the ids are of {current.vocabulary!r}")
    if outputs.value and not model.value_head:
        raise ScoreError(f"weights {name!r} have no value head")
    if outputs.hidden and outputs.hidden[-1] > model.layers:
        raise ScoreError(f"hidden layer {outputs.hidden[-1]}, weights {name!r} have {model.layers}")
    if outputs.topk > model.vocab_size:
        raise ScoreError(f"top-{outputs.topk} of a vocabulary of {model.vocab_size}")
    given = request.given_ids
    if given is not None and given.size and given.max() >= model.vocab_size:
        raise ScoreError(f"given id {given.max()} in a vocabulary of {model.vocab_size}")


@dataclass(frozen=True, eq=False)
class ScoreGroup:
    """The rows that run under one set of weights: F rows, M ids, and what is read where.

    ``row_offsets`` int64 [F+1]; ``ids`` int32 [M]; ``source`` int64 [M], the batch's token whose recorded routing is
    replayed, -1 for none. Items are read at places of ``ids``, rising: ``scored`` int64 [N] tokens that are predicted
    (by what stands one before); ``topk`` int64 [K] those whose likeliest ids are wanted; ``given`` int64 [G] with
    ``given_id`` int32 [G]; ``hidden`` int64 [H] tokens whose own states are wanted. ``outputs`` is what any row wants.
    """

    names: tuple[str, ...]
    weights: ScoreWeights
    outputs: ScoreOutputs
    row_offsets: NDArray[np.int64]
    ids: NDArray[np.int32]
    source: NDArray[np.int64]
    scored: NDArray[np.int64]
    topk: NDArray[np.int64]
    given: NDArray[np.int64]
    given_id: NDArray[np.int32]
    hidden: NDArray[np.int64]

    @property
    def num_rows(self) -> int:
        return len(self.row_offsets) - 1

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Tokens of each row, int64 [F]."""
        return np.diff(self.row_offsets)


@dataclass(frozen=True, eq=False)
class Aim:
    """Where a request's answers are among its group's items: int64 [P] each, ``given`` [P * m]; empty where unasked."""

    group: int
    scored: NDArray[np.int64]
    topk: NDArray[np.int64]
    given: NDArray[np.int64]
    hidden: NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ScorePlan:
    """Groups in the order they run, and for each request where its reply is read. ``asked_tokens`` is what the requests
    would cost one by one, ``num_tokens`` what is run."""

    requests: tuple[ScoreRequest, ...]
    groups: tuple[ScoreGroup, ...]
    aims: tuple[Aim, ...]
    asked_tokens: int

    @property
    def num_rows(self) -> int:
        return sum(group.num_rows for group in self.groups)

    @property
    def num_tokens(self) -> int:
        return sum(group.num_tokens for group in self.groups)

    def tokens_by_weights(self) -> dict[str, int]:
        """Tokens run under each set of weights, by its first name."""
        return {group.names[0]: group.num_tokens for group in self.groups}


def plan_scores(
    requests: Sequence[ScoreRequest], batch: TrajectoryBatch, weights: Mapping[str, ScoreWeights]
) -> ScorePlan:
    """The forwards that answer all requests about a batch; see the module's invariants."""
    return plan_rows(score_rows(requests, batch, weights), weights)


def plan_rows(rows: Sequence[ScoreRow], weights: Mapping[str, ScoreWeights]) -> ScorePlan:
    """The same from rows already made by ``score_rows``."""
    table = ordered(weights)
    group_of = {model.identity: number for number, (_, model) in enumerate(table)}
    member = np.array([group_of[row.weights.identity] for row in rows], dtype=np.int64)
    groups, aims = [], [Aim(0, *[np.empty(0, dtype=np.int64)] * 4)] * len(rows)
    for number, (names, model) in enumerate(table):
        mine = np.flatnonzero(member == number).tolist()
        group, found = _group(names, model, [rows[i] for i in mine], number)
        groups.append(group)
        for i, aim in zip(mine, found, strict=True):
            aims[i] = aim
    asked = sum(len(row.ids) for row in rows)
    return ScorePlan(tuple(row.request for row in rows), tuple(groups), tuple(aims), asked)


def _merge(rows: Sequence[ScoreRow]) -> tuple[list[int], list[int]]:
    """The rows that run, as indices, in the order of their ids; and for every row which of those holds it.

    Sorted by big-endian bytes, ids that begin others stand right before them, so neighbours alone are compared. A row
    without ids is held by none (-1).
    """
    keys = [(row.replay, row.ids.astype(">i4").tobytes()) for row in rows]
    order = sorted(range(len(rows)), key=keys.__getitem__)
    leaders: list[int] = []
    home = [-1] * len(rows)
    for i in reversed(order):
        if not len(rows[i].ids):
            continue
        replay, ids = keys[i]
        if not leaders or keys[leaders[-1]][0] != replay or not keys[leaders[-1]][1].startswith(ids):
            leaders.append(i)
        home[i] = len(leaders) - 1
    return leaders[::-1], [len(leaders) - 1 - h if h >= 0 else -1 for h in home]


def _group(
    names: tuple[str, ...], model: ScoreWeights, rows: Sequence[ScoreRow], number: int
) -> tuple[ScoreGroup, list[Aim]]:
    leaders, home = _merge(rows)
    lengths = np.array([len(rows[i].ids) for i in leaders], dtype=np.int64)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    size = int(offsets[-1])
    ids = np.concatenate([rows[i].ids for i in leaders]) if leaders else np.empty(0, dtype=np.int32)
    replay = np.array([rows[i].replay for i in leaders], dtype=np.int64)[owners(offsets)]
    within = np.arange(size) - offsets[:-1][owners(offsets)]
    flat = [row.place + offsets[h] for row, h in zip(rows, home, strict=True)]
    wants = [row.request.outputs for row in rows]

    def items(wanted: Sequence[bool]) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
        """Places that any of the wanting rows reads, and each row's answers among them."""
        mark = np.zeros(size, dtype=bool)
        for at, wants_it in zip(flat, wanted, strict=True):
            if wants_it:
                mark[at] = True
        index = np.cumsum(mark) - 1
        none = np.empty(0, dtype=np.int64)
        return np.flatnonzero(mark), [index[at] if w else none for at, w in zip(flat, wanted, strict=True)]

    given_ids = [row.request.given_ids for row in rows]
    scored, at_scored = items(
        [w.distribution or w.value or g is not None for w, g in zip(wants, given_ids, strict=True)]
    )
    topk, at_topk = items([w.topk > 0 for w in wants])
    hidden, at_hidden = items([bool(w.hidden) for w in wants])
    pairs = [
        np.empty(0, dtype=np.int64) if g is None else ((at[:, None] << 32) | g.astype(np.int64)).reshape(-1)
        for at, g in zip(flat, given_ids, strict=True)
    ]
    pair, inverse = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *pairs]), return_inverse=True)
    at_given = np.split(inverse.astype(np.int64), np.cumsum([len(p) for p in pairs])[:-1]) if pairs else []
    group = ScoreGroup(
        names=names,
        weights=model,
        outputs=reduce(ScoreOutputs.union, (row.request.outputs for row in rows if len(row.ids)), NO_OUTPUTS),
        row_offsets=offsets,
        ids=ids,
        source=np.where(replay >= 0, replay + within, -1).astype(np.int64),
        scored=scored,
        topk=topk,
        given=pair >> 32,
        given_id=(pair & 0xFFFFFFFF).astype(np.int32),
        hidden=hidden,
    )
    found = zip(at_scored, at_topk, at_given, at_hidden, strict=True)
    return group, [Aim(number, *places) for places in found]
