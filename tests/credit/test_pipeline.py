"""Invariants 1-6 of ``credit/pipeline.py``, and how statistics combine."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from megatron_ext.credit.base import Baseline
from megatron_ext.credit.edits.length_penalty import LengthPenalty
from megatron_ext.credit.edits.whiten import Whiten
from megatron_ext.credit.pipeline import Pipeline, by_edit, combine, flat, local, open_view
from megatron_ext.credit.protocol import Counter, CreditEdit, CreditError, CreditView, EditTraits, Reduce, Slot, Stat
from megatron_ext.credit.scoring import ScoreReply, ScoreRequest
from megatron_ext.tracking import names
from megatron_ext.tracking.names import lookup
from megatron_ext.trajectory.joining import select_groups
from megatron_ext.trajectory.record import TrajectoryBatch, equal
from tests.helpers.credit_contract import check_ranks
from tests.helpers.records import build, model, random_groups, single, user


@dataclass
class Edit:
    """An edit made of a function and a declaration; counts its calls, which is also its state."""

    change: Callable[[CreditView], CreditView]
    traits: EditTraits = EditTraits()
    calls: int = 0
    log: list[str] = field(default_factory=list)
    name: str = ""
    asks: Sequence[ScoreRequest] = ()
    got: Sequence[ScoreReply] = ()

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return self.asks

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return {}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        self.calls += 1
        self.log.append(self.name)
        self.got = view.replies
        return self.change(view)

    def state_dict(self) -> dict[str, Any]:
        return {"calls": self.calls}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


REWARD_SIDE = EditTraits(slot=Slot.REWARD)


def unchanged(view: CreditView) -> CreditView:
    return view


def scaled(view: CreditView) -> CreditView:
    return replace(view, advantage=view.advantage * 2)


@pytest.fixture
def batch() -> TrajectoryBatch:
    turns = [user([1]), model([2, 3, 4])]
    return build([(single(turns, reward=1.0), single(turns[:1] + [model([5])], reward=0.0))])


def test_without_edits_it_is_the_base_advantage() -> None:
    batch = build(random_groups(2))
    view, reports = Pipeline().run(open_view(batch))
    assert np.array_equal(view.advantage, Baseline().tokens(batch, batch.reward)) and reports == ()
    assert view.reward.dtype == view.advantage.dtype == np.float64


def test_reward_edits_run_before_centring_in_order(batch: TrajectoryBatch) -> None:  # invariant 1
    log: list[str] = []

    def raise_first(view: CreditView) -> CreditView:
        assert not view.advantage.any()
        return replace(view, reward=view.reward + [3.0, 0.0])

    def see_centred(view: CreditView) -> CreditView:
        assert view.advantage.tolist() == [0, 2, 2, 2, 0, -2]
        return scaled(view)

    edits = [
        ("late", Edit(see_centred, log=log, name="late")),
        ("early", Edit(raise_first, REWARD_SIDE, log=log, name="early")),
        ("last", Edit(unchanged, log=log, name="last")),
    ]
    view, reports = Pipeline(edits, baseline=Baseline(normalize="mean")).run(open_view(batch))
    assert log == ["early", "late", "last"] == [*(r.name for r in reports)][:1] + ["late", "last"]
    assert view.advantage.tolist() == [0, 4, 4, 4, 0, -4]
    early, late, last = reports
    assert (early.positive_before, early.positive_after, early.changed_fraction) == (1.5, 6.0, 1.0)
    assert (late.positive_before, late.negative_before, late.positive_after, late.negative_after) == (6, -2, 12, -4)
    assert last.changed == 0 and last.trained == 4
    assert all(lookup(name) for report in reports for name in report.metrics())


def test_the_share_of_changed_tokens(batch: TrajectoryBatch) -> None:
    def first_only(view: CreditView) -> CreditView:
        values = view.advantage.copy()
        values[1] += 1.0
        return replace(view, advantage=values)

    _, (report,) = Pipeline([("one", Edit(first_only))]).run(open_view(batch))
    assert report.changed_fraction == 0.25


def test_two_edits_that_set_the_scale_are_refused() -> None:  # invariant 2
    length = LengthPenalty(coefficient=1.0, free=1, limit=2)
    Pipeline([("white", Whiten()), ("length", length)])
    with pytest.raises(CreditError, match="'white' and 'again' both set the scale"):
        Pipeline([("white", Whiten()), ("length", length), ("again", Whiten(center=True))])


def test_names_and_declarations_are_checked_when_built() -> None:
    with pytest.raises(CreditError, match="repeat a name"):
        Pipeline([("a", Edit(unchanged)), ("a", Edit(unchanged))])
    with pytest.raises(CreditError, match="'a' declares entropy"):
        Pipeline([("a", Edit(unchanged, EditTraits(conserves=frozenset({"entropy"}))))])
    with pytest.raises(CreditError, match="'a' declares z"):
        Pipeline([("a", Edit(unchanged, EditTraits(breaks=frozenset("z"))))])


def on_mask(view: CreditView) -> CreditView:
    return replace(view, advantage=view.advantage + 1.0)


def to_nan(view: CreditView) -> CreditView:
    return replace(view, advantage=view.advantage * np.nan)


def shorter(view: CreditView) -> CreditView:
    return replace(view, advantage=view.advantage[:-1])


def first_half(view: CreditView) -> CreditView:
    return replace(view, advantage=view.advantage * np.where(np.arange(6) < 4, 0.5, 1.0))


def single_precision(view: CreditView) -> CreditView:
    return replace(view, advantage=view.advantage.astype(np.float32))


def rewards(view: CreditView) -> CreditView:
    return replace(view, reward=view.reward + 1.0)


def infinite(view: CreditView) -> CreditView:
    return replace(view, reward=view.reward * np.inf)


@pytest.mark.parametrize(
    ("change", "traits", "message"),
    [
        (on_mask, EditTraits(), "'bad': token 0 of trajectory 'g0/s0' is not trained, advantage 1.0"),
        (to_nan, EditTraits(), "'bad': token 0 of trajectory 'g0/s0' is not finite"),
        (shorter, EditTraits(), "'bad': advantage"),
        (rewards, EditTraits(), "'bad' is advantage-side"),
        (on_mask, REWARD_SIDE, "'bad' is reward-side"),
        (infinite, REWARD_SIDE, "'bad': reward of 'g0/s0' is inf"),
        (scaled, EditTraits(conserves=frozenset({"sum"})), "'bad' declares that it conserves sum: 2 became 4"),
        (scaled, EditTraits(conserves=frozenset({"positive_mass"})), "conserves positive_mass: 3 became 6"),
        (scaled, EditTraits(conserves=frozenset({"negative_mass"})), "conserves negative_mass: -1 became -2"),
        (scaled, EditTraits(conserves=frozenset({"group_sum"})), "conserves group_sum: .* in group 'group0'"),
        (scaled, EditTraits(conserves=frozenset({"trajectory_sum"})), "conserves trajectory_sum: .* 'g0/s0'"),
        (scaled, EditTraits(conserves=frozenset({"turn_sum"})), "conserves turn_sum: .* turn 1 of trajectory 'g0/s0'"),
        (first_half, EditTraits(conserves=frozenset({"group_balance"})), "conserves group_balance: .* 'group0'"),
        (single_precision, EditTraits(), "'bad': advantage float32"),
    ],
)
def test_what_an_edit_did_is_checked(  # invariant 3
    batch: TrajectoryBatch, change: Callable[[CreditView], CreditView], traits: EditTraits, message: str
) -> None:
    with pytest.raises(CreditError, match=message), np.errstate(invalid="ignore"):
        Pipeline([("bad", Edit(change, traits))], baseline=Baseline(eps=0.0)).run(open_view(batch))


def test_what_is_conserved_passes(batch: TrajectoryBatch) -> None:
    def move(view: CreditView) -> CreditView:  # the same positive mass, on other tokens of the trajectory
        return replace(view, advantage=view.advantage * [1, 0.5, 0.5, 2, 1, 1])

    conserves = {"sum", "positive_mass", "negative_mass", "group_sum", "trajectory_sum", "turn_sum", "group_balance"}
    traits = EditTraits(conserves=frozenset(conserves))
    _, (report,) = Pipeline([("move", Edit(move, traits))]).run(open_view(batch))
    assert report.changed == 3


def test_reductions_are_one_an_edit_and_one_at_the_end(batch: TrajectoryBatch) -> None:  # invariant 4
    calls: list[int] = []

    def counting(stats: Mapping[str, Stat]) -> Mapping[str, NDArray[Any]]:
        calls.append(len(stats))
        return local(stats)

    edits: list[tuple[str, CreditEdit]]
    edits = [("a", Edit(unchanged, REWARD_SIDE)), ("b", Edit(unchanged)), ("c", Whiten())]
    for part in (batch, select_groups(batch, [])):
        calls.clear()
        view, reports = Pipeline(edits).run(open_view(part), counting)
        assert calls == [0, 0, 1, 6] and len(reports) == 3 and equal(view.batch, part)


def test_state_and_requests_go_by_name(batch: TrajectoryBatch) -> None:
    def pipeline() -> Pipeline:
        return Pipeline([("a", Edit(unchanged)), ("b", Edit(unchanged, EditTraits(own_signal=True)))])

    one, other = pipeline(), pipeline()
    one.run(open_view(batch))
    other.load_state_dict(one.state_dict())
    assert other.state_dict() == {"a": {"calls": 1}, "b": {"calls": 1}}
    assert set(one.requests(open_view(batch))) == {"a", "b"} and one.own_signal and not Pipeline().own_signal
    with pytest.raises(CreditError, match=r"missing \['b'\], unexpected \['c'\]"):
        one.load_state_dict({"a": {"calls": 1}, "c": {}})


def test_replies_go_to_the_edit_that_asked(batch: TrajectoryBatch) -> None:  # invariant 5
    def ask(count: int) -> tuple[ScoreRequest, ...]:
        return tuple(ScoreRequest(0, None, np.array([1, 2])) for _ in range(count))

    def reply(value: float) -> ScoreReply:
        return ScoreReply(logp=np.full(2, value, dtype=np.float32))

    edits = [
        ("a", Edit(unchanged, REWARD_SIDE, asks=ask(2))),
        ("b", Edit(unchanged)),
        ("c", Edit(unchanged, asks=ask(1))),
    ]
    view, pipeline = open_view(batch), Pipeline(edits)
    requests = pipeline.requests(view)
    assert [len(asked) for asked in requests.values()] == [2, 0, 1] and len(flat(requests)) == 3
    replies = by_edit(requests, [reply(-1.0), reply(-2.0), reply(-3.0)])
    done, _ = pipeline.run(view, replies=replies)
    got = [[float(r.logp[0]) for r in edit.got if r.logp is not None] for _, edit in edits]
    assert got == [[-1.0, -2.0], [], [-3.0]] and done.replies == ()
    with pytest.raises(CreditError, match="credit edits a, c ask for scores"):
        pipeline.run(view)
    with pytest.raises(CreditError, match="2 replies to 3 scoring requests"):
        by_edit(requests, [reply(-1.0), reply(-2.0)])
    with pytest.raises(CreditError, match=r"replies for edits \['a'\]"):
        pipeline.run(view, replies={"a": replies["a"]})


def test_views_share_what_follows_from_the_batch(batch: TrajectoryBatch) -> None:
    view = open_view(batch)
    other = replace(view, advantage=view.advantage + 1.0)
    assert other.turns is view.turns and other.trained is view.trained and other.counts.tolist() == [3, 1]
    moved = replace(view, batch=select_groups(batch, [0]))
    assert moved.turns.batch is moved.batch


def test_combine_over_ranks() -> None:
    def rank(*values: float) -> dict[str, Stat]:
        array = np.array(values)
        return {op.value: Stat(op, array) for op in Reduce}

    got = combine([rank(1.0, 5.0), rank(2.0, 4.0)])
    assert {k: v.tolist() for k, v in got.items()} == {"sum": [3, 9], "max": [2, 5], "gather": [1, 5, 2, 4]}
    with pytest.raises(CreditError, match="ranks 0 and 1 bring different statistics: max"):
        combine([rank(1.0), {k: v for k, v in rank(1.0).items() if k != "max"}])
    with pytest.raises(CreditError, match="'x': ranks disagree"):
        combine([{"x": Stat(Reduce.SUM, np.ones(1))}, {"x": Stat(Reduce.MAX, np.ones(1))}])


@dataclass(frozen=True)
class Counting:
    """Keeps the advantage and counts; ``off`` is the advantage it claims its off arm has, as a multiple."""

    off: float | None = None
    name: str = "turns"
    traits: EditTraits = EditTraits()

    def requests(self, view: CreditView) -> Sequence[ScoreRequest]:
        return ()

    def local_stats(self, view: CreditView) -> Mapping[str, Stat]:
        return {}

    def apply(self, view: CreditView, reduced: Mapping[str, NDArray[Any]]) -> CreditView:
        assert not view.counters and view.off is None, "of the edit before"
        tokens = view.turns.tokens
        counters = {
            self.name: Counter.count(tokens > 0),
            "tokens": Counter.mean(tokens, tokens > 0),
            "silent": Counter.share(tokens == 0),
            "nothing": Counter.mean(tokens, tokens > 10**6),
        }
        return replace(view, counters=counters, off=None if self.off is None else self.off * view.advantage)

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """No state."""


def test_counters_are_of_all_ranks_and_of_one_edit() -> None:  # invariant 6
    batch = build(random_groups(4, groups=6))
    check_ranks(Counting, random_groups(4, groups=6), 4, exact=True)
    view, reports = Pipeline([("a", Counting()), ("b", Counting(name="other"))]).run(open_view(batch))
    tokens = view.turns.tokens
    assert reports[0].counters == {
        "count/turns": np.count_nonzero(tokens),
        "mean/tokens": pytest.approx(tokens[tokens > 0].mean()),
        "share/silent": pytest.approx(np.mean(tokens == 0)),
    }  # a mean of nothing is left out
    assert "count/turns" not in reports[1].counters and not view.counters
    names.check(reports[0].metrics())


def test_changed_tokens_count_against_the_off_arm_that_an_edit_gives() -> None:
    batch = build(random_groups(4, groups=6))
    moved = int(np.count_nonzero(Baseline().tokens(batch, batch.reward)))
    _, reports = Pipeline([("same", Counting()), ("other", Counting(off=2.0))]).run(open_view(batch))
    assert [report.changed for report in reports] == [0, moved]
