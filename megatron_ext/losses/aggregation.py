"""Loss aggregation: one float64 weight a token, with denominators counted over the whole optimizer-step batch.

The loss of a step is ``sum(weight_t * l_t)``, whatever the micro-batches, packing, row order or ranks.

Invariants (``tests/losses/test_aggregation.py`` asserts each):

1. Over a batch with anything to train the weights sum to 1; over one with nothing they are all 0.
2. Mask 0, token weight 0 or an untrainable trajectory give exactly 0, and such units are not counted.
3. Cutting a session into segments or sessions changes nothing, except in ``row_mean`` and, for sessions,
   ``session_mean``: a token of a trajectory of many pieces weighs more there, whatever its trajectory (MOSAIC's trap).
4. Weights of parts of a batch (whole groups), given the sum of their ``StepCounts``, are those of the whole batch.
5. With ``nodes``, the copies of a shared turn weigh together what one of them would, however many trajectories hold it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.levels import Level, token_offsets, trained_tokens
from megatron_ext.credit.spans import count_spans, reduce_spans, spread_spans
from megatron_ext.credit.turns import model_turns
from megatron_ext.trajectory.record import TrajectoryBatch

_LEVELS = MappingProxyType(
    {"row": Level.SEGMENT, "session": Level.SESSION, "trajectory": Level.TRAJECTORY, "prompt": Level.GROUP}
)
# Means within means, outermost first: the mean over prompts of the mean over turns of the mean over tokens, ...
UNITS = MappingProxyType(
    {
        "token_mean": (),
        "row_mean": ("row",),
        "session_mean": ("session",),
        "turn_mean": ("turn",),
        "trajectory_mean": ("trajectory",),
        "prompt_mean": ("prompt",),
        "prompt_turn_mean": ("prompt", "turn"),
        "prompt_trajectory_mean": ("prompt", "trajectory"),
    }
)
MODES = tuple(UNITS)
COUNTED = MappingProxyType(
    {"prompt": "tasks", "trajectory": "trajectories", "session": "sessions", "turn": "turns", "row": "rows"}
)
NORMALIZERS = ("tasks", "trajectories", "turns", "rows")


@dataclass(frozen=True)
class StepCounts:
    """What a step trains on, each thing by its own name; adds over ranks, which hold whole groups.

    ``tasks``: groups, one a prompt; ``trajectories``; ``turns``: model turns, a shared one counted once when nodes are
    given; ``rows``: segments; ``sessions``; ``tokens``: of those, all that have something (a token of weight above 0)
    to train;
    ``weight``: the sum of the token weights, which is ``tokens`` where none is set.
    """

    tasks: int
    trajectories: int
    turns: int
    rows: int
    sessions: int
    tokens: int
    weight: float

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))


def counted(batch: TrajectoryBatch) -> NDArray[np.float64]:
    """What each token counts, float64 [T]: its weight where it is trained, 0 elsewhere."""
    return np.multiply(batch.weight, trained_tokens(batch), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class _Units:
    """U units of one kind in K token spans: ``unit`` [K] of each span; ``prompt`` and ``sums`` (of weights) [U]."""

    start: NDArray[np.int64]
    end: NDArray[np.int64]
    unit: NDArray[np.int64]
    prompt: NDArray[np.int64]
    sums: NDArray[np.float64]

    @property
    def filled(self) -> NDArray[np.bool_]:
        return self.sums > 0


def _units(batch: TrajectoryBatch, kind: str, count: NDArray[np.float64], nodes: NDArray[Any] | None) -> _Units:
    if kind == "turn":
        return _turn_units(batch, count, nodes)
    offsets = token_offsets(batch, _LEVELS[kind])
    start, end = offsets[:-1], offsets[1:]
    group = batch.trajectory_group()
    prompt = {
        "row": lambda: group[batch.segment_trajectory()],
        "session": lambda: group[batch.session_trajectory()],
        "trajectory": lambda: group,
        "prompt": lambda: np.arange(batch.num_groups),
    }[kind]()
    return _Units(start, end, np.arange(len(start)), prompt, reduce_spans(count, start, end))


def _turn_units(batch: TrajectoryBatch, count: NDArray[np.float64], nodes: NDArray[Any] | None) -> _Units:
    turns = model_turns(batch)
    entry = np.sort(turns.entry)
    start, end = batch.turn_start[entry], batch.turn_end[entry]
    group = batch.trajectory_group()[batch.turn_trajectory()[entry]]
    unit = np.arange(len(entry)) if nodes is None else _node_of_turn(nodes, entry)
    size = int(unit.max(initial=-1)) + 1
    prompt = np.zeros(size, dtype=np.int64)
    prompt[unit] = group
    sums = np.bincount(unit, weights=reduce_spans(count, start, end), minlength=size).astype(np.float64)
    return _Units(start, end, unit, prompt, sums)


def _node_of_turn(nodes: NDArray[Any], entry: NDArray[np.int64]) -> NDArray[np.int64]:
    own = np.asarray(nodes)[entry].astype(np.int64)
    alone = own < 0
    own[alone] = own.max(initial=0) + 1 + np.arange(int(alone.sum()))
    return np.unique(own, return_inverse=True)[1].astype(np.int64)


def share_nodes(batch: TrajectoryBatch, count: NDArray[np.float64], nodes: NDArray[Any]) -> NDArray[np.float64]:
    """``count`` [T] divided among the copies of each shared turn, float64 [T].

    ``nodes`` int [N]: equal for the turns that are one node of a rollout tree (drawn once, held by several
    trajectories), -1 for a turn that is its own. Equal ids alone make no node: two draws may agree.
    """
    if np.shape(nodes) != (batch.num_turns,):
        raise ValueError(f"nodes {np.shape(nodes)}: one a turn, the batch holds {batch.num_turns}")
    entry = np.sort(model_turns(batch).entry)
    start, end = batch.turn_start[entry], batch.turn_end[entry]
    unit = _node_of_turn(nodes, entry)
    tokens = count_spans(count > 0, start, end)
    held = tokens > 0  # a copy that nothing is trained on takes no share
    size = int(unit.max(initial=-1)) + 1
    copies = np.bincount(unit[held], minlength=size)
    most = np.zeros(size, dtype=np.int64)
    np.maximum.at(most, unit, tokens)
    odd = held & (tokens != most[unit])
    if odd.any():
        at = int(np.argmax(odd))
        name = batch.trajectory_id[int(batch.turn_trajectory()[entry[at]])]
        raise ValueError(
            f"trajectory {name!r}: turn {batch.turn_number[entry[at]]} trains {tokens[at]} tokens, another copy of its "
            f"node {most[unit[at]]}"
        )
    share = 1.0 / np.maximum(copies, 1)[unit]
    return count * spread_spans(share, start, end, batch.num_tokens, fill=1.0)


def _shared_count(batch: TrajectoryBatch, nodes: NDArray[Any] | None) -> NDArray[np.float64]:
    count = counted(batch)
    return count if nodes is None else share_nodes(batch, count, nodes)


def step_counts(batch: TrajectoryBatch, nodes: NDArray[Any] | None = None) -> StepCounts:
    """This part's counts; add them over the ranks (each holds whole groups), then ``weights``."""
    return _step_counts(batch, _shared_count(batch, nodes), nodes)


