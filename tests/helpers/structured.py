"""Batches with operations and fields, and a slow, plain computation of the routing losses to compare with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch

from megatron_ext.models.forward import packed_logits, unwrap
from megatron_ext.moe.load import RoutingSums
from megatron_ext.trajectory.record import Field, Status, TrajectoryBatch

FIELDS = (Field.THINKING, Field.TOOL_USE)


def with_operations(batch: TrajectoryBatch, seed: int = 0, operations: int = 3) -> TrajectoryBatch:
    """The batch with a thinking start and a tool call behind it in each sampled turn, and an operation for most."""
    rng = np.random.default_rng(seed)
    field = np.zeros(batch.num_tokens, dtype=np.int8)
    for start, end in zip(batch.turn_start.tolist(), batch.turn_end.tolist(), strict=True):
        cut = start + int(rng.integers(0, end - start + 1))
        field[start:cut], field[cut:end] = Field.THINKING, Field.TOOL_USE
    label = np.where(batch.turn_role == 3, rng.integers(-1, operations, batch.num_turns), -1)
    return replace(batch, field=np.where(batch.loss_mask, field, 0), turn_labels={"op": label})


def loads(counts: Sequence[Sequence[int]], layers: Sequence[int] | None = None) -> RoutingSums:
    """What a step's routers chose, of which only the loads are known."""
    table = np.array(counts)
    size, experts = table.shape
    zeros = np.zeros(size)
    return RoutingSums(
        layers=tuple(range(size) if layers is None else layers),
        counts=table,
        jaccard=zeros,
        pairs=0,
        flips=zeros.astype(np.int64),
        flipped=0,
        compared=0,
        operations=np.zeros((size, 2, 0, experts)),
        units=np.zeros((2, 0)),
    )


def trained(batch: TrajectoryBatch) -> np.ndarray:
    """bool [T], token by token: what the policy loss trains."""
    owner = batch.token_trajectory()
    return np.array(
        [
            bool(batch.loss_mask[t]) and batch.weight[t] > 0 and Status(int(batch.status[owner[t]])).trainable
            for t in range(batch.num_tokens)
        ],
        dtype=bool,
    )


def _plain_routing(
    chunk: torch.nn.Module, batch: TrajectoryBatch, detach: bool
) -> tuple[dict[tuple[int, int], torch.Tensor], dict[tuple[int, int], set[int]]]:
    """Probabilities [E] and experts of each (layer, token), segment by segment."""
    from megatron.core.transformer.moe.router import TopKRouter

    p: dict[tuple[int, int], torch.Tensor] = {}
    chosen: dict[tuple[int, int], set[int]] = {}
    routers = [module for module in unwrap(chunk).modules() if isinstance(module, TopKRouter)]
    for start, end in zip(batch.segment_tokens[:-1].tolist(), batch.segment_tokens[1:].tolist(), strict=True):
        if end == start:
            continue
        seen: list[torch.Tensor] = []
        handles = [router.register_forward_pre_hook(partial(_see, seen)) for router in routers]
        ids = torch.from_numpy(batch.ids[start:end].astype(np.int64))
        packed_logits(chunk, ids, torch.arange(end - start), torch.tensor([0, end - start]))
        for handle in handles:
            handle.remove()
        for layer, (router, hidden) in enumerate(zip(routers, seen, strict=True)):
            logits = router.gating(hidden.detach() if detach else hidden).view(end - start, -1)
            for t in range(start, end):
                p[layer, t] = logits[t - start].softmax(-1)
                chosen[layer, t] = set(logits[t - start].topk(router.topk).indices.tolist())
    return p, chosen


def plain_distributions(chunk: torch.nn.Module, batch: TrajectoryBatch) -> list[list[torch.Tensor]]:
    """By layer, the router's probabilities [E] for every trained token, with a graph that ends at the routers."""
    inside = trained(batch)
    found: dict[int, list[torch.Tensor]] = {}
    for (layer, token), values in _plain_routing(chunk, batch, True)[0].items():
        if inside[token]:
            found.setdefault(layer, []).append(values)
    return [found[layer] for layer in sorted(found)]


def plain_losses(
    chunk: torch.nn.Module,
    batch: TrajectoryBatch,
    *,
    tokens: np.ndarray | None = None,
    operations: int = 3,
    pull: str = "selective",
    threshold: float = 0.5,
    detach: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """-I and the token loss, means over fields and layers and over pairs and layers, with their graph: segment by
    segment, turn by turn, token by token."""
    inside = trained(batch) if tokens is None else trained(batch) & tokens
    p, chosen = _plain_routing(chunk, batch, detach)
    layers = range(1 + max((layer for layer, _ in p), default=-1))
    informations = []
    for field in FIELDS:
        for layer in layers:
            units = []
            for u in range(batch.num_turns):
                mine = [
                    t
                    for t in range(int(batch.turn_start[u]), int(batch.turn_end[u]))
                    if inside[t] and batch.field[t] == field
                ]
                label = int(batch.turn_labels["op"][u])
                if mine and label >= 0:
                    units.append((label, torch.stack([p[layer, t] for t in mine]).mean(0)))
            if units:
                informations.append(_information(units, operations))
    losses, pairs = [], 0
    for t in range(1, batch.num_tokens):
        same = batch.turn[t] == batch.turn[t - 1] and batch.field[t] == batch.field[t - 1]
        if not (same and inside[t] and inside[t - 1]):
            continue
        pairs += 1
        for layer in layers:
            before, now = chosen[layer, t - 1], chosen[layer, t]
            gap = 1 - len(before & now) / len(before | now)
            if pull == "all" or (pull == "selective" and gap < threshold):
                losses.append(-p[layer, t][sorted(before)].sum().log())
    zero = torch.zeros(())
    information = torch.stack(informations).mean() if informations else zero
    return -information, (torch.stack(losses).sum() if losses else zero) / max(pairs * len(layers), 1)


def _see(seen: list[torch.Tensor], router: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
    seen.append(args[0])


def _information(units: Sequence[tuple[int, torch.Tensor]], operations: int) -> torch.Tensor:
    def entropy(q: torch.Tensor) -> torch.Tensor:
        return -(q * q.log()).sum()

    whole = torch.stack([q for _, q in units]).mean(0)
    inner = torch.zeros(())
    for o in range(operations):
        own = [q for label, q in units if label == o]
        if own:
            inner = inner + len(own) / len(units) * entropy(torch.stack(own).mean(0))
    return entropy(whole) - inner
