"""Which recorded experts a micro-batch replays (R3, arXiv 2510.11370): from a batch's record to a forward's tokens.

``routed[t]`` of the record belongs to the forward of token t, prompt tokens included, and the last sampled token of a
segment has none: nothing was generated from it. Of a token that an engine ran more than once a segment holds one row,
that of the forward its sampled tokens stand on (``trajectory/builder.py``, 6). A token is *due* when some predicted
token stands behind it in its row, so that its experts matter; the others (the last sampled token, what an environment
said after it) run as the router chooses and matter to nothing. Pure: numpy in, torch tensors out, no Megatron.

Invariants (``tests/moe/test_replay_tokens.py``):

1. Token u of a forward replays the record of the batch's token that it runs, whatever the packing, the cut of rows, the
   context-parallel share; padding replays nothing.
2. A due token without a recording is an error that names trajectory and position, or it runs as the router chooses and
   is counted: which is the caller's word.
3. Rows share a token only where they recorded the same experts for it.
4. The record's layers are the model's MoE layers in order, its experts exist and differ within a token; a record that
   does not fit the model is an error before anything runs.
5. Recorded ids keep the record's integer type up to the router.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_ext.trajectory.record import TrajectoryBatch

if TYPE_CHECKING:
    from megatron_ext.models.hf_config import HFConfig

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]


class ReplayError(ValueError):
    """A record that cannot be replayed: missing, short, or of another model. The message names what and where."""


class OnMissing(StrEnum):
    """What happens to a token whose experts are due and were not recorded."""

    ERROR = "error"
    LIVE = "live"


@dataclass(frozen=True)
class ReplayRule:
    """What a record must look like to be replayed: ``layers`` MoE layers of ``experts`` experts, ``top_k`` a token."""

    layers: int
    top_k: int
    experts: int
    on_missing: OnMissing = OnMissing.ERROR

    def __post_init__(self) -> None:
        if min(self.layers, self.top_k) < 1 or self.experts < self.top_k:
            raise ReplayError(
                "routing replay needs a Mixture-of-Experts model; this one has "
                f"{self.layers} MoE layers, {self.experts} experts, top {self.top_k}"
            )

    @classmethod
    def of(cls, hf: HFConfig, on_missing: OnMissing | str = OnMissing.ERROR) -> ReplayRule:
        """The rule of a model."""
        return cls(sum(hf.moe_pattern), hf.top_k, hf.num_experts, OnMissing(on_missing))

    def check(self, batch: TrajectoryBatch) -> tuple[NDArray[Any], Bools]:
        """The batch's record, ``routed`` [T, L, k] and ``routed_valid`` [T]; without one, a record of nothing. Raises
        ``ReplayError`` for a record of another model."""
        if batch.routed is None or batch.routed_valid is None:
            # Groups that failed before anything was generated hold no record, and nothing of them is due.
            nothing: NDArray[Any] = np.broadcast_to(np.uint8(0), (batch.num_tokens, self.layers, self.top_k))
            return nothing, np.zeros(batch.num_tokens, dtype=bool)
        layers, top_k = batch.routed.shape[1:]
        if (layers, top_k) != (self.layers, self.top_k):
            raise ReplayError(
                f"routing replay: the record has {layers} layers with {top_k} experts a token, the model has "
                f"{self.layers} MoE layers with {self.top_k} (dense layers are not recorded)"
            )
        return batch.routed, batch.routed_valid


@dataclass(frozen=True)
class ReplayCounts:
    """Tokens of forwards, over the whole replica: ``tokens`` run, ``replayed`` of them with recorded experts, ``due``
    ones, ``missing`` (due, and not recorded). Counts add."""

    tokens: int = 0
    replayed: int = 0
    due: int = 0
    missing: int = 0

    def __add__(self, other: ReplayCounts) -> ReplayCounts:
        return ReplayCounts(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(self)))

    def metrics(self) -> dict[str, float]:
        """``moe/replayed_share`` and ``moe/replay_missing`` (share of the due)."""
        return {
            "moe/replayed_share": self.replayed / max(self.tokens, 1),
            "moe/replay_missing": self.missing / max(self.due, 1),
        }


@dataclass(frozen=True, eq=False)
class ReplayTokens:
    """What the U tokens of one rank's forward replay.

    ``experts`` unsigned [U, L, k], read only where ``valid`` bool [U]; ``held`` int64 [U + 1] on the CPU, how many of
    the tokens before each are valid; ``counts`` are of the whole micro-batch, over context-parallel ranks.
    """

    experts: torch.Tensor
    valid: torch.Tensor
    held: torch.Tensor
    counts: ReplayCounts

    def to(self, device: torch.device) -> ReplayTokens:
        return ReplayTokens(self.experts.to(device), self.valid.to(device), self.held, self.counts)

    @property
    def top_k(self) -> int:
        return self.experts.shape[2]

    def due(self, start: int, count: int) -> int:
        """Expert ids that the tokens ``start .. start + count`` replay in one layer."""
        return int(self.held[start + count] - self.held[start]) * self.top_k


def due_tokens(within: Ints, row: Ints, last_read: Ints) -> Bools:
    """bool [M]: places whose forward decides something that is read. ``within`` [M] is the position in row ``row`` [M],
    ``last_read`` [R] the last position of each row whose logits are read, -1 for none."""
    due: Bools = within <= last_read[row]
    return due


def replay_tokens(
    batch: TrajectoryBatch,
    rule: ReplayRule,
    token: Ints,
    due: Bools,
    run: Ints,
    flat: Ints | None = None,
) -> ReplayTokens:
    """What a forward over M places replays.

    Args:
        token: int64 [M], the batch's token at each place, -1 where the place is none of the record's.
        due: bool [M], places whose experts matter.
        run: int64 [U], the place whose record each token of this rank's forward replays, -1 for padding.
        flat: int64 [M], which of the U tokens each place is, where places share tokens.

    Raises:
        ReplayError: a due token was not recorded (unless the rule says live), or the record is not this model's.
    """
    routed, recorded = rule.check(batch)
    known = token >= 0
    valid = np.zeros(len(token), dtype=bool)
    valid[known] = recorded[token[known]]
    due = due & known
    if flat is None:
        due_run, valid_run, ran = due, valid, int(known.sum())
    else:
        # A token that several rows share is due where it is due in one; they recorded the same.
        due_run = np.zeros(len(run), dtype=bool)
        due_run[flat[due]] = True
        valid_run, ran = valid[run], len(run)
    missing = due_run & ~valid_run
    if missing.any() and rule.on_missing is OnMissing.ERROR:
        raise ReplayError(_missing_line(batch, token[run[missing] if flat is not None else np.flatnonzero(missing)]))
    counts = ReplayCounts(ran, int(valid_run.sum()), int(due_run.sum()), int(missing.sum()))

    real = run >= 0
    mine = np.zeros(len(run), dtype=bool)
    mine[real] = valid[run[real]]
    experts = np.zeros((len(run), *routed.shape[1:]), dtype=routed.dtype)
    experts[mine] = routed[token[run[mine]]]
    _check_ids(batch, rule, experts[mine], token[run[mine]])
    return ReplayTokens(
        torch.from_numpy(experts),
        torch.from_numpy(mine),
        torch.from_numpy(np.concatenate([[0], np.cumsum(mine, dtype=np.int64)])),
        counts,
    )


def _where(batch: TrajectoryBatch, token: int) -> str:
    """Trajectory and position of a token, for a message."""
    segment = int(np.searchsorted(batch.segment_tokens, token, side="right")) - 1
    trajectory = int(batch.segment_trajectory()[segment])
    first, end = (int(x) for x in batch.segment_tokens[segment : segment + 2])
    of = segment - batch.trajectory(trajectory).segments.start
    return f"trajectory {batch.trajectory_id[trajectory]!r}, segment {of}, position {token - first} of {end - first}"


def _missing_line(batch: TrajectoryBatch, tokens: Ints) -> str:
    more = f" (and {len(tokens) - 1} more)" if len(tokens) > 1 else ""
    return (
        f"routing replay: {_where(batch, int(tokens[0]))}: no experts were recorded, and later tokens are trained on "
        f"it{more}; generate it with rollout.record_routing=true, or set rollout.replay_missing=live to let the router "
        "choose there"
    )


def _check_ids(batch: TrajectoryBatch, rule: ReplayRule, experts: NDArray[Any], token: Ints) -> None:
    """Every id is an expert of the model, and those of a token differ (else one of them would be lost)."""
    if not experts.size:
        return
    if int(experts.max()) >= rule.experts:
        at = int(np.argmax((experts >= rule.experts).any(axis=(1, 2))))
        raise ReplayError(
            f"routing replay: {_where(batch, int(token[at]))}: expert {int(experts[at].max())} of {rule.experts}"
        )
    twice = np.zeros(experts.shape[:2], dtype=bool)
    for a in range(rule.top_k):
        for b in range(a):
            twice |= experts[:, :, a] == experts[:, :, b]
    if twice.any():
        at, layer = (int(x[0]) for x in np.nonzero(twice))
        raise ReplayError(
            f"routing replay: {_where(batch, int(token[at]))}: MoE layer {layer} names an expert twice: "
            f"{experts[at, layer].tolist()}"
        )
