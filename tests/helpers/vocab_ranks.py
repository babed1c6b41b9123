"""What ranks do with a model whose vocabulary is no multiple of anything, under a ``model.vocab_multiple``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from launch.benches._layouts_rank import whole_tensors
from megatron_ext.config.schema import ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.credit.score_plan import ScoreWeights, plan_scores
from megatron_ext.credit.scoring import ScoreOutputs, ScoreRequest
from megatron_ext.losses.entropy import EntropyBonus
from megatron_ext.losses.policy import ClipLoss
from megatron_ext.losses.protocol import LossTerm
from megatron_ext.models.build import build_model
from megatron_ext.models.forward import packed_logits, unwrap
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.moe.policies import TrainedRouter
from megatron_ext.training import publish
from megatron_ext.training.checkpoints import checkpoint, sharded
from megatron_ext.training.checkpoints.checkpoint import SaveRequest
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.scoring.execution import execute_plan
from megatron_ext.training.trainer import Trainer
from tests.helpers.records import random_batch
from tests.helpers.training import BACKEND, TINY, micro_of, random_inputs, rows_of

VOCAB = 113
TOPK = 5
ROWS = ("word_embeddings.weight", "output_layer.weight")
TERMS: Mapping[str, LossTerm] = {
    "policy": ClipLoss(clip_low=0.2, clip_high=0.28),
    "entropy": EntropyBonus(coefficient=0.1),
}
Arrays = Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Order:
    """A model and what to do with it: ``load`` a checkpoint instead of fresh weights, ``save`` one in the end."""

    tied: bool
    multiple: int
    vocab: int = VOCAB
    moe: bool = True
    load: Path | None = None
    save: Path | None = None
    steps: int = 3

    @property
    def hf(self) -> HFConfig:
        hf = replace(TINY, vocab=self.vocab, heads=4, kv_heads=2, tie_word_embeddings=self.tied)
        return hf if self.moe else replace(hf, family="qwen3", num_experts=0, top_k=0)


@dataclass(frozen=True)
class Found:
    """By rank: its ``logits`` without padding. On rank 0: HF tensors ``before`` and ``after`` the steps, and the
    gradients of the first step. ``padding``: the largest value in padding rows of weights, gradients and moments."""

    logits: np.ndarray
    scores: list[Arrays]
    losses: list[float]
    norms: list[float]
    metrics: list[dict[str, float]]
    grads: Arrays
    before: Arrays
    after: Arrays
    rows: int
    padding: float


def over_ranks(parallel: Mapping[str, Any], order: Order) -> Found | str:
    """``play`` in a layout of its own; the line of a checkpoint that is refused."""
    context = initialize(ParallelConfig(**parallel), BACKEND, seed=1)
    try:
        return play(context, order)
    except checkpoint.CheckpointError as error:
        return str(error)
    finally:
        shutdown(context)


def play(context: ParallelContext, order: Order) -> Found:
    hf = order.hf
    model = ModelConfig(hf_config="", max_context=256, vocab_multiple=order.multiple)
    seed = 1 if order.load is None else 9
    chunks = build_model(hf, model, context.config, BACKEND, TrainedRouter().config_overrides(), seed)
    # With a small epsilon Adam makes steps of one size out of gradients that are rounding.
    settings = OptimizerConfig(lr=1e-2, weight_decay=0.1, clip_grad=0.5, eps=0.1)
    wrapped, optimizer = wrap(chunks, settings, context.config, BACKEND)
    trainer = Trainer(wrapped, optimizer, context, temperature=1.3, router=TrainedRouter())
    if order.load is not None:
        (info,) = checkpoint.list_checkpoints(order.load)
        assert checkpoint.load(info, "odd", trainer).reference is not None
    batch = random_batch(3, groups=4)
    rows = rows_of(batch)
    micro = micro_of(batch, rows)
    with torch.no_grad():
        found = [packed_logits(trainer.chunks[-1], mb.ids, mb.positions, mb.cu_seqlens) for mb in micro]
    columns = found[0].shape[1]
    own = max(0, min(columns, order.vocab - columns * context.groups.tp.rank()))
    before, scores = _exported(trainer, hf), _scores(trainer)
    losses, norms, metrics = [], [], []
    grads: Arrays = {}
    for step in range(order.steps):
        result = trainer.update(micro, random_inputs(batch, step), TERMS, lr=1e-2)
        losses.append(result.loss)
        norms.append(result.grad_norm)
        metrics.append(dict(result.metrics))
        assert result.applied
        if step == 0:
            grads = whole_tensors(trainer, hf, "grad")
    if order.save is not None:
        request = SaveRequest(order.steps, "odd", {}, reference=trainer.snapshot())
        checkpoint.save(order.save, request, trainer)
    return Found(
        logits=torch.cat(found)[:, :own].numpy(),
        scores=scores,
        losses=losses,
        norms=norms,
        metrics=metrics,
        grads=grads,
        before=before,
        after=_exported(trainer, hf),
        rows=columns * context.groups.tp.size(),
        padding=_padding(trainer, order.vocab),
    )


def _exported(trainer: Trainer, hf: HFConfig) -> Arrays:
    """What an engine and an HF folder get, on rank 0."""
    chunks = [unwrap(chunk) for chunk in trainer.chunks]
    return {name: tensor.detach().clone().numpy() for name, tensor in publish.whole_tensors(chunks, hf)}


def _scores(trainer: Trainer) -> list[Arrays]:
    """All that logits are read for, of every segment."""
    batch = random_batch(5)
    table = {
        "current": ScoreWeights(
            model="policy", version=1, vocabulary="bpe", vocab_size=VOCAB, layers=2, max_tokens=200, temperature=0.7
        )
    }
    requests = []
    for segment, (first, end) in enumerate(zip(batch.segment_tokens, batch.segment_tokens[1:], strict=False)):
        positions = np.arange(int(first) + 1, int(end))
        given = np.random.default_rng(segment).integers(0, VOCAB, (len(positions), 4), dtype=np.int32)
        wants = ScoreOutputs(entropy=True, topk=TOPK)
        requests.append(ScoreRequest(segment, None, positions, outputs=wants, given_ids=given))
    requests += [replace(requests[0], outputs=ScoreOutputs(topk=VOCAB))]  # every id there is
    replies = execute_plan(trainer, plan_scores(requests, batch, table), {}, tokens_per_microbatch=80)
    return [{str(name): values for name, values in reply.arrays().items()} for reply in replies]


def _padding(trainer: Trainer, vocab: int) -> float:
    """The largest absolute value in any rank's padding rows of weights, gradients and optimizer moments."""
    held = [
        tensor
        for chunk in trainer.chunks
        for name, parameter in chunk.named_parameters()
        if name.endswith(ROWS)
        for tensor in (parameter.detach(), vars(parameter)["main_grad"])
    ]
    facts = sharded.optimizer_facts(trainer.optimizer)
    state = sharded.optimizer_state(trainer.optimizer, sharded.model_state(trainer.chunks), facts)
    kept = [piece.data for piece in state.values() if piece.key.endswith(ROWS)]
    assert len(kept) == len(held), "Adam keeps two of each"
    rank = trainer.context.groups.tp.rank()
    padding = [tensor[max(0, vocab - len(tensor) * rank) :] for tensor in (*held, *kept)]
    worst = torch.stack([part.abs().max() if part.numel() else torch.zeros(()) for part in padding]).max()
    if dist.get_world_size() > 1:
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def assert_same(parts: list[Found], want: Found, rtol: float = 1e-6) -> None:
    """What ``parts`` (of all ranks, data-parallel size 1) found is what one rank without padding found."""
    first = parts[0]
    logits = np.concatenate([part.logits for part in parts], axis=1)
    assert logits.shape == want.logits.shape

    def near(own: Any, other: Any, what: str) -> None:
        own, other = np.asarray(own, dtype=np.float64), np.asarray(other, dtype=np.float64)
        assert own.shape == other.shape, what
        assert np.linalg.norm(own - other) <= rtol * np.linalg.norm(other) + 1e-12, what

    near(logits, want.logits, "logits")
    for part in parts:
        for own, other in zip(part.scores, want.scores, strict=True):
            assert own.keys() == other.keys()
            for name, values in other.items():
                if name == "topk_ids":
                    assert own[name].max(initial=0) < VOCAB
                    assert np.mean(own[name] == values) > 0.99  # but for ties within rounding
                else:
                    near(own[name], values, name)
        near(part.losses, want.losses, "losses")
        near(part.norms, want.norms, "gradient norms")
        assert part.metrics[0].keys() == want.metrics[0].keys()
        for name, value in want.metrics[0].items():
            near(part.metrics[0][name], value, name)
    assert first.grads.keys() == want.grads.keys() and first.before.keys() == want.before.keys()
    whole = [np.concatenate([found.grads[name].ravel() for name in want.grads]) for found in (first, want)]
    near(whole[0], whole[1], "gradients")
    for name, values in want.grads.items():  # a small one may be a difference of large parts
        scale = max(float(np.linalg.norm(values)), 1e-3)
        assert np.linalg.norm(first.grads[name] - values) <= 10 * rtol * scale, f"gradient of {name}"
    for name, values in want.before.items():
        assert np.array_equal(first.before[name], values), f"{name} is exported as it was drawn"
    for name, values in want.after.items():
        assert first.after[name].shape == values.shape
