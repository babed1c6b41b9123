"""The edit pipeline: reward-side edits, the base normaliser, advantage-side edits, with their declarations checked.

Invariants (``tests/credit/test_pipeline.py`` asserts each):

1. Reward-side edits run before centring, advantage-side edits after it, each slot in the given order.
2. At most one edit sets the scale of the advantage; a second is refused when the pipeline is built.
3. After every edit: shapes and batch unchanged, values finite, exactly 0 on tokens that are not trained, and only the
   edit's own slot changed. What an edit says it conserves is checked over all ranks.
4. Each rank makes the same number of reductions: one for every edit, and one at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline, trained_tokens
from megatron_ext.credit.protocol import CreditEdit, CreditView, Reduce, Scale, ScoreRequest, Slot, Stat
from megatron_ext.trajectory.record import TrajectoryBatch

CONSERVED = ("sum", "positive_mass", "negative_mass")
INVARIANTS = frozenset("abcdefg")
Reduction = Callable[[Mapping[str, Stat]], Mapping[str, NDArray[Any]]]


class CreditError(ValueError):
    """An edit that breaks what it declared, or edits that do not go together; the message names them."""


def combine(stats_per_rank: Sequence[Mapping[str, Stat]]) -> dict[str, NDArray[Any]]:
    """Statistics reduced over ranks, given each rank's in rank order; every rank must bring the same names."""
    first = stats_per_rank[0]
    out: dict[str, NDArray[Any]] = {}
    for rank, stats in enumerate(stats_per_rank):
        if set(stats) != set(first):
            odd = ", ".join(sorted(set(stats) ^ set(first)))
            raise CreditError(f"ranks 0 and {rank} bring different statistics: {odd}")
    for name, stat in first.items():
        if any(s[name].op != stat.op for s in stats_per_rank):
            raise CreditError(f"statistic {name!r}: ranks disagree on how to combine it")
        values = [np.asarray(s[name].value) for s in stats_per_rank]
        if stat.op == Reduce.GATHER:
            out[name] = np.concatenate([np.atleast_1d(v) for v in values])
        else:
            out[name] = np.sum(values, axis=0) if stat.op == Reduce.SUM else np.max(values, axis=0)
    return out


def local(stats: Mapping[str, Stat]) -> dict[str, NDArray[Any]]:
    """The reduction of a single rank."""
    return combine([stats])


def open_view(batch: TrajectoryBatch, scores: Mapping[str, NDArray[Any]] | None = None, *, step: int = 0) -> CreditView:
    """The view a pipeline starts from: the batch's own rewards, advantage 0 everywhere."""
    reward = batch.reward.astype(np.float64)
    return CreditView(batch, reward, np.zeros(batch.num_tokens), {} if scores is None else scores, step)


@dataclass(frozen=True)
class EditReport:
    """What one edit did to the advantage over all ranks. Masses are sums of A over trained tokens, by sign.

    A reward-side edit is measured through the centring: before and after are the advantages of its two rewards.
    """

    name: str
    slot: Slot
    positive_before: float
    negative_before: float
    positive_after: float
    negative_after: float
    changed: int
    trained: int

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
        }
        return {f"credit/{self.name}/{key}": value for key, value in values.items()}


