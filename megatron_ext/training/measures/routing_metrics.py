"""Routing metrics of a step, and the file that keeps the load of every expert: ``routing.jsonl``, one object a step.

A model of 48 layers and 128 experts has 6,144 loads a step: they are no metrics of the tracker, which gets what is
said about them (``moe.load``).

Invariants (``tests/training/measures/test_routing_metrics.py``):

1. Metrics are of the step over all ranks, and the same on every rank.
2. Steps of the file only grow: what a resumed run undid is dropped (``RoutingLog.drop_after``) before it goes on.
3. A last line torn by a crash is left out; other damage is an error that names the line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_ext.moe.load import RoutingSums, expert_counts, layer_flips, operation_sums, token_jaccard
from megatron_ext.moe.statistics import pairs, token_structure
from megatron_ext.tracking.jsonl import MetricsFileError, read_metrics
from megatron_ext.training.ranks.ranks import Gather, alone
from megatron_ext.training.scoring.scores import TokenScores
from megatron_ext.trajectory.record import Field, TrajectoryBatch

FILE_NAME = "routing.jsonl"


def step_routing(
    batch: TrajectoryBatch,
    scores: TokenScores,
    num_experts: int,
    layers: Sequence[int],
    *,
    label: str,
    fields: Sequence[Field],
    replayed: bool = False,
    gather: Gather = alone,
) -> RoutingSums | None:
    """What the step's routers chose; ``batch`` and ``scores`` are this rank's part. None for scores without experts.

    ``layers`` are the numbers of the model's MoE layers, ``label`` the turn label that holds the operation, told apart
    in the tokens of ``fields``, each by itself. With ``replayed`` the load is that of the recorded experts, where there
    are any: they ran, and the scores say what routers would have chosen.
    """
    if scores.experts is None or scores.routed is None:
        return None
    sums = _sums(batch, scores.experts, scores.routed, num_experts, layers, label, fields, replayed)
    return reduce(add, gather(sums))


def _sums(
    batch: TrajectoryBatch,
    chosen: NDArray[np.int64],
    routed: NDArray[np.bool_],
    num_experts: int,
    layers: Sequence[int],
    label: str,
    fields: Sequence[Field],
    replayed: bool,
) -> RoutingSums:
    used, flips, flipped, compared = chosen, np.zeros(len(layers), dtype=np.int64), 0, 0
    if batch.routed is not None and batch.routed_valid is not None:
        both = routed & batch.routed_valid
        apart = layer_flips(chosen[both], batch.routed[both])
        flips, flipped, compared = apart.sum(axis=0), int(apart.any(axis=1).sum()), len(apart)
        if replayed:
            used = np.where(batch.routed_valid[:, None, None], batch.routed, chosen)
    adjacent = np.flatnonzero(pairs(batch) & routed)
    adjacent = adjacent[routed[adjacent - 1]]
    labels = batch.turn_labels.get(label)
    operations = 0 if labels is None else int(labels.max(initial=-1)) + 1
    sums, units = np.zeros((len(layers), len(fields), 0, num_experts)), np.zeros((len(fields), 0))
    if operations:
        structure = token_structure(batch, fields, label, operations)
        cell = np.where(routed, structure.cell, -1)
        cells = len(fields) * operations
        sums = operation_sums(used, num_experts, cell, structure.share, cells)
        sums = sums.reshape(len(layers), len(fields), operations, num_experts)
        units = structure.counts()[:-1].reshape(len(fields), operations)
    return RoutingSums(
        layers=tuple(layers),
        counts=expert_counts(used[routed], num_experts),
        jaccard=token_jaccard(used, adjacent, num_experts),
        pairs=len(adjacent),
        flips=flips,
        flipped=flipped,
        compared=compared,
        operations=sums,
        units=units,
    )


# -- the file ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, eq=False)
class RoutingHistory:
    """Loads of a run: ``steps`` int64 [S], rising; ``layers`` [L]; ``counts`` int64 [S, L, E]."""

    steps: NDArray[np.int64]
    layers: tuple[int, ...]
    counts: NDArray[np.int64]


class RoutingLog:
    """Appends to ``<folder>/routing.jsonl``; one process writes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME
        self._opened = False

    def write(self, step: int, sums: RoutingSums) -> None:
        """The line of ``step``: layers, loads [L][E], and what else is known of each layer, rounded."""
        said = {name: [round(float(v), 5) for v in values] for name, values in sums.by_layer().items()}
        line = {"step": step, "layers": list(sums.layers), "loads": sums.counts.tolist(), **said}
        try:
            if not self._opened:
                self.drop_after(step - 1)
            with self._path.open("ab") as file:
                file.write(json.dumps(line, separators=(",", ":"), allow_nan=False).encode() + b"\n")
        except OSError as error:
            raise MetricsFileError(
                f"{self._path}: step {step} not written: {error.strerror}; free space and continue the run"
            ) from error

    def drop_after(self, step: int) -> None:
        """Leaves the whole lines up to ``step``: the others were undone, or torn. Before the first ``write``."""
        self._opened = True
        if not self._path.exists():
            return
        kept = [row for row in read_metrics(self._path) if row["step"] <= step]
        partial = self._path.with_name(f".{FILE_NAME}.partial")
        text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in kept)
        partial.write_text(text, encoding="utf-8")
        partial.replace(self._path)


def read_routing(folder: Path) -> RoutingHistory | None:
    """The loads that the run in ``folder`` kept; None for one without.

    Raises ``MetricsFileError`` for a line that is no such object or of another model.
    """
    path = folder / FILE_NAME
    rows = read_metrics(path) if path.is_file() else []
    if not rows:
        return None
    first = rows[0]
    for number, row in enumerate(rows, start=1):
        whole = isinstance(row.get("layers"), list) and isinstance(row.get("loads"), list)
        if not whole or row["layers"] != first["layers"] or np.shape(row["loads"]) != np.shape(first["loads"]):
            raise MetricsFileError(f"{path}, line {number}: no loads of the first line's model; restore or delete it")
    steps = np.array([row["step"] for row in rows], dtype=np.int64)
    return RoutingHistory(steps, tuple(rows[0]["layers"]), np.array([row["loads"] for row in rows], dtype=np.int64))
