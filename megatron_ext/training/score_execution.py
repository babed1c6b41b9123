"""Score plans on Megatron: each data-parallel rank runs the forwards of its own requests, all ranks in step.

Every rank of the layout calls ``execute_plan`` together: ranks of one replica (tensor, context, pipeline) with the same
plan, data-parallel ranks with plans of their own over the same table of weights, a plan without requests included.

Invariants (``tests/integration/test_score_execution.py``):

1. A reply is that of the request's own sequence run alone on one rank, whatever the layout, the packing and what the
   other ranks ask for; every rank of a replica holds the same replies, bit for bit.
2. Weights are swapped once a group that any rank has rows for, and are the trained ones again afterwards; parameters,
   gradients and optimizer stay as they were.
3. Log-probs are of logits / the group's own temperature. The vocabulary stays split over tensor-parallel ranks: they
   exchange k candidates and two numbers a token, never logits.
4. Rows that ask for ``replay_routing`` run the experts of the record; the others' routers choose.
5. What cannot be run is refused in one line on every rank before anything is run, not a hang.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.credit.score_plan import CURRENT, ScoreGroup, ScorePlan
from megatron_ext.credit.score_run import ForwardOutputs, PackedScores, assemble, pack_rows, scatter
from megatron_ext.credit.scoring import ScoreError, ScoreReply, from_arrays
from megatron_ext.losses.logprob import token_logprob_entropy
from megatron_ext.models import cpu_platform
from megatron_ext.models.forward import unwrap
from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.replay_tokens import ReplayError, ReplayRule, ReplayTokens, due_tokens, replay_tokens
from megatron_ext.training.context_share import ContextShare, context_share
from megatron_ext.training.lockstep import rounded
from megatron_ext.training.microbatch import MicroBatch
from megatron_ext.training.replica import add_over
from megatron_ext.training.trainer import Trainer
from megatron_ext.trajectory.packing import pack
from megatron_ext.trajectory.record import TrajectoryBatch

cpu_platform.install()
with cpu_platform.quiet_import():
    from megatron.core.transformer.transformer_layer import TransformerLayer

Snapshots = Mapping[str, Sequence[torch.Tensor]]
# The normaliser of the softmax is worked out over about this many logits at a time.
_CHUNK_ELEMENTS = 1 << 22


@dataclass(frozen=True, eq=False)
class Recorded:
    """Where replayed rows find their experts: the batch that the requests are about, and what its record must be."""

    batch: TrajectoryBatch
    rule: ReplayRule


@dataclass(frozen=True, eq=False)
class _Reads:
    """What this rank reads from a micro-batch: where, and which of the group's items each is; int64.

    ``scored_item`` [m] goes with the micro-batch's ``logit_index``; ``topk``, ``given`` index into those m;
    ``hidden`` indexes into the tokens that this rank runs.
    """

    scored_item: torch.Tensor
    topk: torch.Tensor
    topk_item: torch.Tensor
    given: torch.Tensor
    given_id: torch.Tensor
    given_item: torch.Tensor
    hidden: torch.Tensor
    hidden_item: torch.Tensor


@dataclass(frozen=True)
class ScoreMicroBatch(MicroBatch):
    """A packed piece of a group as the trainer's forward takes it; ``token`` are the group's scored items."""

    reads: _Reads = field(kw_only=True)


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


def pack_and_replay(
    group: ScoreGroup,
    members: Sequence[int] | NDArray[np.int64],
    recorded: Recorded | None,
    share: ContextShare | None = None,
) -> tuple[PackedScores, ReplayTokens | None]:
    """The rows ``members`` packed, and the experts that the places of ``share`` (None: all) replay; None where none of
    the group's rows asks for it."""
    piece = pack_rows(group, members)
    if recorded is None or not np.any(group.source >= 0):
        return piece, None
    lengths = np.diff(piece.cu_seqlens).astype(np.int64)
    row = np.repeat(np.arange(len(lengths)), lengths)
    last = np.full(len(lengths), -1)
    np.maximum.at(last, row[piece.logit_index], piece.positions[piece.logit_index])
    # A hidden state at the last sampled token needs experts that nobody could record.
    np.maximum.at(last, row[piece.hidden_index], piece.positions[piece.hidden_index] - 1)
    due = due_tokens(piece.positions, row, last)
    run = np.arange(len(piece.ids)) if share is None else share.entry[share.place]
    try:
        return piece, replay_tokens(recorded.batch, recorded.rule, piece.source, due, run)
    except ReplayError as error:
        raise ScoreError(str(error)) from error


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
def score_microbatch(
    group: ScoreGroup,
    members: Sequence[int] | NDArray[np.int64],
    *,
    context_size: int = 1,
    context_rank: int = 0,
    recorded: Recorded | None = None,
) -> ScoreMicroBatch:
    """The rows ``members`` of a group as the forward takes them: this context-parallel rank's share, on the CPU."""
    rows = np.asarray(members, dtype=np.int64)
    share = context_share(group.lengths[rows], context_size, context_rank)
    piece, replay = pack_and_replay(group, rows, recorded, share)
    lengths = np.diff(piece.cu_seqlens).astype(np.int64)
    real = share.entry >= 0
    ids, source = np.zeros(len(real), dtype=np.int64), np.full(len(real), -1, dtype=np.int64)
    ids[real], source[real] = piece.ids, np.arange(len(piece.ids))
    position = np.arange(len(real)) - np.repeat(share.offsets[:-1], np.diff(share.offsets))
    stands = share.local[real]  # where each token of the piece is on this rank, -1 for elsewhere

    at = stands[piece.logit_index]
    mine = np.flatnonzero(at >= 0)
    among = np.full(len(at), -1, dtype=np.int64)
    among[mine] = np.arange(len(mine))
    topk, given, hidden = among[piece.topk_index], among[piece.given_index], stands[piece.hidden_index]
    row = np.repeat(piece.rows, lengths)[piece.logit_index]

    def held(values: NDArray[np.int64], where: NDArray[np.int64]) -> torch.Tensor:
        return torch.from_numpy(values[where >= 0].astype(np.int64))

    reads = _Reads(
        scored_item=held(piece.scored_item, at),
        topk=held(topk, topk),
        topk_item=held(piece.topk_item, topk),
        given=held(given, given),
        given_id=held(piece.given_id, given),
        given_item=held(piece.given_item, given),
        hidden=held(hidden, hidden),
        hidden_item=held(piece.hidden_item, hidden),
    )
    return ScoreMicroBatch(
        ids=torch.from_numpy(ids[share.place]),
        positions=torch.from_numpy(position[share.place]),
        place=torch.from_numpy(share.place),
        source=torch.from_numpy(source),
        cu_seqlens=torch.from_numpy(share.offsets.astype(np.int32)),
        logit_index=held(at, at),
        target=held(piece.target, at),
        token=torch.from_numpy(piece.scored_item),
        row=torch.from_numpy(row),
        turn=torch.full((len(at),), -1, dtype=torch.int64),
        held=torch.from_numpy(mine) if context_size > 1 else None,
        replay=replay,
        reads=reads,
    )