def _measure(
    before: NDArray[np.float64], after: NDArray[np.float64], trained: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """float64 [6]: positive and negative mass before and after, changed tokens, trained tokens."""
    a, b = before[trained], after[trained]
    changed = np.count_nonzero(~np.isclose(a, b, rtol=1e-9, atol=1e-12))
    masses = [a[a > 0].sum(), a[a < 0].sum(), b[b > 0].sum(), b[b < 0].sum()]
    return np.array([*masses, changed, len(a)], dtype=np.float64)


class Pipeline:
    """Named edits in order, around the base normaliser. Build errors and run errors name the edits concerned."""

    def __init__(self, edits: Sequence[tuple[str, CreditEdit]] = (), *, baseline: Baseline | None = None) -> None:
        self.baseline = Baseline() if baseline is None else baseline
        names = [name for name, _ in edits]
        if len(set(names)) != len(names):
            raise CreditError(f"credit edits repeat a name: {', '.join(names)}")
        setting = [name for name, edit in edits if edit.traits.scale == Scale.SETS]
        if len(setting) > 1:
            raise CreditError(
                f"credit edits {' and '.join(map(repr, setting))} both set the scale of the advantage: keep one of them"
            )
        for name, edit in edits:
            unknown = sorted((edit.traits.conserves - set(CONSERVED)) | (edit.traits.breaks - INVARIANTS))
            if unknown:
                raise CreditError(f"credit edit {name!r} declares {', '.join(unknown)}: not an invariant or a mass")
        by_slot = {slot: tuple((n, e) for n, e in edits if e.traits.slot == slot) for slot in Slot}
        self._reward_edits, self._advantage_edits = by_slot[Slot.REWARD], by_slot[Slot.ADVANTAGE]
        self._edits = (*self._reward_edits, *self._advantage_edits)

    @property
    def own_signal(self) -> bool:
        """An edit brings a signal of its own, so groups constant in reward must not be filtered."""
        return any(edit.traits.own_signal for _, edit in self._edits)

    def requests(self, view: CreditView) -> dict[str, Sequence[ScoreRequest]]:
        """The scores each edit asks for, by edit name."""
        return {name: edit.requests(view) for name, edit in self._edits}

    def run(self, view: CreditView, reduce: Reduction = local) -> tuple[CreditView, tuple[EditReport, ...]]:
        """From the view's rewards to the advantage that the loss sees.

        The view's advantage is recomputed by the base normaliser. ``reduce`` combines statistics over ranks.
        """
        trained = trained_tokens(view.batch)
        measured: dict[str, NDArray[np.float64]] = {}
        for name, edit in self._reward_edits:
            edited = edit.apply(view, reduce(edit.local_stats(view)))
            _check_reward_edit(name, view, edited)
            before, after = (self.baseline.tokens(view.batch, v.reward) for v in (view, edited))
            measured[name] = _measure(before, after, trained)
            view = edited
        view = replace(view, advantage=self.baseline.tokens(view.batch, view.reward))
        for name, edit in self._advantage_edits:
            edited = edit.apply(view, reduce(edit.local_stats(view)))
            _check_advantage_edit(name, view, edited, trained)
            measured[name] = _measure(view.advantage, edited.advantage, trained)
            view = edited
        total = reduce({name: Stat(Reduce.SUM, value) for name, value in measured.items()})
        reports = tuple(_report(name, edit, total[name]) for name, edit in self._edits)
        for (name, edit), report in zip(self._edits, reports, strict=True):
            _check_conservation(name, edit, report)
        return view, reports

    def state_dict(self) -> dict[str, Any]:
        return {name: edit.state_dict() for name, edit in self._edits}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the edits; the names must be those that were saved."""
        names = {name for name, _ in self._edits}
        if set(state) != names:
            missing, extra = sorted(names - set(state)), sorted(set(state) - names)
            raise CreditError(f"credit state of other edits: missing {missing}, unexpected {extra}")
        for name, edit in self._edits:
            edit.load_state_dict(state[name])


def _report(name: str, edit: CreditEdit, total: NDArray[Any]) -> EditReport:
    before_plus, before_minus, after_plus, after_minus = (float(x) for x in total[:4])
    return EditReport(
        name, edit.traits.slot, before_plus, before_minus, after_plus, after_minus, int(total[4]), int(total[5])
    )


def _check_reward_edit(name: str, before: CreditView, after: CreditView) -> None:
    if after.batch is not before.batch or not np.array_equal(after.advantage, before.advantage):
        raise CreditError(f"credit edit {name!r} is reward-side: it may change the reward alone")
    if after.reward.shape != before.reward.shape:
        raise CreditError(f"credit edit {name!r}: reward {after.reward.shape}, expected {before.reward.shape}")
    bad = ~np.isfinite(after.reward)
    if np.any(bad):
        at = int(np.argmax(bad))
        raise CreditError(f"credit edit {name!r}: reward of {after.batch.trajectory_id[at]!r} is {after.reward[at]}")


def _check_advantage_edit(name: str, before: CreditView, after: CreditView, trained: NDArray[np.bool_]) -> None:
    if after.batch is not before.batch or not np.array_equal(after.reward, before.reward):
        raise CreditError(f"credit edit {name!r} is advantage-side: it may change the advantage alone")
    if after.advantage.shape != before.advantage.shape:
        raise CreditError(f"credit edit {name!r}: advantage {after.advantage.shape}, expected {before.advantage.shape}")
    for bad, what in (
        (~np.isfinite(after.advantage), "not finite"),
        (~trained & (after.advantage != 0), "not trained"),
    ):
        if np.any(bad):
            at = int(np.argmax(bad))
            owner = after.batch.trajectory_id[int(after.batch.token_trajectory()[at])]
            value = after.advantage[at]
            raise CreditError(f"credit edit {name!r}: token {at} of trajectory {owner!r} is {what}, advantage {value}")


def _check_conservation(name: str, edit: CreditEdit, report: EditReport) -> None:
    masses = {
        "sum": (report.positive_before + report.negative_before, report.positive_after + report.negative_after),
        "positive_mass": (report.positive_before, report.positive_after),
        "negative_mass": (report.negative_before, report.negative_after),
    }
    size = max(1.0, report.positive_before - report.negative_before)
    for what in sorted(edit.traits.conserves):
        before, after = masses[what]
        if abs(after - before) > 1e-6 * size:
            raise CreditError(
                f"credit edit {name!r} declares that it conserves {what}: {before:.9g} became {after:.9g}"
            )
