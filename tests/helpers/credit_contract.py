"""The contract of credit edits (``credit/protocol.py``, invariants a-g and the split over ranks), as checks that a test
of any edit can call. Each takes a function that makes a fresh edit, and raises ``AssertionError`` naming the invariant.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.pipeline import Pipeline, Reduction, combine, local, open_view
from megatron_ext.credit.protocol import CreditEdit, CreditView, Scale, Slot, Stat
from megatron_ext.trajectory.record import Role, TrajectoryBatch, concat, select_groups
from tests.helpers.records import Group, Segment, Traj, Turn, build, named, on_trained, shuffled, split

MakeEdit = Callable[[], CreditEdit]
Scores = Callable[[TrajectoryBatch], Mapping[str, NDArray[Any]]]


def no_scores(batch: TrajectoryBatch) -> Mapping[str, NDArray[Any]]:
    return {}


def advantage(
    make: MakeEdit, batch: TrajectoryBatch, scores: Scores = no_scores, reduce: Reduction = local
) -> CreditView:
    return Pipeline([("edit", make())], baseline=Baseline()).run(open_view(batch, scores(batch)), reduce)[0]


class ThreadRanks:
    """Runs a function on n threads that reduce together, as ranks would."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=20)
        self._stats: list[Mapping[str, Stat]] = [{}] * ranks
        self.reductions = [0] * ranks

    def reduce(self, rank: int) -> Reduction:
        def together(stats: Mapping[str, Stat]) -> Mapping[str, NDArray[Any]]:
            self._stats[rank] = stats
            self.reductions[rank] += 1
            self._barrier.wait()
            result = combine(self._stats)
            self._barrier.wait()
            return result

        return together

    def run(self, work: Callable[[int, Reduction], Any]) -> list[Any]:
        results: list[Any] = [None] * len(self._stats)
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            try:
                results[rank] = work(rank, self.reduce(rank))
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
        return results


def same(a: Mapping[str, NDArray[Any]], b: Mapping[str, NDArray[Any]], what: str) -> None:
    assert set(a) == set(b)
    for name in a:
        np.testing.assert_allclose(
            a[name], b[name], rtol=1e-9, atol=1e-9, err_msg=f"invariant {what}, trajectory {name}"
        )


def by_trajectory(view: CreditView) -> dict[str, NDArray[Any]]:
    return on_trained(view.batch, view.advantage)


def constant_groups(groups: Sequence[Group]) -> list[Group]:
    return [tuple(replace(t, reward=g[0].reward) for t in g) for g in groups]


def singles(groups: Sequence[Group]) -> list[Group]:
    return [(t,) for g in groups for t in g]


def turn_rows(groups: Sequence[Group]) -> list[Group]:
    """The same trajectories with a segment for each model turn, which repeats what came before it at mask 0."""

    def rows(segment: Segment) -> list[Segment]:
        ends = [i + 1 for i, turn in enumerate(segment) if turn.role is Role.MODEL] or [len(segment)]
        ends[-1] = len(segment)
        out: list[Segment] = []
        for start, end in zip([0, *ends[:-1]], ends, strict=True):
            seen = tuple(x for turn in segment[:start] for x in turn.ids)
            out.append(((Turn(None, seen),) if start else ()) + segment[start:end])
        return out

    def cut(trajectory: Traj) -> Traj:
        sessions = tuple(tuple(row for segment in session for row in rows(segment)) for session in trajectory.sessions)
        return replace(trajectory, sessions=sessions)

    return [tuple(cut(trajectory) for trajectory in group) for group in named(groups)]


def check_contract(make: MakeEdit, groups: Sequence[Group], scores: Scores = no_scores, seed: int = 0) -> None:
    """All invariants that the edit does not declare broken, on one described batch."""
    traits = make().traits
    batch = build(groups)
    view = advantage(make, batch, scores)
    trained = trained_tokens(batch)
    assert np.all(np.isfinite(view.advantage)) and not view.advantage[~trained].any(), "invariant a: masked tokens"
    assert np.array_equal(advantage(make, batch, scores).advantage, view.advantage), "the edit is not deterministic"
    if "b" not in traits.breaks:
        for into in ("segments", "pieces", "sessions"):
            cut = build(split(groups, seed, into=into))
            same(by_trajectory(view), by_trajectory(advantage(make, cut, scores)), f"b: cut into {into}")
    if "g" not in traits.breaks:
        rows = build(turn_rows(groups))
        same(by_trajectory(view), by_trajectory(advantage(make, rows, scores)), "g: rows of one turn")
    if "sum" in traits.conserves and "c" not in traits.breaks:
        before = Baseline().tokens(batch, view.reward if traits.slot == Slot.REWARD else batch.reward)
        assert abs(view.advantage.sum() - before.sum()) < 1e-6 * max(1.0, np.abs(before).sum()), "invariant c"
    if "d" not in traits.breaks:
        other = build(shuffled(groups, seed))
        same(by_trajectory(view), by_trajectory(advantage(make, other, scores)), "d: permutation")
    if "e" not in traits.breaks:
        assert not advantage(make, build(constant_groups(groups)), scores).advantage.any(), (
            "invariant e: constant groups"
        )
    if "f" not in traits.breaks:
        assert not advantage(make, build(singles(groups)), scores).advantage.any(), "invariant f: groups of one"
    if traits.scale == Scale.KEEPS and traits.slot == Slot.ADVANTAGE and not traits.own_signal:
        zero = advantage(make, batch.with_rewards(np.zeros(batch.num_trajectories)), scores)
        assert not zero.advantage.any(), "an edit that keeps the scale makes advantage out of nothing"


def check_ranks(
    make: MakeEdit, groups: Sequence[Group], ranks: int, scores: Scores = no_scores, *, exact: bool = False
) -> None:
    """The groups held by 1 rank or by several (some of them empty) give the same advantages and the same reports;
    ``exact``: bit for bit."""
    batch = build(groups)
    parts = [select_groups(batch, p.tolist()) for p in np.array_split(np.arange(batch.num_groups), ranks)]
    threads = ThreadRanks(ranks)

    def work(rank: int, reduce: Reduction) -> Any:
        return Pipeline([("edit", make())]).run(open_view(parts[rank], scores(parts[rank])), reduce)

    results = threads.run(work)
    whole, reports = Pipeline([("edit", make())]).run(open_view(batch, scores(batch)))
    assert concat(parts).num_tokens == batch.num_tokens
    joined = np.concatenate([view.advantage for view, _ in results])
    np.testing.assert_allclose(joined, whole.advantage, rtol=1e-9, atol=1e-9, err_msg=f"{ranks} ranks")
    if exact:
        assert np.array_equal(joined, whole.advantage), f"{ranks} ranks: equal to rounding only"
    assert len(set(threads.reductions)) == 1, "ranks reduced a different number of times"
    for _, rank_reports in results:
        assert not exact or rank_reports == reports, f"{ranks} ranks: reports are equal to rounding only"
        for got, want in zip(rank_reports, reports, strict=True):
            assert got.metrics().keys() == want.metrics().keys()
            np.testing.assert_allclose(list(got.metrics().values()), list(want.metrics().values()), atol=1e-9)
