"""What ranks of a pool run to execute score plans in a layout (``launch.benches._ranks.RankPool``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from megatron_ext.config.schema import ParallelConfig
from megatron_ext.credit.score_plan import ScoreWeights, plan_scores, score_rows
from megatron_ext.credit.scoring import ScoreError, ScoreOutputs, ScoreRequest
from megatron_ext.models.forward import packed_logits, unwrap
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.training.scoring.execution import execute_plan
from megatron_ext.training.scoring.microbatch import Recorded
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.record import TrajectoryBatch
from tests.helpers.records import random_batch
from tests.helpers.replaying import randomly_routed
from tests.helpers.tiny_scorer import ask, hint
from tests.helpers.training import BACKEND, TINY, make_trainer

# Divides by 2 in every dimension.
MODEL = replace(TINY, heads=4, kv_heads=2)
MODELS = {
    "moe": MODEL,
    "dense": replace(MODEL, family="qwen3", num_experts=0, top_k=0),
    "deep": replace(MODEL, layers=4),
}
Answer = dict[str | int, np.ndarray]
ALL = ScoreOutputs(entropy=True, topk=5, hidden=(0, 1, 2))


def table(value_head: bool = False) -> dict[str, ScoreWeights]:
    """``current``, an older ``snapshot`` at another temperature, and ``unused``."""
    base: dict[str, Any] = {"vocabulary": "bpe", "vocab_size": MODEL.vocab, "layers": MODEL.layers, "max_tokens": 200}
    base["value_head"] = value_head
    return {
        "current": ScoreWeights(model="policy", version=1, **base),
        "snapshot": ScoreWeights(model="policy", version=0, temperature=0.7, **base),
        "unused": ScoreWeights(model="other", version=0, **base),
    }


def some_batch() -> TrajectoryBatch:
    """With recorded experts that no router would choose; ``deep`` has more layers than were recorded."""
    return randomly_routed(random_batch(5))


def some_requests(batch: TrajectoryBatch) -> list[ScoreRequest]:
    """Every kind of request, under both weights, about the segments that are long enough."""
    rng = np.random.default_rng(3)
    made: list[ScoreRequest] = []
    for segment in np.flatnonzero(np.diff(batch.segment_tokens) >= 4).tolist():
        first, end = int(batch.segment_tokens[segment]), int(batch.segment_tokens[segment + 1])
        late = np.arange(first + 2, end)
        given = rng.integers(0, MODEL.vocab, (len(late), 3))
        made += [
            ask(segment, None, np.arange(first + 1, end), "current", ALL),
            ask(segment, [7, 8, 9, 90, 91], late, "current", ScoreOutputs(topk=2), given_ids=given),
            ask(
                segment, None, late, "snapshot", ScoreOutputs(entropy=True, topk=3), inserts=(hint(first + 2, [3, 4]),)
            ),
            ask(segment, None, late, "snapshot", ScoreOutputs(hidden=(2,))),
            ScoreRequest.likelihood(segment, [70, 71, 72], cut=first + 3),
            ScoreRequest.likelihood(segment, [5, 110], context_ids=np.array([1, 2, 3]), weights_ref="snapshot"),
            ask(segment, None, [], "current", ALL),
        ]
        # An engine recorded what led to the last sampled token: up to there experts can be replayed.
        sampled = np.flatnonzero(batch.version[first:end] >= 0)
        if len(sampled) and sampled[-1] > 1:
            replayed = ask(segment, None, np.arange(first + 1, first + sampled[-1] + 1), "current", ALL)
            made.append(replace(replayed, replay_routing=True))
    return made


def _trainer(context: ParallelContext, kind: str = "moe") -> tuple[Trainer, dict[str, list[torch.Tensor]]]:
    # The trainer's own temperature must not matter.
    trainer = make_trainer(context, hf=MODELS[kind], temperature=1.7)
    snapshots = {"snapshot": [_other(values) for values in trainer.snapshot()]}
    return trainer, snapshots


def _other(values: torch.Tensor) -> torch.Tensor:
    """Other weights, the same in every layout: what a tensor's shard becomes depends on its own values alone."""
    return values + 0.3 * values.abs().sqrt() * values.sign() * (values * 1e4).sin()


def run_plan(parallel: Mapping[str, Any], cap: int, chosen: Sequence[Sequence[int]], kind: str = "moe") -> list[Answer]:
    """The replies to the requests ``chosen[data-parallel rank]`` (one entry: all ranks the same)."""
    context = initialize(ParallelConfig(**parallel), BACKEND, seed=1)
    try:
        trainer, snapshots = _trainer(context, kind)
        batch = some_batch()
        requests = some_requests(batch)
        mine = [requests[i] for i in chosen[context.data_parallel_rank % len(chosen)]]
        before = trainer.snapshot()
        recorded = Recorded(batch, ReplayRule.of(MODELS[kind])) if kind == "moe" else None
        mine = [request for request in mine if recorded is not None or not request.replay_routing]
        plan = plan_scores(mine, batch, table())
        replies = execute_plan(trainer, plan, snapshots, tokens_per_microbatch=cap, recorded=recorded)
        assert all(torch.equal(a, b) for a, b in zip(before, trainer.snapshot(), strict=True))
        assert all(chunk.training for chunk in trainer.chunks)
        return [reply.arrays() for reply in replies]
    finally:
        shutdown(context)


