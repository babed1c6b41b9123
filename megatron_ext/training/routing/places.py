"""Where a routing loss's tokens stand among the rows of a layout's routers.

Invariants (``tests/moe/test_structured.py``, over layouts ``tests/integration/test_routing_layouts.py``):

1. Each token that counts, and each pair, stands on one rank, whatever is elsewhere: in a sequence-parallel slice, a
   context-parallel share, or another row (a repeated prefix).
2. Every rank of a stage enters the same collectives, whatever its tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_ext.models.parallel import ParallelContext
from megatron_ext.moe.statistics import TokenStructure
from megatron_ext.moe.tap import RouterCall
from megatron_ext.moe.view import RouterView
from megatron_ext.training.context_share import context_share
from megatron_ext.training.microbatch import MicroBatch


@dataclass(frozen=True, eq=False)
class LocalTokens:
    """What one rank's routers see of a micro-batch's structure; indices into the router's n rows.

    Tokens with a cell: their rows ``at``, numbers in the batch ``token`` and ``cell`` int64 [m], ``share`` fp32 [m].
    Pairs: ``now`` int64 [p], and ``before`` int64 [p] into the n rows with the ``borders`` rows behind them, which hold
    the experts of tokens that precede a pair on another rank; this rank fills those at ``border`` int64 [g] from its
    rows ``lent`` int64 [g].
    """

    token: torch.Tensor
    at: torch.Tensor
    cell: torch.Tensor
    share: torch.Tensor
    now: torch.Tensor
    before: torch.Tensor
    borders: int
    border: torch.Tensor
    lent: torch.Tensor


def local_tokens(
    mb: MicroBatch,
    tokens: TokenStructure,
    rows: int,
    *,
    tensor: tuple[int, int] = (0, 1),
    context: tuple[int, int] = (0, 1),
) -> LocalTokens:
    """The structure of a micro-batch as the rank ``tensor`` (rank, size) and ``context`` (rank, size) has it, whose
    routers have ``rows`` rows, as those of every rank of the replica have. No communication."""
    assert mb.predicted is not None, "a micro-batch of build_microbatch"
    place = mb.predicted.cpu().numpy()
    token = mb.token.cpu().numpy()
    offsets = mb.cu_seqlens.cpu().numpy().astype(np.int64)
    part, run = np.zeros(int(offsets[-1]), dtype=np.int64), np.arange(int(offsets[-1]))
    if mb.shared is not None:
        run = mb.shared.distinct.cpu().numpy()
    elif context[1] > 1:
        for rank in range(context[1]):
            share = context_share(np.diff(offsets), context[1], rank)
            here = share.local >= 0
            part[here], run[here] = rank, share.local[here]
    owner, row = part * tensor[1] + run // rows, run % rows
    own = context[0] * tensor[1] + tensor[0]

    mine = (owner[place] == own) & (tokens.cell[token] >= 0)
    ends = place[tokens.pair[token]]
    begins = ends - 1
    apart = owner[begins] != owner[ends]
    slot = np.cumsum(apart) - 1
    held = owner[ends] == own
    gives = apart & (owner[begins] == own)

    def on_device(values: NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(mb.ids.device)

    return LocalTokens(
        token=on_device(token[mine].astype(np.int64)),
        at=on_device(row[place[mine]]),
        cell=on_device(tokens.cell[token[mine]]),
        share=on_device(tokens.share[token[mine]].astype(np.float32)),
        now=on_device(row[ends[held]]),
        before=on_device(np.where(apart, rows + slot, row[begins])[held]),
        borders=int(apart.sum()),
        border=on_device(slot[gives]),
        lent=on_device(row[begins[gives]]),
    )


class Places:
    """``LocalTokens`` of a pass's micro-batches, made once for all layers. ``kept`` fp32 [T, K] by layer is what a
    routing loss finds again of each token."""

    def __init__(
        self, tokens: TokenStructure, context: ParallelContext, kept: Mapping[int, torch.Tensor] | None = None
    ) -> None:
        self._tokens, self._context, self._kept = tokens, context, kept or {}
        self._made: dict[int, LocalTokens] = {}

    def view(self, call: RouterCall, routing_map: torch.Tensor, logits: torch.Tensor | None = None) -> RouterView:
        """The call as a routing loss sees it; ``logits`` [n, E] in the place of the call's own."""
        local, chosen = self._of(call), routing_map.bool()
        kept = self._kept.get(call.position)
        return RouterView(
            layer=call.position,
            logits=call.logits if logits is None else logits,
            score_function=call.router.score_function,
            chosen=chosen,
            token=local.token,
            at=local.at,
            cell=local.cell,
            share=local.share,
            now=local.now,
            kept=None if kept is None else kept[local.token],
            ask_before=partial(_before, call, local, chosen),
        )

    def _of(self, call: RouterCall) -> LocalTokens:
        number, groups = call.run.number, self._context.groups
        if number not in self._made:
            self._made[number] = local_tokens(
                call.run.micro,
                self._tokens,
                len(call.logits),
                tensor=(groups.tp.rank(), groups.tp.size()),
                context=(groups.cp.rank(), groups.cp.size()),
            )
        return self._made[number]


def _before(call: RouterCall, local: LocalTokens, chosen: torch.Tensor) -> torch.Tensor:
    """Experts bool [p, E] of the token before each of this rank's pairs; ``chosen`` bool [n, E]."""
    if local.borders:
        borders = torch.zeros(local.borders, chosen.shape[1], dtype=torch.uint8, device=chosen.device)
        borders[local.border] = chosen[local.lent].to(torch.uint8)
        if call.router.tp_cp_group.size() > 1:
            dist.all_reduce(borders, group=call.router.tp_cp_group)
        chosen = torch.cat([chosen, borders.bool()])
    return chosen[local.before]
