"""What an edit did to the advantage: masses before and after, tokens changed, and whether what it conserves held.

Invariants (``tests/credit/test_conservation.py`` asserts each):

1. Masses are sums of A over trained tokens by sign; how ranks share the groups out changes no bit of them.
2. An advantage that is not finite, or not 0 on a token that is not trained, is found and named.
3. Whatever ``conserves`` names is compared before and after, relative to the mass there is to move.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.exact import LIMBS, exact_parts, exact_value
from megatron_ext.credit.levels import Level, token_offsets
from megatron_ext.credit.protocol import Counter, CreditEdit, CreditError, Kind, Slot
from megatron_ext.credit.spans import parts
from megatron_ext.credit.turns import Layout, turn_reduce
from megatron_ext.trajectory.record import TrajectoryBatch

TOLERANCE = 1e-6
ROUNDING = 1e-9  # an advantage that moves by a smaller part of itself has not changed
CONSERVED = {
    "sum": "the sum of A over all trained tokens of the step",
    "positive_mass": "the sum of the positive A over all trained tokens of the step",
    "negative_mass": "the sum of the negative A over all trained tokens of the step",
    "group_sum": "the sum of A over the trained tokens of each group",
    "trajectory_sum": "the sum of A over the trained tokens of each trajectory",
    "turn_sum": "the sum of A over the trained tokens of each model turn",
    "group_balance": "the sum of the trajectories' mean A (over their trained tokens) in each group",
}
LOCAL = ("group_sum", "trajectory_sum", "turn_sum", "group_balance")


@dataclass(frozen=True, eq=False)
class Masses:
    """Sums of A over the trained tokens of each trajectory, by sign: ``positive``, ``negative`` float64 [J]."""

    positive: NDArray[np.float64]
    negative: NDArray[np.float64]

    def __add__(self, other: Masses) -> Masses:
        return Masses(self.positive + other.positive, self.negative + other.negative)

    @classmethod
    def constant(cls, values: NDArray[np.float64], tokens: NDArray[np.int64]) -> Masses:
        """Of trajectories [J] that have one advantage each, on so many tokens."""
        return cls(np.maximum(values, 0.0) * tokens, np.minimum(values, 0.0) * tokens)

    @property
    def total(self) -> NDArray[np.float64]:
        return self.positive + self.negative

    @property
    def size(self) -> NDArray[np.float64]:
        return self.positive - self.negative


@dataclass(frozen=True, eq=False)
class Change:
    """An edit on one rank's batch: masses before and after, tokens ``changed``, the worst violation of what the edit
    conserves within a group, trajectory or turn (name -> (relative error, where)), and the edit's own counters."""

    before: Masses
    after: Masses
    changed: int
    violations: dict[str, tuple[float, str]]
    counters: Mapping[str, Counter] = field(default_factory=dict)

    def sums(self, trained: int) -> NDArray[np.float64]:
        """What adds over ranks, float64 [5, LIMBS]."""
        counts = np.zeros((1, LIMBS))
        counts[0, :2] = self.changed, trained
        masses = (self.before.positive, self.before.negative, self.after.positive, self.after.negative)
        return np.concatenate([*(exact_parts(mass) for mass in masses), counts])

    def counter_sums(self) -> dict[str, NDArray[np.float64]]:
        """What adds over ranks of each counter, float64 [2, LIMBS]: its sum and its size, by kind and name."""
        out = {}
        for name, counter in self.counters.items():
            size = np.zeros((1, LIMBS))
            size[0, 0] = counter.size
            out[f"{counter.kind}/{name}"] = np.concatenate([exact_parts(counter.values), size])
        return out

    def worst(self) -> NDArray[np.float64]:
        """The errors whose largest over ranks counts, float64 [len(LOCAL)]."""
        return np.array([self.violations.get(name, (0.0, ""))[0] for name in LOCAL])


@dataclass(frozen=True)
class EditReport:
    """What one edit did to the advantage over all ranks. Masses are sums of A over trained tokens, by sign.

    A reward-side edit is measured through the centring: before and after are the advantages of its two rewards.
    ``changed`` counts against the edit's off arm where it gives one (``CreditView.off``), else against what it was
    given. ``counters``: the edit's own numbers, by kind and name.
    """

    name: str
    slot: Slot
    positive_before: float
    negative_before: float
    positive_after: float
    negative_after: float
    changed: int
    trained: int
    counters: Mapping[str, float] = field(default_factory=dict)

    @property
    def changed_fraction(self) -> float:
        """Share of the trained tokens whose advantage the edit changed."""
        return self.changed / self.trained if self.trained else 0.0

    def metrics(self) -> dict[str, float]:
        values = {
            "positive_mass_before": self.positive_before,
            "negative_mass_before": self.negative_before,
            "positive_mass_after": self.positive_after,
            "negative_mass_after": self.negative_after,
            "changed_fraction": self.changed_fraction,
            **self.counters,
        }
        return {f"credit/{self.name}/{key}": value for key, value in values.items()}


def report(name: str, slot: Slot, sums: NDArray[np.float64], counters: Mapping[str, NDArray[np.float64]]) -> EditReport:
    """From the ``Change.sums`` and ``Change.counter_sums`` of all ranks."""
    positive, negative, positive_after, negative_after = (float(x) for x in exact_value(sums[:4]))
    changed, trained = (int(x) for x in sums[4, :2])
    own = {key: value for key, parts in counters.items() if (value := _counted(key, parts)) is not None}
    return EditReport(name, slot, positive, negative, positive_after, negative_after, changed, trained, own)


