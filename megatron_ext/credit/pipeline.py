"""The edit pipeline: reward-side edits, the base normaliser, advantage-side edits, with their declarations checked.

Invariants (``tests/credit/test_pipeline.py`` asserts each):

1. Reward-side edits run before centring, advantage-side edits after it, each slot in the given order.
2. At most one edit sets the scale of the advantage; a second is refused when the pipeline is built.
3. After every edit: shapes and batch unchanged, values finite, exactly 0 on tokens that are not trained, and only the
   edit's own slot changed. What an edit says it conserves is checked over all ranks.
4. Each rank makes the same number of reductions: one for every edit, and one at the end.
5. An edit sees the replies to its own requests, in their order; edits that asked are not run without an answer.
6. Counters of an edit are of all ranks, to the bit whoever holds the groups, and are its own: none reaches the next.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.conservation import (
    CONSERVED,
    Change,
    EditReport,
    Masses,
    check_conserved,
    report,
    token_masses,
    violations,
)
from megatron_ext.credit.levels import broadcast
from megatron_ext.credit.protocol import CreditEdit, CreditError, CreditView, Reduce, Scale, Slot, Stat
from megatron_ext.credit.scoring import ScoreReply, ScoreRequest
from megatron_ext.credit.turns import Layout
from megatron_ext.trajectory.record import TrajectoryBatch

INVARIANTS = frozenset("abcdefg")
Reduction = Callable[[Mapping[str, Stat]], Mapping[str, NDArray[Any]]]
Requests = Mapping[str, Sequence[ScoreRequest]]
Replies = Mapping[str, Sequence[ScoreReply]]


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


def flat(requests: Requests) -> tuple[ScoreRequest, ...]:
    """All requests in one sequence, for one call of a scorer; ``by_edit`` takes its replies apart again."""
    return tuple(request for asked in requests.values() for request in asked)


def by_edit(requests: Requests, replies: Sequence[ScoreReply]) -> dict[str, tuple[ScoreReply, ...]]:
    """The replies to ``flat(requests)``, by the edit that asked."""
    wanted = sum(len(asked) for asked in requests.values())
    if len(replies) != wanted:
        raise CreditError(f"{len(replies)} replies to {wanted} scoring requests")
    out: dict[str, tuple[ScoreReply, ...]] = {}
    first = 0
    for name, asked in requests.items():
        out[name] = tuple(replies[first : first + len(asked)])
        first += len(asked)
    return out


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

    @property
    def needs_reference(self) -> bool:
        """An edit asks for scores under the reference policy."""
        return any(edit.traits.reference for _, edit in self._edits)

    @property
    def reads_states(self) -> tuple[str, ...]:
        """The edits that compare turns by their state key."""
        return tuple(name for name, edit in self._edits if edit.traits.states)

    def requests(self, view: CreditView) -> dict[str, Sequence[ScoreRequest]]:
        """The scores each edit asks for, by edit name; see ``flat`` and ``by_edit``."""
        return {name: edit.requests(view) for name, edit in self._edits}

    def run(
        self, view: CreditView, reduce: Reduction = local, replies: Replies | None = None
    ) -> tuple[CreditView, tuple[EditReport, ...]]:
        """From the view's rewards to the advantage that the loss sees.

        The view's advantage is recomputed by the base normaliser. ``reduce`` combines statistics over ranks;
        ``replies`` answer ``requests(view)``, by edit name.
        """
        answers = self._answers(view, replies)
        batch, trained, counts = view.batch, view.trained, view.counts
        layout = Layout(batch) if view.layout is None else view.layout
        changes: dict[str, Change] = {}

        for name, edit in self._reward_edits:
            edited = self._apply(edit, replace(view, replies=answers[name]), reduce)
            _check_reward_edit(name, view, edited)
            changes[name] = self._reward_change(edit, view, edited, layout)
            view = replace(edited, counters={}, off=None)

        value = self.baseline.trajectory(batch, view.reward)
        view = replace(view, advantage=broadcast(batch, value), replies=())
        masses = Masses.constant(value, counts)

        for name, edit in self._advantage_edits:
            edited = self._apply(edit, replace(view, replies=answers[name]), reduce)
            _check_advantage_edit(name, view, edited)
            before, after = view.advantage, edited.advantage
            off = before if edited.off is None else edited.off
            new, changed = (masses, 0) if after is before is off else token_masses(batch, after, trained, name, off)
            broken = violations(layout, edit.traits.conserves, (masses, new), partial(_pair, before, after))
            changes[name] = Change(masses, new, changed, broken, edited.counters)
            view, masses = replace(edited, replies=(), counters={}, off=None), new

        return view, self._reports(changes, int(counts.sum()), reduce)

    @staticmethod
    def _apply(edit: CreditEdit, view: CreditView, reduce: Reduction) -> CreditView:
        return edit.apply(view, reduce(edit.local_stats(view)))

    def _answers(self, view: CreditView, replies: Replies | None) -> Replies:
        if replies is None:
            asking = [name for name, asked in self.requests(view).items() if asked]
            if asking:
                raise CreditError(f"credit edits {', '.join(asking)} ask for scores: run their requests first")
            return {name: () for name, _ in self._edits}
        names = {name for name, _ in self._edits}
        if set(replies) != names:
            raise CreditError(f"replies for edits {sorted(replies)}, the pipeline has {sorted(names)}")
        return replies

    def _reward_change(self, edit: CreditEdit, old: CreditView, new: CreditView, layout: Layout) -> Change:
        batch, counts = layout.batch, layout.counts
        before, after = (self.baseline.trajectory(batch, view.reward) for view in (old, new))
        changed = int(counts[~np.isclose(before, after, rtol=1e-9, atol=1e-12)].sum())
        old_masses, new_masses = Masses.constant(before, counts), Masses.constant(after, counts)

        def tokens() -> tuple[NDArray[np.float64], NDArray[np.float64]]:
            return broadcast(batch, before), broadcast(batch, after)

        broken = violations(layout, edit.traits.conserves, (old_masses, new_masses), tokens)
        return Change(old_masses, new_masses, changed, broken, new.counters)

    def _reports(self, changes: Mapping[str, Change], trained: int, reduce: Reduction) -> tuple[EditReport, ...]:
        stats = {f"{name}/sums": Stat(Reduce.SUM, change.sums(trained)) for name, change in changes.items()}
        stats |= {f"{name}/worst": Stat(Reduce.MAX, change.worst()) for name, change in changes.items()}
        counters = {name: change.counter_sums() for name, change in changes.items()}
        stats |= {
            f"{name}/counter/{key}": Stat(Reduce.SUM, x) for name in counters for key, x in counters[name].items()
        }
        total = reduce(stats)
        reports = tuple(
            report(
                name,
                edit.traits.slot,
                total[f"{name}/sums"],
                {key: total[f"{name}/counter/{key}"] for key in counters[name]},
            )
            for name, edit in self._edits
        )
        for (name, edit), result in zip(self._edits, reports, strict=True):
            check_conserved(name, edit, result, total[f"{name}/worst"], changes[name].violations)
        return reports

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


def _pair(before: NDArray[np.float64], after: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return before, after


def _check_reward_edit(name: str, before: CreditView, after: CreditView) -> None:
    same = after.advantage is before.advantage or np.array_equal(after.advantage, before.advantage)
    if after.batch is not before.batch or not same:
        raise CreditError(f"credit edit {name!r} is reward-side: it may change the reward alone")
    if after.reward.shape != before.reward.shape:
        raise CreditError(f"credit edit {name!r}: reward {after.reward.shape}, expected {before.reward.shape}")
    bad = ~np.isfinite(after.reward)
    if np.any(bad):
        at = int(np.argmax(bad))
        raise CreditError(f"credit edit {name!r}: reward of {after.batch.trajectory_id[at]!r} is {after.reward[at]}")


def _check_advantage_edit(name: str, before: CreditView, after: CreditView) -> None:
    if after.batch is not before.batch or not np.array_equal(after.reward, before.reward):
        raise CreditError(f"credit edit {name!r} is advantage-side: it may change the advantage alone")
    if after.advantage.shape != before.advantage.shape or after.advantage.dtype != np.float64:
        raise CreditError(
            f"credit edit {name!r}: advantage {after.advantage.dtype} {after.advantage.shape}, expected float64 "
            f"{before.advantage.shape}"
        )
    if after.off is not None and after.off.shape != before.advantage.shape:
        raise CreditError(f"credit edit {name!r}: off {after.off.shape}, expected {before.advantage.shape}")
