"""One training step under a parallel layout: what a rank of the pool runs for the layout bench.

The whole step, three times: rows, packing, scoring of policy and reference, credit, loss, gradient, SGD.
"""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from launch.benches._layouts_setup import (
    LR,
    STEPS,
    TEMPERATURE,
    TERMS,
    Arrays,
    Case,
    Outcome,
    make_batch,
    with_experts,
)
from megatron_ext.config.schema import BackendConfig, ModelConfig, OptimizerConfig, ParallelConfig
from megatron_ext.credit.base import Baseline
from megatron_ext.credit.pipeline import Pipeline, open_view
from megatron_ext.losses.aggregation import token_weights
from megatron_ext.models.backends import resolve_backend
from megatron_ext.models.build import build_model
from megatron_ext.models.forward import unwrap
from megatron_ext.models.hf_config import HFConfig
from megatron_ext.models.hf_map import Piece, rank_plan
from megatron_ext.models.hf_tensors import hf_shapes
from megatron_ext.models.hf_weights import join, place_of
from megatron_ext.models.parallel import ParallelContext, initialize, shutdown
from megatron_ext.moe.policies import TrainedRouter, routers
from megatron_ext.moe.replay_tokens import ReplayRule
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.training.optimizer import wrap
from megatron_ext.training.ranks.lockstep import rank_microbatches
from megatron_ext.training.ranks.replica import gather_scores
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.training.trainer import TokenInputs, Trainer
from megatron_ext.trajectory.packing import PackPlan
from megatron_ext.trajectory.record import TrajectoryBatch
from megatron_ext.trajectory.rows import Rows, make_rows

# Megatron's distributed optimizer takes Adam alone. Without memory and with an eps far above any gradient, Adam moves
# by lr / eps times the gradient, to the last bits of fp32.
ADAM_EPS = 1e6


def run_case(case: Case) -> Outcome | None:
    """Runs the case on this rank of the process group; the first rank returns what came of it.

    Raises when ranks disagree on a result that all of them should have, or on a weight that several hold.
    """
    context = initialize(ParallelConfig(**case.parallel), resolve_backend(BackendConfig(device="cpu")), seed=1)
    try:
        return _run(case, context)
    finally:
        shutdown(context)


RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}


def _build(hf: HFConfig, context: ParallelContext, seed: int, recompute: str = "") -> list[torch.nn.Module]:
    model = ModelConfig(hf_config="", max_context=128)
    overrides = TrainedRouter().config_overrides() | dict(RECOMPUTE[recompute])
    chunks: list[torch.nn.Module] = list(build_model(hf, model, context.config, context.backend, overrides, seed))
    for _, router in routers(chunks) if hf.expert_bias else ():
        # Fresh ones are zeros, which decide nothing.
        router.expert_bias.copy_(torch.linspace(-0.2, 0.2, hf.num_experts).roll(router.layer_number))
    return chunks


def _trainer(case: Case, hf: HFConfig, context: ParallelContext) -> Trainer:
    rule: dict[str, Any] = {"name": "sgd"}
    if context.config.distributed_optimizer:
        rule = {"name": "adam", "beta1": 0.0, "beta2": 0.0, "eps": ADAM_EPS}
    config = OptimizerConfig(clip_grad=case.clip, weight_decay=0.0, **rule)
    chunks, optimizer = wrap(_build(hf, context, 1, case.recompute), config, context.config, context.backend)
    return Trainer(chunks, optimizer, context, temperature=TEMPERATURE, router=TrainedRouter())


