"""Score plans on Megatron: each data-parallel rank runs the forwards of its own requests, all ranks in step.

Every rank of the layout calls ``execute_plan`` together: ranks of one replica (tensor, context, pipeline) with the same
plan, data-parallel ranks with plans of their own over the same table of weights, a plan without requests included.

Invariants (``tests/integration/test_score_execution.py``):

1. A reply is that of the request's own sequence run alone on one rank, whatever the layout, the packing and what the
   other ranks ask for; every rank of a replica holds the same replies, bit for bit.
2. Weights are swapped once a group that any rank has rows for, and are the trained ones again afterwards; parameters,
   gradients and optimizer stay as they were.
3. Rows that ask for ``replay_routing`` run the experts of the record; the others' routers choose.
4. What cannot be run is refused in one line on every rank before anything is run, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.credit.score_plan import CURRENT, ScoreGroup, ScorePlan
from megatron_ext.credit.score_run import ForwardOutputs, assemble, pack_rows, scatter
from megatron_ext.credit.scoring import ScoreError, ScoreReply, from_arrays
from megatron_ext.models.forward import unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.training.ranks.lockstep import rounded
from megatron_ext.training.ranks.replica import add_over
from megatron_ext.training.scoring.microbatch import Recorded, ScoreMicroBatch, pack_and_replay, score_microbatch
from megatron_ext.training.scoring.outputs import item_shapes, read_logits, record_hidden
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.packing import pack

Snapshots = Mapping[str, Sequence[torch.Tensor]]


def execute_plan(
    trainer: Trainer,
    plan: ScorePlan,
    snapshots: Snapshots,
    *,
    tokens_per_microbatch: int,
    recorded: Recorded | None = None,
) -> tuple[ScoreReply, ...]:
    """The reply to each request of this rank's plan, in its order. No gradient.

    Args:
        snapshots: weights by name (``Trainer.snapshot``), for what is asked of others than ``current``.
        tokens_per_microbatch: the tokens of a micro-batch on one context-parallel rank.
        recorded: where requests with ``replay_routing`` find the experts of their rows.

    Raises:
        ScoreError: outputs the trainer cannot give (values), weights without a snapshot, a row over
            ``tokens_per_microbatch``, experts that were not recorded, ranks whose plans do not go together, scores that
            are not finite; on every rank.
    """
    context = trainer.context
    packed: list[list[NDArray[np.int64]]] = []
    held = [(g.names, g.weights, [n for n in g.names if n in snapshots]) for g in plan.groups]
    table = crc32(repr(held).encode())

    def prepare() -> None:
        for group in plan.groups:
            _check_weights(trainer, group, snapshots)
            packed.append(_packed(group, tokens_per_microbatch, context.config.context, recorded))

    _together(plan, table, context, prepare)
    counts = torch.tensor([len(rows) for rows in packed], dtype=torch.int64, device=context.device)
    if context.data_parallel_size > 1:
        dist.all_reduce(counts, op=dist.ReduceOp.MAX, group=context.groups.dp)
    outputs: list[ForwardOutputs] = []
    for group, rows, count in zip(plan.groups, packed, counts.tolist(), strict=True):
        if not count:
            outputs.append(ForwardOutputs())
            continue
        snapshot = _snapshot(group, snapshots)
        with nullcontext() if snapshot is None else trainer.weights(snapshot):
            outputs.append(_run_group(trainer, group, rows, rounded(count, context.config), recorded))
    replies: list[ScoreReply] = []

    def answer() -> None:
        whole = [
            assemble(group, [(pack_rows(group, np.arange(group.num_rows)), out)] if group.num_rows else [])
            for group, out in zip(plan.groups, outputs, strict=True)
        ]
        replies.extend(scatter(plan, whole))

    _together(plan, table, context, answer)
    return tuple(replies)


# -- before and after the forwards -------------------------------------------------------------------------------------
def _snapshot(group: ScoreGroup, snapshots: Snapshots) -> Sequence[torch.Tensor] | None:
    """The weights to swap in for a group; None for those that the trainer holds."""
    if CURRENT in group.names:
        return None
    return next(snapshots[name] for name in group.names if name in snapshots)


def _check_weights(trainer: Trainer, group: ScoreGroup, snapshots: Snapshots) -> None:
    """Refuses rows whose weights are not here, and snapshots of another model or layout."""
    names = " = ".join(group.names)
    if CURRENT in group.names:
        return
    if not any(name in snapshots for name in group.names):
        if group.num_rows:
            raise ScoreError(f"weights {names!r}: no snapshot; there are {', '.join(sorted(snapshots)) or 'none'}")
        return
    own = [parameter.shape for chunk in trainer.chunks for parameter in chunk.parameters()]
    if [values.shape for values in _snapshot(group, snapshots) or ()] != own:
        raise ScoreError(
            f"weights {names!r}: the snapshot is not of this model in this layout; take Trainer.snapshot()"
        )


def _packed(group: ScoreGroup, cap: int, context_size: int, recorded: Recorded | None) -> list[NDArray[np.int64]]:
    """The rows of each micro-batch of a group, or the reason why the trainer cannot run it."""
    names = " = ".join(group.names)
    if group.outputs.value:
        raise ScoreError(f"weights {names!r}: values are asked for, and the trained model has no value head")
    if np.any(group.source >= 0):
        if recorded is None:
            raise ScoreError(
                f"weights {names!r}: replay_routing, and the run replays none; set rollout.replay_routing=true or ask "
                "without it"
            )
        pack_and_replay(group, np.arange(group.num_rows), recorded)
    if not group.num_rows:
        return []
    return list(pack(group.lengths, cap=cap, context=context_size).microbatches[0])


def _together(plan: ScorePlan, table: int, context: ParallelContext, work: Callable[[], None]) -> None:
    """Runs what may fail on one rank alone, so that it fails on all; and compares the ranks' plans and tables."""
    error: ValueError | None = None
    try:
        work()
    except ValueError as caught:
        error = caught
    if context.world_size > 1:
        own = _content(plan)
        ends = torch.tensor([own, -own], dtype=torch.int64, device=context.device)
        for group in (context.groups.tp, context.groups.cp, context.groups.pp):
            dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=group)
        mixed = int(ends[0]) != -int(ends[1])
        state = [int(error is not None), int(mixed), table, -table]
        worst = torch.tensor(state, dtype=torch.int64, device=context.device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        failed, any_mixed, most, fewest = worst.tolist()
        if error is None and most != -fewest:
            error = ScoreError("ranks have different tables of weights or snapshots; every rank needs the same")
        if error is None and any_mixed:
            error = ScoreError("ranks of one replica (tensor, context, pipeline) plan different score requests")
        if error is None and failed:
            error = ScoreError("another rank cannot run its score plan; its own error says why")
    if error is not None:
        raise error if isinstance(error, ScoreError) else ScoreError(str(error)) from error


def _content(plan: ScorePlan) -> int:
    """A number that differs when what is run or read differs."""
    key = 0
    for group in plan.groups:
        key = crc32(repr(group.outputs).encode(), key)
        for array in (group.row_offsets, group.ids, group.scored, group.topk, group.given, group.given_id):
            key = crc32(np.ascontiguousarray(array).tobytes(), key)
        key = crc32(np.ascontiguousarray(group.hidden).tobytes(), key)
    return key


# -- one group ---------------------------------------------------------------------------------------------------------
def _run_group(
    trainer: Trainer,
    group: ScoreGroup,
    rows: Sequence[NDArray[np.int64]],
    count: int,
    recorded: Recorded | None,
) -> ForwardOutputs:
    """The items of a group on every rank of the replica, from ``count`` micro-batches."""
    context, wants = trainer.context, group.outputs

    def made(members: Sequence[int] | NDArray[np.int64]) -> ScoreMicroBatch:
        size, place = context.config.context, context.context_rank
        return score_microbatch(group, members, context_size=size, context_rank=place, recorded=recorded).to(
            context.device
        )

    micro = [made(part) for part in rows]
    micro += [made([])] * (count - len(micro))
    items = {name: torch.zeros(shape, dtype=dtype, device=context.device) for name, shape, dtype in item_shapes(group)}
    width = unwrap(trainer.chunks[0]).config.hidden_size
    states = {layer: torch.zeros(len(group.hidden), width, device=context.device) for layer in wants.hidden}

    def read(mb: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        assert isinstance(mb, ScoreMicroBatch)
        read_logits(mb, logits, group, items, context.tensor_group, trainer.vocab)
        return logits.new_zeros(()), None

    for chunk in trainer.chunks:
        chunk.eval()
    try:
        with torch.no_grad(), record_hidden(trainer, micro, states):
            trainer.run(micro, read, forward_only=True)
    finally:
        for chunk in trainer.chunks:
            chunk.train()
    # Only the last stage has logits, and a context-parallel rank those of its share: elsewhere the items are zeros.
    for values in items.values():
        add_over(context.groups.cp, values)
        add_over(context.groups.pp, values)
    for values in states.values():
        for ranks in (context.groups.tp, context.groups.cp, context.groups.pp):
            add_over(ranks, values)
    found: dict[str | int, NDArray[Any]] = {name: values.cpu().numpy() for name, values in items.items()}
    found.update((layer, values.cpu().numpy()) for layer, values in states.items())
    return ForwardOutputs(**from_arrays(found))
