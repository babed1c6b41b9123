"""The contract of credit edits (``credit/protocol.py``, invariants a-g and the split over ranks), as checks that a test
of any edit can call. Each takes a function that makes a fresh edit, and raises ``AssertionError`` naming the invariant.

Edits that ask for scores are answered by ``canned``, which looks at the ids of a request's own sequence alone.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.conservation import EditReport
from megatron_ext.credit.levels import trained_tokens
from megatron_ext.credit.pipeline import Pipeline, Reduction, by_edit, combine, flat, local, open_view
from megatron_ext.credit.protocol import CreditEdit, CreditView, Scale, Slot, Stat
from megatron_ext.credit.score_plan import CURRENT, ScoreWeights, score_rows
from megatron_ext.credit.scoring import ScoreReply, ScoreRequest
from megatron_ext.trajectory.joining import concat, select_groups
from megatron_ext.trajectory.record import Role, TrajectoryBatch
from tests.helpers.records import Group, Segment, Traj, Turn, build, named, on_trained, shuffled, split

MakeEdit = Callable[[], CreditEdit]
Scores = Callable[[TrajectoryBatch], Mapping[str, NDArray[Any]]]


def no_scores(batch: TrajectoryBatch) -> Mapping[str, NDArray[Any]]:
    return {}


def canned(requests: Sequence[ScoreRequest], batch: TrajectoryBatch) -> list[ScoreReply]:
    """Log-probs between -3 and 0 of the asked tokens: each a hash of the ids up to it, as a model's would be."""
    whole = ScoreWeights(model="canned", version=0, vocabulary="words", vocab_size=2**31, layers=1, max_tokens=2**31)

    def logp(ids: NDArray[Any], place: NDArray[Any]) -> NDArray[np.float32]:
        return np.array([-3.0 * (crc32(ids[: p + 1].tobytes()) / 2**32) for p in place], dtype=np.float32)

    return [ScoreReply(logp=logp(row.ids, row.place)) for row in score_rows(requests, batch, {CURRENT: whole})]


def run_edits(
    edits: Sequence[tuple[str, CreditEdit]],
    batch: TrajectoryBatch,
    scores: Scores = no_scores,
    reduce: Reduction = local,
    baseline: Baseline | None = None,
) -> tuple[CreditView, tuple[EditReport, ...]]:
    """The edits behind the baseline on one rank's batch; what they ask for is answered by ``canned``."""
    pipeline, view = Pipeline(edits, baseline=baseline), open_view(batch, scores(batch))
    requests = pipeline.requests(view)
    return pipeline.run(view, reduce, by_edit(requests, canned(flat(requests), batch)))


def advantage(
    make: MakeEdit, batch: TrajectoryBatch, scores: Scores = no_scores, reduce: Reduction = local
) -> CreditView:
    return run_edits([("edit", make())], batch, scores, reduce)[0]