def _counted(key: str, parts: NDArray[np.float64]) -> float | None:
    """The value of a counter; None for a mean or share of nothing."""
    total, size = float(exact_value(parts[:1])[0]), float(parts[1, 0])
    if key.startswith(f"{Kind.COUNT}/"):
        return total
    return total / size if size else None


def token_masses(
    batch: TrajectoryBatch,
    after: NDArray[np.float64],
    trained: NDArray[np.bool_],
    name: str,
    before: NDArray[np.float64] | None = None,
) -> tuple[Masses, int]:
    """Masses of ``after`` [T], and how many trained tokens differ from ``before`` by more than rounding.

    Raises ``CreditError`` naming edit ``name``, trajectory and token when ``after`` is not finite, or not 0 off
    training.
    """
    total, size = np.zeros(batch.num_trajectories), np.zeros(batch.num_trajectories)
    changed = 0
    for tokens, part, edges in parts(token_offsets(batch, Level.TRAJECTORY)):
        value = after[tokens]
        total[part] = np.add.reduceat(value, edges)
        absolute = np.abs(value)
        size[part] = np.add.reduceat(absolute, edges)
        if np.any((value != 0.0) > trained[tokens]) or not np.all(np.isfinite(size[part])):
            _refuse(batch, after, trained, tokens, name)
        if before is not None:
            difference = value - before[tokens]
            np.abs(difference, out=difference)
            difference *= 1.0 / ROUNDING
            changed += int(np.count_nonzero(difference > absolute))
    return Masses((size + total) / 2, (total - size) / 2), changed


def _refuse(
    batch: TrajectoryBatch, after: NDArray[np.float64], trained: NDArray[np.bool_], tokens: slice, name: str
) -> None:
    for bad, what in (
        (~np.isfinite(after[tokens]), "not finite"),
        (~trained[tokens] & (after[tokens] != 0), "not trained"),
    ):
        if np.any(bad):
            at = tokens.start + int(np.argmax(bad))
            owner = int(np.searchsorted(batch.trajectory_tokens(), at, side="right")) - 1
            raise CreditError(
                f"credit edit {name!r}: token {at} of trajectory {batch.trajectory_id[owner]!r} is {what}, "
                f"advantage {after[at]}"
            )
    raise CreditError(
        f"credit edit {name!r}: advantages of tokens {tokens.start}-{tokens.stop} sum to more than float64"
    )


def violations(
    layout: Layout,
    conserves: frozenset[str],
    masses: tuple[Masses, Masses],
    tokens: Callable[[], tuple[NDArray[np.float64], NDArray[np.float64]]],
) -> dict[str, tuple[float, str]]:
    """The largest relative change of what must not change within a group, trajectory or turn, and where it is.

    ``masses`` before and after; ``tokens`` gives the advantages themselves, and is called only for what is compared by
    turn.
    """
    batch, counts, (before, after) = layout.batch, layout.counts, masses
    found: dict[str, tuple[float, str]] = {}
    for what in sorted(conserves & set(LOCAL)):
        if what == "turn_sum":
            turns, (earlier, later) = layout.turns, tokens()
            old, new, size = (turn_reduce(values, turns) for values in (earlier, later, np.abs(earlier)))
            at, error = _largest(old, new, size)
            place = (
                f"turn {turns.number[at]} of trajectory {batch.trajectory_id[turns.trajectory[at]]!r}" if error else ""
            )
        elif what == "trajectory_sum":
            at, error = _largest(before.total, after.total, before.size)
            place = f"trajectory {batch.trajectory_id[at]!r}" if error else ""
        else:
            share = 1.0 / np.maximum(counts, 1) if what == "group_balance" else np.ones(len(counts))
            old, new, size = (_by_group(batch, x * share) for x in (before.total, after.total, before.size))
            at, error = _largest(old, new, size)
            place = f"group {batch.group_id[at]!r}" if error else ""
        found[what] = (error, place)
    return found


def _by_group(batch: TrajectoryBatch, values: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.bincount(batch.trajectory_group(), weights=values, minlength=batch.num_groups).astype(np.float64)


def _largest(before: NDArray[np.float64], after: NDArray[np.float64], size: NDArray[np.float64]) -> tuple[int, float]:
    error = np.abs(after - before) / np.maximum(size, 1.0)
    at = int(np.argmax(error)) if len(error) else 0
    return at, float(error[at]) if len(error) else 0.0


def check_conserved(
    name: str, edit: CreditEdit, result: EditReport, worst: NDArray[np.float64], own: dict[str, tuple[float, str]]
) -> None:
    """Raises ``CreditError``, on every rank alike, when something that the edit declares conserved was not.

    ``worst`` [len(LOCAL)]: the errors within groups, trajectories and turns, largest over ranks; ``own``: this rank's.
    """
    masses = {
        "sum": (result.positive_before + result.negative_before, result.positive_after + result.negative_after),
        "positive_mass": (result.positive_before, result.positive_after),
        "negative_mass": (result.negative_before, result.negative_after),
    }
    size = max(1.0, result.positive_before - result.negative_before)
    for what in sorted(edit.traits.conserves):
        if what in masses:
            before, after = masses[what]
            if abs(after - before) > TOLERANCE * size:
                raise CreditError(
                    f"credit edit {name!r} declares that it conserves {what}: {before:.9g} became {after:.9g}"
                )
            continue
        error = float(worst[LOCAL.index(what)])
        if error > TOLERANCE:
            where = own[what][1] if own[what][0] == error else "a group of another rank"
            raise CreditError(
                f"credit edit {name!r} declares that it conserves {what}: it changed by {error:.3g} of its mass in "
                f"{where}"
            )