def _moved(mb: ScoreMicroBatch, device: torch.device) -> ScoreMicroBatch:
    def to(item: Any) -> dict[str, torch.Tensor]:
        return {name: value.to(device) for name, value in vars(item).items() if isinstance(value, torch.Tensor)}

    replay = None if mb.replay is None else mb.replay.to(device)
    return replace(mb, **to(mb), replay=replay, reads=replace(mb.reads, **to(mb.reads)))


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
        share = score_microbatch(
            group,
            members,
            context_size=context.config.context,
            context_rank=context.context_rank,
            recorded=recorded,
        )
        return _moved(share, context.device)

    micro = [made(part) for part in rows]
    micro += [made([])] * (count - len(micro))
    items = {name: torch.zeros(shape, dtype=dtype, device=context.device) for name, shape, dtype in _shapes(group)}
    width = unwrap(trainer.chunks[0]).config.hidden_size
    states = {layer: torch.zeros(len(group.hidden), width, device=context.device) for layer in wants.hidden}

    def read(mb: MicroBatch, logits: torch.Tensor) -> tuple[torch.Tensor, Any]:
        assert isinstance(mb, ScoreMicroBatch)
        _read_logits(mb, logits, group, items, context.tensor_group)
        return logits.new_zeros(()), None

    for chunk in trainer.chunks:
        chunk.eval()
    try:
        with torch.no_grad(), _record_hidden(trainer, micro, states):
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


def _shapes(group: ScoreGroup) -> Iterator[tuple[str, tuple[int, ...], torch.dtype]]:
    """What the logits are read for: name, shape over the group's items and type."""
    wants = group.outputs
    for name in ("logp", "entropy"):
        if getattr(wants, name):
            yield name, (len(group.scored),), torch.float32
    if wants.topk:
        yield "topk_ids", (len(group.topk), wants.topk), torch.int64
        yield "topk_logp", (len(group.topk), wants.topk), torch.float32
    if len(group.given):
        yield "given_logp", (len(group.given),), torch.float32