class ThreadRanks:
    """Runs a function on n threads that reduce together, as ranks would."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=120)
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


@dataclass(frozen=True)
class Case:
    """An edit on one described batch, and what it made of it."""

    make: MakeEdit
    groups: Sequence[Group]
    scores: Scores
    seed: int
    batch: TrajectoryBatch
    view: CreditView

    @classmethod
    def of(cls, make: MakeEdit, groups: Sequence[Group], scores: Scores = no_scores, seed: int = 0) -> Case:
        batch = build(groups)
        return cls(make, groups, scores, seed, batch, advantage(make, batch, scores))

    def on(self, groups: Sequence[Group]) -> CreditView:
        return advantage(self.make, build(groups), self.scores)

    def unchanged(self, groups: Sequence[Group], what: str) -> None:
        same(by_trajectory(self.view), by_trajectory(self.on(groups)), what)


def masked(case: Case) -> None:
    values = case.view.advantage
    assert np.all(np.isfinite(values)) and not values[~trained_tokens(case.batch)].any(), "invariant a: masked tokens"


def cuts(case: Case) -> None:
    case.unchanged(split(case.groups, case.seed, into="segments"), "b: cut into segments")
    pieces = split(case.groups, case.seed, into="pieces")
    if not any(case.make().requests(open_view(b, case.scores(b))) for b in (case.batch, build(pieces))):
        # A piece lacks what came before it, so that a model asked about it is asked something else, or asked at all
        # where the whole was too long.
        case.unchanged(pieces, "b: cut into pieces")


def session_cuts(case: Case) -> None:
    case.unchanged(split(case.groups, case.seed, into="sessions"), "b: cut into sessions")


def sums(case: Case) -> None:
    traits = case.make().traits
    before = Baseline().tokens(case.batch, case.view.reward if traits.slot == Slot.REWARD else case.batch.reward)
    moved = abs(case.view.advantage.sum() - before.sum())
    assert "sum" not in traits.conserves or moved < 1e-6 * max(1.0, np.abs(before).sum()), "invariant c"


def order(case: Case) -> None:
    case.unchanged(shuffled(case.groups, case.seed), "d: permutation")


def first_is_zero(view: CreditView) -> bool:
    """Whether the first group has advantage 0 throughout."""
    trajectories = int(view.batch.group_trajectories[1])
    return not view.advantage[: int(view.batch.trajectory_tokens()[trajectories])].any()


def constant(case: Case) -> None:
    """All groups constant, and the first one among others that are not."""
    first, *others = case.groups
    assert not case.on(constant_groups(case.groups)).advantage.any(), "invariant e: constant groups"
    assert first_is_zero(case.on([*constant_groups([first]), *others])), "invariant e: a constant group among others"


def alone(case: Case) -> None:
    """All groups of one, and the first one among others that are not."""
    first, *others = case.groups
    assert not case.on(singles(case.groups)).advantage.any(), "invariant f: groups of one"
    assert first_is_zero(case.on([first[:1], *others])), "invariant f: a group of one among others"


def rows_of_turns(case: Case) -> None:
    case.unchanged(turn_rows(case.groups), "g: rows of one turn")


CHECKS: Mapping[str, Callable[[Case], None]] = {
    "a": masked,
    "b": cuts,
    "sessions": session_cuts,
    "c": sums,
    "d": order,
    "e": constant,
    "f": alone,
    "g": rows_of_turns,
}


def gives_up(edit: CreditEdit) -> set[str]:
    """The checks that an edit declares it does not pass. Who gives up b gives up cuts of any kind."""
    traits = edit.traits
    sessions = {"sessions"} if traits.sessions or "b" in traits.breaks else set()
    return (set(traits.breaks) | sessions) - {"a"}


def check_contract(make: MakeEdit, groups: Sequence[Group], scores: Scores = no_scores, seed: int = 0) -> None:
    """All invariants that the edit does not declare broken, on one described batch."""
    case, edit = Case.of(make, groups, scores, seed), make()
    again = advantage(make, case.batch, scores).advantage
    assert np.array_equal(again, case.view.advantage), "the edit is not deterministic"
    for name, check in CHECKS.items():
        if name not in gives_up(edit):
            check(case)
    if edit.traits.scale == Scale.KEEPS and edit.traits.slot == Slot.ADVANTAGE and not edit.traits.own_signal:
        zero = advantage(make, case.batch.with_rewards(np.zeros(case.batch.num_trajectories)), scores)
        assert not zero.advantage.any(), "an edit that keeps the scale makes advantage out of nothing"


def never_broken(make: MakeEdit, batches: Sequence[Sequence[Group]], scores: Scores = no_scores) -> set[str]:
    """The invariants that the edit declares broken although they held on every one of the batches."""
    held = gives_up(make())
    for number, groups in enumerate(batches):
        case = Case.of(make, groups, scores, number)
        for name in sorted(held):
            try:
                CHECKS[name](case)
            except AssertionError:
                held.discard(name)
    return held


def check_ranks(
    make: MakeEdit, groups: Sequence[Group], ranks: int, scores: Scores = no_scores, *, exact: bool = False
) -> None:
    """The groups held by 1 rank or by several (some of them empty) give the same advantages and the same reports;
    ``exact``: bit for bit."""
    batch = build(groups)
    parts = [select_groups(batch, p.tolist()) for p in np.array_split(np.arange(batch.num_groups), ranks)]
    threads = ThreadRanks(ranks)

    def work(rank: int, reduce: Reduction) -> Any:
        return run_edits([("edit", make())], parts[rank], scores, reduce)

    results = threads.run(work)
    whole, reports = run_edits([("edit", make())], batch, scores)
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
