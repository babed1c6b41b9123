"""A causal model of a few lines that scores packed rows, and the same scores one request at a time without any plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from megatron_ext.credit.score_plan import ScoreWeights
from megatron_ext.credit.score_run import ForwardOutputs, PackedScores
from megatron_ext.credit.scoring import Insert, ScoreOutputs, ScoreReply, ScoreRequest
from megatron_ext.trajectory.record import TrajectoryBatch

VOCAB, WIDTH, LAYERS = 100, 8, 2


def ask(segment: int, context_ids: ArrayLike | None, positions: ArrayLike, *args: Any, **values: Any) -> ScoreRequest:
    """A request from plain lists."""
    context = None if context_ids is None else np.asarray(context_ids)
    return ScoreRequest(segment, context, np.asarray(positions), *args, **values)


def hint(before: int, ids: ArrayLike) -> Insert:
    return Insert(before, np.asarray(ids))


def table(**other: Any) -> dict[str, ScoreWeights]:
    """``current``, a ``snapshot`` of it one version older, a ``teacher``; and ``other``."""
    base: dict[str, Any] = {
        "vocabulary": "bpe",
        "vocab_size": VOCAB,
        "layers": LAYERS,
        "max_tokens": 200,
        "value_head": True,
    }
    return {
        "current": ScoreWeights(model="policy", version=1, **base),
        "snapshot": ScoreWeights(model="policy", version=0, **base),
        "teacher": ScoreWeights(model="teacher", version=0, temperature=2.0, **base),
        **{name: ScoreWeights(**(base | values)) for name, values in other.items()},
    }


class TinyModel:
    """Two layers of causal attention with positions, one set of random fp64 parameters an identity of weights."""

    def __init__(self) -> None:
        self.tokens = 0  # that went through a forward
        self.swaps: list[str] = []

    def run(self, weights: ScoreWeights, ids: Any, positions: Any, row: Any) -> list[torch.Tensor]:
        """Hidden states after the embedding and each layer [T, d], then logits [T, V] and values [T]."""
        seed = sum(map(ord, weights.model)) * 10 + weights.version
        generator = torch.Generator().manual_seed(seed)

        def matrix(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)

        embed, place, out, value = matrix(VOCAB, WIDTH), matrix(300, WIDTH), matrix(WIDTH, VOCAB), matrix(WIDTH)
        states = [embed[torch.as_tensor(ids)] + place[torch.as_tensor(positions)]]
        row = torch.as_tensor(row)
        allowed = (row[:, None] == row[None, :]) & torch.ones(len(row), len(row), dtype=torch.bool).tril()
        for _ in range(LAYERS):
            q, k, v = (states[-1] @ matrix(WIDTH, WIDTH) / WIDTH**0.5 for _ in range(3))
            weight = (q @ k.T).masked_fill(~allowed, -torch.inf).softmax(-1)
            states.append((states[-1] + weight @ v).tanh())
        return [*states, states[-1] @ out / weights.temperature, states[-1] @ value]

    def __call__(self, piece: PackedScores) -> ForwardOutputs:
        if not self.swaps or self.swaps[-1] != piece.group.names[0]:
            self.swaps.append(piece.group.names[0])
        self.tokens += piece.num_tokens
        row = np.repeat(np.arange(len(piece.rows)), np.diff(piece.cu_seqlens))
        with torch.no_grad():
            *states, logits, value = self.run(piece.group.weights, piece.ids, piece.positions, row)
            logp = logits[piece.logit_index].log_softmax(-1)
            top = logp[piece.topk_index].topk(piece.outputs.topk)
            return ForwardOutputs(
                logp=logp.gather(1, torch.as_tensor(piece.target)[:, None])[:, 0].numpy(),
                entropy=-(logp.exp() * logp).sum(-1).numpy(),
                value=value[piece.logit_index].numpy(),
                topk_ids=top.indices.numpy(),
                topk_logp=top.values.numpy(),
                given_logp=logp[piece.given_index, piece.given_id].numpy(),
                hidden={layer: states[layer][piece.hidden_index].numpy() for layer in piece.outputs.hidden},
            )

    def naive(
        self, request: ScoreRequest, batch: TrajectoryBatch, weights: Mapping[str, ScoreWeights]
    ) -> dict[str | int, np.ndarray]:
        """The scores of one request, its sequence written token by token."""
        first, end = (int(batch.segment_tokens[request.segment + i]) for i in (0, 1))
        answer, context = request.answer_ids, request.context_ids
        if answer is not None:
            stop = end if request.cut is None else request.cut
            start = first if context is None else stop if request.start is None else request.start
        else:
            stop = int(request.positions[-1]) + 1
            start = int(request.positions[0]) if request.start is None else request.start
            start = first if context is None else start
        ids = [] if context is None else context.tolist()
        where = {}
        for token in range(start, stop + 1):
            for insert in request.inserts:
                ids += insert.ids.tolist() if insert.before == token else []
            if token < stop:
                where[token] = len(ids)
                ids.append(int(batch.ids[token]))
        if answer is not None:
            where = {i: len(ids) + i for i in range(len(answer))}
            ids += answer.tolist()
        at = torch.tensor([where[int(p)] for p in request.positions])
        with torch.no_grad():
            *states, logits, value = self.run(weights[request.weights_ref], ids, range(len(ids)), torch.zeros(len(ids)))
        logp = logits.log_softmax(-1)[at - 1]
        wants = request.outputs
        out: dict[str | int, np.ndarray] = {layer: states[layer][at].numpy() for layer in wants.hidden}
        if wants.logp:
            out["logp"] = logp[torch.arange(len(at)), torch.tensor(ids)[at]].numpy()
        if wants.entropy:
            out["entropy"] = -(logp.exp() * logp).sum(-1).numpy()
        if wants.value:
            out["value"] = value[at - 1].numpy()
        if wants.topk:
            top = logp.topk(wants.topk)
            out |= {"topk_ids": top.indices.numpy(), "topk_logp": top.values.numpy()}
        if request.given_ids is not None:
            given = torch.from_numpy(request.given_ids.astype(np.int64))
            out["given_logp"] = logp.gather(1, given).numpy()
        return out


def assert_same(reply: ScoreReply, want: Mapping[str | int, np.ndarray], what: str = "") -> None:
    held = reply.arrays()
    assert set(held) == set(want), what
    for name, values in want.items():
        np.testing.assert_allclose(held[name], values, rtol=2e-6, atol=2e-6, err_msg=f"{what} {name}")


def random_requests(batch: TrajectoryBatch, seed: int, count: int) -> list[ScoreRequest]:
    """Requests of every kind about random segments: plain, another context, hints, an answer; repeats among them."""
    rng = np.random.default_rng(seed)
    usable = np.flatnonzero(np.diff(batch.segment_tokens) >= 3)
    made: list[ScoreRequest] = []

    def words(low: int, high: int) -> np.ndarray:
        # Few distinct ids, so that contexts and answers of different requests meet.
        return rng.integers(0, 3, int(rng.integers(low, high)))

    while len(made) < count and len(usable):
        segment = int(rng.choice(usable))
        first, end = int(batch.segment_tokens[segment]), int(batch.segment_tokens[segment + 1])
        kind = rng.choice(["plain", "context", "inserts", "answer", "context_answer", "again"])
        if kind == "again" and made:
            made.append(made[int(rng.integers(len(made)))])
            continue
        positions = np.sort(rng.choice(np.arange(first + 1, end), int(rng.integers(1, end - first)), replace=False))
        context = words(1, 4) if kind.startswith("context") else None
        values: dict[str, Any] = {}
        if kind == "inserts":
            spots = np.sort(rng.integers(first, positions[-1] + 1, int(rng.integers(1, 4))))
            values["inserts"] = tuple(Insert(int(spot), words(0, 4)) for spot in spots)
        elif kind.endswith("answer"):
            answer = words(1, 5)
            positions = np.flatnonzero(rng.random(len(answer)) < 0.7)
            values |= {"answer_ids": answer, "cut": int(rng.integers(first + 1, end + 1))}
            if context is not None and rng.random() < 0.5:
                values["start"] = int(rng.integers(first, values["cut"] + 1))
        elif context is not None and rng.random() < 0.5:
            values["start"] = int(rng.integers(first, positions[0] + 1))
        if rng.random() < 0.3:
            values["given_ids"] = rng.integers(0, VOCAB, (len(positions), 3))
        outputs = ScoreOutputs(
            logp=bool(rng.random() < 0.8) or len(positions) == 0,
            entropy=bool(rng.random() < 0.3),
            value=bool(rng.random() < 0.3),
            topk=int(rng.integers(0, 4)),
            hidden=((), (1,), (0, 2))[int(rng.integers(3))],
        )
        if outputs == ScoreOutputs(logp=False) and "given_ids" not in values:
            continue
        ref = str(rng.choice(["current", "snapshot", "teacher"]))
        made.append(ScoreRequest(segment, context, positions, ref, outputs, **values))
    return made


def shifted(requests: Sequence[ScoreRequest], segments: int, tokens: int) -> list[ScoreRequest]:
    """The requests as they are of a batch that lacks the first ``segments`` segments and ``tokens`` tokens."""
    out = []
    for r in requests:
        moved = tuple(Insert(insert.before - tokens, insert.ids) for insert in r.inserts)
        out.append(
            ScoreRequest(
                r.segment - segments,
                r.context_ids,
                r.positions if r.answer_ids is not None else r.positions - tokens,
                r.weights_ref,
                r.outputs,
                start=None if r.start is None else r.start - tokens,
                cut=None if r.cut is None else r.cut - tokens,
                answer_ids=r.answer_ids,
                inserts=moved,
                given_ids=r.given_ids,
            )
        )
    return out