def _step_counts(batch: TrajectoryBatch, count: NDArray[np.float64], nodes: NDArray[Any] | None) -> StepCounts:
    rows = _units(batch, "row", count, nodes)
    trajectory = np.bincount(batch.segment_trajectory()[rows.filled], minlength=batch.num_trajectories) > 0
    return StepCounts(
        tasks=len(np.unique(batch.trajectory_group()[trajectory])),
        trajectories=int(np.count_nonzero(trajectory)),
        turns=int(np.count_nonzero(_units(batch, "turn", count, nodes).filled)),
        rows=int(np.count_nonzero(rows.filled)),
        sessions=len(np.unique(batch.segment_session()[rows.filled])),
        tokens=int(np.count_nonzero(count)),
        weight=float(rows.sums.sum()),
    )


def weights(
    batch: TrajectoryBatch,
    mode: str,
    step: StepCounts,
    *,
    nodes: NDArray[Any] | None = None,
    normalizer: str | None = None,
) -> NDArray[np.float64]:
    """Weight of each token, float64 [T], given the counts of the whole optimizer-step batch.

    Args:
        batch: this rank's part, whole groups.
        mode: ``token_mean`` w_t / sum w; ``row_mean`` (segments: sequence mean of token mean), ``session_mean``,
            ``turn_mean``, ``trajectory_mean`` and ``prompt_mean`` (specs, section 5) w_t / (units x sum of w over the
            token's unit); ``prompt_turn_mean`` and ``prompt_trajectory_mean`` w_t / (prompts x units of the prompt x
            sum over the unit).
        step: counts of the step, with the same ``nodes``.
        nodes: int [N], see ``share_nodes``: a node's copies share its weight. None: each trajectory's copy counts.
        normalizer: counts these instead of the mode's own outermost units (Agent Lightning's published Z counts rows,
            so that the total mass varies with how rollouts are cut).
    """
    return _weights(batch, _shared_count(batch, nodes), mode, step, nodes, normalizer)


def _weights(
    batch: TrajectoryBatch,
    count: NDArray[np.float64],
    mode: str,
    step: StepCounts,
    nodes: NDArray[Any] | None,
    normalizer: str | None,
) -> NDArray[np.float64]:
    """``weights``, written over ``count``."""
    if mode not in UNITS:
        raise ValueError(f"aggregation {mode!r}: must be one of {', '.join(MODES)}")
    if normalizer is not None and (normalizer not in NORMALIZERS or not UNITS[mode]):
        raise ValueError(
            f"normalizer {normalizer!r} of {mode}: must be one of {', '.join(NORMALIZERS)}, of a mean of means"
        )
    if mode == "token_mean":
        if step.weight > 0:
            count /= step.weight
        return count
    *outer, inner = UNITS[mode]
    units = _units(batch, inner, count, nodes)
    filled = units.filled
    outermost = COUNTED[(outer or [inner])[0]] if normalizer is None else normalizer
    total = int(getattr(step, outermost))
    share = np.divide(1.0, units.sums, out=np.zeros(len(units.sums)), where=filled) / max(total, 1)
    if outer:
        siblings = np.bincount(units.prompt[filled], minlength=batch.num_groups)
        share = share / np.maximum(siblings, 1)[units.prompt]
    count *= spread_spans(share[units.unit], units.start, units.end, batch.num_tokens)
    return count


def token_weights(
    batch: TrajectoryBatch, mode: str, *, nodes: NDArray[Any] | None = None, normalizer: str | None = None
) -> NDArray[np.float64]:
    """``weights`` when ``batch`` is the whole optimizer-step batch; float64 [T]."""
    count = _shared_count(batch, nodes)
    return _weights(batch, count, mode, _step_counts(batch, count, nodes), nodes, normalizer)