def _run(case: Case, context: ParallelContext) -> Outcome | None:
    hf = case.model()
    trainer, batch = _trainer(case, hf, context), make_batch()
    batch = with_experts(batch) if case.replay else batch
    rows = make_rows(batch, case.tokens_per_row)
    micro = rank_microbatches(
        batch,
        rows,
        context,
        cap=case.cap,
        share_prefixes=case.share_prefixes,
        plan=_plan(case, rows, context),
        replay=ReplayRule.of(hf) if case.replay else None,
    )
    scores = _scored(trainer, micro, batch, _reference(trainer, hf, context))
    view, _ = Pipeline([], baseline=Baseline()).run(open_view(batch, step=0))
    assert scores.reference is not None
    inputs = TokenInputs(
        old_logp=_column(scores.logp),
        rollout_logp=_column(batch.rollout_logp),
        advantage=_column(view.advantage),
        weight=_column(token_weights(batch, "token_mean")),
        ref_logp=_column(scores.reference),
    )
    lr = LR * (ADAM_EPS if context.config.distributed_optimizer else 1.0)
    terms = TERMS[case.terms]()
    results, grads = [], []
    with _margins(trainer if context.world_size == 1 else None) as margins:
        for step in range(STEPS):
            first = step == 0
            results.append(trainer.update(micro, inputs, terms, lr, keep_scores=first, record_experts=first))
            grads.append(whole_tensors(trainer, hf, "grad"))
    kept = results[0].scores
    assert kept is not None
    kept = gather_scores(kept, context)
    skipped = None
    if case.poison:
        # One token of one data-parallel rank: every rank has to skip the step, and the parameters stay.
        bad = inputs.advantage.clone()
        bad[int(np.flatnonzero(batch.loss_mask)[-1])] = float("nan")
        skipped = not trainer.update(micro, replace(inputs, advantage=bad), terms, lr).applied
    params = whole_tensors(trainer, hf, "param")
    loss, norm = [result.loss for result in results], [result.grad_norm for result in results]
    metrics = {name: [result.metrics[name] for result in results] for name in results[0].metrics}
    _agree((loss, norm, metrics, skipped, kept.logp, kept.experts))
    if context.rank:
        return None
    found = {"logp": scores.logp, "entropy": scores.entropy, "reference": scores.reference, "experts": scores.experts}
    found |= {"kept_logp": kept.logp, "kept_entropy": kept.entropy, "kept_experts": kept.experts}
    by_token = {name: values for name, values in found.items() if values is not None}
    margin = min(margins, default=float("inf"))
    return Outcome(
        loss, norm, metrics, grads, params, by_token, margin, skipped, len(micro), sum(mb.num_tokens for mb in micro)
    )


def _column(values: NDArray[Any]) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _reference(trainer: Trainer, hf: HFConfig, context: ParallelContext) -> list[torch.Tensor]:
    """Weights near the policy's, so that the divergence from them is of a size that training meets."""
    other = [q.detach() for chunk in _build(hf, context, seed=2) for q in chunk.parameters()]
    return [p + 0.1 * q for p, q in zip(trainer.snapshot(), other, strict=True)]


def _plan(case: Case, rows: Rows, context: ParallelContext) -> PackPlan | None:
    """None for the packer's own; else micro-batches dealt over data-parallel ranks as they come."""
    if case.plan == "pack":
        return None
    lengths, ranks = rows.lengths, context.data_parallel_size
    order = np.arange(rows.num_rows)
    if case.plan != "one":
        order = np.random.default_rng(0).permutation(order)
    bins: list[list[int]] = []
    for row in order.tolist():
        fits = bins and case.plan != "one" and lengths[[*bins[-1], row]].sum() <= case.cap
        if fits:
            bins[-1].append(row)
        else:
            bins.append([row])
    if case.plan == "first":
        bins = [part for rows_of_bin in bins for part in [rows_of_bin, *[[] for _ in range(ranks - 1)]]]
    bins += [[] for _ in range(-len(bins) % ranks)]
    table = tuple(tuple(np.array(part, dtype=np.int64) for part in bins[rank::ranks]) for rank in range(ranks))
    tokens = np.array([[int(lengths[part].sum()) for part in parts] for parts in table])
    return PackPlan(table, tokens, tokens.astype(np.float64))


