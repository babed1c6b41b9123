"""Running a score plan: packed rows to a forward, its outputs back to the requests. Pure numpy around one callable.

Invariants (``tests/credit/test_scoring_run.py`` asserts each):

1. Positions restart at 0 in every row of a packed piece, and ``cu_seqlens`` bounds the rows: no attention crosses one.
2. The logits at ``logit_index`` predict ``target``; ``hidden_index`` stands on the token itself.
3. How rows are packed changes no reply; every row of a group runs exactly once.
4. A forward's outputs are checked (shapes, finite) before any reply is made from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_ext.credit.score_plan import Aim, ScoreGroup, ScorePlan
from megatron_ext.credit.scoring import ScoreArrays, ScoreError, ScoreOutputs, ScoreReply, ScoreRequest, from_arrays
from megatron_ext.trajectory.packing import pack


@dataclass(frozen=True, eq=False)
class PackedScores:
    """Some ``rows`` int64 [R] of a group as one forward sees them: T tokens, n of them predicted.

    ``ids``, ``positions``, ``source`` int64 [T] (``source`` as in ``ScoreGroup``); ``cu_seqlens`` int32 [R+1];
    ``logit_index``, ``target`` int64 [n]; ``topk_index`` int64 [k'] and ``given_index`` int64 [g] index into the n
    predicted tokens; ``given_id`` int64 [g]; ``hidden_index`` int64 [h] indexes into the T tokens. ``*_item`` say which
    of the group's items each is.
    """

    group: ScoreGroup
    rows: NDArray[np.int64]
    ids: NDArray[np.int64]
    positions: NDArray[np.int64]
    source: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    logit_index: NDArray[np.int64]
    target: NDArray[np.int64]
    topk_index: NDArray[np.int64]
    given_index: NDArray[np.int64]
    given_id: NDArray[np.int64]
    hidden_index: NDArray[np.int64]
    scored_item: NDArray[np.int64]
    topk_item: NDArray[np.int64]
    given_item: NDArray[np.int64]
    hidden_item: NDArray[np.int64]

    @property
    def outputs(self) -> ScoreOutputs:
        """What the forward must return (``topk`` and ``hidden`` only at their own indices)."""
        return self.group.outputs

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


def _ranges(start: NDArray[np.int64], size: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The indices of several ranges one after another, and the range each belongs to."""
    owner = np.repeat(np.arange(len(size), dtype=np.int64), size)
    return np.arange(len(owner), dtype=np.int64) + (start - np.cumsum(size) + size)[owner], owner


def pack_rows(group: ScoreGroup, members: ArrayLike) -> PackedScores:
    """The rows ``members`` int [R] of a group, packed in that order; none make an empty piece, which keeps a rank in
    step with the others."""
    rows = np.asarray(members, dtype=np.int64).reshape(-1)
    starts, lengths = group.row_offsets[rows], group.lengths[rows]
    cu = np.concatenate([[0], np.cumsum(lengths)])
    token, owner = _ranges(starts, lengths)

    def items(places: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Which of the items at ``places`` the rows hold, and where those stand in this piece."""
        first = np.searchsorted(places, starts)
        item, row = _ranges(first, np.searchsorted(places, starts + lengths) - first)
        return item, places[item] - starts[row] + cu[:-1][row]

    scored_item, scored = items(group.scored)
    topk_item, topk = items(group.topk)
    given_item, given = items(group.given)
    hidden_item, hidden = items(group.hidden)
    ids = group.ids[token].astype(np.int64)
    return PackedScores(
        group=group,
        rows=rows,
        ids=ids,
        positions=np.arange(len(token), dtype=np.int64) - cu[:-1][owner],
        source=group.source[token],
        cu_seqlens=cu.astype(np.int32),
        logit_index=scored - 1,
        target=ids[scored],
        topk_index=np.searchsorted(scored, topk),
        given_index=np.searchsorted(scored, given),
        given_id=group.given_id[given_item].astype(np.int64),
        hidden_index=hidden,
        scored_item=scored_item,
        topk_item=topk_item,
        given_item=given_item,
        hidden_item=hidden_item,
    )


class ForwardOutputs(ScoreArrays):
    """What a forward returns for packed rows, and what the rows of a group give together.

    ``logp``, ``entropy``, ``value`` [n] at the predicted tokens; ``topk_ids``, ``topk_logp`` [k', k] at ``topk_index``;
    ``given_logp`` [g] of ``given_id`` at ``given_index``; ``hidden`` layer -> [h, d] at ``hidden_index``. Any float
    type; replies are float32.
    """


def _items(group: ScoreGroup) -> dict[str | int, tuple[int, int]]:
    """What a forward of this group returns: name -> (how many items the group has, dimensions of the array)."""
    wants, count = group.outputs, len(group.scored)
    needed: dict[str | int, tuple[int, int]] = {
        name: (count, 1) for name in ("logp", "entropy", "value") if getattr(wants, name)
    }
    if wants.topk:
        needed |= {"topk_ids": (len(group.topk), 2), "topk_logp": (len(group.topk), 2)}
    if len(group.given):
        needed["given_logp"] = (len(group.given), 1)
    return needed | dict.fromkeys(wants.hidden, (len(group.hidden), 2))


def _places(piece: PackedScores, name: str | int) -> NDArray[np.int64]:
    """Which of the group's items a piece's array ``name`` holds."""
    if isinstance(name, int):
        return piece.hidden_item
    if name.startswith("topk"):
        return piece.topk_item
    return piece.given_item if name == "given_logp" else piece.scored_item


def assemble(group: ScoreGroup, pieces: Iterable[tuple[PackedScores, ForwardOutputs]]) -> ForwardOutputs:
    """The outputs of a whole group from those of its packed pieces, in any order; each row must come exactly once."""
    done = list(pieces)
    ran = np.concatenate([np.empty(0, dtype=np.int64), *(piece.rows for piece, _ in done)])
    times = np.bincount(ran, minlength=group.num_rows)
    if np.any(times != 1):
        row = int(np.argmax(times != 1))
        raise ScoreError(f"weights {group.names[0]!r}: row {row} ran {times[row]} times, every row runs once")
    if not done:
        return ForwardOutputs()
    out: dict[str | int, NDArray[Any]] = {}
    for name, (count, ndim) in _items(group).items():
        parts = [_part(name, ndim, piece, outputs) for piece, outputs in done]
        joined = np.empty((count, *parts[0].shape[1:]), dtype=parts[0].dtype)
        for (piece, _), part in zip(done, parts, strict=True):
            joined[_places(piece, name)] = part
        out[name] = joined
    return ForwardOutputs(**from_arrays(out))


def _part(name: str | int, ndim: int, piece: PackedScores, outputs: ForwardOutputs) -> NDArray[Any]:
    what = f"hidden[{name}]" if isinstance(name, int) else name
    held = outputs.arrays()
    if name not in held:
        raise ScoreError(f"weights {piece.group.names[0]!r}: the forward returned no {what}")
    array = held[name]
    shape: tuple[int, ...] = (len(_places(piece, name)),)
    if ndim == 2:
        shape += (piece.outputs.topk,) if not isinstance(name, int) else array.shape[1:2]
    if array.shape != shape or array.ndim != ndim:
        raise ScoreError(f"weights {piece.group.names[0]!r}: the forward's {what} is {array.shape}, expected {shape}")
    if not np.all(np.isfinite(np.asarray(array, dtype=np.float64))):
        raise ScoreError(f"weights {piece.group.names[0]!r}: the forward's {what} is not finite")
    return array.astype(np.int32 if name == "topk_ids" else np.float32)


def scatter(plan: ScorePlan, outputs: Sequence[ForwardOutputs]) -> tuple[ScoreReply, ...]:
    """The reply to each request of a plan, in its order, from the outputs of each of its groups."""
    held = [group_outputs.arrays() for group_outputs in outputs]
    if len(held) != len(plan.groups):
        raise ScoreError(f"outputs of {len(held)} groups for a plan of {len(plan.groups)}")
    replies = []
    for request, aim in zip(plan.requests, plan.aims, strict=True):
        reply = ScoreReply(**from_arrays(_answers(request, aim, held[aim.group])))
        reply.check(request)
        replies.append(reply)
    return tuple(replies)


def _answers(request: ScoreRequest, aim: Aim, held: Mapping[str | int, NDArray[Any]]) -> dict[str | int, NDArray[Any]]:
    wants, count = request.outputs, len(request.positions)
    found: dict[str | int, NDArray[Any]] = {}
    # A request without positions ran nowhere: its answers are empty arrays.
    for name in ("logp", "entropy", "value"):
        if getattr(wants, name):
            found[name] = held[name][aim.scored] if count else np.empty(0, dtype=np.float32)
    for name, dtype in (("topk_ids", np.int32), ("topk_logp", np.float32)):
        if wants.topk:
            found[name] = held[name][aim.topk, : wants.topk] if count else np.empty((0, wants.topk), dtype=dtype)
    for layer in wants.hidden:
        found[layer] = held[layer][aim.hidden] if count else np.empty((0, 0), dtype=np.float32)
    if request.given_ids is not None:
        given = held["given_logp"][aim.given] if request.given_ids.size else np.empty(0, dtype=np.float32)
        found["given_logp"] = given.reshape(request.given_ids.shape)
    return found


def execute(
    plan: ScorePlan, forward: Callable[[PackedScores], ForwardOutputs], *, tokens_per_microbatch: int
) -> tuple[ScoreReply, ...]:
    """The replies of a plan by one callable that maps packed rows to outputs: what a laptop or a test runs.

    ``forward`` sees the pieces of one set of weights after another (``piece.group``), so that it swaps weights once a
    group; a group without rows is not run. Raises ``PackingError`` on a row over ``tokens_per_microbatch``.
    """
    outputs = []
    for group in plan.groups:
        members = pack(group.lengths, cap=tokens_per_microbatch).microbatches[0] if group.num_rows else ()
        pieces = [pack_rows(group, rows) for rows in members]
        outputs.append(assemble(group, [(piece, forward(piece)) for piece in pieces]))
    return scatter(plan, outputs)