def _read_logits(
    mb: ScoreMicroBatch,
    logits: torch.Tensor,
    group: ScoreGroup,
    items: Mapping[str, torch.Tensor],
    ranks: dist.ProcessGroup,
) -> None:
    """Writes what one micro-batch's logits [U, V / tp] say about its items."""
    wants, reads, temperature = group.outputs, mb.reads, group.weights.temperature
    if not items or not group.num_rows:
        return
    used = logits.index_select(0, mb.logit_index)
    if wants.logp or wants.entropy:
        logp, entropy = token_logprob_entropy(
            used, mb.target, temperature=temperature, group=ranks, need_entropy=wants.entropy, need_entropy_grad=False
        )
        for name, values in (("logp", logp), ("entropy", entropy)):
            if name in items:
                items[name][reads.scored_item] = values.float()
    if not wants.topk and "given_logp" not in items:
        return
    total = _log_normaliser(used, temperature, ranks)
    offset = ranks.rank() * used.shape[1]
    if wants.topk:
        ids, top = _topk(used.index_select(0, reads.topk), wants.topk, offset, ranks)
        items["topk_ids"][reads.topk_item] = ids
        items["topk_logp"][reads.topk_item] = top / temperature - total[reads.topk].unsqueeze(1)
    if "given_logp" in items:
        column = reads.given_id - offset
        here = (column >= 0) & (column < used.shape[1])
        own = used[reads.given, column.clamp(0, used.shape[1] - 1)].float()
        # Where another rank holds the id this one adds nothing, not 0 * logit: a logit may be infinite.
        chosen = add_over(ranks, torch.where(here, own, torch.zeros_like(own)))
        items["given_logp"][reads.given_item] = chosen / temperature - total[reads.given]


def _log_normaliser(logits: torch.Tensor, temperature: float, ranks: dist.ProcessGroup) -> torch.Tensor:
    """log sum exp over the whole vocabulary of ``logits / temperature``, float32 [n], from slices [n, V / tp]."""
    step = max(1, _CHUNK_ELEMENTS // max(logits.shape[1], 1))
    parts = [(part.float() / temperature).logsumexp(-1) for part in logits.split(step)]
    own = torch.cat(parts) if parts else logits.new_empty(0, dtype=torch.float32)
    if ranks.size() == 1:
        return own
    most = own.clone()
    dist.all_reduce(most, op=dist.ReduceOp.MAX, group=ranks)
    return most + add_over(ranks, (own - most).exp()).log()


def _topk(logits: torch.Tensor, k: int, offset: int, ranks: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids int64 and logits float32 [n, k] of the k largest over the whole vocabulary, the largest first."""
    top = logits.float().topk(min(k, logits.shape[1]), dim=-1)
    values, ids = top.values, top.indices + offset
    if ranks.size() > 1:
        values, ids = (_side_by_side(part, ranks) for part in (values, ids))
        best = values.topk(k, dim=-1)
        values, ids = best.values, ids.gather(1, best.indices)
    return ids, values


def _side_by_side(part: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    parts = [torch.empty_like(part) for _ in range(ranks.size())]
    dist.all_gather(parts, part.contiguous(), group=ranks)
    return torch.cat(parts, dim=1)


# -- hidden states -----------------------------------------------------------------------------------------------------
@contextmanager
def _record_hidden(
    trainer: Trainer, micro: Sequence[ScoreMicroBatch], states: Mapping[int, torch.Tensor]
) -> Iterator[None]:
    """Writes the wanted states of this rank's layers and tokens, item by item, while the context is open.

    ``states`` layer -> [H, d], zeros elsewhere, so that the replica's ranks add up. Layer 0 is the embedding's output,
    layer l that of the model's l-th layer, before the final norm.
    """
    tensor, sequence = trainer.context.groups.tp, trainer.context.config.sequence
    seen = dict.fromkeys(states, 0)

    def hook(layer: int) -> Callable[[torch.nn.Module, Any, Any], None]:
        def record(module: torch.nn.Module, args: Any, output: Any) -> None:
            values = output[0] if isinstance(output, tuple) else output
            mb = micro[seen[layer]]
            seen[layer] += 1
            if not sequence and tensor.rank():
                return  # every tensor-parallel rank holds every token: one of them tells
            values = values.squeeze(1)
            at = mb.reads.hidden - (tensor.rank() * len(values) if sequence else 0)
            here = (at >= 0) & (at < len(values))
            states[layer][mb.reads.hidden_item[here]] = values[at[here]].float()

        return record

    handles = []
    for chunk in trainer.chunks if states else ():
        model = unwrap(chunk)
        if 0 in states and model.pre_process:
            handles.append(model.embedding.register_forward_hook(hook(0)))
        for module in model.modules():
            if isinstance(module, TransformerLayer) and module.layer_number in states:
                handles.append(module.register_forward_hook(hook(module.layer_number)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
