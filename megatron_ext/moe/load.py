"""Metrics of what routers chose: how evenly experts are used, how long they last, what they tell apart. Pure numpy.

Load, over the tokens n_e of each expert of a layer (CV, peak and cold as in the MiMo-V2.6 report): ``CV = std(n) /
mean(n)``, ``peak = max(n) / mean(n)``, ``cold = share of experts below a tenth of the mean``; ``entropy`` of ``n /
sum(n)`` over its maximum log E. The forward of training is counted, and so is the last sampled token of a trajectory,
which no engine ran: its experts are the trainer's choice, also where a record is replayed. Structure (arXiv 2610.07332
as summarised by third parties, from choices instead of probabilities): the Jaccard index of the experts of adjacent
sampled tokens, and the mutual information in nats of experts and operations over turns, as ``moe.routing_losses``
defines it.

Invariants (``tests/moe/test_load.py``):

1. A perfectly even load has CV 0, peak 1, entropy 1 and no cold expert.
2. Two routings are the same when they name the same set of experts, in whatever order.
3. Sums of parts add up to those of the whole, so that ranks may hold parts.
4. Nothing here needs a routing recorded in rollout but the disagreement with it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Experts = NDArray[Any]
COLD_SHARE = 0.1  # an expert below a tenth of the mean load counts as cold, as the metric table says


def expert_counts(experts: Experts, num_experts: int) -> NDArray[np.int64]:
    """How often each expert was chosen, int64 [L, E], from ``experts`` int [n, L, k]. Counts of parts add."""
    layers = experts.shape[1]
    return np.stack([np.bincount(experts[:, i].ravel(), minlength=num_experts) for i in range(layers)])


def layer_loads(counts: NDArray[np.int64]) -> dict[str, NDArray[np.float64]]:
    """``load_cv``, ``load_peak``, ``cold_fraction`` and ``load_entropy`` of each layer, [L], from ``expert_counts``
    [L, E]. Empty when nothing was routed."""
    mean = counts.mean(axis=1)
    if not mean.all():
        return {}
    share = counts / counts.sum(axis=1, keepdims=True)
    with np.errstate(divide="ignore", invalid="ignore"):
        surprise = np.where(share > 0, -share * np.log(share), 0.0).sum(axis=1)
    return {
        "load_cv": counts.std(axis=1) / mean,
        "load_peak": counts.max(axis=1) / mean,
        "cold_fraction": (counts < COLD_SHARE * mean[:, None]).mean(axis=1),
        "load_entropy": surprise / math.log(counts.shape[1]) if counts.shape[1] > 1 else np.ones(len(counts)),
    }


def load_metrics(counts: NDArray[np.int64], layers: Sequence[int] | None = None) -> dict[str, float]:
    """The load of ``expert_counts`` [L, E] as metrics: means over layers (the peak: of the worst), and each layer's,
    by its number in ``layers`` (None: 0 to L - 1)."""
    by_layer = layer_loads(counts)
    return _named(by_layer, range(len(counts)) if layers is None else layers)


def _named(by_layer: dict[str, NDArray[np.float64]], layers: Sequence[int]) -> dict[str, float]:
    metrics = {f"moe/{name}": float(v.max() if name == "load_peak" else v.mean()) for name, v in by_layer.items()}
    for at, layer in enumerate(layers):
        metrics |= {f"moe/layer/{layer}/{name}": float(values[at]) for name, values in by_layer.items()}
    return metrics


def routing_flips(a: Experts, b: Experts) -> NDArray[np.bool_]:
    """bool [n]: tokens for which some layer chose other experts in ``a`` than in ``b`` (both int [n, L, k])."""
    return np.asarray(layer_flips(a, b).any(axis=1))


def layer_flips(a: Experts, b: Experts) -> NDArray[np.bool_]:
    """bool [n, L]: where a layer chose other experts for a token in ``a`` than in ``b`` (both int [n, L, k])."""
    if a.shape != b.shape:
        raise ValueError(f"routings of different shapes: {a.shape} and {b.shape}")
    differ = np.sort(a.astype(np.int64), axis=-1) != np.sort(b.astype(np.int64), axis=-1)
    flips: NDArray[np.bool_] = differ.any(axis=2)
    return flips


def _sets(experts: Experts, num_experts: int) -> NDArray[np.uint64]:
    """The sets of experts as bits, uint64 [n, ceil(E / 64)], from ``experts`` int [n, k] of one layer."""
    words = np.zeros((len(experts), -(-num_experts // 64)), dtype=np.uint64)
    token = np.arange(len(experts))
    for column in experts.T.astype(np.uint64):
        words[token, (column // 64).astype(np.int64)] |= np.uint64(1) << (column % np.uint64(64))
    return words


def token_jaccard(experts: Experts, pairs: NDArray[np.int64], num_experts: int) -> NDArray[np.float64]:
    """Sum over ``pairs`` int64 [p] of the Jaccard index of the experts of token t and of t - 1, [L], from ``experts``
    int [n, L, k]."""
    sums = np.zeros(experts.shape[1])
    for layer in range(experts.shape[1]):
        words = _sets(experts[:, layer], num_experts)
        now, before = words[pairs], words[pairs - 1]
        both = np.bitwise_count(now & before).sum(axis=1, dtype=np.int64)
        either = np.bitwise_count(now | before).sum(axis=1, dtype=np.int64)
        sums[layer] = (both / either).sum()
    return sums


def operation_sums(
    experts: Experts, num_experts: int, cell: NDArray[np.int64], share: NDArray[np.float64], cells: int
) -> NDArray[np.float64]:
    """Each expert's share of a unit's choices, summed over the units of each cell, [L, C, E] (``moe.statistics``), from
    ``experts`` int [n, L, k] with ``cell`` int64 [n] (-1: none) and ``share`` [n]."""
    n, layers, k = experts.shape
    inside = np.flatnonzero(cell >= 0)
    weights = np.repeat(share[inside] / k, k)
    found = np.zeros((layers, cells, num_experts))
    for layer in range(layers):
        key = cell[inside, None] * num_experts + experts[inside, layer]
        found[layer] = np.bincount(key.ravel(), weights, cells * num_experts).reshape(cells, num_experts)
    return found


def operation_information(sums: NDArray[np.float64], units: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mutual information of experts and operations in nats [L], mean over the fields that have units, from sums
    [L, F, O, E] over ``units`` [F, O]. Empty without units."""
    occurring = units.sum(axis=1) > 0
    if not occurring.any():
        return np.zeros(0)
    sums, units = sums[:, occurring], units[occurring]
    total = units.sum(axis=1)
    each = sums / np.maximum(units, 1)[None, :, :, None]
    whole = sums.sum(axis=2, keepdims=True) / total[None, :, None, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.where(sums > 0, sums * np.log(each / whole), 0.0)
    information: NDArray[np.float64] = (terms.sum(axis=(2, 3)) / total[None]).mean(axis=1)
    return information


@dataclass(frozen=True, eq=False)
class RoutingSums:
    """What a part of a batch adds to its routing metrics, over L layers (numbers ``layers``) and E experts.

    ``counts`` int64 [L, E]; ``jaccard`` [L], summed over ``pairs``; ``flips`` int64 [L] and ``flipped``, of
    ``compared`` tokens that rollout recorded too; ``operations`` [L, F, O, E], summed over ``units`` [F, O] (O 0: no
    turn says its operation).
    """

    layers: tuple[int, ...]
    counts: NDArray[np.int64]
    jaccard: NDArray[np.float64]
    pairs: int
    flips: NDArray[np.int64]
    flipped: int
    compared: int
    operations: NDArray[np.float64]
    units: NDArray[np.float64]

    def __add__(self, other: RoutingSums) -> RoutingSums:
        more = max(self.units.shape[1], other.units.shape[1])
        return RoutingSums(
            self.layers,
            self.counts + other.counts,
            self.jaccard + other.jaccard,
            self.pairs + other.pairs,
            self.flips + other.flips,
            self.flipped + other.flipped,
            self.compared + other.compared,
            _wider(self.operations, more, 2) + _wider(other.operations, more, 2),
            _wider(self.units, more, 1) + _wider(other.units, more, 1),
        )

    def by_layer(self) -> dict[str, NDArray[np.float64]]:
        """Every metric of each layer, [L]; those that nothing was measured of are left out."""
        found = layer_loads(self.counts)
        if self.pairs:
            found["token_jaccard"] = self.jaccard / self.pairs
        information = operation_information(self.operations, self.units)
        if len(information):
            found["op_mi"] = information
        if self.compared:
            found["disagreement"] = self.flips / self.compared
        return found

    def metrics(self) -> dict[str, float]:
        """Means over layers (the peak: of the worst), each layer's by its number, and ``offpolicy/routing_flips``."""
        metrics = _named(self.by_layer(), self.layers)
        if self.compared:
            metrics["offpolicy/routing_flips"] = self.flipped / self.compared
        return metrics


def _wider(values: NDArray[np.float64], size: int, axis: int) -> NDArray[np.float64]:
    """``values`` with zeros behind it on ``axis``, up to ``size``."""
    padding = [(0, size - values.shape[a] if a == axis else 0) for a in range(values.ndim)]
    return np.pad(values, padding)