def run_naive() -> list[Answer]:
    """The same by one plain forward of each request's own sequence, softmax over the gathered logits in fp64."""
    context = initialize(ParallelConfig(), BACKEND, seed=1)
    try:
        trainer, snapshots = _trainer(context)
        batch = some_batch()
        requests = some_requests(batch)
        answers = []
        for row in score_rows(requests, batch, table()):
            own = trainer.snapshot()
            if row.request.weights_ref == "snapshot":
                trainer._write(snapshots["snapshot"])
            with _by_hand(trainer, batch, row.request) if row.request.replay_routing else nullcontext():
                answers.append(_naive(trainer, row.request, row.ids, row.place, row.weights.temperature))
            trainer._write(own)
        return answers
    finally:
        shutdown(context)


@contextmanager
def _by_hand(trainer: Trainer, batch: TrajectoryBatch, request: ScoreRequest) -> Iterator[None]:
    """Puts the recorded experts of the request's segment into the routers, layer by layer."""
    first, calls = int(batch.segment_tokens[request.segment]), iter(range(MODEL.layers))
    assert batch.routed is not None and batch.routed_valid is not None
    routed, valid = batch.routed, batch.routed_valid

    def routing(logits: torch.Tensor, padding_mask: object = None) -> tuple[torch.Tensor, torch.Tensor]:
        flat, layer = logits.view(-1, MODEL.num_experts), next(calls)
        span = slice(first, first + len(flat))
        given = torch.from_numpy(routed[span, layer].astype(np.int64))
        known = torch.from_numpy(valid[span].copy())
        ids = torch.where(known[:, None], given, flat.topk(MODEL.top_k, dim=1).indices)
        weights = torch.zeros_like(flat).scatter(1, ids, flat.gather(1, ids).softmax(-1))
        return weights, torch.zeros_like(flat, dtype=torch.bool).scatter(1, ids, True)

    routers = [router for _, router in trainer.tap.routers()]
    for router in routers:
        router.routing = routing
    try:
        yield
    finally:
        for router in routers:
            del router.routing


@torch.no_grad()
def _naive(trainer: Trainer, request: ScoreRequest, ids: np.ndarray, place: np.ndarray, temperature: float) -> Answer:
    wants, size = request.outputs, len(ids)
    if not size:
        return {}
    chunk, states = unwrap(trainer.chunks[0]), []
    watched = [chunk.embedding, *chunk.decoder.layers]
    handles = [
        part.register_forward_hook(lambda m, a, out: states.append(out[0] if isinstance(out, tuple) else out))
        for part in watched
    ]
    tokens = torch.from_numpy(ids.astype(np.int64))
    logits = packed_logits(chunk, tokens, torch.arange(size), torch.tensor([0, size], dtype=torch.int32))
    for handle in handles:
        handle.remove()
    at = torch.from_numpy(place)
    logp = (logits.double() / temperature).log_softmax(-1)[at - 1]
    out: Answer = {layer: states[layer][:, 0][at].numpy() for layer in wants.hidden}
    if wants.logp:
        out["logp"] = logp.gather(1, tokens[at].unsqueeze(1))[:, 0].numpy()
    if wants.entropy:
        out["entropy"] = -(logp.exp() * logp).sum(-1).numpy()
    if wants.topk:
        top = logp.topk(wants.topk)
        out |= {"topk_ids": top.indices.numpy(), "topk_logp": top.values.numpy()}
    if request.given_ids is not None:
        out["given_logp"] = logp.gather(1, torch.from_numpy(request.given_ids.astype(np.int64))).numpy()
    return out


def refusals(parallel: Mapping[str, Any]) -> dict[str, str]:
    """What every rank says to plans that cannot run; where only some ranks hold the reason, the others say so."""
    context = initialize(ParallelConfig(**parallel), BACKEND, seed=1)
    try:
        trainer, snapshots = _trainer(context)
        batch = some_batch()
        segment = int(np.argmax(np.diff(batch.segment_tokens)))
        first = int(batch.segment_tokens[segment])
        plain = ask(segment, None, [first + 1])
        odd = context.rank % 2 == 1

        def said(
            requests: list[ScoreRequest],
            weights: Mapping[str, ScoreWeights],
            cap: int = 512,
            more: Mapping[str, list[torch.Tensor]] = MappingProxyType({}),
        ) -> str:
            try:
                plan = plan_scores(requests, batch, weights)
                execute_plan(trainer, plan, {**snapshots, **more}, tokens_per_microbatch=cap)
            except ScoreError as error:
                return str(error)
            return ""

        wanting = ask(segment, None, [first + 1], "unused")
        value = ask(segment, None, [first + 1], "current", ScoreOutputs(value=True))
        teacher = table() | {"teacher": replace(table()["unused"], model="teacher")}
        found = {
            "snapshot": said([wanting], table()),
            "shape": said([wanting], table(), more={"unused": trainer.snapshot()[1:]}),
            "one snapshot": said([plain], table(), more={"unused" if odd else "snapshot": trainer.snapshot()}),
            "value": said([value], table(value_head=True)),
            "cap": said([plain], table(), cap=1),
            "one rank": said([value] if odd else [plain], table(value_head=True)),
            "table": said([plain], teacher if odd else table()),
            "different": said([plain] * (1 - odd), table()),
        }
        assert said([plain], table()) == ""  # the ranks are still in step
        return found
    finally:
        shutdown(context)