def _scored(
    trainer: Trainer,
    micro: list[MicroBatch],
    batch: TrajectoryBatch,
    reference: list[torch.Tensor],
) -> TokenScores:
    """Scores of the whole batch under the policy and the reference, the same on every rank."""
    own = trainer.score(micro, batch.num_tokens, record_experts=True)
    with trainer.weights(reference):
        other = trainer.score(micro, batch.num_tokens)
    scores = gather_scores(replace(own, reference=other.logp), trainer.context)
    _agree((scores.logp, scores.entropy, scores.reference, scores.experts))
    return scores


def _agree(values: Any) -> None:
    """Raises on every rank unless all hold the same bits."""
    digest = hashlib.sha256(pickle.dumps(values)).hexdigest()
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, digest)
    if set(found) != {digest}:
        raise AssertionError(f"ranks hold different results: {found}")


def whole_tensors(trainer: Trainer, hf: HFConfig, what: str) -> Arrays:
    """Every HF tensor's parameter ("param") or gradient of the last update ("grad"), put together on the first rank.

    Raises when ranks that hold the same piece hold different values. Other ranks get an empty mapping.
    """
    chunks = [unwrap(chunk) for chunk in trainer.chunks]
    if what == "grad" and trainer.context.config.distributed_optimizer:
        _complete_gradients(trainer.chunks)
    layout, at = place_of(chunks)
    pieces: list[tuple[Piece, NDArray[Any]]] = []
    for plan in rank_plan(hf, layout, at):
        chunk = chunks[plan.chunk]
        parameter = dict(chunk.named_parameters()).get(plan.param)
        if parameter is None:
            # An expert bias: a buffer, and no gradient moves it.
            buffer = dict(chunk.named_buffers())[plan.param]
            value = buffer if what == "param" else torch.zeros_like(buffer)
        else:
            value = parameter.detach() if what == "param" else vars(parameter)["main_grad"]
        row = 0
        for piece in plan.pieces:
            rows = piece.stop - piece.start if piece.dim == 0 else len(value)
            pieces.append((piece, value[row : row + rows].clone().numpy()))
            row += rows
    world = dist.get_world_size()
    ranks: list[Any] = [None] * world
    dist.gather_object(pieces, ranks if dist.get_rank() == 0 else None)
    if dist.get_rank():
        return {}
    held: dict[Piece, NDArray[Any]] = {}
    for rank, parts in enumerate(ranks):
        for piece, value in parts:
            if not np.array_equal(held.setdefault(piece, value), value):
                gap = np.abs(held[piece] - value).max() / np.abs(value).max()
                raise AssertionError(f"{what} of {piece}: rank {rank} differs from another by {gap:.1e}")
    shapes, found = hf_shapes(hf), {}
    for name, shape in shapes.items():
        own = [(piece, torch.from_numpy(value)) for piece, value in held.items() if piece.name == name]
        found[name] = join(name, shape, own).numpy()
    return found


def _complete_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    """The distributed optimizer leaves on each rank the reduced gradient of its own shard of every bucket."""
    for chunk in chunks:
        for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]:
            group = buffer.data_parallel_group
            for bucket in buffer.buckets:
                shards = list(bucket.grad_data.chunk(group.size()))
                dist.all_gather(shards, shards[group.rank()].clone(), group=group)


@contextmanager
def _margins(trainer: Trainer | None) -> Iterator[list[float]]:
    """``Outcome.margin`` of each router call; nothing without a trainer."""
    from megatron.core.transformer.moe.router import TopKRouter

    found: list[float] = []

    def hook(router: Any, args: Any, output: Any) -> None:
        with torch.no_grad():
            best = router.gating(args[0]).softmax(-1).topk(router.topk + 1, dim=-1).values
            found.append(float((best[..., :-1] - best[..., 1:]).min()))

    chunks = [] if trainer is None else trainer.chunks
    routers = [module for chunk in chunks for module in chunk.modules() if isinstance(module, TopKRouter)]
    handles = [router.register_forward_hook(hook) for router in routers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
